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
      moves: int32[3 * len(amounts), 24]: after move m, sticker i has the colour of
        moves[m, i]; the turns of three faces that meet in a corner, one face after
        the other.
      amounts: quarter turns of each face's moves, in their order.

    Returns:
      Indices into `moves`; empty if the cube is solved.
    """
    moves = moves.tolist()
    start = tuple(np.asarray(stickers).tolist())
    # The corner that these turns leave alone says how the solved cube is held.
    fixed = [s for s in range(STICKERS) if all(move[s] == s for move in moves)]
    (goal,) = (
        tuple(held) for held in HELD.tolist() if all(held[s] == start[s] for s in fixed)
    )
    ways = [{start: ()}, {goal: ()}]  # from the start, and from the goal
    fronts = [[start], [goal]]
    while not (met := ways[0].keys() & ways[1].keys()):
        near = int(len(fronts[1]) < len(fronts[0]))
        front, fronts[near] = fronts[near], []
        for seen in front:
            for action, move in enumerate(moves):
                further = tuple([seen[i] for i in move])
                if further not in ways[near]:
                    ways[near][further] = (*ways[near][seen], action)
                    fronts[near].append(further)
    middle = min(met, key=lambda m: len(ways[0][m]) + len(ways[1][m]))
    undone = [amounts.index(4 - amount) for amount in amounts]
    back = [
        action - action % len(amounts) + undone[action % len(amounts)]
        for action in reversed(ways[1][middle])
    ]
    return (*ways[0][middle], *back)
