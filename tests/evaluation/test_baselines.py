"""Players without a model: their success rates, their levels and their limits."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import ROOT

from ragen_jax import cli, envs
from ragen_jax import settings as settings_lib
from ragen_jax.envs.base import NO_ACTION, TEST, VALIDATION
from ragen_jax.envs.frozen_lake import env as frozen_lake
from ragen_jax.envs.frozen_lake.planning import slip_values
from ragen_jax.errors import UserError
from ragen_jax.evaluation import baselines
from ragen_jax.evaluation import evaluator as evaluator_lib
from ragen_jax.rollout import prng
from ragen_jax.trajectory import ENV_DONE, OUT_OF_ACTIONS, OUT_OF_TURNS

ACTIONS, PROMPTS, ROLLOUTS = 6, 40, 50
LAKE = frozen_lake.FrozenLake(success_probability=0.6)


@pytest.fixture(scope="module")
def settings():
    config = cli.load_config(f"{ROOT}/configs/frozenlake.py").to_dict()
    config["env"]["success_probability"] = LAKE.success_probability
    config["rollout"] |= {"actions": ACTIONS}
    return settings_lib.from_dict(config)


@pytest.fixture(scope="module")
def play(settings):
    """Plays with a baseline; each is compiled once."""
    env = frozen_lake.make(LAKE)
    made = {
        name: baselines.make_baseline(name, env, settings.tasks()[0])
        for name in ("random", "planner")
    }
    usual = dict(prompts=PROMPTS, rollouts=ROLLOUTS, split=TEST, seed=3)

    def of(name, **changes):
        return baselines.play(env, made[name], actions=ACTIONS, **usual | changes)

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
    key = prng.iteration_key(np.uint32(3), np.int32(TEST), np.int32(0))

    def one(group):
        return frozen_lake.reset(prng.level_key(key, group), jnp.int32(TEST), LAKE)

    return jax.jit(jax.vmap(one))(jnp.arange(PROMPTS))


@pytest.mark.slow
def test_the_planner_succeeds_as_often_as_its_values_say(planned, levels):
    """Which is the most that any player can, by the Bellman equation."""
    values = jax.jit(jax.vmap(lambda t: slip_values(t, 0.6, ACTIONS)[0][ACTIONS]))
    row, column = np.asarray(levels.player).T
    rngs = np.asarray(values(levels.tiles))[np.arange(PROMPTS), row, column]
    rates = planned.success.reshape(PROMPTS, ROLLOUTS).mean(axis=1)
    # Binomial noise of each level; independent between levels.
    noise = np.sqrt(rngs * (1 - rngs) / ROLLOUTS)
    assert 0.2 < rngs.mean() < 0.98
    assert abs(rates.mean() - rngs.mean()) < 4 * np.linalg.norm(noise) / PROMPTS
    assert (np.abs(rates - rngs) < 4.5 * noise + 0.02).all()


@pytest.mark.slow
def test_the_random_player_does_worse_on_the_same_levels(planned, random):
    best = evaluator_lib.score(planned, ROLLOUTS)
    worst = evaluator_lib.score(random, ROLLOUTS)
    gain, error = evaluator_lib.paired_difference(worst, best)
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
def test_every_episode_ends_in_the_environment_or_out_of_actions(request, name):
    episodes = request.getfixturevalue({"planner": "planned"}.get(name, name))
    assert set(np.unique(episodes.end)) == {ENV_DONE, OUT_OF_ACTIONS}
    acted = episodes.actions.sum(axis=1)
    np.testing.assert_array_equal(acted, episodes.turns)
    assert (acted[episodes.end == OUT_OF_ACTIONS] == ACTIONS).all()
    np.testing.assert_array_equal(episodes.reward.sum(axis=1), episodes.success)
    np.testing.assert_array_equal(
        episodes.group, np.repeat(np.arange(PROMPTS), ROLLOUTS)
    )
    # The ice slips by itself in each episode of a level.
    assert episodes.turns.reshape(PROMPTS, ROLLOUTS).std(axis=1).max() > 0
    # An action is a turn, and none comes after the end.
    late = np.arange(ACTIONS)[None] >= episodes.turns[:, None]
    assert not episodes.actions[late].any() and not episodes.reward[late].any()


@pytest.mark.parametrize(
    "name", ["countdown", pytest.param("math", marks=pytest.mark.slow)]
)
def test_chance_does_not_guess_that_an_answer_is_right(settings, name):
    """Where an action is what an answer comes to, one in two or three would be."""
    env = envs.make(name, ())
    chance = baselines.make_baseline("random", env, settings.tasks()[0])
    usual = dict(prompts=4, rollouts=4, split=TEST, seed=3)
    episodes = baselines.play(env, chance, actions=ACTIONS, **usual)
    assert not episodes.success.any()
    assert (episodes.actions.sum(axis=1) == ACTIONS).all()
    assert episodes.reward.sum(axis=1).max() < 0.2


def test_a_rule_that_names_no_action_takes_none(settings):
    env = dataclasses.replace(
        frozen_lake.make(LAKE), rule=lambda state: jnp.int32(NO_ACTION)
    )
    idle = baselines.make_baseline("rule", env, settings.tasks()[0])
    usual = dict(actions=ACTIONS, prompts=2, rollouts=2, split=TEST, seed=3)
    episodes = baselines.play(env, idle, **usual)
    assert not episodes.actions.any() and not episodes.success.any()
    assert (episodes.turns == ACTIONS).all() and (episodes.end == OUT_OF_TURNS).all()


@pytest.mark.slow
def test_a_player_draws_by_itself_in_each_episode_of_a_level_and_each_turn():
    coin = baselines.Baseline(
        description="one action or none",
        act=lambda key, known, state, left: -jax.random.bernoulli(key).astype(int),
    )
    usual = dict(actions=ACTIONS, prompts=3, rollouts=8, split=TEST, seed=3)
    taken = baselines.play(frozen_lake.make(LAKE), coin, **usual).actions
    assert len(np.unique(taken[:8], axis=0)) > 1
    assert (taken.sum(axis=1) % ACTIONS > 0).any()


def test_what_is_planned_is_played_by_how_many_actions_are_left(settings):
    env, state = frozen_lake.make(LAKE), SimpleNamespace(player=jnp.array([1, 2]))
    best = jnp.arange((ACTIONS + 1) * 16).reshape(-1, 4, 4)
    planner = baselines.make_baseline("planner", env, settings.tasks()[0])
    solver = baselines._solver(env, ACTIONS)
    for left in (1, ACTIONS):
        assert planner.act(None, best, state, left) == 16 * left + 4 * 1 + 2
        assert solver.act(None, jnp.arange(ACTIONS), state, left) == ACTIONS - left


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["sokoban", "sudoku", "countdown", "rubik", "bandit", "household"]
)
def test_the_planner_solves_every_level_where_nothing_is_random(settings, name):
    env = envs.make(name, ())
    chosen = dataclasses.replace(settings.tasks()[0], name=name, options=(), actions=60)
    planner = baselines.make_baseline("planner", env, chosen)
    usual = dict(prompts=6, rollouts=2, split=TEST, seed=3)
    episodes = baselines.play(env, planner, actions=60, **usual)
    assert episodes.success.all() and (episodes.end == ENV_DONE).all()


@pytest.mark.slow
def test_a_plan_ahead_of_random_results_is_refused_in_a_sentence(settings):
    env = frozen_lake.make(LAKE)
    chosen = dataclasses.replace(settings.tasks()[0], name="my_lake.py")
    planner = baselines.make_baseline("planner", env, chosen)
    usual = dict(prompts=6, rollouts=2, split=TEST, seed=3)
    with pytest.raises(UserError, match="of actions in frozen_lake are random"):
        baselines.play(env, planner, actions=ACTIONS, **usual)


@pytest.mark.slow
def test_the_same_seed_plays_the_same_and_another_seed_or_split_does_not(play, planned):
    same = play("planner")
    for one, two in zip(jax.tree.leaves(same), jax.tree.leaves(planned), strict=True):
        np.testing.assert_array_equal(one, two)
    assert (play("planner", seed=4).reward != planned.reward).any()
    assert (play("planner", split=VALIDATION).reward != planned.reward).any()


def test_an_environment_without_a_planner_is_refused_in_a_sentence(settings):
    # Also a file's that is called as a built-in one is: its rules are its own.
    env = dataclasses.replace(frozen_lake.make(LAKE), solve=None)
    chosen = dataclasses.replace(settings.tasks()[0], name="my_lake.py")
    with pytest.raises(UserError, match="'my_lake.py' has no solver: choose --policy="):
        baselines.make_baseline("planner", env, chosen)
    for rule, solve, why in (
        (None, max, "player: choose --policy=random or --policy=planner$"),
        (max, None, "solver: choose --policy=random or --policy=rule$"),
    ):
        other = dataclasses.replace(env, rule=rule, solve=solve)
        with pytest.raises(UserError, match=why):
            baselines.make_baseline("rule" if solve else "planner", other, chosen)
    assert (
        "equally likely" in baselines.make_baseline("random", env, chosen).description
    )
