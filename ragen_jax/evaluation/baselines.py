"""Baselines without a language model: random, rule-based and planning players.

The planner is the environment's own `solve`, planned ahead, where states do not depend
on chance; in FrozenLake, whose ice is slippery, it is value iteration that knows the
slip.

They play the same levels as `evaluator.evaluate` with the same seed and split. They
choose one action at a time and see the state after each, up to the episode's limit on
actions. Limits on turns and the reply format do not apply to them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.base import NO_ACTION, Environment, random_action
from ragen_jax.envs.frozen_lake.env import FrozenLake
from ragen_jax.envs.frozen_lake.planning import slip_values
from ragen_jax.errors import UserError
from ragen_jax.evaluation import interactive
from ragen_jax.rollout import prng
from ragen_jax.rollout import turn as turn_lib
from ragen_jax.settings import TaskSettings, env_settings
from ragen_jax.text.prompts import TurnLimits
from ragen_jax.trajectory import END_OF_TURN, NO_REPLY, UNFINISHED, Episodes


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A player of one environment. `act` and `study` handle one episode."""

    description: str  # for the table of results
    # (key, result of `study` or `plan`, State, actions left int32[]) -> action
    act: Callable[[jax.Array, Any, Any, jax.Array], jax.Array]
    # State at the start -> anything that `act` needs. Called once per episode.
    study: Callable[[Any], Any] = lambda state: ()
    # Host side, in place of `study`: State at the start -> all actions.
    plan: Callable[[Any], tuple] | None = None


def make_baseline(name: str, env: Environment, chosen: TaskSettings) -> Baseline:
    """Makes the baseline of a given name for an environment.

    Args:
      name: "random", "rule" or "planner".
      env: made from `chosen`.
      chosen: settings of the run to compare with, with its limits filled in.

    Raises:
      UserError: if the environment has no such baseline.
    """
    if name == "random":
        return _random_player(env)
    if name == "rule":
        return _rule_player(env)
    # By the config's name: a file of one's own may call its environment as it likes.
    if chosen.name == "frozen_lake":
        return _lake_planner(chosen.options, chosen.actions)
    if env.solve is None:
        raise UserError(
            f"--policy={name}: env.name = {chosen.name!r} has no solver: choose"
            f" --policy=random{' or --policy=rule' if env.rule else ''}"
        )
    return _solver(env, chosen.actions)


def _random_player(env: Environment) -> Baseline:
    drawn = "each action equally likely"
    if env.sample_action is not None:
        drawn = "random actions, as the environment draws them"
    return Baseline(
        description=f"{drawn}, one after the other",
        act=lambda key, known, state, left: random_action(key, env),
    )


def _rule_player(env: Environment) -> Baseline:
    if env.rule is None:
        raise UserError(
            f"--policy=rule: env.name = {env.name!r} has no rule-based player: choose"
            f" --policy=random{' or --policy=planner' if env.solve else ''}"
        )
    return Baseline(
        description="a fixed rule that sees what is shown",
        act=lambda key, known, state, left: env.rule(state),
    )


def _solver(env: Environment, actions: int) -> Baseline:
    """The environment's own solver, which plans each level once, at its start."""
    return Baseline(
        description="the environment's solver, which knows what is hidden",
        act=lambda key, plan, state, left: plan[actions - left],
        plan=env.solve,
    )


def _lake_planner(options, actions: int) -> Baseline:
    """The optimal policy, by finite-horizon value iteration with the true slip."""
    lake = env_settings(options, FrozenLake)

    def study(state):
        return slip_values(state.tiles, lake.success_probability, actions)[1]

    def act(key, best, state, left):
        return best[left, state.player[0], state.player[1]]

    return Baseline(
        description="value iteration that knows the slip, by place and actions left",
        study=study,
        act=act,
    )


