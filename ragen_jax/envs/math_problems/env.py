"""Math: word problems in which steps change the number of things that somebody has.

There are several attempts; a right answer after k wrong ones earns 1 / 2^k, as in
RAGEN's MetaMathQA. Every function handles one problem: `vmap` to batch.
"""

import dataclasses
import functools
import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.envs import base, phrase_tables, rendering

ACTION_NAMES = ("wrong", "right")  # An action is the verdict on an answer.
WRONG, RIGHT = range(2)
ANSWER_BYTES = 24
MOST_STEPS = 8
_HIGHEST_TRIES = 30  # wrong answers are counted, and shown, up to this
_NUMERATOR_DIGITS, _DENOMINATOR_DIGITS = 6, 4  # at most, of an answer
# Bounds on amounts: a step that would go beyond is an addition, which may.
_MOST, _MOST_DENOMINATOR = 99_999, 999
_NAMES = "Ada Ben Cleo Dan Eva Finn Gina Hal Iris Jack Kim Leo".split()
_THINGS = ("apples", "pencils", "stickers", "marbles", "cards", "shells")
_MEASURED = ("litres of juice", "metres of rope", "kilos of flour")
# By operation: words before its first number, between its two numbers, and at the end.
# Only BUY and HELP have a second number.
_OPERATIONS = (
    ("gets", None, "more.\n"),
    ("gives away", None, "of that.\n"),
    ("comes to have", None, "times as much.\n"),
    ("keeps one of", None, "equal shares.\n"),
    ("buys", "packs of", "each.\n"),
    ("hands", "friends", "each.\n"),
)
ADD, TAKE, TIMES, SHARE, BUY, HELP = range(len(_OPERATIONS))


@dataclasses.dataclass(frozen=True)
class Math:
    """Settings of one kind of problem."""

    min_steps: int = 1  # fewest steps that change what somebody has
    max_steps: int = 3  # S, most such steps
    highest_number: int = 50  # largest number in a problem's text
    fractions: bool = False  # Amounts and answers may be fractions.


@struct.dataclass
class State:
    """One problem and how often it was answered wrongly."""

    name: jax.Array  # int32[], of _NAMES
    thing: jax.Array  # int32[], of _THINGS, or of _MEASURED with `fractions`
    start: jax.Array  # int32[], the amount at first
    operation: jax.Array  # int32[S], ADD, ..., HELP, padded with NO_OPERATION
    first: jax.Array  # int32[S], each operation's first number
    second: jax.Array  # int32[S], the second number of BUY and HELP, otherwise 0
    numerator: jax.Array  # int32[], of the answer, in lowest terms
    denominator: jax.Array  # int32[], above 0
    tries: jax.Array  # int32[], wrong answers so far
    done: jax.Array  # bool[], True once it was answered correctly


NO_OPERATION = -1


def make(settings: Math) -> base.Environment:
    """Binds the settings into an environment. ValueError if they cannot be used."""
    check(settings)
    return base.Environment(
        name="math",
        action_names=ACTION_NAMES,
        phrases=phrases(settings),
        observation_phrases=7 + 5 * settings.max_steps,
        instruction=instruction(settings),
        reset=functools.partial(reset, settings=settings),
        step=step,
        observe=functools.partial(observe, settings=settings),
        example_actions=("7/2",) if settings.fractions else ("12",),
        longest_observation=functools.partial(_longest_observation, settings=settings),
        answer_bytes=ANSWER_BYTES,
        most_actions=1,
        read_action=read_action,
        read_action_text=read_action_text,
        sample_action=sample_action,
        action_text=action_text,
        picture=rendering.text_view(
            phrases(settings), functools.partial(observe, settings=settings)
        ),
        solve=lambda state: () if bool(state.done) else (RIGHT,),
    )


