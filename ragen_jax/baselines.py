"""Players without a language model: how far chance, and how far good planning, gets.

They play the levels that `evaluation.evaluate` plays under the same seed and split,
and name one action at a time, seeing the world after each, within the episode's
actions. Turns, several actions in one reply and the reply format are not asked of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.base import World
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.planning import slip_values
from ragen_jax.rollout import keys, turns
from ragen_jax.settings import UserError, WorldSettings, world_settings
from ragen_jax.text.dialogue import TurnLimits
from ragen_jax.trajectory import END_OF_TURN, NO_REPLY, UNFINISHED, Episodes

NAMES = ("random", "planner")


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A player of one world, on one game: `vmap` to batch."""

    description: str  # for the table of results
    study: Callable[[Any], Any]  # level's State -> what is worth knowing of it
    # (key, what `study` returned, State, actions left int32[]) -> action int32[]
    act: Callable[[jax.Array, Any, Any, jax.Array], jax.Array]


def make_baseline(name: str, world: World, chosen: WorldSettings) -> Baseline:
    """The baseline of that name for a world.

    Args:
      name: one of NAMES.
      world: made from `chosen`.
      chosen: of the run that the baseline is compared with, limits filled in.

    Raises:
      UserError: if the world has no such baseline.
    """
    if name == "random":
        return _random_player(world)
    if world.name not in _PLANNERS:
        raise UserError(
            f"--policy={name}: env.name = {world.name!r} has no planner, only"
            f" {', '.join(_PLANNERS)} has: choose --policy=random"
        )
    return _PLANNERS[world.name](chosen.options, chosen.actions)


def _random_player(world: World) -> Baseline:
    count = len(world.action_names)
    return Baseline(
        description="each action equally likely, one after the other",
        study=lambda state: (),
        act=lambda key, known, state, left: jax.random.randint(key, (), 0, count),
    )


def _lake_planner(options, actions: int) -> Baseline:
    """The best policy there is: finite-horizon value iteration over the true slip."""
    lake = world_settings(options, FrozenLake)

    def study(state):
        return slip_values(state.tiles, lake.success_probability, actions)[1]

    def act(key, best, state, left):
        return best[left, state.player[0], state.player[1]]

    return Baseline(
        description="value iteration that knows the slip, replanned at every action",
        study=study,
        act=act,
    )


_PLANNERS = {"frozen_lake": _lake_planner}


def play(
    world: World,
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
      world: the rules.
      baseline: the player, of this world.
      actions: most actions of an episode.
      prompts, rollouts: P and n.
      split: base.VALIDATION or base.TEST (or TRAIN).
      seed: decides the levels, the world's chance and the player's.

    Returns:
      B = P * n episodes as host arrays, for `evaluation.score`; each action counts as a
      turn of its own, with a valid reply of no tokens.
    """
    limits = TurnLimits(
        turns=actions, actions_per_turn=1, actions=actions, reply_tokens=0
    )
    call = (
        np.uint32(seed),
        np.int32(split),
        np.arange(prompts * rollouts, dtype=np.int32),
    )
    return jax.device_get(_play_all(world, baseline, limits, rollouts, *call))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _play_all(world, baseline, limits, rollouts, seed, split, episodes) -> Episodes:
    key = keys.iteration_key(seed, split, 0)
    one = functools.partial(_play_one, world, baseline, limits, rollouts, key, split)
    return jax.vmap(one)(episodes)


def _play_one(
    world: World,
    baseline: Baseline,
    limits: TurnLimits,
    rollouts: int,
    key: jax.Array,
    split: jax.Array,
    episode: jax.Array,
) -> Episodes:
    """One episode, every field without its leading axis."""
    group = episode // rollouts
    level = world.reset(keys.level_key(key, group), split)
    known = baseline.study(level)

    def one_action(game: turns.Game, turn: jax.Array):
        goes_on = game.end == UNFINISHED
        choice = keys.token_key(key, episode, turn, jnp.zeros((), jnp.int32))
        left = limits.actions - game.actions
        action = baseline.act(choice, known, game.state, left)
        chance = keys.world_key(key, episode, turn)
        after, played = turns.play_turn(chance, world, limits, game, action[None])
        after = jax.tree.map(lambda a, b: jnp.where(goes_on, a, b), after, game)
        return after, (jnp.where(goes_on, played.reward, 0), goes_on)

    rounds = jnp.arange(limits.turns, dtype=jnp.int32)
    game, (reward, acted) = jax.lax.scan(one_action, turns.new_game(level), rounds)
    return Episodes(
        group=group,
        environment=jnp.zeros((), jnp.int32),
        success=game.success,
        end=game.end,
        turns=game.turn,
        reward=reward,
        is_valid=acted,
        actions=acted.astype(jnp.int32),
        reply_tokens=jnp.zeros(limits.turns, jnp.int32),
        reply_end=jnp.where(acted, END_OF_TURN, NO_REPLY),
        thought_tokens=jnp.zeros(limits.turns, jnp.int32),
        grounded=jnp.zeros(limits.turns, jnp.float32),
    )
