"""Phrases grouped by kind: one table for each kind, their ids numbered consecutively.

The id of a phrase is the first id of its kind plus its index in that kind's table. Used
by the environments of text.
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
    """Tokens of each kind's longest phrase; `lengths`: int[phrases], those of each."""
    first = first_ids(tables)
    return {
        kind: int(np.max(lengths[first[kind] : first[kind] + len(table)]))
        for kind, table in tables.items()
    }


def close_gaps(ids: jax.Array) -> jax.Array:
    """int32[M], the ids in the same order, with every NO_PHRASE moved to the end."""
    return ids[jnp.argsort(ids == NO_PHRASE, stable=True)].astype(jnp.int32)
