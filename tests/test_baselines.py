"""Players without a model: their chances, their levels and their limits."""

import dataclasses

import common
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from ragen_jax import baselines, evaluation
from ragen_jax import settings as settings_lib
from ragen_jax.envs import frozen_lake
from ragen_jax.envs.base import TEST, VALIDATION
from ragen_jax.envs.planning import slip_values
from ragen_jax.rollout import keys
from ragen_jax.settings import UserError
from ragen_jax.trajectory import OUT_OF_ACTIONS, WORLD_DONE

ROOT = models.__file__.rsplit("/", 2)[0]
ACTIONS, PROMPTS, ROLLOUTS = 6, 40, 50
LAKE = frozen_lake.FrozenLake(success_probability=0.6)


@pytest.fixture(scope="module")
def settings():
    config = common.load_config(f"{ROOT}/configs/frozenlake.py").to_dict()
    config["env"]["success_probability"] = LAKE.success_probability
    config["rollout"] |= {"actions": ACTIONS}
    return settings_lib.from_dict(config)


@pytest.fixture(scope="module")
def play(settings):
    """Plays with a baseline; each is compiled once."""
    world = frozen_lake.world(LAKE)
    made = {
        name: baselines.make_baseline(name, world, settings.worlds()[0])
        for name in baselines.NAMES
    }
    usual = dict(prompts=PROMPTS, rollouts=ROLLOUTS, split=TEST, seed=3)

    def of(name, **changes):
        return baselines.play(world, made[name], actions=ACTIONS, **usual | changes)

    return of


@pytest.fixture(scope="module")
def planned(play):
    return play("planner")


@pytest.fixture(scope="module")
def random(play):
    return play("random")


@pytest.fixture(scope="module")
def levels():
    """The levels that an evaluation with this seed and split plays."""
    key = keys.iteration_key(np.uint32(3), np.int32(TEST), np.int32(0))

    def one(group):
        return frozen_lake.reset(keys.level_key(key, group), jnp.int32(TEST), LAKE)

    return jax.jit(jax.vmap(one))(jnp.arange(PROMPTS))


def test_the_planner_succeeds_as_often_as_its_values_say(planned, levels):
    """Which is the most that any player can, by the Bellman equation."""
    values = jax.jit(jax.vmap(lambda t: slip_values(t, 0.6, ACTIONS)[0][ACTIONS]))
    row, column = np.asarray(levels.player).T
    chances = np.asarray(values(levels.tiles))[np.arange(PROMPTS), row, column]
    rates = planned.success.reshape(PROMPTS, ROLLOUTS).mean(axis=1)
    # Binomial noise of each level; independent between levels.
    noise = np.sqrt(chances * (1 - chances) / ROLLOUTS)
    assert 0.2 < chances.mean() < 0.98
    assert abs(rates.mean() - chances.mean()) < 4 * np.linalg.norm(noise) / PROMPTS
    assert (np.abs(rates - chances) < 4.5 * noise + 0.02).all()


def test_the_random_player_does_worse_on_the_same_levels(planned, random):
    best = evaluation.score(planned, ROLLOUTS)
    worst = evaluation.score(random, ROLLOUTS)
    gain, error = evaluation.paired_difference(worst, best)
    assert gain > 5 * error > 0
    assert 0 < worst.success < best.success


def test_a_random_player_never_wins_where_the_goal_is_too_far(random, levels):
    tiles, player = np.asarray(levels.tiles), np.asarray(levels.player)
    goals = np.array([np.argwhere(board == frozen_lake.GOAL)[0] for board in tiles])
    near = np.abs(goals - player).sum(axis=1)
    success = random.success.reshape(PROMPTS, ROLLOUTS)
    turns = np.where(success, random.turns.reshape(success.shape), ACTIONS)
    assert (turns >= np.minimum(near, ACTIONS)[:, None]).all()


@pytest.mark.parametrize("name", ["random", "planner"])
def test_every_episode_ends_in_the_world_or_out_of_actions(request, name):
    episodes = request.getfixturevalue({"planner": "planned"}.get(name, name))
    assert set(np.unique(episodes.end)) == {WORLD_DONE, OUT_OF_ACTIONS}
    acted = episodes.actions.sum(axis=1)
    np.testing.assert_array_equal(acted, episodes.turns)
    assert (acted[episodes.end == OUT_OF_ACTIONS] == ACTIONS).all()
    np.testing.assert_array_equal(episodes.reward.sum(axis=1), episodes.success)
    np.testing.assert_array_equal(
        episodes.group, np.repeat(np.arange(PROMPTS), ROLLOUTS)
    )
    # An action is a turn, and none comes after the end.
    late = np.arange(ACTIONS)[None] >= episodes.turns[:, None]
    assert not episodes.actions[late].any() and not episodes.reward[late].any()


def test_the_same_seed_plays_the_same_and_another_seed_or_split_does_not(play, planned):
    same = play("planner")
    for one, two in zip(jax.tree.leaves(same), jax.tree.leaves(planned), strict=True):
        np.testing.assert_array_equal(one, two)
    assert (play("planner", seed=4).reward != planned.reward).any()
    assert (play("planner", split=VALIDATION).reward != planned.reward).any()


def test_a_world_without_a_planner_is_refused_in_a_sentence(settings):
    world = dataclasses.replace(frozen_lake.world(LAKE), name="chess")
    with pytest.raises(UserError, match="'chess' has no planner, only frozen_lake has"):
        baselines.make_baseline("planner", world, settings.worlds()[0])
    assert "equally likely" in (
        baselines.make_baseline("random", world, settings.worlds()[0]).description
    )
