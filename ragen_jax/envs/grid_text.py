"""Square boards as phrases: a grid of symbols, and lists of places.

A cell is a phrase with its leading space (" P"), the last cell of a row one with its
newline (" P\n"): joined, they mostly have the tokens that the whole text would have
(docs/environments.md says which do not).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.base import NO_PHRASE


def grid_phrases(symbols: Sequence[str]) -> tuple[str, ...]:
    """Title, cells, and cells that end a row: 1 + 2 * len(symbols) phrases."""
    inner = tuple(f" {symbol}" for symbol in symbols)
    return ("State:\n", *inner, *(f"{cell}\n" for cell in inner))


def grid_ids(cells: jax.Array, symbols: int) -> jax.Array:
    """int32[1 + S * S], a board as indices into `grid_phrases`.

    Args:
      cells: int32[S, S], the index of each cell's symbol.
      symbols: how many there are.
    """
    side = cells.shape[0]
    ends_row = jnp.where(jnp.arange(side) == side - 1, symbols, 0)
    ids = 1 + cells + ends_row[None, :]
    title = jnp.zeros((1,), jnp.int32)
    return jnp.concatenate([title, ids.reshape(-1)]).astype(jnp.int32)


def longest_grid(lengths: np.ndarray, side: int) -> int:
    """Most tokens in a grid.

    Args:
      lengths: int[1 + 2 * symbols], the tokens of each of `grid_phrases`.
      side: S, rows and columns.
    """
    inner, ending = lengths[1:].reshape(2, -1).max(axis=1)
    return int(lengths[0] + side * (side - 1) * inner + side * ending)


def place_phrases(side: int) -> tuple[str, ...]:
    """The S * S places before a comma, then those that end a line; row by row."""
    places = [f" ({row}, {column})" for row in range(side) for column in range(side)]
    return (*(f"{place}," for place in places), *(f"{place}\n" for place in places))


def place_line(is_there: jax.Array, most: int, first: int) -> jax.Array:
    """int32[most], a list of places, the last of which ends the line.

    Args:
      is_there: bool[S, S], the places that are listed, at most `most`; where there is
        none the line is empty, NO_PHRASE throughout.
      most: static.
      first: the id of the first of `place_phrases`.
    """
    count, cells = is_there.sum(), is_there.size
    (places,) = jnp.nonzero(is_there.reshape(-1), size=most, fill_value=0)
    position = jnp.arange(most)
    ids = jnp.where(position == count - 1, first + cells, first) + places
    return jnp.where(position < count, ids, NO_PHRASE).astype(jnp.int32)
