"""How far a box is from its target: the fewest actions from every place, on device.

Breadth first from the solved places, all of a pass at once: a row of places of the
player is one word of bits, and what is found is counted in planes of bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.sokoban.generator import MOVES

UNSOLVABLE = 100_000  # Stands for an infinite number of actions.
_PLANES = 8  # Bits of the number of actions; what is farther counts as unsolvable.


class Distances(NamedTuple):
    """Fewest actions by box and player; bit c of a word is the player's column.

    Indexed by the box's row and column and the player's row.
    """

    is_reached: jax.Array  # uint32[S, S, S], where play leads to the target
    planes: jax.Array  # uint32[8, S, S, S], the bits of how many actions it takes


def measure(is_open: jax.Array, target: jax.Array) -> Distances:
    """Fewest actions to the solution from every place of player and one box.

    Args:
      is_open: bool[S, S], the cells where both may go; none is on the border.
      target: int32[], row * S + column, where the box belongs.
    """
    size = is_open.shape[0]
    columns = jnp.uint32(1) << jnp.arange(size, dtype=jnp.uint32)
    rows = jnp.where(is_open, columns[None], jnp.uint32(0)).sum(1)
    # uint32[S, S, S], by box and the player's row: where the player is the box's cell.
    here = np.zeros((size,) * 3, np.uint32)
    for row in range(size):
        here[row, :, row] = 1 << np.arange(size, dtype=np.uint32)
    free = rows[None, None] & ~jnp.asarray(here)
    free = jnp.where(is_open[..., None], free, jnp.uint32(0))

    def widen(carry):
        reached, planes, _, count = carry
        # Shifts go around the border, where nothing is open: nobody comes from there.
        found = reached | reached << 1 | reached >> 1
        found |= jnp.roll(reached, 1, axis=2) | jnp.roll(reached, -1, axis=2)
        for row, column in MOVES:
            # A push: to the player in the box's old place, the box one further.
            pushed = jnp.roll(reached, (-row, -column), axis=(0, 1)) & here
            behind = np.roll(here, -row, axis=2) if row else _sideways(here, column)
            found |= jnp.where((pushed != 0).any(2, keepdims=True), behind, 0)
        new = found & free & ~reached
        bits = (count >> jnp.arange(_PLANES, dtype=jnp.uint32)) & 1
        planes |= jnp.where(bits[:, None, None, None] == 1, new, jnp.uint32(0))
        return reached | new, planes, (new != 0).any(), count + 1

    is_target = (jnp.arange(size * size) == target).reshape(size, size, 1)
    solved = jnp.where(is_target, free, jnp.uint32(0))
    planes = jnp.zeros((_PLANES, *solved.shape), jnp.uint32)
    start = (solved, planes, (solved != 0).any(), jnp.uint32(1))
    # Ends: each pass but the last adds at least one of finitely many places.
    reached, planes, _, _ = jax.lax.while_loop(
        lambda carry: carry[2] & (carry[3] < 1 << _PLANES), widen, start
    )
    return Distances(is_reached=reached, planes=planes)


def actions_left(found: Distances, player: jax.Array, box: jax.Array) -> jax.Array:
    """int32[...], the fewest actions; `UNSOLVABLE` where no play leads to the target.

    Args:
      found: of the room.
      player, box: int32[...], row * S + column. The same cell counts as unsolvable.
    """
    size = found.is_reached.shape[0]
    row, column = jnp.divmod(player, size)
    at = (*jnp.divmod(box, size), row)
    bit = lambda words: ((words >> column.astype(jnp.uint32)) & 1).astype(jnp.int32)
    count = sum(bit(plane[at]) << k for k, plane in enumerate(found.planes))
    return jnp.where(bit(found.is_reached[at]) == 1, count, UNSOLVABLE)


def _sideways(words: np.ndarray, column: int) -> np.ndarray:
    """Bits moved against a move's column: those of the player behind the box."""
    return words >> 1 if column > 0 else words << 1
