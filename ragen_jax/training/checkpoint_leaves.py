"""A state as one flat table of leaves, as a checkpoint holds it."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ragen_jax.training import checkpoint_files as files


def handler() -> ocp.CompositeCheckpointHandler:
    """What writes a state and its record; an array's files are named after its leaf."""
    # Not as OCDBT, which puts all leaves into common files: here a file's name says
    # which leaf is damaged, and whoever reads some leaves verifies those alone.
    return ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(use_ocdbt=False),
        info=ocp.JsonCheckpointHandler(filename=files.INFO.name),
    )


def flat(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path, such as `actor.layers.query.kernel`."""
    leaves = jax.tree.leaves_with_path(tree)
    table = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in leaves
    }
    if len(table) < len(leaves):
        raise ValueError("two leaves of the state have the same dotted path")
    return table


def flat_arrays(state: Any) -> dict[str, jax.Array]:
    """The same of a state whose leaves can be saved. Raises for one that cannot."""
    table = flat(state)
    for path, leaf in table.items():
        if not isinstance(leaf, jax.Array) or jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            raise TypeError(f"{path} is {type(leaf).__name__}, not a plain jax.Array")
        if leaf.size == 0:
            raise ValueError(f"{path} is empty, which Orbax cannot save")
    return table


def difference(
    saved: Mapping[str, Any],
    expected: Mapping[str, jax.ShapeDtypeStruct],
    partial: bool,
) -> str:
    """The first leaf in which two flat states differ, in words; "" when in none."""
    for path, leaf in expected.items():
        if path not in saved:
            return f"{path} is missing there"
        there, here = (
            f"{np.dtype(side.dtype).name}{list(side.shape)}"
            for side in (saved[path], leaf)
        )
        if there != here:
            return f"{path} is {there} there and {here} here"
    extra = [] if partial else [path for path in saved if path not in expected]
    return f"{extra[0]} is there and not here" if extra else ""
