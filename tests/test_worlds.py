"""Every world in the table keeps to the contract."""

import dataclasses

import jax.numpy as jnp
import pytest
from world_contract import check_contract

from ragen_jax.envs import WORLDS, frozen_lake
from ragen_jax.envs.frozen_lake import FrozenLake

SETTINGS = {
    "frozen_lake": [
        FrozenLake(),
        FrozenLake(size=2, frozen_probability=0.5, observation="coordinates"),
        FrozenLake(size=6, success_probability=1.0, observation="both"),
    ],
}
CASES = [(name, settings) for name in SETTINGS for settings in SETTINGS[name]]


def test_every_world_of_the_table_is_checked_here():
    assert set(SETTINGS) == set(WORLDS)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_world_keeps_to_the_contract(name, settings):
    world = WORLDS[name](settings)
    assert world.name == name
    check_contract(world)


def _goes_on_after_the_end(key, state, action):
    open_state = state.replace(done=jnp.zeros_like(state.done))
    return frozen_lake.step(key, open_state, action, FrozenLake(size=2))


def _is_silent(state):
    return jnp.full((5,), -1, jnp.int32)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"step": _goes_on_after_the_end}, "an ended game went on"),
        ({"observe": _is_silent}, "an observation is empty"),
        ({"longest_observation": lambda lengths: 4}, "longest_observation is too"),
        ({"example_actions": ("Jump",)}, "Jump"),
    ],
)
def test_the_contract_finds_a_world_that_breaks_it(fault, message):
    sound = WORLDS["frozen_lake"](FrozenLake(size=2, frozen_probability=0.5))
    with pytest.raises(AssertionError, match=message):
        check_contract(dataclasses.replace(sound, **fault))
