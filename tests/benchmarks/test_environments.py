"""Speeds of environments: what is counted, what stands beside it, and the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax import envs
from ragen_jax.benchmarks import environments, other_environments
from ragen_jax.benchmarks.environments import EnvFunctions, Speed


def test_every_built_in_environment_has_a_row():
    assert {name for name, _ in environments.kinds("all")} == set(envs.NAMES)
    for name, options in environments.kinds("all"):
        assert envs.make(name, options.items()).name == name
    assert [options for _, options in environments.kinds("sudoku")] == [
        {},
        {"size": 9, "clues": 40},
    ]
    assert environments.kinds("my_env.py") == (("my_env.py", {}),)


def test_a_finished_game_begins_again_and_nothing_else_is_played():
    """A clock that ends at 3 shows 1, 2, 3, 1, 2, ...: seen by the rewards it gives."""
    calls = []

    def step(key, state, action):
        time = state + 1
        jax.debug.callback(lambda t, a: calls.append((int(t), int(a))), time, action)
        return time, time.astype(jnp.float32), time == 3

    functions = EnvFunctions(
        reset=lambda key: jnp.int32(0),
        step=step,
        sample=lambda key: jax.random.randint(key, (), 0, 5),
    )
    speed = environments.step_rate(functions, batch=2, steps=7, repeats=2)
    jax.effects_barrier()
    assert np.isfinite(speed) and speed > 0
    assert len(calls) == (2 + 1) * 2 * 7  # One call more, which compiles.
    times, counts = np.unique([time for time, _ in calls], return_counts=True)
    assert (times.tolist(), counts.tolist()) == ([1, 2, 3], [18, 12, 12])
    assert {action for _, action in calls} == set(range(5))


@pytest.mark.slow
def test_an_environment_and_its_installed_peers_are_measured(monkeypatch):
    monkeypatch.setattr(environments, "STEPS", 20)
    monkeypatch.setattr(other_environments, "_SECONDS", 0.02)
    ours = environments.measure(envs.make("frozen_lake", ()), batch=8)
    others = {
        speed.name: speed for speed in other_environments.others("frozen_lake", {}, 8)
    }
    assert ours.name == "frozen_lake"
    for speed in (ours, others["gymnasium FrozenLake"]):
        assert speed.steps > 0 and speed.resets > 0
    assert list(other_environments.others("countdown", {}, 8)) == []


def test_a_peer_stands_beside_the_settings_that_it_is_like(monkeypatch):
    def absent(options, batch):
        raise ImportError

    def present(options, batch):
        return Speed(f"of {options['size']}", 1.0, None)

    table = {"sokoban": (({}, absent), ({"size": 10}, present))}
    monkeypatch.setattr(other_environments, "_OTHERS", table)
    assert list(other_environments.others("sokoban", {}, 8)) == []
    assert list(other_environments.others("sokoban", {"size": 8}, 8)) == []
    found = list(other_environments.others("sokoban", {"size": 10, "boxes": 4}, 8))
    assert [speed.name for speed in found] == ["of 10"]


def test_the_table_says_how_many_times_as_fast_ours_is():
    ours = Speed("maze size=4", 1_200_000.0, 9000.0)
    others = [Speed("theirs", 10_000.0, 2000.0), Speed("others", 2_400_000.0, None)]
    text = environments.table([(ours, others), (Speed("lone", 5.0, None), [])])
    lines = [line.split() for line in text.splitlines()]
    assert lines[1] == ["maze", "size=4", "1,200,000", "9,000"]
    assert lines[2] == "theirs 10,000 2,000 120.0 steps, 4.5 resets".split()
    assert lines[3] == "others 2,400,000 - 0.5 steps".split()
    assert lines[4] == ["lone", "5", "-"]


@pytest.mark.parametrize("name", ["gymnax", "jumanji", "gym_sokoban"])
def test_peers_that_are_not_installed_are_left_out(monkeypatch, name):
    import sys

    monkeypatch.setattr(other_environments, "_SECONDS", 0.0)
    monkeypatch.setitem(sys.modules, name, None)  # Importing it now fails.
    env = {"gymnax": "bandit", "jumanji": "2048", "gym_sokoban": "sokoban"}[name]
    assert list(other_environments.others(env, {}, 8)) == []
