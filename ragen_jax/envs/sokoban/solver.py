"""Shortest solutions of Sokoban levels, breadth first, on the host."""

import collections

import numpy as np

from ragen_jax.envs.sokoban.types import MOVES, TARGET, WALL


def shortest_solution(
    tiles: np.ndarray, boxes: np.ndarray, player: np.ndarray
) -> tuple[int, ...] | None:
    """Fewest actions that bring every box onto a target.

    Args:
      tiles: int32[S, S], each FLOOR, WALL or TARGET; the border is wall.
      boxes: bool[S, S], where the boxes are.
      player: int32[2], (row, column).

    Returns:
      Indices into `texts.ACTION_NAMES`; () where no box is off a target; None where
      the level cannot be solved.
    """
    flat, size = np.asarray(tiles).reshape(-1), len(tiles)
    is_wall = (flat == WALL).tolist()
    steps = [int(row) * size + int(column) for row, column in MOVES]
    targets = frozenset(np.flatnonzero(flat == TARGET).tolist())
    dead = _dead_cells(is_wall, targets, steps)
    row, column = (int(i) for i in player)
    start = (row * size + column, frozenset(np.flatnonzero(boxes).tolist()))
    if start[1] <= targets:
        return ()
    came_from = {start: (start, -1)}
    queue = collections.deque([start])
    while queue:
        at, placed = here = queue.popleft()  # (player, boxes)
        for action, step in enumerate(steps):
            ahead, moved = at + step, placed
            if is_wall[ahead]:
                continue
            if ahead in placed:
                beyond = ahead + step
                if is_wall[beyond] or beyond in placed or dead[beyond]:
                    continue
                moved = placed - {ahead} | {beyond}
            there = (ahead, moved)
            if there in came_from:
                continue
            came_from[there] = (here, action)
            if moved is not placed and moved <= targets:
                return _actions(came_from, start, there)
            queue.append(there)
    return None


def _dead_cells(
    is_wall: list[bool], targets: frozenset[int], steps: list[int]
) -> list[bool]:
    """For each cell whether a box on it, even alone, can reach no target.

    Found by pulling boxes away from the targets. A box can be pulled to the next cell
    if the cell after that is free for the player, who goes ahead of it.
    """
    dead = [True] * len(is_wall)
    queue = list(targets)
    for cell in queue:
        dead[cell] = False
        for step in steps:
            pulled = cell + step
            # Checked in this order: two steps from an inner cell may leave the board,
            # but the step before has then met the wall.
            if dead[pulled] and not (is_wall[pulled] or is_wall[pulled + step]):
                dead[pulled] = False
                queue.append(pulled)
    return dead


def _actions(came_from: dict, start, state) -> tuple[int, ...]:
    """The actions from `start` to `state`, read backwards."""
    actions = []
    while state != start:
        state, action = came_from[state]
        actions.append(action)
    return tuple(reversed(actions))
