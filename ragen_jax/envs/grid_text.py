"""Square boards as phrases: a grid of symbols, and lists of places.

A cell is a phrase with its leading space (" P"); the last cell of a row also has the
newline (" P\n"). Cut so, the phrases mostly have the tokens that the whole text would
have (docs/environments.md names the exceptions).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.base import NO_PHRASE

OBSERVATIONS = ("grid", "coordinates", "both")  # how a board can be shown


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


def board_phrases(settings: Any, labels: tuple[str, ...]) -> tuple[str, ...]:
    """The phrases of a board, the grid's before the coordinates'.

    Args:
      settings: the environment's, with the fields `observation`, `symbols` and `size`.
      labels: of the lists of places; they come before `place_phrases`.
    """
    coordinates = (*labels, *place_phrases(settings.size))
    return of_shown(settings.observation, grid_phrases(settings.symbols), coordinates)


def of_shown(observation: str, grid: Any, coordinates: Any) -> Any:
    """The grid's share, the coordinates' share or, where both are shown, their sum.

    Args:
      observation: one of OBSERVATIONS.
      grid, coordinates: two tuples of phrases, or two numbers of phrases.
    """
    return {"grid": grid, "coordinates": coordinates, "both": grid + coordinates}[
        observation
    ]


def longest_grid(lengths: np.ndarray, side: int) -> int:
    """Most tokens in a grid.

    Args:
      lengths: int[1 + 2 * symbols], the tokens of each of `grid_phrases`.
      side: S, rows and columns.
    """
    inner, ending = lengths[1:].reshape(2, -1).max(axis=1)
    return int(lengths[0] + side * (side - 1) * inner + side * ending)


def is_at(place: jax.Array, side: int) -> jax.Array:
    """bool[S, S], True at the (row, column) of int32[2] `place`."""
    index = jnp.arange(side)
    is_row, is_column = index == place[0], index == place[1]
    return is_row[:, None] & is_column[None]


def check_shown(name: str, settings: Any, meanings: Sequence[str]) -> None:
    """Raises ValueError, in one sentence, if `observation` or `symbols` are unusable.

    Args:
      name: of the environment.
      settings: its own, with the fields `observation` and `symbols`.
      meanings: what each symbol stands for, in their order.
    """
    if settings.observation not in OBSERVATIONS:
        raise ValueError(
            f"{name}.observation = {settings.observation!r} is unknown: choose one of"
            f" {', '.join(OBSERVATIONS)}"
        )
    symbols = settings.symbols
    is_usable = len(set(symbols)) == len(symbols) == len(meanings)
    if not is_usable or any(symbol.split() != [symbol] for symbol in symbols):
        raise ValueError(
            f"{name}.symbols = {symbols} must be {len(meanings)} different texts"
            f" without white space, for {', '.join(meanings)}"
        )


def place_phrases(side: int) -> tuple[str, ...]:
    """The S * S places before a comma, then those that end a line; row by row."""
    places = [f" ({row}, {column})" for row in range(side) for column in range(side)]
    return (*(f"{place}," for place in places), *(f"{place}\n" for place in places))


def place_line(is_there: jax.Array, most: int, first: int) -> jax.Array:
    """int32[most], a line that lists places, padded with NO_PHRASE.

    Args:
      is_there: bool[S, S], the places to list, at most `most`; without any, all of the
        line is NO_PHRASE.
      most: static.
      first: the id of the first of `place_phrases`.
    """
    count, cells = is_there.sum(), is_there.size
    (places,) = jnp.nonzero(is_there.reshape(-1), size=most, fill_value=0)
    position = jnp.arange(most)
    ids = jnp.where(position == count - 1, first + cells, first) + places
    return jnp.where(position < count, ids, NO_PHRASE).astype(jnp.int32)
