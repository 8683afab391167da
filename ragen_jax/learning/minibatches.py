"""Which rows a minibatch holds, and in which order."""

import jax
import jax.numpy as jnp

from ragen_jax.learning.batch import Batch, reply_lengths
from ragen_jax.learning.train_state import TrainState
from ragen_jax.settings import Settings


def order_key(
    settings: Settings, seed: jax.Array, state: TrainState, epoch: jax.Array
) -> jax.Array:
    """key[], which shuffles the rows in one epoch of one use of the episodes.

    Args:
      settings: of the run.
      seed: uint32[], of the run.
      state: before the use.
      epoch: int32[], 0-based.
    """
    key = jax.random.fold_in(jax.random.key(seed), state.iteration)
    if settings.optimizer.reuse > 1:  # Another order in each use of the episodes.
        key = jax.random.fold_in(key, state.updates)
    return jax.random.fold_in(key, epoch)


def shuffled(key: jax.Array, weight: jax.Array) -> jax.Array:
    """int32[C], the rows of weight 1 in random order, then the others."""
    rank = jax.random.uniform(key, weight.shape)
    return jnp.argsort(jnp.where(weight > 0, rank, 2.0), stable=True)


def even_minibatch(
    batch: Batch,
    order: jax.Array,
    index: jax.Array,
    count: jax.Array,
    real_rows: jax.Array,
    minibatch: int,
) -> Batch:
    """Minibatch `index` of `count` that differ by at most one row, longest rows first.

    Filters and rows of single turns vary the number of rows: if all minibatches but
    the last were full, the last could hold a single row and still take as large a step.

    Args:
      batch: C rows, enough for `count` whole minibatches.
      order: int32[C], the `real_rows` rows of weight 1 in front.
      index, count, real_rows: int32[].
      minibatch: rows of the result, of which the last are padding; static.
    """
    # Equal to real_rows * i // count, whose product could overflow int32.
    spare = minibatch * count - real_rows
    start, end = (minibatch * i + -spare * i // count for i in (index, index + 1))
    rows = jax.lax.dynamic_slice_in_dim(order, start, minibatch)
    is_real = jnp.arange(minibatch) < end - start
    return take_rows(batch, rows, is_real)


def take_rows(batch: Batch, rows: jax.Array, is_real: jax.Array) -> Batch:
    """Some rows of a batch, longest first, so that microbatches are of like length.

    Args:
      batch: C rows.
      rows: int32[n], indices of rows.
      is_real: bool[n]; the others become padding rows of weight 0, and stand last.
    """
    lengths = jnp.where(is_real, reply_lengths(batch.is_reply)[rows], 0)
    longest_first = jnp.argsort(-lengths, stable=True)
    rows, is_real = rows[longest_first], is_real[longest_first]
    minibatch_rows = jax.tree.map(lambda x: x[rows], batch)
    return minibatch_rows.replace(
        is_reply=minibatch_rows.is_reply & is_real[:, None],
        weight=jnp.where(is_real, minibatch_rows.weight, 0),
    )
