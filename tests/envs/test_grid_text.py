"""Boards as phrases: hand-written texts of grids and lists of places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs import grid_text
from ragen_jax.envs.base import NO_PHRASE, text_of


def test_a_grid_reads_row_by_row():
    phrases = grid_text.grid_phrases("_OP")
    cells = jnp.array([[0, 1, 0], [2, 0, 0], [1, 1, 2]])
    ids = jax.jit(grid_text.grid_ids, static_argnums=1)(cells, 3)
    assert ids.dtype == jnp.int32 and ids.shape == (10,)
    assert text_of(phrases, np.asarray(ids)) == "State:\n _ O _\n P _ _\n O O P\n"


def test_the_longest_grid_has_the_longest_cells_everywhere():
    # Title 4; cells of 1 and 2 tokens, of 3 and 5 at a row's end: 4 + 6 * 2 + 3 * 5.
    lengths = np.array([4, 1, 2, 3, 5])
    assert grid_text.longest_grid(lengths, 3) == 31


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([], ""),
        ([(1, 0)], " (1, 0)\n"),
        ([(0, 1), (1, 1)], " (0, 1), (1, 1)\n"),
        ([(0, 0), (0, 1), (1, 0)], " (0, 0), (0, 1), (1, 0)\n"),
    ],
)
def test_a_list_of_places_ends_its_line_with_the_last(places, text):
    is_there = np.zeros((2, 2), bool)
    for place in places:
        is_there[place] = True
    line = jax.jit(grid_text.place_line, static_argnums=(1, 2))
    ids = np.asarray(line(jnp.asarray(is_there), 3, 5))
    assert ids.shape == (3,) and (ids[len(places) :] == NO_PHRASE).all()
    phrases = (*["label"] * 5, *grid_text.place_phrases(2))
    assert text_of(phrases, ids) == text
