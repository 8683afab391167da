"""Sudoku in plain Python: which numbers a cell can hold, and all solutions."""

import functools

import numpy as np


@functools.cache
def related(size, row, column):
    """The other cells of the row, column and box."""
    box = {4: 2, 9: 3}[size]
    return [
        (r, c)
        for r, c in np.ndindex(size, size)
        if (
            r == row
            or c == column
            or (r // box, c // box) == (row // box, column // box)
        )
        and (r, c) != (row, column)
    ]


def left(cells, row, column):
    """The numbers that the row, column and box leave for an empty cell."""
    size = len(cells)
    taken = {cells[r][c] for r, c in related(size, row, column)}
    return [number for number in range(1, size + 1) if number not in taken]


def solutions(cells, most=2):
    """Up to `most` solutions, by trying every number in a cell with fewest."""
    cells = np.asarray(cells, int).tolist()
    best = None
    for row, column in np.ndindex(len(cells), len(cells)):
        if cells[row][column] == 0:
            numbers = left(cells, row, column)
            if best is None or len(numbers) < len(best[0]):
                best = numbers, row, column
            if len(numbers) < 2:
                break
    if best is None:
        return [cells]
    numbers, row, column = best
    found = []
    for number in numbers:
        cells[row][column] = number
        found += solutions(cells, most - len(found))
        if len(found) >= most:
            break
    return found


def singles(solution, given):
    """bool[n, n], by going through cells and numbers."""
    size = len(solution)
    box = {4: 2, 9: 3}[size]
    cells = np.where(given, solution, 0).tolist()
    open_cells = {
        (r, c): left(cells, r, c) for r, c in np.ndindex(size, size) if not given[r, c]
    }
    found = np.zeros((size, size), bool)
    units = (lambda r, c: r, lambda r, c: c, lambda r, c: (r // box, c // box))
    for (row, column), numbers in open_cells.items():
        right = solution[row, column]
        is_hidden = any(
            sum(
                right in others
                for place, others in open_cells.items()
                if unit(*place) == unit(row, column)
            )
            == 1
            for unit in units
        )
        found[row, column] = len(numbers) == 1 or is_hidden
    return found


def filled_by_singles(solution, given):
    while (further := given | singles(solution, given)).sum() > given.sum():
        given = further
    return given
