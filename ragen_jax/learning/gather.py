"""The counted gather: kept rows moved to the front of a buffer of fixed size."""

import chex
import jax
import jax.numpy as jnp

from ragen_jax.trajectory import PADDING, Rows


def is_kept_row(rows: Rows, keep: jax.Array) -> jax.Array:
    """Marks the rows with a token of a kept episode.

    Args:
      rows: R rows, each of episodes that are all kept or all dropped.
      keep: bool[B], by the episodes that `rows.episode` points into.

    Returns:
      bool[R]; False for a row that is all padding.
    """
    chex.assert_type(keep, bool)
    is_kept_token = keep[jnp.maximum(rows.episode, 0)]
    return (is_kept_token & (rows.episode != PADDING)).any(axis=1)


def gather_rows(
    rows: Rows, is_kept: jax.Array, capacity: int
) -> tuple[Rows, jax.Array]:
    """Moves the kept rows, in their order, to the front of a buffer of fixed size.

    Args:
      rows: R rows of T tokens.
      is_kept: bool[R].
      capacity: C, rows of the result; static. If more are kept, the last are lost, so
        make room for all: `room_for_episodes` times the most rows of an episode.

    Returns:
      (Rows of C rows, weight float32[C]): weight 1 for the kept rows; behind them
      padding of weight 0, without an episode, a reply or a turn end.
    """
    chex.assert_shape(is_kept, (rows.tokens.shape[0],))
    chex.assert_type(is_kept, bool)
    (source,) = jnp.nonzero(is_kept, size=capacity, fill_value=0)
    is_real = jnp.arange(capacity) < is_kept.sum()
    gathered = jax.tree.map(lambda field: field[source], rows)

    def blank(field: jax.Array, padding: bool | int | float) -> jax.Array:
        return jnp.where(is_real[:, None], field, jnp.asarray(padding, field.dtype))

    padded = gathered.replace(
        tokens=blank(gathered.tokens, 0),
        is_reply=blank(gathered.is_reply, False),
        logprobs=blank(gathered.logprobs, 0),
        entropy=blank(gathered.entropy, 0),
        episode=blank(gathered.episode, PADDING),
        turn=blank(gathered.turn, PADDING),
        turn_end=blank(gathered.turn_end, False),
    )
    return padded, is_real.astype(jnp.float32)
