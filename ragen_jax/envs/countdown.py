"""Countdown: make the target from the given numbers with one arithmetic expression.

Rules as in RAGEN and TinyZero, whose rewards these are, but numbers may be left over
(unless `use_all`), divisions must come out even, and an episode may go on after a wrong
answer. Every function is on one puzzle: `vmap` to batch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base, pictures
from ragen_jax.envs.countdown_expression import (
    ANSWER_BYTES,
    LIMIT,
    OTHER,
    TARGET,
    read_bytes,
    read_text,
)

ACTION_NAMES = ("refused", "other value", "target")  # What an answer comes to.
_LABELS = ("Numbers:", "Target:", *(f"Last answer: {n}\n" for n in ACTION_NAMES))
_NUMBERS, _TARGET, _VERDICT = 0, 1, 2
_SUM, _PRODUCT, _ATOM = range(3)  # What a text of the solver is, for parentheses.
_NUMBER_COLOUR, _TARGET_COLOUR = (214, 226, 240), (252, 214, 120)


@dataclasses.dataclass(frozen=True)
class Countdown:
    """Settings of one kind of puzzle."""

    min_numbers: int = 3  # given in a puzzle
    max_numbers: int = 4  # N
    highest_number: int = 99  # Numbers are from 1 to this, each equally likely.
    highest_target: int = 999
    use_all: bool = False  # Refuses answers that leave a number over.
    # Of the reward 1, for a first legal answer of another value; RAGEN's format score.
    partial_reward: float = 0.1


@struct.dataclass
class State:
    """One puzzle and what the last answer came to."""

    numbers: jax.Array  # int32[N], 0 behind the last
    target: jax.Array  # int32[]
    verdict: jax.Array  # int32[], the last action, or base.NO_ACTION before the first
    is_paid: jax.Array  # bool[], whether the partial reward has been paid
    done: jax.Array  # bool[], True once the target was made


def world(settings: Countdown) -> base.World:
    """Binds the settings into a world. Raises ValueError if they make no puzzle."""
    check(settings)
    return base.World(
        name="countdown",
        action_names=ACTION_NAMES,
        phrases=phrases(settings),
        observation_phrases=settings.max_numbers + 4,
        instruction=instruction(settings),
        reset=functools.partial(reset, settings=settings),
        step=functools.partial(step, settings=settings),
        observe=functools.partial(observe, settings=settings),
        example_actions=("(1 + 2) * 3",),
        longest_observation=functools.partial(_longest_observation, settings=settings),
        answer_bytes=ANSWER_BYTES,
        read_action=functools.partial(read_action, settings=settings),
        read_action_text=functools.partial(read_action_text, settings=settings),
        picture=picture,
        solve=functools.partial(solve, settings=settings),
    )


def check(settings: Countdown) -> None:
    """Raises ValueError, in one sentence, unless puzzles can be made and shown."""
    fewest, most = settings.min_numbers, settings.max_numbers
    if fewest not in range(2, 7):
        raise ValueError(
            f"countdown.min_numbers = {fewest} is not possible: choose a whole number"
            " from 2 to 6"
        )
    if most not in range(fewest, 7):
        raise ValueError(
            f"countdown.max_numbers = {most} is not possible: choose a whole number"
            f" from countdown.min_numbers = {fewest} to 6"
        )
    if settings.highest_number not in range(10, 1000):
        raise ValueError(
            f"countdown.highest_number = {settings.highest_number} is not possible:"
            " choose a whole number from 10 to 999"
        )
    # With lower targets too few random expressions would come out as one.
    if settings.highest_target not in range(settings.highest_number, 10_000):
        raise ValueError(
            f"countdown.highest_target = {settings.highest_target} is not possible:"
            " choose a whole number from countdown.highest_number ="
            f" {settings.highest_number} to 9999"
        )
    if not 0 <= settings.partial_reward < 1:
        raise ValueError(
            f"countdown.partial_reward = {settings.partial_reward} is no part of the"
            " reward 1: choose at least 0 and less than 1"
        )


def reset(key: jax.Array, split: jax.Array, settings: Countdown) -> State:
    """Draws a puzzle that has a solution and belongs to the split.

    The split is decided by the numbers without their order, and the target. The target
    is none of the numbers: at least one operation is needed.

    Args:
      key: decides the puzzle.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: how many numbers, and how high.
    """

    def redraw(carry):
        key, _, _, _ = carry
        key, draw_key = jax.random.split(key)
        numbers, target = draw(draw_key, settings)
        content = base.content_hash(jnp.sort(numbers), target)
        is_puzzle = (target >= 1) & (target <= settings.highest_target)
        is_puzzle &= (numbers != target).all()
        return key, numbers, target, is_puzzle & (base.split_of(content) == split)

    start = (
        key,
        jnp.zeros((settings.max_numbers,), jnp.int32),
        jnp.zeros((), jnp.int32),
        jnp.zeros((), bool),
    )
    # Ends: `check` lets pass only settings that more than 1 draw in 60 fits.
    _, numbers, target, _ = jax.lax.while_loop(lambda carry: ~carry[3], redraw, start)
    return State(
        numbers=numbers,
        target=target,
        verdict=jnp.full((), base.NO_ACTION, jnp.int32),
        is_paid=jnp.zeros((), bool),
        done=jnp.zeros((), bool),
    )


def draw(key: jax.Array, settings: Countdown) -> tuple[jax.Array, jax.Array]:
    """Random numbers, int32[N], and what a random expression of all makes, int32[].

    Again and again two of the values at hand become one: their sum, their difference,
    their product if it stays within LIMIT (else the sum) or their quotient if it is
    whole (else the difference). The result may be unfit for a target.
    """
    most = settings.max_numbers
    count_key, number_key, pair_key, operator_key = jax.random.split(key, 4)
    count = jax.random.randint(count_key, (), settings.min_numbers, most + 1)
    numbers = jax.random.randint(number_key, (most,), 1, settings.highest_number + 1)
    place = jnp.arange(most)
    numbers = jnp.where(place < count, numbers, 0)

    def join(carry, drawn):
        values, is_left = carry
        chance, operator = drawn
        _, (one, two) = jax.lax.top_k(jnp.where(is_left, chance, -1.0), 2)
        high = jnp.maximum(values[one], values[two])
        low = jnp.minimum(values[one], values[two])
        divisor = jnp.maximum(low, 1)
        is_whole = (low > 0) & (high % divisor == 0)
        product = jnp.where(high <= LIMIT // divisor, high * low, high + low)
        quotient = jnp.where(is_whole, high // divisor, high - low)
        results = jnp.stack([high + low, high - low, product, quotient])
        joins = is_left.sum() > 1
        values = jnp.where(joins & (place == one), results[operator], values)
        return (values, is_left & ~(joins & (place == two))), None

    chances = jax.random.uniform(pair_key, (most - 1, most))
    operators = jax.random.randint(operator_key, (most - 1,), 0, 4)
    start = numbers, place < count
    (values, is_left), _ = jax.lax.scan(join, start, (chances, operators))
    return numbers, jnp.where(is_left, values, 0).sum()


def step(
    key: jax.Array, state: State, action: jax.Array, settings: Countdown
) -> tuple[State, base.Outcome]:
    """Takes note of what an answer came to; the target ends the episode.

    In all 1 is paid if the target is made, and no more than `partial_reward` if not,
    however many answers there are: what a first legal answer of another value has
    earned, the target does not pay again.

    Args:
      key: not used; nothing is left to chance.
      state: one puzzle; a finished one does not change.
      action: int32[], index in ACTION_NAMES, or base.NO_ACTION.
      settings: the partial reward.
    """
    del key
    answers = ~state.done & (action != base.NO_ACTION)
    success = answers & (action == TARGET)
    is_legal = answers & ((action == OTHER) | success)
    partial = jnp.where(is_legal & ~state.is_paid, settings.partial_reward, 0.0)
    reward = partial + jnp.where(success, 1 - settings.partial_reward, 0.0)
    done = state.done | success
    outcome = base.Outcome(
        reward=reward.astype(jnp.float32), success=success, done=done
    )
    verdict = jnp.where(answers, action, state.verdict)
    is_paid = state.is_paid | is_legal
    return state.replace(verdict=verdict, is_paid=is_paid, done=done), outcome


def read_action(
    text: jax.Array, length: jax.Array, state: State, settings: Countdown
) -> jax.Array:
    """int32[], what an answer comes to, or base.NO_ACTION if it cannot be read.

    Args:
      text: uint8[ANSWER_BYTES]; see countdown_expression.py for what can be read.
      length: int32[], its bytes.
      state: the puzzle.
      settings: whether all numbers must be used.
    """
    return read_bytes(text, length, state.numbers, state.target, settings.use_all)


def read_action_text(text: bytes, state: State, settings: Countdown) -> int:
    """What `read_action` must equal, from bytes and a host State."""
    numbers = [int(number) for number in state.numbers]
    return read_text(text, numbers, int(state.target), settings.use_all)


def observe(state: State, settings: Countdown) -> jax.Array:
    """int32[N + 4], the puzzle as indices into `phrases(settings)`."""
    listed = len(_LABELS) - 1  # The phrase of number n before a comma is listed + n.
    ending = listed + settings.highest_number
    place = jnp.arange(settings.max_numbers)
    is_last = place == (state.numbers > 0).sum() - 1
    numbers = jnp.where(is_last, ending, listed) + state.numbers
    numbers = jnp.where(state.numbers > 0, numbers, base.NO_PHRASE)
    has_verdict = state.verdict != base.NO_ACTION
    verdict = jnp.where(has_verdict, _VERDICT + state.verdict, base.NO_PHRASE)
    label = jnp.array([_NUMBERS])
    rest = jnp.stack([jnp.full((), _TARGET), ending + state.target, verdict])
    ids = jnp.concatenate([label, numbers, rest])
    # Gaps go to the end.
    return ids[jnp.argsort(ids == base.NO_PHRASE, stable=True)].astype(jnp.int32)


def phrases(settings: Countdown) -> tuple[str, ...]:
    """Labels, numbers followed by another, and numbers that end a line."""
    listed = (f" {n}," for n in range(1, settings.highest_number + 1))
    ending = (f" {n}\n" for n in range(1, settings.highest_target + 1))
    return (*_LABELS, *listed, *ending)


def instruction(settings: Countdown) -> str:
    """The rules for the system prompt; short, since small models read it too."""
    use = (
        "all the numbers, each once" if settings.use_all else "each number at most once"
    )
    return (
        "Make the target from the given numbers with one arithmetic expression. Use"
        f" {use}, with + - * / and parentheses; every division must come out even."
        " Action: the expression, such as (1 + 2) * 3. After a wrong one you are told"
        f" what the last answer was: {ACTION_NAMES[0]} (against the rules) or"
        f" {ACTION_NAMES[1]} (legal, but not the target)."
    )


def picture(state: State) -> np.ndarray:
    """uint8[48, 48 * (N + 1), 3], RGB: the numbers, then the target."""
    colours = [*[_NUMBER_COLOUR] * len(state.numbers), _TARGET_COLOUR]
    texts = [str(n) if n else "" for n in (*state.numbers, state.target)]
    return pictures.board(np.array([colours], np.uint8), [texts], cell=48)


def solve(state: State, settings: Countdown) -> tuple[int, ...]:
    """(TARGET,) if an expression makes it, else nothing; `solution_text` tells it."""
    return () if state.done or solution_text(state, settings) is None else (TARGET,)


def solution_text(state: State, settings: Countdown) -> str | None:
    """An expression that makes the target, or None if there is none. Host side.

    Args:
      state: NumPy arrays or numbers.
      settings: whether all numbers must be used.
    """
    terms = [(int(n), str(n), _ATOM) for n in state.numbers if n]
    return _search(terms, int(state.target), settings.use_all, set())


def _search(terms: list, target: int, use_all: bool, failed: set) -> str | None:
    """Joins two terms in every way, then the rest; `failed` keeps what led nowhere.

    Args:
      terms: (value, text, _SUM, _PRODUCT or _ATOM) of each.
      target: the value that one text should have.
      use_all: whether that text must hold all terms.
      failed: the tuples of values that were searched in vain; grows.
    """
    for value, text, _ in terms:
        if value == target and (len(terms) == 1 or not use_all):
            return text
    values = tuple(sorted(value for value, _, _ in terms))
    if values in failed:
        return None
    failed.add(values)
    for one in range(len(terms)):
        for two in range(one):
            rest = [t for place, t in enumerate(terms) if place not in (one, two)]
            for joined in _joins(*sorted((terms[one], terms[two]), reverse=True)):
                if found := _search([*rest, joined], target, use_all, failed):
                    return found
    return None


def _joins(high: tuple, low: tuple) -> list[tuple]:
    """The terms that two others make; the first has the higher value, or the same."""
    (a, _, _), (b, _, _) = high, low
    made = [(a + b, " + ", _SUM), (a - b, " - ", _SUM), (a * b, " * ", _PRODUCT)]
    if b and a % b == 0:
        made.append((a // b, " / ", _PRODUCT))
    return [
        (value, _enclosed(high, kind) + operator + _enclosed(low, kind + 1), kind)
        for value, operator, kind in made
        if value <= LIMIT
    ]


def _enclosed(term: tuple, least: int) -> str:
    """The term's text, in parentheses if it binds less than it has to."""
    _, text, kind = term
    return text if kind >= least else f"({text})"


def _longest_observation(lengths, settings: Countdown) -> int:
    """Most tokens in an observation; `lengths` is int[phrases], the tokens of each."""
    labels, listed, ending = np.split(
        lengths, [len(_LABELS), len(_LABELS) + settings.highest_number]
    )
    total = labels[_NUMBERS] + labels[_TARGET] + labels[_VERDICT:].max()
    total += (settings.max_numbers - 1) * listed.max()
    return int(total + ending[: settings.highest_number].max() + ending.max())
