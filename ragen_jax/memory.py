"""What a run will keep in each device's memory, told before any of it is allocated.

Parameters, optimizer states and the cache are counted from their shapes and
shardings; what the two programs need besides is asked of the compiler, which builds
them for these devices without running them.
"""

import dataclasses
import math
import os

import jax
import numpy as np

from ragen_jax import ahead, loop, weights
from ragen_jax import mesh as meshes
from ragen_jax.loop import Run
from ragen_jax.models import parameters

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes on the device that holds most."""

    resident: dict[str, int]  # what lies there from the first iteration to the last
    rollout: dict[str, int]  # what the rollout needs besides, while it runs
    update: dict[str, int]  # what the update needs besides, while it runs
    available: int | None  # what the device has; None where it does not say

    @property
    def total(self) -> int:
        """Everything that lies there at the worst moment."""
        passing = max(sum(self.rollout.values()), sum(self.update.values()))
        return sum(self.resident.values()) + passing


def plan(run: Run) -> Needs:
    """Compiles the programs of an iteration and counts; allocates no array of theirs.

    Args:
      run: from `loop.prepare`.
    """
    programs = loop.make_programs(run, loads=False)
    lowered = programs.rollout.lower(*ahead.rollout_arguments(run))
    arguments = ahead.update_arguments(run, lowered)
    sampling = lowered.compile()
    learning = programs.update.lower(*arguments).compile()
    record, model = ahead.record_shapes(run, lowered), weights.abstract_parameters(run)
    copy, cache = _sampler_copy(run), _cache(run)
    temporary = sampling.memory_analysis().temp_size_in_bytes
    merged = 0 if run.adapters is None else _bytes(model)
    return Needs(
        resident=resident(run) | {"episodes": _bytes(record)},
        rollout={
            "sampler's copy of the weights": copy + merged,
            "keys and values": cache,
            "rest": max(0, temporary - copy - cache),
        },
        update={
            "gradients and activations": learning.memory_analysis().temp_size_in_bytes
        },
        available=available(),
    )


def resident(run: Run) -> dict[str, int]:
    """Bytes on one device of what lies there all the time; compiles nothing."""
    state, model = weights.abstract_state(run), _bytes(weights.abstract_parameters(run))
    has_base, has_reference = run.adapters is not None, run.settings.loss.kl > 0
    sizes = {
        "actor": _bytes(state.actor),
        "actor's optimizer": _bytes(state.actor_optimizer),
        "critic": _bytes(state.critic),
        "critic's optimizer": _bytes(state.critic_optimizer),
        "base model under the adapters": model if has_base else 0,
        # With adapters the reference is the base itself.
        "reference of the KL term": model if has_reference and not has_base else 0,
    }
    return {name: size for name, size in sizes.items() if size}


def available() -> int | None:
    """Bytes of memory that one device of this process has, or may share on a CPU."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return whole // jax.local_device_count()
    return None


def table(needs: Needs) -> str:
    """For a person: MiB on each device, and whether that fits."""
    lines = ["memory of one device, MiB", "-------------------------"]
    for title, part in (
        ("all the time", needs.resident),
        ("while sampling", needs.rollout),
        ("while learning", needs.update),
    ):
        lines.append(f"  {title}")
        lines += [f"    {name:32s} {size / _MIB:12,.1f}" for name, size in part.items()]
    lines.append(f"  {'at the worst moment':34s} {needs.total / _MIB:12,.1f}")
    if needs.available is not None:
        lines.append(f"  {'there is':34s} {needs.available / _MIB:12,.1f}")
    return "\n".join(lines)


def advice(run: Run, needs: Needs) -> list[tuple[str, str]]:
    """(overrides, why), the most effective first; empty where everything fits."""
    if needs.available is None or needs.total <= needs.available:
        return []
    settings, found = run.settings, []
    shards = meshes.row_shards(run.mesh)
    if sum(needs.resident.values()) > needs.available / 2:
        if run.mesh.shape[meshes.DATA] > 1:
            found.append(("mesh.data=1 mesh.fsdp=-1", "share weights and optimizers"))
        if run.adapters is None:
            found.append(("lora.rank=64", "train adapters alone"))
        if settings.estimator == "ppo":
            found.append(("estimator=grpo", "do without a critic"))
    if sum(needs.update.values()) >= sum(needs.rollout.values()):
        if not settings.model.remat:
            found.append(("model.remat=True", "recompute activations"))
        if (smaller := settings.optimizer.microbatch // 2) >= shards:
            found.append((f"optimizer.microbatch={smaller}", "fewer rows at a time"))
    else:
        if (slots := run.plan.slots * shards // 2) >= shards:
            found.append((f"rollout.slots={slots}", "fewer episodes at a time"))
        if settings.rollout.layout == "replicated":
            found.append(("rollout.layout=tensor", "share the sampler's weights"))
    flag = "--config."
    return [
        (" ".join(flag + part for part in parts.split()), why) for parts, why in found
    ]


def report(run: Run, needs: Needs) -> str:
    """The table, and what to change if it does not fit."""
    lines = [table(needs), ""]
    if changes := advice(run, needs):
        lines.append("This does not fit. What would help, the most effective first:")
        lines += [f"  {overrides:44s}  {why}" for overrides, why in changes]
    elif needs.available is None:
        lines.append("The device does not say how much memory it has.")
    else:
        lines.append("This fits.")
    return "\n".join(lines)


def _bytes(tree) -> int:
    """Of one device's part of a tree of ShapeDtypeStructs with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _sampler_copy(run: Run) -> int:
    """Bytes of the weights as decoding wants them, on one device."""
    declared = parameters.declare(run.config)
    specs = meshes.rollout_specs(declared, run.mesh, run.settings.rollout.layout)
    placed = meshes.shardings(specs, run.mesh)
    shapes = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        parameters.shapes(declared, run.dtype),
        placed,
    )
    return _bytes(shapes)


def _cache(run: Run) -> int:
    """Bytes of the slots' keys and values on one device."""
    config, size = run.config, np.dtype(run.dtype).itemsize
    heads = config.kv_heads
    if run.settings.rollout.layout == "tensor" and meshes.shares_heads(
        config.heads, heads, run.mesh
    ):
        heads //= run.mesh.shape[meshes.TENSOR]
    positions = run.plan.slots * run.plan.context
    return 2 * config.layers * positions * heads * config.head_dim * size
