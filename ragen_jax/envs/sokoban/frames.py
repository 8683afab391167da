"""Rooms framed by more walls, so that drawings have many numbers of rows and columns.

Used in demonstrations only. A model that sees few sizes memorizes where each cell is in
the text of each size; one that sees many has to count rows and columns.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.envs.base import NO_PHRASE, Environment
from ragen_jax.envs.sokoban import texts
from ragen_jax.envs.sokoban.types import MEANINGS, WALL, Sokoban, State


@struct.dataclass
class FramedState(State):
    """A room in the upper left part of a board of S rows and columns, the rest wall."""

    shape: jax.Array  # int32[2], the rows and columns that are drawn


def in_frames(
    env: Environment, settings: Sokoban, shapes: Sequence[tuple[int, int]]
) -> tuple[Environment, Sokoban]:
    """`env` with its rooms at random places in drawings of one of `shapes`.

    Args:
      env: made from `settings`.
      settings: of the rooms, shown as a grid.
      shapes: (rows, columns), none smaller than a room; each is equally likely. The
        instruction names the first of them.

    Returns:
      The environment, and its settings: those of the rooms with the size of the board
      that holds every shape.

    Raises:
      ValueError: if a shape is smaller than a room, or the board is not a grid.
    """
    size, side = settings.size, max(max(shape) for shape in shapes)
    if min(min(shape) for shape in shapes) < size or settings.observation != "grid":
        raise ValueError(
            f"rooms of {size} x {size} cells shown as {settings.observation!r} cannot"
            f" be drawn in {shapes}: choose 'grid' and shapes that hold them"
        )
    board = dataclasses.replace(settings, size=side)

    def reset(key: jax.Array, split: jax.Array) -> FramedState:
        shape_key, place_key, key = jax.random.split(key, 3)
        room = env.reset(key, split)
        shape = jax.random.choice(shape_key, jnp.array(shapes, jnp.int32))
        place = jax.random.randint(place_key, (2,), 0, shape - size + 1)
        on_board = lambda cells, fill: jax.lax.dynamic_update_slice(
            jnp.full((side, side), fill, cells.dtype), cells, tuple(place)
        )
        return FramedState(
            tiles=on_board(room.tiles, WALL),
            boxes=on_board(room.boxes, False),
            player=room.player + place,
            done=room.done,
            shape=shape,
        )

    framed = dataclasses.replace(
        env,
        reset=reset,
        observe=observe,
        observation_phrases=texts.observation_phrases(board),
        longest_observation=lambda lengths: texts.longest_observation(lengths, board),
    )
    return with_named_shape(framed, (size, size), shapes[0]), board


def with_named_shape(
    env: Environment, named: tuple[int, int], shape: tuple[int, int]
) -> Environment:
    """`env` with (rows, columns) `named` replaced by `shape` in its instruction."""
    text = "room of {} x {} cells"
    instruction = env.instruction.replace(text.format(*named), text.format(*shape))
    return dataclasses.replace(env, instruction=instruction)


def shape_index(state: FramedState, shapes: Sequence[tuple[int, int]]) -> jax.Array:
    """int32[], which of `shapes` a room is drawn in."""
    is_shape = (jnp.array(shapes, jnp.int32) == state.shape[None]).all(axis=1)
    return jnp.argmax(is_shape).astype(jnp.int32)


def observe(state: FramedState) -> jax.Array:
    """int32[1 + S * S], the drawn part as ids of `grid_text.grid_phrases`."""
    cells, symbols = texts.symbols_of(state), len(MEANINGS)
    index = jnp.arange(cells.shape[0])
    rows, columns = index[:, None], index[None]
    ids = 1 + cells + jnp.where(columns == state.shape[1] - 1, symbols, 0)
    is_drawn = (rows < state.shape[0]) & (columns < state.shape[1])
    ids = jnp.where(is_drawn, ids, NO_PHRASE).reshape(-1)
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), ids]).astype(jnp.int32)
