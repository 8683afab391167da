"""Writes sudoku.npz: puzzles of reasoning-gym, and which placements it lets pass.

  pip install reasoning-gym
  python tests/golden/make_sudoku.py

The stored file was made with reasoning-gym 0.1.25 (games/mini_sudoku.py and
games/sudoku.py). For 4 x 4 and 9 x 9 it holds puzzles with their solutions, boards
that add some right and some wrong numbers to them, and for every cell and number
whether reasoning-gym lets it stand in that cell, once the cell is cleared.
"""

import copy
from pathlib import Path
from random import Random

import numpy as np

FILE = Path(__file__).with_name("sudoku.npz")


def main() -> None:
    """Runs the reference."""
    from reasoning_gym.games.mini_sudoku import MiniSudokuConfig, MiniSudokuDataset
    from reasoning_gym.games.sudoku import SudokuConfig, SudokuDataset

    small = MiniSudokuDataset(
        MiniSudokuConfig(min_empty=4, max_empty=12, seed=1, size=60)
    )
    large = SudokuDataset(SudokuConfig(min_empty=20, max_empty=55, seed=1, size=20))
    arrays = {"origin": "reasoning-gym 0.1.25"}
    for side, dataset in ((4, small), (9, large)):
        entries = [dataset[index]["metadata"] for index in range(len(dataset))]
        boards = [_partly_filled(entry, Random(i)) for i, entry in enumerate(entries)]
        arrays |= {
            f"puzzles{side}": np.array([e["puzzle"] for e in entries], np.uint8),
            f"solutions{side}": np.array([e["solution"] for e in entries], np.uint8),
            f"boards{side}": np.array(boards, np.uint8),
            f"fits{side}": np.array([_fits(dataset, board) for board in boards]),
        }
    np.savez_compressed(FILE, **arrays)


def _partly_filled(entry, rng: Random) -> list[list[int]]:
    side, board = len(entry["puzzle"]), copy.deepcopy(entry["puzzle"])
    for row in range(side):
        for column in range(side):
            if board[row][column] == 0 and rng.random() < 0.4:
                right = entry["solution"][row][column]
                is_right = rng.random() < 0.7
                board[row][column] = right if is_right else rng.randint(1, side)
    return board


def _fits(dataset, board) -> list:
    """bool[n, n, n], by row, column and number - 1."""
    fits = []
    for row, line in enumerate(board):
        fits.append([])
        for column in range(len(line)):
            cleared = copy.deepcopy(board)
            cleared[row][column] = 0
            numbers = range(1, len(board) + 1)
            fits[-1].append(
                [dataset._is_valid(cleared, row, column, v) for v in numbers]
            )
    return fits


if __name__ == "__main__":
    main()
