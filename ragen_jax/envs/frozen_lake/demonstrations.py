"""Imperfect demonstrations for FrozenLake, for the supervised start of small models.

The thought names where the player and the goal are, then each action of a plan with the
tile it should lead to. Boards are always read correctly, but plans are only sensible:
some ignore the holes, some actions are random, slipping is not accounted for, and a
share of plans is all random.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ragen_jax.envs import walks
from ragen_jax.envs.base import Environment
from ragen_jax.envs.frozen_lake import planning, texts
from ragen_jax.envs.frozen_lake.types import GOAL, HOLE, MOVES, FrozenLake, State

_LANDMARKS = (", goal",)


@dataclasses.dataclass(frozen=True)
class Demonstrator:
    """How imperfect the demonstrations are."""

    ignore_holes: float = 0.5  # share of plans that walk straight through holes
    random_plan: float = 0.0  # share of plans that ignore the goal: all actions random
    noise: float = 0.1  # share of actions drawn at random in the other plans
    longest: int = 5  # actions in a plan at most; lengths up to it are equally likely


def with_demonstrations(
    env: Environment, settings: FrozenLake, player: Demonstrator, *, thinking: bool
) -> Environment:
    """`env` with `reply_phrases` and `demonstrate` filled in."""
    return dataclasses.replace(
        env,
        reply_phrases=walks.walk_phrases(_LANDMARKS, settings.size, env.action_names),
        demonstrate=functools.partial(_demonstrate, player=player, thinking=thinking),
    )


def _demonstrate(
    key: jax.Array, state: State, player: Demonstrator, thinking: bool
) -> jax.Array:
    """int32[Md], one reply as phrase ids, without the end-of-turn token."""
    actions, tiles, random_plan = plan(key, state, player)
    size = state.tiles.shape[0]
    return walks.walk_reply(
        actions,
        tiles,
        state.player[0] * size + state.player[1],
        [jnp.argmax(state.tiles.reshape(-1) == GOAL)],
        random_plan,
        side=size,
        names=len(texts.ACTION_NAMES),
        thinking=thinking,
    )


def plan(
    key: jax.Array, state: State, player: Demonstrator
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A plan of at least one action.

    Args:
      key: consumed.
      state: of an episode that is not over.
      player: how imperfect the plan is.

    Returns:
      int32[longest], the actions; int32[longest], the tiles (row * S + column) that
      they lead to without slipping; both padded with -1. bool[], whether the plan is
      one of random actions.
    """
    size = state.tiles.shape[0]
    ignore_holes_key, random_plan_key, length_key, key = jax.random.split(key, 4)
    random_plan = jax.random.bernoulli(random_plan_key, player.random_plan)
    noise = jnp.where(random_plan, 1.0, player.noise)
    ignore_holes = jax.random.bernoulli(ignore_holes_key, player.ignore_holes)
    length = jax.random.randint(length_key, (), 1, player.longest + 1)
    _, goal = texts.landmarks(state)
    passable = ignore_holes | (state.tiles != HOLE)
    distance = planning.distances(passable, goal)
    moves = jnp.asarray(MOVES)

    def one(carry, key):
        at, over, step = carry
        choice_key, noise_key, random_key = jax.random.split(key, 3)
        ahead = jnp.clip(at[None] + moves, 0, size - 1)
        steps = distance[ahead[:, 0], ahead[:, 1]]
        # The nearest tile ahead; among equally near ones each is equally likely.
        tie = jax.random.uniform(choice_key, (4,))
        best = jnp.argmin(steps + tie)
        random = jax.random.randint(random_key, (), 0, 4)
        is_random = jax.random.bernoulli(noise_key, noise)
        action = jnp.where(is_random, random, best)
        tile = ahead[action]
        now_over = over | (step >= length)
        written = jnp.where(now_over, -1, jnp.stack([action, tile[0] * size + tile[1]]))
        over = now_over | (state.tiles[tile[0], tile[1]] == GOAL)
        return (jnp.where(now_over, at, tile), over, step + 1), written

    start = (state.player, jnp.zeros((), bool), jnp.zeros((), jnp.int32))
    _, written = jax.lax.scan(one, start, jax.random.split(key, player.longest))
    return written[:, 0], written[:, 1], random_plan