def check(settings: Math) -> None:
    """Raises ValueError, in one sentence, for settings that cannot be used."""
    limits = {
        "max_steps": range(1, MOST_STEPS + 1),
        "min_steps": range(1, settings.max_steps + 1),
        "highest_number": range(10, 100),
    }
    for key, possible in limits.items():
        value = getattr(settings, key)
        if value not in possible:
            raise ValueError(
                f"math.{key} = {value} is not possible: choose a whole number from"
                f" {possible[0]} to {possible[-1]}"
            )


def reset(key: jax.Array, split: jax.Array, settings: Math) -> State:
    """Draws a problem that `split_of` assigns to the split."""

    def draw_problem(key):
        problem = draw(key, settings)
        return problem, split_of(problem) == split

    # It ends: about 1 draw in 8 is of the rarest split.
    return base.draw_until_fit(draw_problem, key)


def split_of(state: State) -> jax.Array:
    """int32[], the split of a problem, by its numbers and operations.

    It does not depend on names and things, nor on `max_steps`, to which operations are
    padded.
    """
    missing = (0, MOST_STEPS - state.operation.size)
    return base.split_of(
        base.content_hash(
            state.start,
            jnp.pad(state.operation, missing, constant_values=NO_OPERATION),
            jnp.pad(state.first, missing),
            jnp.pad(state.second, missing),
        )
    )


def draw(key: jax.Array, settings: Math) -> State:
    """A random problem. A step whose result would be out of bounds becomes an ADD."""
    most = settings.max_steps
    keys = jax.random.split(key, 6)
    highest = settings.highest_number
    count = jax.random.randint(keys[0], (), settings.min_steps, most + 1)
    start = jax.random.randint(keys[1], (), 2, highest + 1)
    operations = jax.random.randint(keys[2], (most,), 0, len(_OPERATIONS))
    large = jax.random.randint(keys[3], (most,), 2, highest + 1)
    small = jax.random.randint(keys[4], (2, most), 2, 7)
    things = len(_MEASURED) if settings.fractions else len(_THINGS)
    name, thing = jax.random.randint(keys[5], (2,), 0, jnp.array([len(_NAMES), things]))

    def change(value, inputs):
        operation, large, small, second, is_there = inputs
        has_two = (operation == BUY) | (operation == HELP)
        is_small = has_two | (operation == TIMES) | (operation == SHARE)
        first = jnp.where(is_small, small, large)
        second = jnp.where(has_two, second, 0)
        after = apply(value, operation, first, second)
        is_possible = (after[0] > 0) & (after[0] <= _MOST)
        is_possible &= after[1] <= (_MOST_DENOMINATOR if settings.fractions else 1)
        operation = jnp.where(is_possible, operation, ADD)
        first = jnp.where(is_possible, first, large)
        second = jnp.where(is_possible, second, 0)
        after = apply(value, operation, first, second)
        after = tuple(
            jnp.where(is_there, new, old) for new, old in zip(after, value, strict=True)
        )
        row = jnp.stack([operation, first, second])
        return after, jnp.where(is_there, row, jnp.array([NO_OPERATION, 0, 0]))

    is_there = jnp.arange(most) < count
    value, rows = jax.lax.scan(
        change, (start, jnp.int32(1)), (operations, large, *small, is_there)
    )
    return State(
        name=name,
        thing=thing,
        start=start,
        operation=rows[:, 0],
        first=rows[:, 1],
        second=rows[:, 2],
        numerator=value[0],
        denominator=value[1],
        tries=jnp.zeros((), jnp.int32),
        done=jnp.zeros((), bool),
    )


def apply(value, operation, first, second) -> tuple[jax.Array, jax.Array]:
    """The amount after an operation, as (numerator, denominator) in lowest terms."""
    top, bottom = value
    pack = jnp.where(second > 0, first * second, first)
    adds = jnp.where((operation == TAKE) | (operation == HELP), -pack, pack)
    changed = jnp.where(operation == TIMES, top * first, top + adds * bottom)
    top = jnp.where(operation == SHARE, top, changed)
    bottom = jnp.where(operation == SHARE, bottom * first, bottom)
    divisor = jnp.maximum(jnp.gcd(top, bottom), 1)
    return top // divisor, bottom // divisor


