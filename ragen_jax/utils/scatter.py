"""Writes into arrays at indices of which some are not to be written."""

import math

import jax
import jax.numpy as jnp


def put_where(
    array: jax.Array,
    index: jax.Array | tuple[jax.Array, ...],
    new: jax.Array,
    is_used: jax.Array,
) -> jax.Array:
    """`array.at[index].set(new)`, but only where `is_used`.

    The compiler is told that no two writes meet. Otherwise a deterministic program on a
    GPU takes every single number of `new` to be a write of its own and sorts them all
    first: 2 MB of cache entries take 14 MB of memory so, and nothing otherwise.

    Args:
      array: [n, ...].
      index: int32[...], or several of one shape, of leading axes of `array`; where
        `is_used`, no two alike and within the array.
      new: index.shape + the other axes.
      is_used: bool[...], the shape of `index`.
    """
    first, *rest = index if isinstance(index, tuple) else (index,)
    # Behind the end, where nothing is written, each has a place of its own, too.
    behind = array.shape[0] + jnp.arange(math.prod(is_used.shape))
    where = jnp.where(is_used, first, behind.reshape(is_used.shape))
    put = array.at[(where, *rest)].set
    return put(new, mode="drop", unique_indices=True)