def play(
    env: Environment,
    baseline: Baseline,
    *,
    actions: int,
    prompts: int,
    rollouts: int,
    split: int,
    seed: int,
) -> Episodes:
    """Plays n episodes of each of P levels.

    Args:
      env: the rules.
      baseline: the player, of this environment.
      actions: most actions of an episode.
      prompts, rollouts: P and n.
      split: base.VALIDATION or base.TEST (or TRAIN).
      seed: decides the levels, the environment's randomness and the player's.

    Returns:
      B = P * n episodes as host arrays, for `evaluator.score`. Each action (or
      NO_ACTION) counts as a turn with a valid reply of no tokens.

    Raises:
      UserError: if the player plans ahead and the results of its plans are random.
    """
    limits = TurnLimits(
        turns=actions, actions_per_turn=1, actions=actions, reply_tokens=0
    )
    call = (
        np.uint32(seed),
        np.int32(split),
        np.arange(prompts * rollouts, dtype=np.int32),
    )
    plans = _plans(env, baseline, actions, prompts, *call[:2])
    return jax.device_get(_play_all(env, baseline, limits, rollouts, *call, plans))


def _plans(env: Environment, baseline, actions: int, prompts: int, seed, split):
    """int32[P, actions(, action_size)], by `baseline.plan`, padded with NO_ACTION."""
    if baseline.plan is None:
        return None
    key = prng.iteration_key(seed, split, 0)
    reset = jax.jit(
        jax.vmap(lambda group: env.reset(prng.level_key(key, group), split))
    )
    levels = jax.device_get(reset(np.arange(prompts, dtype=np.int32)))
    step = jax.jit(env.step)
    shape = (env.action_size,) if env.action_size else ()
    plans = np.full((prompts, actions, *shape), NO_ACTION, np.int32)
    for group, plan in enumerate(plans):
        level = jax.tree.map(lambda leaf, group=group: leaf[group], levels)
        solution = tuple(baseline.plan(level))[:actions]
        if not interactive.is_sure(step, level, solution):
            raise UserError(
                f"--policy=planner: the results of actions in {env.name} are random,"
                " and its solver can plan only one action at a time: choose"
                " --policy=random, or launch/play.py with --policy=solver"
            )
        for place, action in enumerate(solution):
            plan[place] = action
    return plans


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _play_all(
    env, baseline, limits, rollouts, seed, split, episodes, plans
) -> Episodes:
    key = prng.iteration_key(seed, split, 0)
    one = functools.partial(
        _play_one, env, baseline, limits, rollouts, key, split, plans
    )
    return jax.vmap(one)(episodes)


def _play_one(
    env: Environment,
    baseline: Baseline,
    limits: TurnLimits,
    rollouts: int,
    key: jax.Array,
    split: jax.Array,
    plans: jax.Array | None,
    episode: jax.Array,
) -> Episodes:
    """One episode, with every field of `Episodes` without its leading axis."""
    group = episode // rollouts
    level = env.reset(prng.level_key(key, group), split)
    known = baseline.study(level) if plans is None else plans[group]

    def one_action(env_episode: turn_lib.EnvEpisode, turn: jax.Array):
        continues = env_episode.end == UNFINISHED
        choice = prng.token_key(key, episode, turn, jnp.zeros((), jnp.int32))
        left = limits.actions - env_episode.actions
        action = baseline.act(choice, known, env_episode.state, left)
        env_key = prng.env_key(key, episode, turn)
        after, played = turn_lib.play_turn(
            env_key, env, limits, env_episode, action[None]
        )
        after = jax.tree.map(
            lambda a, b: jnp.where(continues, a, b), after, env_episode
        )
        reward = jnp.where(continues, played.reward, 0)
        taken = jnp.where(continues, played.actions, 0)
        return after, (reward, taken, continues)

    rounds = jnp.arange(limits.turns, dtype=jnp.int32)
    env_episode, (reward, taken, acted) = jax.lax.scan(
        one_action, turn_lib.start_env_episode(level), rounds
    )
    return Episodes(
        group=group,
        environment=jnp.zeros((), jnp.int32),
        success=env_episode.success,
        end=env_episode.end,
        turns=env_episode.turn,
        reward=reward,
        is_valid=acted,
        actions=taken,
        reply_tokens=jnp.zeros(limits.turns, jnp.int32),
        reply_end=jnp.where(acted, END_OF_TURN, NO_REPLY),
        thought_tokens=jnp.zeros(limits.turns, jnp.int32),
        grounded=jnp.zeros(limits.turns, jnp.float32),
    )
