"""The fewest actions that push one box to its target, from every state, on device.

A breadth-first search backwards from the solved states; each pass handles all states of
one distance at once. A state is (box, player). The player's columns within a row are
the bits of one word, and distances are stored in bit planes: plane k has their bit k.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.sokoban.types import MOVES

UNSOLVABLE = 100_000  # Stands for an infinite number of actions.
_PLANES = 8  # Bits of a distance; states farther than that count as unsolvable.


class Distances(NamedTuple):
    """Fewest actions by state: (box's row, box's column, player's row), and bit c of a
    word for the player's column c."""

    is_reached: jax.Array  # uint32[S, S, S], states from which the box can arrive
    planes: jax.Array  # uint32[8, S, S, S], plane k holds bit k of the fewest actions


def measure(is_open: jax.Array, target: jax.Array) -> Distances:
    """Fewest actions to the solution from every state of the player and one box.

    Args:
      is_open: bool[S, S], cells that player and box may enter; none on the border.
      target: int32[], row * S + column of the box's target.
    """
    size = is_open.shape[0]
    columns = jnp.uint32(1) << jnp.arange(size, dtype=jnp.uint32)
    rows = jnp.where(is_open, columns[None], jnp.uint32(0)).sum(1)
    # uint32[S, S, S]: the states, impossible ones, with the player in the box's cell.
    here = np.zeros((size,) * 3, np.uint32)
    for row in range(size):
        here[row, :, row] = 1 << np.arange(size, dtype=np.uint32)
    free = rows[None, None] & ~jnp.asarray(here)
    free = jnp.where(is_open[..., None], free, jnp.uint32(0))

    def widen(carry):
        reached, planes, _, count = carry
        # Shifts and rolls wrap around, but only at the border, where nothing is open.
        neighbours = reached | reached << 1 | reached >> 1
        neighbours |= jnp.roll(reached, 1, axis=2) | jnp.roll(reached, -1, axis=2)
        for row, column in MOVES:
            # A push, reversed. After it the box is one cell further and the player in
            # the box's old cell; before it the player is behind that cell.
            pushed = jnp.roll(reached, (-row, -column), axis=(0, 1)) & here
            behind = np.roll(here, -row, axis=2) if row else _sideways(here, column)
            neighbours |= jnp.where((pushed != 0).any(2, keepdims=True), behind, 0)
        new = neighbours & free & ~reached
        bits = (count >> jnp.arange(_PLANES, dtype=jnp.uint32)) & 1
        planes |= jnp.where(bits[:, None, None, None] == 1, new, jnp.uint32(0))
        return reached | new, planes, (new != 0).any(), count + 1

    is_target = (jnp.arange(size * size) == target).reshape(size, size, 1)
    solved = jnp.where(is_target, free, jnp.uint32(0))
    planes = jnp.zeros((_PLANES, *solved.shape), jnp.uint32)
    start = (solved, planes, (solved != 0).any(), jnp.uint32(1))
    # The loop ends: each pass but the last adds at least one of finitely many states.
    reached, planes, _, _ = jax.lax.while_loop(
        lambda carry: carry[2] & (carry[3] < 1 << _PLANES), widen, start
    )
    return Distances(is_reached=reached, planes=planes)


def actions_left(distances: Distances, player: jax.Array, box: jax.Array) -> jax.Array:
    """int32[...], the fewest actions; `UNSOLVABLE` where the box cannot arrive.

    Args:
      distances: from `measure`, for the room and the box's target.
      player, box: int32[...], row * S + column. The same cell counts as unsolvable.
    """
    size = distances.is_reached.shape[0]
    row, column = jnp.divmod(player, size)
    at = (*jnp.divmod(box, size), row)
    bit = lambda words: ((words >> column.astype(jnp.uint32)) & 1).astype(jnp.int32)
    count = sum(bit(plane[at]) << k for k, plane in enumerate(distances.planes))
    return jnp.where(bit(distances.is_reached[at]) == 1, count, UNSOLVABLE)


def _sideways(words: np.ndarray, column: int) -> np.ndarray:
    """The bits of the cell behind the box, for a push to the right (1) or left (-1)."""
    return words >> 1 if column > 0 else words << 1
