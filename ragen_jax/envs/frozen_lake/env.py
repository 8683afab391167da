"""FrozenLake: cross the slippery ice to the goal, and keep out of the holes.

The rules are those of Gymnasium's FrozenLake-v1; random start, goal and holes, and the
symbols, are as in RAGEN (arXiv:2504.20073, section 3). Every function handles one lake:
`vmap` to batch.
"""

import functools

import jax
import jax.numpy as jnp

from ragen_jax.envs import base
from ragen_jax.envs.frozen_lake import generator, planning, texts
from ragen_jax.envs.frozen_lake.picture import picture
from ragen_jax.envs.frozen_lake.types import (
    GOAL,
    ICE,
    MOVES,
    FrozenLake,
    State,
    check,
)


def make(settings: FrozenLake) -> base.Environment:
    """Binds the settings into an environment. ValueError if they cannot be used."""
    check(settings)
    return base.Environment(
        name="frozen_lake",
        action_names=texts.ACTION_NAMES,
        phrases=texts.phrases(settings),
        observation_phrases=texts.observation_phrases(settings),
        instruction=texts.instruction(settings),
        reset=functools.partial(reset, settings=settings),
        step=functools.partial(step, settings=settings),
        observe=functools.partial(texts.observe, settings=settings),
        example_actions=("Down", "Right"),
        longest_observation=functools.partial(
            texts.longest_observation, settings=settings
        ),
        landmarks=texts.landmarks,
        picture=picture,
        solve=solve,
    )


def reset(key: jax.Array, split: jax.Array, settings: FrozenLake) -> State:
    """Draws a solvable lake that belongs to the split.

    Args:
      key: decides the lake.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: size and probability of ice.
    """
    return generator.draw(key, split, settings)


def step(
    key: jax.Array, state: State, action: jax.Array, settings: FrozenLake
) -> tuple[State, base.Outcome]:
    """Tries an action; the ice decides where the player goes.

    As in Gymnasium's FrozenLake-v1, the player moves in the intended direction with
    `success_probability`, and to either side of it with half of the rest.

    Args:
      key: decides whether, and to which side, the player slips.
      state: one lake; once `done`, it does not change.
      action: int32[], a direction (index in texts.ACTION_NAMES) or base.NO_ACTION.
      settings: of which `success_probability` is read.
    """
    success = settings.success_probability
    uniform = jax.random.uniform(key)
    # Quarter turns from the intended direction: none, or 1 or 3 (to either side).
    turn = jnp.where(uniform < success, 0, jnp.where(uniform < (1 + success) / 2, 1, 3))
    direction = jnp.where(action == base.NO_ACTION, action, (action + turn) % 4)
    return move(state, direction)


def move(state: State, direction: jax.Array) -> tuple[State, base.Outcome]:
    """Moves the player one tile, unless a border, NO_ACTION or the end prevents it.

    Args:
      state: one lake.
      direction: int32[], where the player really goes, or base.NO_ACTION.

    Returns:
      The next state and what happened: reward 1 on reaching the goal, else 0. Holes
      and the goal end the episode.
    """
    size = state.tiles.shape[0]
    target = jnp.clip(state.player + jnp.asarray(MOVES)[direction], 0, size - 1)
    stays = state.done | (direction == base.NO_ACTION)
    player = jnp.where(stays, state.player, target)
    tile = state.tiles[player[0], player[1]]
    done = state.done | (tile != ICE)
    success = (tile == GOAL) & ~state.done
    outcome = base.Outcome(
        reward=success.astype(jnp.float32), success=success, done=done
    )
    return state.replace(player=player, done=done), outcome


def solve(state: State) -> tuple[int, ...]:
    """A shortest path to the goal if nothing slips; empty if there is none."""
    return () if state.done else planning.shortest_path(state.tiles, state.player)
