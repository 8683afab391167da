"""Sudoku's puzzles against a plain solver and a plain search for singles."""

import functools

import jax
import numpy as np
import pytest
from helpers import split_levels
from helpers.plain_sudoku import filled_by_singles, related, singles, solutions

from ragen_jax.envs import base
from ragen_jax.envs.sudoku import env as sudoku
from ragen_jax.envs.sudoku import generator
from ragen_jax.envs.sudoku.env import Sudoku
from ragen_jax.envs.sudoku.generator import Puzzle

LEVELS = 20  # a split, for `_fresh`
SMALL, LARGE = Sudoku(), Sudoku(size=9, clues=28)
_fresh = functools.partial(split_levels.drawn, sudoku.reset, count=LEVELS, seed=7)


@pytest.mark.parametrize(
    "settings", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)]
)
def test_every_puzzle_has_one_solution_and_belongs_to_its_split(settings):
    levels, size = _fresh(settings), settings.size
    numbers = set(range(1, size + 1))
    for cells, solution, given in zip(
        levels.cells, levels.solution, levels.given, strict=True
    ):
        for row, column in np.ndindex(size, size):
            others = {solution[place] for place in related(size, row, column)}
            assert others == numbers - {solution[row, column]}
        np.testing.assert_array_equal(cells, np.where(given, solution, 0))
        assert settings.clues <= given.sum() <= settings.clues + 3
        assert solutions(cells) == [solution.tolist()]
    assert not levels.done.any()
    hashes = jax.jit(jax.vmap(base.content_hash))(levels.cells)
    splits = np.repeat(np.arange(3), LEVELS)
    np.testing.assert_array_equal(base.split_of(hashes), splits)
    assert len(np.unique(levels.cells, axis=0)) == 3 * LEVELS


@pytest.fixture(scope="module")
def dug():
    """6000 grids of 4 x 4 with as few clues as can be, and a symmetry of each."""

    def one(key):
        puzzle = generator.dig(key, size=4, clues=4)
        return puzzle, generator.vary(jax.random.fold_in(key, 1), puzzle)

    keys = jax.random.split(jax.random.key(2), 6000)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(keys))


def test_digging_goes_on_until_no_number_can_go(dug):
    puzzles, _ = dug
    counts = puzzles.given.sum(axis=(1, 2))
    assert set(counts.tolist()) == {4, 5, 6}
    for index in np.flatnonzero(counts > 4)[:20]:
        solution, given = puzzles.solution[index], puzzles.given[index]
        assert filled_by_singles(solution, given).all()
        for place in np.argwhere(given):
            fewer = given.copy()
            fewer[tuple(place)] = False
            assert not filled_by_singles(solution, fewer).all()


def test_all_288_grids_of_4_x_4_come_up(dug):
    _, varied = dug
    grids, counts = np.unique(varied.solution, axis=0, return_counts=True)
    # 96 of them are symmetries of the first grid and 192 of the other.
    assert len(grids) == 288 and counts.max() < 2 * 6000 / 192


@pytest.mark.parametrize("size", [4, pytest.param(9, marks=pytest.mark.slow)])
def test_singles_are_those_of_a_plain_search(size):
    levels = _fresh({4: SMALL, 9: LARGE}[size])
    rng = np.random.default_rng(size)
    full = levels.solution
    given = rng.random(full.shape) < rng.random((len(full), 1, 1))
    puzzles = Puzzle(solution=full, given=given)
    found = np.asarray(jax.jit(jax.vmap(generator.singles))(puzzles))
    for index in range(len(full)):
        expected = singles(full[index], given[index])
        np.testing.assert_array_equal(found[index], expected)
    assert 0.1 < found[~given].mean() < 0.9
