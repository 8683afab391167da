"""Countdown: its puzzles and their solutions, rewards, words and settings."""

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import ROOT

from ragen_jax import cli
from ragen_jax import settings as settings_lib
from ragen_jax.envs import base
from ragen_jax.envs.base import NO_ACTION
from ragen_jax.envs.countdown import env as countdown
from ragen_jax.envs.countdown import generator, solver, texts
from ragen_jax.envs.countdown.env import Countdown, State
from ragen_jax.envs.countdown.expression import (
    ANSWER_BYTES,
    OTHER,
    REFUSED,
    TARGET,
    read_text,
)
from ragen_jax.errors import UserError

LEVELS = 100  # of each split, for `_levels`
SMALLEST = Countdown(min_numbers=2, max_numbers=2, highest_number=10, highest_target=10)


@functools.cache
def _levels(settings):
    """Fresh states, leaves [3 * LEVELS, ...], as NumPy."""
    reset = functools.partial(countdown.reset, settings=settings)
    keys = jax.random.split(jax.random.key(1), 3 * LEVELS)
    splits = jnp.repeat(jnp.arange(3, dtype=jnp.int32), LEVELS)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(reset))(keys, splits))


def _state(numbers, target, verdict=NO_ACTION):
    return State(
        numbers=jnp.array(numbers, jnp.int32),
        target=jnp.int32(target),
        verdict=jnp.int32(verdict),
        is_paid=jnp.zeros((), bool),
        done=jnp.zeros((), bool),
    )


# Puzzles.


@pytest.mark.parametrize(
    "settings",
    [
        Countdown(),
        pytest.param(
            Countdown(min_numbers=5, max_numbers=6, use_all=True),
            marks=pytest.mark.slow,
        ),
        SMALLEST,
    ],
)
def test_every_puzzle_can_be_solved_and_its_solution_is_read_as_one(settings):
    levels, env = _levels(settings), countdown.make(settings)
    counts = collections.Counter()
    for numbers, target in zip(levels.numbers, levels.target, strict=True):
        given = [n for n in numbers.tolist() if n]
        assert numbers.tolist() == given + [0] * (settings.max_numbers - len(given))
        assert 1 <= min(given) and max(given) <= settings.highest_number
        assert 1 <= target <= settings.highest_target and target not in given
        counts[len(given)] += 1
    assert set(counts) == {*range(settings.min_numbers, settings.max_numbers + 1)}
    assert max(counts.values()) < 3 * LEVELS or len(counts) == 1
    for index in range(0, 3 * LEVELS, 12):
        state = jax.tree.map(lambda leaf, index=index: leaf[index], levels)
        text = solver.solution_text(state, settings).encode()
        assert len(text) <= ANSWER_BYTES
        assert env.read_action_text(text, state) == TARGET, text
        assert env.solve(state) == (TARGET,)
    assert env.solve(state.replace(done=np.True_)) == ()


def test_no_puzzle_is_made_by_way_of_a_number_that_no_solution_may_have(monkeypatch):
    """Beyond LIMIT, which with the true one is rare; an own solver says what can be."""
    for module in (generator, solver):
        monkeypatch.setattr(module, "LIMIT", 99)
    settings = Countdown(min_numbers=3, max_numbers=3, use_all=True)
    draw = jax.vmap(lambda key: generator.random_puzzle(key, settings))
    numbers, targets = jax.device_get(draw(jax.random.split(jax.random.key(0), 4000)))
    fit = [i for i, target in enumerate(targets) if 1 <= target <= 99]
    state = State(numbers[0], targets[0], np.int32(NO_ACTION), np.False_, np.False_)
    for i in fit:
        puzzle = state.replace(numbers=numbers[i], target=targets[i])
        assert solver.solution_text(puzzle, settings) is not None, (i, puzzle)
    assert len(fit) > 1000


def test_splits_share_no_puzzle_in_whatever_order_its_numbers_are_given():
    levels = _levels(SMALLEST)
    content = np.column_stack([np.sort(levels.numbers), levels.target])
    split_of = jax.jit(jax.vmap(generator.split_of))
    np.testing.assert_array_equal(
        split_of(content[:, :2], content[:, 2]), np.repeat(range(3), LEVELS)
    )
    found = [{tuple(row) for row in rows.tolist()} for rows in np.split(content, 3)]
    assert min(map(len, found)) > 3
    for left, right in itertools.combinations(found, 2):
        assert not left & right
    # In training puzzles both orders of two numbers come up.
    orders = {tuple(numbers) for numbers in levels.numbers[:LEVELS].tolist()}
    assert {order[::-1] for order in orders} & {o for o in orders if o[0] < o[1]}


