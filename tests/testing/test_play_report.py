"""What the checks say of levels, steps and texts that are legal and may be unmeant."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs.frozen_lake import env as frozen_lake
from ragen_jax.envs.frozen_lake.env import FrozenLake
from ragen_jax.testing import check_dynamics as dynamics
from ragen_jax.testing import check_helpers, check_texts, play_report
from ragen_jax.testing.check_dynamics import CheckError
from ragen_jax.testing.check_splits import check_splits

SLIPPERY = FrozenLake(size=3, frozen_probability=0.6, success_probability=0.5)


@pytest.fixture(scope="module")
def lake():
    return frozen_lake.make(SLIPPERY)


def _said(env):
    return play_report.steps_seen(env, dynamics.make_player(env, 12, 8)())


def _numbers(line):
    return [int(word) for word in line.split() if word.isdigit()]


def test_the_steps_that_depend_on_action_and_key_are_counted(lake):
    moves, changed, shown, by_action, by_key = _numbers(line := _said(lake))
    assert moves >= changed >= shown > 0
    assert 0 < by_key < moves and 0 < by_action < moves
    assert "fare alike" not in line


def test_steps_without_chance_actions_without_effect_and_hidden_changes_are_told(lake):
    still = dataclasses.replace(
        lake,
        step=lambda key, state, action: lake.step(
            jax.random.key(1), state, jnp.where(action >= 0, 1, action)
        ),
        observe=lambda state: lake.observe(
            state.replace(player=jnp.zeros_like(state.player))
        ),
    )
    _, changed, shown, by_action, by_key = _numbers(line := _said(still))
    assert changed > 0 and shown == by_action == by_key == 0
    assert line.endswith("for chance in steps would come from their key")


def test_changes_of_a_uint32_state_are_counted_but_not_those_of_a_key_kept_in_it(lake):
    as_uint32 = lambda state: state.replace(player=state.player.astype(jnp.uint32))
    as_int32 = lambda state: state.replace(player=state.player.astype(jnp.int32))

    def reset(key, split):
        return as_uint32(lake.reset(key, split)), jax.random.key_data(key)

    def step(key, state, action):
        room, key_data = state
        after, outcome = lake.step(key, as_int32(room), action)
        (later,) = jax.random.split(jax.random.wrap_key_data(key_data), 1)
        is_played = (action >= 0) & ~room.done
        later = jnp.where(is_played, jax.random.key_data(later), key_data)
        return (as_uint32(after), later), outcome

    unsigned = dataclasses.replace(
        lake,
        reset=reset,
        step=step,
        observe=lambda state: lake.observe(as_int32(state[0])),
    )
    numbers = _numbers(_said(unsigned))
    assert numbers == _numbers(_said(lake)) and 0 < numbers[1] < numbers[0]


@pytest.mark.slow
def test_levels_that_are_over_when_they_begin_are_found_and_counted(lake):
    def reset(key, split):
        state = lake.reset(key, split)
        return state.replace(done=jax.random.bernoulli(key, 0.01))

    with pytest.raises(CheckError, match=r"train levels [1-9]\d* are over when they"):
        check_splits(dataclasses.replace(lake, reset=reset))


def test_a_number_in_the_state_that_is_no_array_is_named(lake):
    def reset(key, split):
        return lake.reset(key, split).replace(done=False)

    with pytest.raises(CheckError, match=r"reset gives State\.done as False: make it"):
        dynamics.check_types(dataclasses.replace(lake, reset=reset))


@pytest.mark.parametrize("plan", [("Left",), (1.0,), np.array([2.0])])
def test_a_solution_of_other_things_than_numbers_of_actions_is_found(lake, plan):
    wrong = dataclasses.replace(lake, solve=lambda state: plan)
    functions = dynamics.compile_functions(wrong)
    plays = dynamics.make_player(wrong, 6, 2)()
    with pytest.raises(CheckError, match="choose actions from 0 to 3"):
        check_helpers.check_solve(wrong, functions, plays)


def test_actions_that_the_instruction_does_not_name_are_told(lake):
    assert check_texts.names_told(lake) == "the instruction names every action"
    silent = dataclasses.replace(lake, instruction="Walk to the goal: go left.")
    assert "does not name Down, Right, Up: nothing" in check_texts.names_told(silent)
