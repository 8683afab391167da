"""Phrases in tables by kind, one behind the other: ids, texts, and how long they are.

The id of a phrase is the first id of its kind plus its place in the kind's table.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.base import NO_PHRASE

Tables = Mapping[str, tuple[str, ...]]  # kind -> its phrases


def texts(tables: Tables) -> tuple[str, ...]:
    """The phrases of all kinds, in the order of their ids."""
    return tuple(text for table in tables.values() for text in table)


def first_ids(tables: Tables) -> dict[str, int]:
    """The id of the first phrase of each kind."""
    first, start = {}, 0
    for kind, table in tables.items():
        first[kind] = start
        start += len(table)
    return first


def most_tokens(tables: Tables, lengths: np.ndarray) -> dict[str, int]:
    """Tokens of the longest phrase of each kind; `lengths` is int[phrases], of all."""
    first = first_ids(tables)
    return {
        kind: int(np.max(lengths[first[kind] : first[kind] + len(table)]))
        for kind, table in tables.items()
    }


def close_gaps(ids: jax.Array) -> jax.Array:
    """int32[M], phrase ids in their order, every NO_PHRASE behind the last of them."""
    return ids[jnp.argsort(ids == NO_PHRASE, stable=True)].astype(jnp.int32)