def test_settings_that_give_a_puzzle_too_leave_it_in_its_split():
    numbers, target = _levels(SMALLEST).numbers, _levels(SMALLEST).target
    wider = np.pad(numbers, [(0, 0), (0, 2)])
    split = jax.vmap(generator.split_of)(wider, target)
    np.testing.assert_array_equal(split, np.repeat(range(3), LEVELS))


def test_every_split_has_a_fair_share_of_even_the_smallest_puzzles():
    worst, rows = [], []
    for a, b in itertools.product(range(1, 41), repeat=2):
        high, low = max(a, b), min(a, b)
        quotient = high - low if high % low else high // low
        rows += [(low, high, r) for r in (a + b, high - low, a * b, quotient)]
    content = np.array(rows, np.int32)
    split = np.asarray(jax.vmap(generator.split_of)(content[:, :2], content[:, 2]))
    low, high, target = content.T
    for highest in range(10, 41):
        for top in (highest, 999):
            fits = (target >= 1) & (target <= top) & (target != low) & (target != high)
            drawn = high <= highest
            share = [
                (fits & drawn & (split == s)).sum() / drawn.sum() for s in range(3)
            ]
            worst.append(min(share))
    assert min(worst) > 1 / 60


def test_every_split_has_a_fair_share_of_the_largest_puzzles():
    def split_of(key, highest, top):
        settings = Countdown(6, 6, highest, top)
        numbers, target = generator.random_puzzle(key, settings)
        fits = (target >= 1) & (target <= top) & (numbers != target).all()
        return jnp.where(fits, generator.split_of(numbers, target), len(base.SPLITS))

    draws, limits = 10_000, np.array([(10, 10), (99, 999), (999, 999)])
    keys = jax.random.split(jax.random.key(2), draws)
    many = jax.vmap(jax.vmap(split_of, (0, None, None)), (None, 0, 0))
    for row in np.asarray(jax.jit(many)(keys, *limits.T)):
        assert np.bincount(row, minlength=3)[:3].min() > draws / 60


def test_a_puzzle_without_a_solution_has_none():
    assert solver.solution_text(_state([1, 1, 0], 3), Countdown()) is None
    assert countdown.solve(_state([2, 2, 2], 100), Countdown()) == ()
    # 2 and 3 make 6, but not with the 8.
    state = _state([2, 3, 8], 6)
    assert solver.solution_text(state, Countdown(use_all=True)) is None
    found = solver.solution_text(state, Countdown()).encode()
    assert read_text(found, [2, 3, 8], 6) == TARGET


def test_the_text_of_the_action_that_solves_a_puzzle_is_a_solution():
    env, state = countdown.make(Countdown()), _state([2, 3, 7, 0], 42)
    (action,) = env.solve(state)
    text = base.text_of_action(action, env, state)
    assert re.fullmatch(r"[237 *()]+", text)
    assert env.read_action_text(text.encode(), state) == TARGET
    assert base.text_of_action(OTHER, env, state) == "other value"
    assert base.text_of_action(TARGET, env, _state([2, 2, 0, 0], 99)) == "target"


def test_a_solution_holds_all_numbers_only_where_the_settings_say_so():
    state = _state([2, 3, 8], 8)
    assert solver.solution_text(state, Countdown()) == "8"
    found = solver.solution_text(state, Countdown(use_all=True)).encode()
    assert sorted(re.findall(rb"\d", found)) == [b"2", b"3", b"8"]
    assert read_text(found, [2, 3, 8], 8) == TARGET


# Rewards.


@pytest.mark.parametrize(
    ("actions", "rewards"),
    [
        ([TARGET, TARGET], [1.0, 0.0]),
        ([OTHER, OTHER, TARGET], [0.1, 0.0, 0.9]),
        ([REFUSED, NO_ACTION, OTHER, REFUSED, OTHER], [0.0, 0.0, 0.1, 0.0, 0.0]),
        ([NO_ACTION, REFUSED, TARGET, OTHER], [0.0, 0.0, 1.0, 0.0]),
    ],
)
def test_in_all_the_target_pays_one_and_a_legal_answer_its_part_once(actions, rewards):
    state, paid = _state([1, 2, 3], 7), []
    for action in actions:
        before = state
        state, outcome = countdown.step(
            jax.random.key(0), state, jnp.int32(action), Countdown()
        )
        paid.append(float(outcome.reward))
        assert bool(outcome.success) == (action == TARGET and not before.done)
        assert bool(outcome.done) == bool(state.done)
        if before.done or action == NO_ACTION:
            assert int(state.verdict) == int(before.verdict)
        else:
            assert int(state.verdict) == action
    np.testing.assert_allclose(paid, rewards, rtol=1e-6)
    assert bool(state.done) == (TARGET in actions)


