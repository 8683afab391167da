"""Sokoban: push every box onto a target; boxes cannot be pulled.

Rules and rewards are those of gym-sokoban 0.0.6, with its four push actions; symbols
are as in RAGEN (arXiv:2504.20073, section 3). Every function handles one level: `vmap`
to batch.
"""

import functools

import jax
import jax.numpy as jnp

from ragen_jax.envs import base
from ragen_jax.envs.sokoban import generator, solver, texts
from ragen_jax.envs.sokoban.picture import picture
from ragen_jax.envs.sokoban.types import MOVES, TARGET, WALL, Sokoban, State, check

STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0


def make(settings: Sokoban) -> base.Environment:
    """Binds the settings into an environment. ValueError if they cannot be used."""
    check(settings)
    return base.Environment(
        name="sokoban",
        action_names=texts.ACTION_NAMES,
        phrases=texts.phrases(settings),
        observation_phrases=texts.observation_phrases(settings),
        instruction=texts.instruction(settings),
        reset=functools.partial(reset, settings=settings),
        step=step,
        observe=functools.partial(texts.observe, settings=settings),
        example_actions=("Up", "Left"),
        longest_observation=functools.partial(
            texts.longest_observation, settings=settings
        ),
        landmarks=functools.partial(texts.landmarks, settings=settings),
        picture=picture,
        solve=solve,
    )


def reset(key: jax.Array, split: jax.Array, settings: Sokoban) -> State:
    """Draws a solvable level of the split that is not solved yet.

    Args:
      key: decides the level.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: size, boxes and how hard levels are.
    """
    return generator.draw(key, split, settings)


def step(key: jax.Array, state: State, action: jax.Array) -> tuple[State, base.Outcome]:
    """Moves the player, and the box ahead if the cell behind it is free.

    As gym-sokoban's `_push` and `_calc_reward`: every action costs 0.1, a box pushed
    onto a target earns 1 and one pushed off a target costs 1 (from one target onto
    another: 0), and the last box in place earns 10 more. An impossible move costs 0.1
    and changes nothing.

    Args:
      key: not used; nothing is random.
      state: one level; once `done`, it does not change.
      action: int32[], index in texts.ACTION_NAMES, or base.NO_ACTION.
    """
    del key
    size = state.tiles.shape[0]
    change = jnp.asarray(MOVES)[action]
    # Clipped indices lie on the border, which is wall and thus never free.
    ahead = jnp.clip(state.player + change, 0, size - 1)
    beyond = jnp.clip(ahead + change, 0, size - 1)
    place, further = ahead[0] * size + ahead[1], beyond[0] * size + beyond[1]
    tiles, boxes = state.tiles.reshape(-1), state.boxes.reshape(-1)
    is_box = boxes[place]
    can_push = is_box & (tiles[further] != WALL) & ~boxes[further]
    is_idle = state.done | (action == base.NO_ACTION)
    can_move = (tiles[place] != WALL) & (~is_box | can_push) & ~is_idle
    is_pushed = can_push & can_move

    cell = jnp.arange(size * size)
    pushed = jnp.where(cell == place, False, boxes | (cell == further))
    boxes = jnp.where(is_pushed, pushed, boxes)
    is_solved = ~(boxes & (tiles != TARGET)).any() & ~is_idle
    gained = (tiles[further] == TARGET).astype(jnp.float32) - (tiles[place] == TARGET)
    reward = STEP_REWARD + BOX_REWARD * jnp.where(is_pushed, gained, 0.0)
    reward += SOLVED_REWARD * is_solved
    done = state.done | is_solved
    outcome = base.Outcome(
        reward=jnp.where(is_idle, 0.0, reward), success=is_solved, done=done
    )
    state = state.replace(
        boxes=boxes.reshape(size, size),
        player=jnp.where(can_move, ahead, state.player),
        done=done,
    )
    return state, outcome


def solve(state: State) -> tuple[int, ...]:
    """A shortest solution; empty if there is none, or the level is solved."""
    solution = solver.shortest_solution(state.tiles, state.boxes, state.player)
    return solution or ()
