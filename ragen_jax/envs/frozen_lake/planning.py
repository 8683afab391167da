"""Planners on S x S grids: breadth-first distances, and value iteration with slipping.

The generator, the demonstrations, the solver and the planner baseline use them. They
are pure functions of arrays and work under `vmap`, but for `shortest_path`, which runs
on the host.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import grid_text
from ragen_jax.envs.base import NO_ACTION
from ragen_jax.envs.frozen_lake.types import GOAL, HOLE, ICE, MOVES

UNREACHABLE = 1_000_000  # Stands for an infinite distance; one more still fits int32.
_TIE = 1e-6  # Success probabilities closer than this are rounding, not preference.


def distances(passable: jax.Array, goal: jax.Array) -> jax.Array:
    """Steps from each tile to the goal through passable tiles, breadth first.

    Args:
      passable: bool[S, S], tiles that a path may use; the goal's own entry is not read.
      goal: int32[2], (row, column).

    Returns:
      int32[S, S], steps of one tile up, down, left or right; 0 at the goal,
      `UNREACHABLE` where no path exists and on tiles that are not passable.
    """
    is_goal = grid_text.is_at(goal, passable.shape[0])
    open_tiles = passable | is_goal
    start = jnp.where(is_goal, 0, UNREACHABLE).astype(jnp.int32)

    def widen(carry):
        steps, _ = carry
        nearer = jnp.minimum(steps, 1 + neighbours(steps).min(axis=0))
        nearer = jnp.where(open_tiles, nearer, UNREACHABLE)
        return nearer, jnp.any(nearer != steps)

    # Pass d settles the tiles at distance d: the loop ends after at most S * S passes.
    steps, _ = jax.lax.while_loop(lambda carry: carry[1], widen, (start, True))
    return steps


def slip_values(
    tiles: jax.Array, success_probability: float, horizon: int
) -> tuple[jax.Array, jax.Array]:
    """The best probability of reaching the goal within h moves, and the actions for it.

    Finite-horizon value iteration (Bellman 1957). With h moves left on ice,
      V_h(s) = max_a  p V_{h-1}(s + a) + (1 - p) / 2 sum_side V_{h-1}(s + side(a)),
    V = 1 on the goal and 0 in holes for every h, V_0 = 0 on ice; a move across the
    border leaves the player in place. Ties between actions go to the smallest expected
    distance from the goal, so that the planner does not dawdle with many moves left,
    then to the lowest index.

    Args:
      tiles: int32[S, S], each ICE, HOLE or GOAL, one GOAL.
      success_probability: p in [0, 1]; either side has (1 - p) / 2.
      horizon: H, the most moves left; static.

    Returns:
      float32[H + 1, S, S], V by moves left and tile, and int32[H + 1, S, S], the best
      direction; NO_ACTION off the ice and with 0 moves left.
    """
    side = tiles.shape[0]
    is_ice = tiles == ICE
    is_goal = tiles == GOAL
    goal = jnp.stack(jnp.divmod(jnp.argmax(is_goal), side))
    # Bounded, so that a possible slip into a hole does not dominate the expectation.
    steps = jnp.minimum(distances(is_ice, goal), side * side).astype(jnp.float32)
    steps_left = _after_slip(steps, success_probability)

    def back_up(value, _):
        action_values = _after_slip(value, success_probability)
        best = action_values.max(axis=0)
        is_tied = action_values >= (best - _TIE)[None]
        action = jnp.argmin(jnp.where(is_tied, steps_left, jnp.inf), axis=0)
        value = jnp.where(is_ice, best, value)
        action = jnp.where(is_ice, action, NO_ACTION).astype(jnp.int32)
        return value, (value, action)

    value = is_goal.astype(jnp.float32)
    _, (values, actions) = jax.lax.scan(back_up, value, length=horizon)
    nothing = jnp.full_like(tiles, NO_ACTION)
    return (
        jnp.concatenate([value[None], values]),
        jnp.concatenate([nothing[None], actions]),
    )


def neighbours(grid: jax.Array) -> jax.Array:
    """[4, S, S], the value of each tile's neighbour by direction; at borders its own.

    Args:
      grid: [S, S], of any type.
    """
    side = grid.shape[0]
    padded = jnp.pad(grid, 1, mode="edge")
    return jnp.stack(
        [padded[1 + r : 1 + r + side, 1 + c : 1 + c + side] for r, c in MOVES]
    )


def _after_slip(grid: jax.Array, success_probability: float) -> jax.Array:
    """float32[4, S, S], the mean of `grid` after a move in each intended direction."""
    there = neighbours(grid)
    to_sides = jnp.roll(there, 1, axis=0) + jnp.roll(there, -1, axis=0)
    return success_probability * there + (1 - success_probability) / 2 * to_sides


def shortest_path(tiles: np.ndarray, player: np.ndarray) -> tuple[int, ...]:
    """Directions of a shortest path to the goal, around the holes. Host side.

    Args:
      tiles: int32[S, S], each ICE, HOLE or GOAL.
      player: int32[2], (row, column) where the path begins.

    Returns:
      Indices into MOVES; empty where no path exists.
    """
    tiles, start = np.asarray(tiles), tuple(map(int, player))
    paths = {start: ()}
    for cell, path in (queue := list(paths.items())):  # Grows while it is read.
        if tiles[cell] == GOAL:
            return path
        for direction, (down, right) in enumerate(MOVES.tolist()):
            ahead = cell[0] + down, cell[1] + right
            is_inside = min(ahead) >= 0 and max(ahead) < len(tiles)
            if is_inside and ahead not in paths and tiles[ahead] != HOLE:
                paths[ahead] = (*path, direction)
                queue.append((ahead, paths[ahead]))
    return ()