def test_without_a_partial_reward_only_the_target_pays():
    settings = Countdown(partial_reward=0.0)
    key, state = jax.random.key(0), _state([1, 2, 3], 7)
    state, outcome = countdown.step(key, state, jnp.int32(OTHER), settings)
    assert float(outcome.reward) == 0
    _, outcome = countdown.step(key, state, jnp.int32(TARGET), settings)
    assert float(outcome.reward) == 1


# Words.


def test_random_answers_are_refused_or_of_another_value_and_never_the_target():
    drawn = jax.vmap(countdown.sample_action)(jax.random.split(jax.random.key(0), 200))
    assert set(np.asarray(drawn).tolist()) == {REFUSED, OTHER}


def test_the_observation_reads_as_the_host_renders_it():
    settings = Countdown()
    env, levels = countdown.make(settings), _levels(settings)
    verdicts = np.arange(3 * LEVELS, dtype=np.int32) % 4 - 1
    states = levels.replace(verdict=verdicts)
    ids = np.asarray(jax.jit(jax.vmap(env.observe))(states))
    for row, numbers, target, verdict in zip(
        ids, states.numbers, states.target, verdicts, strict=True
    ):
        listed = ", ".join(str(n) for n in numbers if n)
        expected = f"Numbers: {listed}\nTarget: {target}\n"
        if verdict != NO_ACTION:
            expected += f"Last answer: {countdown.ACTION_NAMES[verdict]}\n"
        assert base.text_of(env.phrases, row) == expected


def test_the_instruction_is_computed_from_the_settings():
    text = texts.instruction(Countdown())
    assert "each number at most once" in text and "(1 + 2) * 3" in text
    assert len(text) <= 430
    assert "all the numbers, each once" in texts.instruction(Countdown(use_all=True))


def test_the_picture_is_as_wide_for_fewer_numbers():
    images = [countdown.picture(_state(n, 42)) for n in ([3, 5, 7, 9], [3, 5, 7, 0])]
    assert all(i.shape == (48, 240, 3) and i.dtype == np.uint8 for i in images)
    differs = (images[0] != images[1]).any(axis=(0, 2))
    assert differs[146:190].any() and not differs[:144].any()
    assert not differs[193:].any()


# Settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_numbers": 1}, "countdown.min_numbers = 1 .* 2 to 6"),
        ({"max_numbers": 7}, "countdown.max_numbers = 7 .* = 3 to 6"),
        ({"min_numbers": 5}, "countdown.max_numbers = 4 .* = 5 to 6"),
        ({"highest_number": 9}, "countdown.highest_number = 9 .* 10 to 999"),
        ({"highest_number": 1000}, "countdown.highest_number = 1000 .* 10 to 999"),
        ({"highest_target": 98}, "countdown.highest_target = 98 .* = 99 to 9999"),
        ({"highest_target": 10_000}, "highest_target = 10000 .* = 99 to 9999"),
        ({"partial_reward": 1.0}, "partial_reward = 1.0 .* less than 1"),
        ({"partial_reward": -0.1}, "partial_reward = -0.1 .* at least 0"),
        ({"partial_reward": float("nan")}, "countdown.partial_reward = nan"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence_with_the_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        countdown.make(Countdown(**changes))


@pytest.mark.parametrize(
    ("variant", "turns", "use_all"),
    [("", 3, False), ("smoke", 3, False), ("paper", 1, True)],
)
def test_the_config_asks_for_one_expression_a_turn(variant, turns, use_all):
    path = f"{ROOT}/configs/countdown.py:{variant}"
    made = settings_lib.from_dict(cli.load_config(path).to_dict())
    chosen = settings_lib.env_settings(made.env.options, Countdown)
    assert made.env.name == countdown.make(chosen).name
    assert chosen == Countdown(use_all=use_all)
    limits = made.rollout
    assert (limits.turns, limits.actions_per_turn, limits.actions) == (turns, 1, turns)
    assert made.iterations == {"smoke": 2, "paper": 200}.get(variant, 60)


def test_an_unknown_variant_of_the_config_is_refused():
    with pytest.raises(UserError, match="'big': choose one of 'smoke'"):
        cli.load_config(f"{ROOT}/configs/countdown.py:big")
