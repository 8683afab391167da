"""Splits of levels that can be listed: which indices belong to each, and a draw.

Used by the shop's goals and the encyclopedia's questions.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import base


def by_content(contents: np.ndarray) -> tuple[np.ndarray, ...]:
    """Indices of the rows whose hash belongs to train, validation and test: int32[n]
    for each.

    Args:
      contents: int32[levels, k], the numbers that identify each level.
    """
    split = jax.vmap(lambda row: base.split_of(base.content_hash(row)))(contents)
    return tuple(
        np.flatnonzero(np.asarray(split) == one).astype(np.int32)
        for one in range(len(base.SPLITS))
    )


def draw(key: jax.Array, split: jax.Array, lists: Sequence[np.ndarray]) -> jax.Array:
    """int32[], one of the indices listed for the split, each equally likely.

    Args:
      key: consumed.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      lists: the indices of each split, none of them empty; static.
    """
    longest = max(map(len, lists))
    padded = np.stack(
        [np.pad(indices, (0, longest - len(indices))) for indices in lists]
    )
    counts = jnp.array([len(indices) for indices in lists])
    position = jax.random.randint(key, (), 0, counts[split])
    return jnp.asarray(padded)[split, position]
