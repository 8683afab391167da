"""Draws Sudoku puzzles with exactly one solution, on device.

Numbers are removed from a full grid as long as simple reasoning ("singles") recovers
them. Random symmetries of Sudoku then turn the result into a puzzle of the split.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base

# Full grids to start from; none is a symmetry of another. The symmetries of the two
# 4 x 4 grids are all 288 grids that exist. The first 9 x 9 grid consists of the shifted
# rows that RAGEN always starts from (ragen/env/sudoku/env.py); the others were found by
# random backtracking.
_GRIDS = {
    4: ("1234341221434321", "1234341223414123"),
    9: (
        "123456789456789123789123456234567891567891234891234567345678912678912345912345678",
        "872593146346821759195476283289165437613742598457389612521937864738654921964218375",
        "452639871361578429879241563697382154584716392123495687736824915948157236215963748",
        "341685792569172834287934516675819423938247651412563978196358247824791365753426189",
        "683147529159632784427589361542396817791854632368271945276918453915463278834725196",
        "813256749627948153594371286359814672246793815781562934172439568935687421468125397",
        "493785621628931745571264839154673982782149356369528417816357294947812563235496178",
        "315248967697531284284679351748123695153496728926857413531762849469385172872914536",
    ),
}
_SYMMETRIES = 256  # that are tried on a dug grid before another is dug


@struct.dataclass
class Puzzle:
    """A solution, and the part of it that is given. n is the grid's side."""

    solution: jax.Array  # int32[n, n], 1..n
    given: jax.Array  # bool[n, n], cells whose number is shown


def draw(key: jax.Array, split: jax.Array, size: int, clues: int) -> Puzzle:
    """Draws a puzzle with one solution that belongs to the split.

    Args:
      key: decides the puzzle.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      size: n, 4 or 9; static.
      clues: numbers given at least; more where digging stops before.
    """

    def dig_and_vary(dig_key, vary_key):
        dug = dig(dig_key, size, clues)

        def vary_again(carry):
            key, _, _, tries = carry
            key, draw_key = jax.random.split(key)
            puzzle = vary(draw_key, dug)
            content = base.content_hash(shown(puzzle))
            return key, puzzle, base.split_of(content) == split, tries + 1

        def continues(carry):
            _, _, is_fit, tries = carry
            return ~is_fit & (tries < _SYMMETRIES)

        # Not `draw_until_fit`: it would go on for ever if no symmetry fitted.
        start = (vary_key, dug, jnp.zeros((), bool), jnp.zeros((), jnp.int32))
        _, puzzle, is_fit, _ = jax.lax.while_loop(continues, vary_again, start)
        return puzzle, is_fit

    # It ends, nearly always after one draw: 1 symmetry in 8 fits a given split.
    return base.draw_until_fit(dig_and_vary, key, keys=2)


def shown(puzzle: Puzzle) -> jax.Array:
    """int32[n, n], the numbers given; 0 elsewhere."""
    return jnp.where(puzzle.given, puzzle.solution, 0)


def dig(key: jax.Array, size: int, clues: int) -> Puzzle:
    """Removes numbers from one of `_GRIDS`, in random order, if singles recover them.

    A number is removed if singles lead back to it from the remaining ones. So singles
    always lead to the whole solution, which is thus the only one.

    Args:
      key: decides the grid and the order.
      size: n, 4 or 9; static.
      clues: the fewest numbers that stay.
    """
    grids = np.array([list(map(int, text)) for text in _GRIDS[size]], np.int32)
    uniforms = jax.random.uniform(key, (1 + size * size,))
    solution = jnp.asarray(grids)[(uniforms[0] * len(grids)).astype(jnp.int32)]
    solution = solution.reshape(size, size)
    cells = jnp.arange(size * size).reshape(size, size)

    def take(given, cell):
        is_cell = cells == cell

        def reason(carry):
            known, _ = carry
            further = known | singles(Puzzle(solution=solution, given=known))
            return further, jnp.any(further != known)

        # The loop ends: each pass but the last finds a number, of n * n at most.
        known, _ = jax.lax.while_loop(
            lambda carry: carry[1] & ~jnp.any(carry[0] & is_cell),
            reason,
            (given & ~is_cell, given.sum() > clues),
        )
        return given & ~(is_cell & known), None

    given = jnp.ones((size, size), bool)
    given, _ = jax.lax.scan(take, given, jnp.argsort(uniforms[1:]))
    return Puzzle(solution=solution, given=given)


