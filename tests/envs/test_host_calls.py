"""A user's functions on the host: what they raise or give is told in a sentence."""

import dataclasses

import numpy as np
import pytest
from helpers import runs

from ragen_jax import envs
from ragen_jax.envs import base
from ragen_jax.errors import UserError

COIN_WALK = str(runs.ROOT / "docs" / "examples" / "coin_walk.py")


@pytest.fixture(scope="module")
def walk():
    return envs.make(COIN_WALK, ())


@pytest.mark.parametrize(
    ("part", "function", "message"),
    [
        ("solve", lambda state: 1 / 0, "solve fails: ZeroDivisionError: .*: fix it"),
        ("solve", lambda state: None, "solve gives None: let it give a tuple"),
        ("solve", lambda state: (0, 2), r"solve gives \(0, 2\): let it"),
        ("solve", lambda state: ("Left",), "let it give a tuple of actions"),
        ("picture", lambda state: np.zeros((9, 9)), "let it give a NumPy array uint8"),
        ("read_action_text", lambda state: None, "let it give an action, or base.NO_"),
        ("action_text", lambda state: 0, "action_text gives 0: let it give a text"),
    ],
)
def test_a_function_that_fails_or_gives_something_else_is_named(
    walk, part, function, message
):
    env = envs.guard(dataclasses.replace(walk, **{part: function}), COIN_WALK)
    with pytest.raises(
        UserError, match=f"^env.name = '.*coin_walk.py': .*{message}"
    ) as e:
        getattr(env, part)(None)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("part", "result"),
    [
        ("solve", ()),
        ("solve", [np.int32(1), 0]),
        ("picture", np.zeros((2, 3, 3), np.uint8)),
        ("read_action_text", base.NO_ACTION),
        ("action_text", "left"),
    ],
)
def test_results_that_are_promised_are_passed_on(walk, part, result):
    env = dataclasses.replace(walk, **{part: lambda state: result})
    assert getattr(envs.guard(env, COIN_WALK), part)(None) is result


def test_what_is_built_in_stays_as_it_is():
    lake = envs.make("frozen_lake", ())
    assert envs.guard(lake, "frozen_lake") is lake
