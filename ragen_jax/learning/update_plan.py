"""What the update is compiled for, and how its rows lie on the mesh.

Rows are computed on a microbatch at a time, each as short as its replies allow.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.learning.batch import reply_lengths
from ragen_jax.learning.train_state import TrainState
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.parallel import mesh as meshes
from ragen_jax.settings import Settings
from ragen_jax.trajectory import Episodes, Rows, first_to_hold

# How the arrays of `split_into_microbatches` are sharded.
MICROBATCHES = PartitionSpec(None, *meshes.ROWS)


@dataclasses.dataclass(frozen=True)
class UpdatePlan:
    """What the update is compiled for. Static."""

    settings: Settings
    config: ModelConfig
    mesh: Mesh | None  # None: arrays are one device's shards, inside `shard_map`
    dtype: Any  # of the transformers' computation
    shardings: TrainState  # of the state, before and after
    lengths: tuple[int, ...]  # row lengths compiled for, rising; the last is T
    prefix: tuple[int, ...] = ()  # tokens that every row begins with; shorter than all
    # Trainable and frozen tree -> parameters; full training: the trainable one.
    assemble: Callable[[Any, Any], Parameters] = lambda trainable, frozen: trainable


def check_record(plan: UpdatePlan, rows: Rows, episodes: Episodes) -> None:
    """Refuses a record of other sizes than the plan's, part of which would be ignored.

    It checks shapes, so it is free after tracing; and, called with numbers, as from a
    notebook, that rows begin with the plan's prefix, which is not read from them.

    Raises:
      ValueError: naming the sizes, or the row that begins otherwise.
    """
    length, rollout = rows.tokens.shape[1], plan.settings.rollout
    if length != plan.lengths[-1]:
        raise ValueError(
            f"rows have T = {length} tokens and the plan {plan.lengths[-1]} (its last"
            " length): fill rows up with padding, or make a plan for longer ones"
        )
    count = rollout.prompts * rollout.group_size
    if episodes.turns.shape[0] != count:
        raise ValueError(
            f"there are B = {episodes.turns.shape[0]} episodes, and rollout.prompts *"
            f" rollout.group_size = {rollout.prompts} * {rollout.group_size}: make a"
            " plan of settings for as many"
        )
    if plan.prefix and not isinstance(rows.tokens, jax.core.Tracer):
        _check_prefix(plan, rows)


def _check_prefix(plan: UpdatePlan, rows: Rows) -> None:
    """Raises ValueError for a row that learns, and does not begin with the prefix."""
    prefix = jnp.array(plan.prefix)[None]
    begins = (rows.tokens[:, : prefix.shape[1]] == prefix).all(axis=1)
    others = jnp.flatnonzero(~begins & rows.is_reply.any(axis=1))
    if len(others):
        raise ValueError(
            f"row {int(others[0])} does not begin with the {len(plan.prefix)} tokens"
            " of the plan's prefix, which is computed once for all rows: begin it with"
            " those, or score by dataclasses.replace(plan, prefix=())"
        )


def plan_of_one_device(plan: UpdatePlan) -> UpdatePlan:
    """The plan for one device's rows of each microbatch, inside `shard_map`."""
    assert plan.mesh is not None
    optimizer = plan.settings.optimizer
    rows = optimizer.microbatch // meshes.row_shards(plan.mesh)
    optimizer = dataclasses.replace(optimizer, microbatch=rows)
    settings = dataclasses.replace(plan.settings, optimizer=optimizer)
    return dataclasses.replace(plan, settings=settings, mesh=None)


def constrain(plan: UpdatePlan, tree, spec: PartitionSpec):
    """The tree with every array sharded by `spec`; unchanged on one device's shards."""
    if plan.mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(plan.mesh, spec))


def shard_rows(plan: UpdatePlan, tree):
    """Shards every array's leading axis over data and fsdp."""
    return constrain(plan, tree, meshes.ROWS)


def split_into_microbatches(plan: UpdatePlan, tree):
    """[rows, ...] -> [microbatches, rows of each, ...], the second axis sharded."""
    micro = plan.settings.optimizer.microbatch
    cut_up = jax.tree.map(lambda x: x.reshape(-1, micro, *x.shape[1:]), tree)
    return constrain(plan, cut_up, MICROBATCHES)


def by_length(plan: UpdatePlan, compute: Callable, is_reply: jax.Array, microbatch):
    """`compute(length, microbatch)` at the shortest compiled length that fits.

    Args:
      plan: with the compiled lengths.
      compute: (length, static, and microbatch) -> anything, of shapes that do not
        depend on the length.
      is_reply: bool[R, T], of the microbatch's rows.
      microbatch: the microbatch, in rows of T tokens.
    """
    longest = reply_lengths(is_reply).max()
    shortest = first_to_hold(plan.lengths, longest)
    branches = [functools.partial(compute, length) for length in plan.lengths]
    return jax.lax.switch(shortest, branches, microbatch)


def truncate(microbatch, length: int):
    """The first `length` tokens of every row."""
    return jax.tree.map(lambda x: x[:, :length] if x.ndim == 2 else x, microbatch)