def step(key: jax.Array, state: State, action: jax.Array) -> tuple[State, base.Outcome]:
    """Records the verdict on an answer; the right one ends the episode.

    Args:
      key: not used; nothing is random.
      state: one problem; once `done`, it does not change.
      action: int32[], index in ACTION_NAMES, or base.NO_ACTION.
    """
    del key
    answers = ~state.done & (action != base.NO_ACTION)
    success = answers & (action == RIGHT)
    reward = jnp.where(success, jnp.exp2(-state.tries.astype(jnp.float32)), 0.0)
    wrong = (answers & ~success).astype(jnp.int32)
    done = state.done | success
    tries = jnp.minimum(state.tries + wrong, _HIGHEST_TRIES)
    outcome = base.Outcome(reward=reward, success=success, done=done)
    return state.replace(tries=tries, done=done), outcome


# Answers -----------------------------------------------------------------------------


def read_action(text: jax.Array, length: jax.Array, state: State) -> jax.Array:
    """int32[], what `read_action_text` returns.

    Args:
      text: uint8[ANSWER_BYTES], padded with 0.
      length: int32[], its bytes.
      state: the problem.
    """
    is_white = jnp.isin(text, jnp.array([*b" \t\n\r\v\f"], jnp.uint8))
    is_white |= jnp.arange(ANSWER_BYTES) >= length
    text = text[jnp.argsort(is_white, stable=True)]
    length = ANSWER_BYTES - is_white.sum()
    place = jnp.arange(ANSWER_BYTES)
    is_negative = text[0] == ord("-")
    is_slash = (text == ord("/")) & (place < length)
    has_slash = is_slash.any()
    begin = is_negative.astype(jnp.int32)
    slash = jnp.where(has_slash, jnp.argmax(is_slash), length)

    def number(start, end, digits: int) -> tuple[jax.Array, jax.Array]:
        """The number in text[start:end], and whether it has 1 to `digits` digits."""
        at = start + jnp.arange(digits)
        digit = text[jnp.clip(at, 0, ANSWER_BYTES - 1)].astype(jnp.int32) - ord("0")
        is_in_number = at < end
        is_one = (end > start) & (end - start <= digits)
        is_one &= (~is_in_number | ((digit >= 0) & (digit <= 9))).all()
        value = jnp.zeros((), jnp.int32)
        for index in range(digits):
            longer = value * 10 + digit[index]
            value = jnp.where(is_in_number[index] & is_one, longer, value)
        return value, is_one

    top, is_number = number(begin, slash, _NUMERATOR_DIGITS)
    bottom, is_second = number(slash + 1, length, _DENOMINATOR_DIGITS)
    bottom = jnp.where(has_slash, bottom, 1)
    is_number &= ~has_slash | (is_second & (bottom > 0))
    top = jnp.where(is_negative, -top, top)
    is_right = top * state.denominator == state.numerator * bottom
    # Products that exceed int32 could be equal but for a multiple of 2^32.
    rounded = top.astype(jnp.float32) * state.denominator
    rounded -= state.numerator * bottom.astype(jnp.float32)
    is_right &= jnp.abs(rounded) < 2.0**31
    return jnp.where(is_number, is_right, base.NO_ACTION).astype(jnp.int32)


def read_action_text(text: bytes, state: State) -> int:
    """The verdict on an integer or a fraction; NO_ACTION for other texts.

    White space is ignored. A fraction need not be in lowest terms.
    """
    match = re.fullmatch(
        rb"(-?[0-9]{1,%d})(?:/([0-9]{1,%d}))?"
        % (_NUMERATOR_DIGITS, _DENOMINATOR_DIGITS),
        re.sub(rb"[ \t\n\r\v\f]", b"", text),
    )
    if match is None or (match[2] is not None and int(match[2]) == 0):
        return base.NO_ACTION
    answer = Fraction(int(match[1]), int(match[2] or 1))
    is_right = answer == Fraction(int(state.numerator), int(state.denominator))
    return RIGHT if is_right else WRONG


