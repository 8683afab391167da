"""Word problems: their texts solved by a plain reader, answers, rewards, settings."""

import functools
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax import envs
from ragen_jax.envs import base
from ragen_jax.envs.math_problems import env
from ragen_jax.envs.math_problems.env import Math
from ragen_jax.errors import SettingsError

LEVELS = 60  # of each split
KINDS = [Math(), Math(max_steps=6, fractions=True), Math(min_steps=2, max_steps=2)]


@functools.cache
def _levels(settings):
    keys = jax.random.split(jax.random.key(1), 3 * LEVELS)
    splits = jnp.repeat(jnp.arange(3, dtype=jnp.int32), LEVELS)
    reset = functools.partial(env.reset, settings=settings)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(reset))(keys, splits))


def _level(settings, index):
    return jax.tree.map(lambda leaf: leaf[index], _levels(settings))


def _read_and_solve(text: str) -> tuple[Fraction, int]:
    """The answer to a problem's text, and the number of its steps."""
    first, *steps, question = text.strip().split("\n")
    name, value = re.fullmatch(r"(\w+) has (\d+) [a-z ]+\.", first).groups()
    value = Fraction(value)
    assert re.fullmatch(rf"How (many|much) \w+ does {name} have now\?", question)
    for line in steps:
        numbers = [int(n) for n in re.findall(r"\d+", line)]
        product = int(np.prod(numbers))
        if " gets " in line or " buys " in line:
            value += product
        elif " gives away " in line or " hands " in line:
            value -= product
        elif "times as much" in line:
            value *= product
        else:
            assert "equal shares" in line
            value /= product
        assert value > 0 and line.startswith(name)
    return value, len(steps)


@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.slow
def test_problems_have_the_answer_that_a_reader_of_their_text_finds(settings):
    environment, counts, whole = env.make(settings), set(), set()
    observe = jax.jit(jax.vmap(environment.observe))(_levels(settings))
    for index, ids in enumerate(np.asarray(observe)):
        value, count = _read_and_solve(base.text_of(environment.phrases, ids))
        state = _level(settings, index)
        assert value == Fraction(int(state.numerator), int(state.denominator))
        counts.add(count)
        whole.add(value.denominator == 1)
    assert counts == set(range(settings.min_steps, settings.max_steps + 1))
    assert whole == ({True, False} if settings.fractions else {True})


def test_no_problem_is_in_two_splits():
    levels = _levels(Math(max_steps=1, highest_number=10))
    parts = [levels.start[:, None], levels.operation, levels.first, levels.second]
    rows = np.concatenate(parts, axis=1).reshape(3, LEVELS, -1)
    train, validation, test = ({tuple(row) for row in part.tolist()} for part in rows)
    assert not train & validation and not train & test and not validation & test


def test_settings_that_give_a_problem_too_leave_it_in_its_split():
    levels, none = _levels(Math(max_steps=1, highest_number=10)), env.NO_OPERATION
    longer = levels.replace(
        operation=np.pad(levels.operation, [(0, 0), (0, 2)], constant_values=none),
        first=np.pad(levels.first, [(0, 0), (0, 2)]),
        second=np.pad(levels.second, [(0, 0), (0, 2)]),
    )
    split = jax.vmap(env.split_of)(longer)
    np.testing.assert_array_equal(split, np.repeat(range(3), LEVELS))


def test_the_right_answer_earns_half_as_much_after_each_wrong_one():
    step, state = jax.jit(env.step), _level(KINDS[0], 0)
    key = jax.random.key(0)
    for wrong in range(4):
        after, outcome = step(key, state, jnp.int32(env.RIGHT))
        assert outcome.reward == 0.5**wrong and outcome.success and outcome.done
        state, outcome = step(key, state, jnp.int32(env.WRONG))
        assert outcome.reward == 0 and not outcome.done
    _, outcome = step(key, after, jnp.int32(env.RIGHT))
    assert outcome.reward == 0 and not outcome.success and outcome.done


def test_more_than_thirty_wrong_answers_read_as_thirty():
    state = _level(KINDS[0], 0).replace(tries=np.int32(30))
    after, _ = jax.jit(env.step)(jax.random.key(0), state, jnp.int32(env.WRONG))
    environment = env.make(KINDS[0])
    ids = np.asarray(jax.jit(environment.observe)(after))
    text = base.text_of(environment.phrases, ids)
    assert text.endswith(" have now?\nWrong answers: 30\n")


@pytest.mark.parametrize(
    ("answer", "meaning"),
    [
        *[("7/2", env.RIGHT), (" 14 / 4 ", env.RIGHT), ("3500/1000", env.RIGHT)],
        *[("-7/2", env.WRONG), ("3", env.WRONG), ("7", env.WRONG), ("0/5", env.WRONG)],
        *[("7/0", -1), ("7/", -1), ("/2", -1), ("3.5", -1), ("x", -1), ("--7", -1)],
        *[("7/2/1", -1), ("1234567", -1), ("7/20000", -1), ("7/-2", -1), ("- 7", 0)],
    ],
)
def test_answers_are_whole_numbers_and_fractions(answer, meaning):
    state = _level(KINDS[1], 0).replace(numerator=np.int32(7), denominator=np.int32(2))
    text = answer.strip().encode()
    assert env.read_action_text(text, state) == meaning
    row = np.zeros(env.ANSWER_BYTES, np.uint8)
    row[: len(text)] = np.frombuffer(text, np.uint8)
    assert jax.jit(env.read_action)(row, jnp.int32(len(text)), state) == meaning


def test_an_answer_whose_product_differs_by_all_that_an_int32_holds_is_wrong():
    state = _level(KINDS[1], 0)
    state = state.replace(numerator=np.int32(429_540), denominator=np.int32(1))
    assert 429_540 * 9999 - 3164 == 2**32
    for answer, meaning in (("3164/9999", env.WRONG), ("429540", env.RIGHT)):
        row = np.zeros(env.ANSWER_BYTES, np.uint8)
        row[: len(answer)] = np.frombuffer(answer.encode(), np.uint8)
        assert jax.jit(env.read_action)(row, jnp.int32(len(answer)), state) == meaning


def test_the_solver_writes_the_answer():
    for index in range(3 * LEVELS):
        state = _level(KINDS[1], index)
        right, wrong = (env.action_text(a, state) for a in (env.RIGHT, env.WRONG))
        assert env.read_action_text(right.encode(), state) == env.RIGHT
        assert env.read_action_text(wrong.encode(), state) == env.WRONG


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(max_steps=9), "max_steps = 9 is not possible"),
        (dict(min_steps=4), "from 1 to 3"),
        (dict(highest_number=9), "from 10 to 99"),
    ],
)
def test_settings_without_problems_are_refused(options, sentence):
    with pytest.raises(SettingsError, match=sentence):
        envs.make("math", options.items())
