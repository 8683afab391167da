"""Levels that are listed beforehand: the numbers of those that belong to each split."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import base


def by_content(contents: np.ndarray) -> tuple[np.ndarray, ...]:
    """int32[n] for train, validation and test: the rows whose hash is of the split.

    Args:
      contents: int32[levels, k], what a level is known by.
    """
    split = jax.vmap(lambda row: base.split_of(base.content_hash(row)))(contents)
    return tuple(
        np.flatnonzero(np.asarray(split) == one).astype(np.int32)
        for one in range(len(base.SPLITS))
    )


def draw(key: jax.Array, split: jax.Array, lists: Sequence[np.ndarray]) -> jax.Array:
    """int32[], one of the numbers listed for the split (int32[]), each equally likely.

    Args:
      key: consumed.
      split: base.TRAIN, base.VALIDATION or base.TEST.
      lists: of the splits, none of them empty; static.
    """
    longest = max(map(len, lists))
    padded = np.stack([np.pad(own, (0, longest - len(own))) for own in lists])
    counts = jnp.array([len(own) for own in lists])
    place = jax.random.randint(key, (), 0, counts[split])
    return jnp.asarray(padded)[split, place]