def sample_action(key: jax.Array) -> jax.Array:
    """int32[], WRONG: the verdict that a random answer would have."""
    del key
    return jnp.full((), WRONG, jnp.int32)


def action_text(action: Any, state: State) -> str:
    """The right answer, or for WRONG the right answer plus 1."""
    value = Fraction(int(state.numerator), int(state.denominator))
    return str(value + (int(action) == WRONG))


# Texts -------------------------------------------------------------------------------


def _tables(settings: Math) -> dict[str, tuple[str, ...]]:
    """The kinds of phrases in order."""
    things = _MEASURED if settings.fractions else _THINGS
    many = "How much" if settings.fractions else "How many"
    return {
        "number": tuple(f" {n}" for n in range(settings.highest_number + 1)),
        "has": tuple(f"{name} has" for name in _NAMES),
        "thing": tuple(f" {thing}.\n" for thing in things),
        "act": tuple(f"{name} {op[0]}" for op in _OPERATIONS for name in _NAMES),
        "between": tuple(f" {op[1]}" for op in _OPERATIONS if op[1]),
        "end": tuple(f" {op[2]}" for op in _OPERATIONS),
        "many": tuple(f"{many} {thing.split(' of ')[-1]} does" for thing in things),
        "now": tuple(f" {name} have now?\n" for name in _NAMES),
        "tries": tuple(f"Wrong answers: {n}\n" for n in range(_HIGHEST_TRIES + 1)),
        "solved": ("Right.\n",),
    }


def phrases(settings: Math) -> tuple[str, ...]:
    """The texts that the ids of `observe` stand for."""
    return phrase_tables.texts(_tables(settings))


def observe(state: State, settings: Math) -> jax.Array:
    """int32[7 + 5 S], the problem as indices into `phrases(settings)`."""
    at = phrase_tables.first_ids(_tables(settings))
    operation = jnp.maximum(state.operation, 0)
    has_two = (operation == BUY) | (operation == HELP)
    none = jnp.full(operation.shape, base.NO_PHRASE)
    between = at["between"] + (operation == HELP)
    rows = jnp.stack(
        [
            at["act"] + operation * len(_NAMES) + state.name,
            at["number"] + state.first,
            jnp.where(has_two, between, none),
            jnp.where(has_two, at["number"] + state.second, none),
            at["end"] + operation,
        ],
        axis=1,
    )
    rows = jnp.where((state.operation >= 0)[:, None], rows, base.NO_PHRASE)
    tries = jnp.where(state.tries > 0, at["tries"] + state.tries, base.NO_PHRASE)
    head = [at["has"] + state.name, at["number"] + state.start]
    head.append(at["thing"] + state.thing)
    last = [at["many"] + state.thing, at["now"] + state.name, tries]
    last.append(jnp.where(state.done, at["solved"], base.NO_PHRASE))
    ids = jnp.concatenate([jnp.stack(head), rows.reshape(-1), jnp.stack(last)])
    return phrase_tables.close_gaps(ids)


def instruction(settings: Math) -> str:
    """The rules for the system prompt."""
    form = "a whole number such as 12"
    if settings.fractions:
        form += " or a fraction such as 7/2"
    return (
        f"Solve the word problem. Answer with {form}, and nothing else. The right"
        " answer earns 1, half of that after one wrong answer, a quarter after two,"
        " and so on."
    )


def _longest_observation(lengths, settings: Math) -> int:
    """Most tokens in an observation; `lengths` is int[phrases], the tokens of each."""
    most = phrase_tables.most_tokens(_tables(settings), lengths)
    row = most["act"] + 2 * most["number"] + most["between"] + most["end"]
    head = most["has"] + most["number"] + most["thing"]
    last = most["many"] + most["now"] + most["tries"] + most["solved"]
    return head + settings.max_steps * row + last