def singles(puzzle: Puzzle) -> jax.Array:
    """bool[n, n], empty cells whose number follows from the given ones in one step.

    Naked singles: only one number is possible in the cell. Hidden singles: the number
    is possible in no other cell of its row, column or box.
    """
    size = puzzle.solution.shape[0]
    bits = jnp.left_shift(1, puzzle.solution)
    seen = jnp.where(puzzle.given, bits, 0)
    used = jnp.zeros_like(seen)
    for view in _VIEWS:
        in_unit, _ = _counted(view(seen))
        used |= view(jnp.broadcast_to(in_unit[:, None], (size, size)))
    every = 2 ** (size + 1) - 2
    possible = jnp.where(puzzle.given, 0, every & ~used)
    is_single = possible == bits
    for view in _VIEWS:
        in_unit, twice = _counted(view(possible))
        once = view(jnp.broadcast_to((in_unit & ~twice)[:, None], (size, size)))
        is_single |= (possible & bits & once) != 0
    return is_single


def vary(key: jax.Array, puzzle: Puzzle) -> Puzzle:
    """Applies a random symmetry: one of n! 2 (b!)^(2 (b + 1)), where b * b = n.

    Numbers are permuted, rows and columns are permuted within their band of boxes, so
    are the bands, and the grid may be transposed. The solution remains the only one.
    """
    size = puzzle.solution.shape[0]
    box = round(size**0.5)
    cuts = np.cumsum([size, box, size, box, size])
    parts = jnp.split(jax.random.uniform(key, (cuts[-1] + 1,)), cuts)
    names = 1 + jnp.argsort(parts[0])
    rows, columns = _shuffled(*parts[1:3]), _shuffled(*parts[3:5])
    is_transposed = parts[5][0] < 0.5

    def rearranged(grid):
        grid = jnp.where(is_transposed, grid.T, grid)
        return grid[rows][:, columns]

    solution = names[rearranged(puzzle.solution) - 1].astype(jnp.int32)
    return Puzzle(solution=solution, given=rearranged(puzzle.given))


def boxes(grid: jax.Array) -> jax.Array:
    """[n, n], each box of the grid as a row, in reading order. Its own inverse."""
    size = grid.shape[0]
    box = round(size**0.5)
    return grid.reshape(box, box, box, box).swapaxes(1, 2).reshape(size, size)


# Functions that turn the rows, columns or boxes of a grid into rows. Each is its own
# inverse.
_VIEWS = (lambda grid: grid, jnp.transpose, boxes)


def _counted(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32[n] twice: the bits set in at least one, and in at least two cells of a row.

    Args:
      rows: int32[n, n], sets of numbers as bits.
    """
    once = twice = jnp.zeros_like(rows[:, 0])
    for column in rows.T:
        once, twice = once | column, twice | (once & column)
    return once, twice


def _shuffled(bands: jax.Array, rows: jax.Array) -> jax.Array:
    """int32[n], a permutation of rows that keeps the rows of a band together.

    Args:
      bands: float32[b], random numbers whose order is that of the bands.
      rows: float32[n], random numbers whose order is that of the rows in each band.
    """
    box = bands.shape[0]
    within = jnp.argsort(rows.reshape(box, box), axis=1)
    return (jnp.argsort(bands)[:, None] * box + within).reshape(-1)
