"""Shortest solutions of the 2 x 2 x 2 cube, on the host."""

from collections.abc import Sequence

import numpy as np

from ragen_jax.envs.rubik.cube import HELD, STICKERS


def shortest_solution(
    stickers: np.ndarray, moves: np.ndarray, amounts: Sequence[int]
) -> tuple[int, ...]:
    """Fewest turns that solve a cube, breadth first from both ends.

    Args:
      stickers: int32[24], colours 0..5.
      moves: int32[3 * len(amounts), 24]: move m gives sticker i the colour of sticker
        moves[m, i]. All turns of one face, then of the next, for three faces that meet
        in a corner.
      amounts: clockwise quarter turns of a face's moves, in their order.

    Returns:
      Indices into `moves`; empty if the cube is solved.
    """
    moves = moves.tolist()
    start = tuple(np.asarray(stickers).tolist())
    # No turn moves the opposite corner, which thus tells the solved cube's orientation.
    fixed = [s for s in range(STICKERS) if all(move[s] == s for move in moves)]
    (goal,) = (
        tuple(held) for held in HELD.tolist() if all(held[s] == start[s] for s in fixed)
    )
    # Cube -> the moves that lead to it: from the start, and from the goal.
    ways = [{start: ()}, {goal: ()}]
    fronts = [[start], [goal]]
    while not (meeting_cubes := ways[0].keys() & ways[1].keys()):
        side = int(len(fronts[1]) < len(fronts[0]))  # The smaller side goes on.
        front, fronts[side] = fronts[side], []
        for cube in front:
            for action, move in enumerate(moves):
                next_cube = tuple([cube[i] for i in move])
                if next_cube not in ways[side]:
                    ways[side][next_cube] = (*ways[side][cube], action)
                    fronts[side].append(next_cube)
    middle = min(meeting_cubes, key=lambda m: len(ways[0][m]) + len(ways[1][m]))
    # The moves from the goal, inverted and in reverse: from the middle to the goal.
    undone = [amounts.index(4 - amount) for amount in amounts]
    back = [
        action - action % len(amounts) + undone[action % len(amounts)]
        for action in reversed(ways[1][middle])
    ]
    return (*ways[0][middle], *back)
