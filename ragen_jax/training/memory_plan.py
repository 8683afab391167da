"""The memory that a run will need on each device, before any of it is allocated.

Parameters, optimizer states and the cache are counted from their shapes and
shardings; what the programs need besides is asked of the compiler, which builds them
for these devices without running them.
"""

import dataclasses
import math
import sys
from typing import Any

import jax

from ragen_jax import settings as settings_lib
from ragen_jax.errors import UserError
from ragen_jax.models import parameters
from ragen_jax.parallel import backend_choices
from ragen_jax.parallel import mesh as meshes
from ragen_jax.rollout import cache_attention
from ragen_jax.settings import Settings
from ragen_jax.training import context_checks, placement, validation, weights
from ragen_jax.training import model as model_lib
from ragen_jax.training import programs as programs_lib
from ragen_jax.training.run import Run
from ragen_jax.utils import host_memory

_MIB = 2**20
_TOKEN_BYTES = 16  # at least, for each token of a rollout's record
# Part -> what makes it smaller; other parts depend on the model.
_BOUNDED_BY = {
    "episodes": "lower rollout.prompts, rollout.group_size or rollout.reply_tokens",
    "keys and values": "lower rollout.slots or rollout.reply_tokens",
}


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes on the device that holds most."""

    resident: dict[str, int]  # in memory from the first iteration to the last
    rollout: dict[str, int]  # on top of it while the rollout runs
    update: dict[str, int]  # on top of it while the update runs
    available: int | None  # what the device has; None if unknown
    # On top of it while each program of evaluation runs.
    evaluation: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> int:
        """The peak: what is resident, and the largest of what comes on top."""
        passing = max(
            sum(self.rollout.values()),
            sum(self.update.values()),
            *self.evaluation.values(),
        )
        return sum(self.resident.values()) + passing


def plan(run: Run) -> Needs:
    """Compiles rollout, update and evaluations and counts; allocates none of theirs.

    Args:
      run: from `prepare`.
    """
    programs = programs_lib.make_programs(run, loads=False)
    parameters, tokens, rollout_args = programs_lib.abstract_rollout_arguments(run)
    lowered = programs.rollout.lower(parameters, tokens, rollout_args)
    arguments = programs_lib.abstract_update_arguments(run, lowered)
    evaluation = {
        name: evaluator.rollout.lower(parameters, evaluator.tokens, rollout_args)
        for name, evaluator in validation.programs_of(run)
    }
    return count(
        run,
        programs_lib.record_shapes(run, lowered),
        sampling=_temporaries(lowered),
        learning=_temporaries(programs.update.lower(*arguments)),
        available=available(),
        evaluation={name: _temporaries(each) for name, each in evaluation.items()},
    )


def count(
    run: Run,
    record,
    *,
    sampling: int,
    learning: int,
    available: int | None,
    evaluation: dict[str, int] | None = None,
) -> Needs:
    """The parts of a device's memory; compiles nothing.

    Args:
      run: from `prepare`.
      record: of a rollout, from `programs.record_shapes`.
      sampling, learning: temporary bytes of the compiled rollout and update.
      available: bytes that programs may have.
      evaluation: temporary bytes of other rollouts, by name.
    """
    model = weights.abstract_parameters(run.model)
    copy, cache = _sampler_copy(run), _cache(run)
    merged = 0 if run.model.adapters is None else _bytes(model)
    return Needs(
        resident=resident(run) | {"episodes": _bytes(record)},
        rollout={
            "sampler's copy of the weights": copy + merged,
            "keys and values": cache,
            "other temporaries": max(0, sampling - copy - cache),
        },
        update={"gradients and activations": learning},
        available=available,
        evaluation={name: size + merged for name, size in (evaluation or {}).items()},
    )


def resident(run: Run) -> dict[str, int]:
    """Bytes on one device that stay allocated all the time; compiles nothing."""
    state, model = (
        weights.abstract_state(run),
        _bytes(weights.abstract_parameters(run.model)),
    )
    has_base, has_reference = run.model.adapters is not None, run.settings.has_reference
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


def layer_keys(run: Run) -> int:
    """Bytes of one layer's keys in the KV cache of one device, its padding included.

    For absent devices, call it where programs are traced for them.
    """
    config, mesh, dtype = run.model.config, run.model.mesh, run.model.dtype
    rollout, heads = run.settings.rollout, config.kv_heads
    if rollout.layout == "tensor" and meshes.shards_heads(config.heads, heads, mesh):
        heads //= mesh.shape[meshes.TENSOR]
    kernel = backend_choices.decode_attention(
        rollout.decode_attention, dtype, config.head_dim
    )
    to_entry = cache_attention.by_name(kernel, config).to_entry
    keys = (run.plan.slots, run.plan.context, heads, config.head_dim)
    entry = jax.eval_shape(to_entry, jax.ShapeDtypeStruct(keys, dtype))
    return entry.size * entry.dtype.itemsize


def check_least(run: Run, limit: int | None = None) -> None:
    """Refuses a run that cannot fit whatever its programs need; compiles nothing.

    Args:
      run: from `prepare`.
      limit: bytes of memory of a device; None: what it has.

    Raises:
      UserError: naming the largest part.
    """
    limit = available() if limit is None else limit
    parts = resident(run) | {
        "episodes": run.plan.rows * run.plan.context * _TOKEN_BYTES,
        "sampler's copy of the weights": _sampler_copy(run),
        "keys and values": _cache(run),
    }
    if limit is None or (least := sum(parts.values())) <= limit:
        return
    largest = max(parts, key=lambda name: parts[name])
    rank = run.settings.lora.rank
    other = f"choose a smaller model, or {'a smaller' if rank else 'set'} lora.rank"
    keys = _BOUNDED_BY.get(largest, other)
    raise UserError(
        f"this run needs at least {least / 2**30:,.1f} GiB on a device that has"
        f" {limit / 2**30:,.1f} GiB, {parts[largest] / 2**30:,.1f} GiB of it for"
        f" {largest}: {keys}, or take more devices; --plan shows every part"
    )


def available() -> int | None:
    """Bytes of memory that one device of this process has, or may share on a CPU."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    memory = host_memory.most_bytes() if device.platform == "cpu" else None
    return memory and memory // jax.local_device_count()


def peak_memory() -> float:
    """GiB: the most a local device has held, or this process where that is unknown."""
    stats: Any = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 2**30
    import resource  # Here, since Windows has none, where this module can be imported.

    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * (1 if sys.platform == "darwin" else 1024) / 2**30


def table(needs: Needs) -> str:
    """The plan as text: MiB of each part, their peak, and the device's memory."""
    lines = ["memory of one device, MiB", "-------------------------"]
    for title, part in (
        ("throughout the run", needs.resident),
        ("added by the rollout", needs.rollout),
        ("added by the update", needs.update),
        ("added by evaluation", needs.evaluation),
    ):
        if not part:
            continue
        lines.append(f"  {title}")
        lines += [f"    {name:32s} {size / _MIB:12,.1f}" for name, size in part.items()]
    lines.append(
        f"  {'peak, with the largest addition':34s} {needs.total / _MIB:12,.1f}"
    )
    if needs.available is not None:
        lines.append(f"  {'available':34s} {needs.available / _MIB:12,.1f}")
    return "\n".join(lines)


def advice(run: Run, needs: Needs) -> list[tuple[str, str]]:
    """(overrides, why), the most effective first; empty where everything fits."""
    if needs.available is None or needs.total <= needs.available:
        return []
    settings = run.settings
    suggestions: list[tuple[dict[str, Any], str]] = []
    shards = meshes.row_shards(run.model.mesh)
    if sum(needs.resident.values()) > needs.available / 2:
        if run.model.mesh.shape[meshes.DATA] > 1:
            sharded = {"mesh.data": 1, "mesh.fsdp": -1}
            suggestions.append((sharded, "shard weights and optimizers"))
        if run.model.adapters is None:
            suggestions.append(({"lora.rank": 64}, "train adapters alone"))
        if settings.has_critic:
            suggestions.append(({"estimator": "grpo"}, "do without a critic"))
    rollout, update = sum(needs.rollout.values()), sum(needs.update.values())
    if max(needs.evaluation.values(), default=0) > max(rollout, update):
        half = _evaluated_at_a_time(settings) // 2
        if slots := half // shards * shards:
            fewer = {"evaluation.slots": slots}
            suggestions.append((fewer, "fewer episodes evaluated at a time"))
    elif update >= rollout:
        if not settings.model.remat:
            suggestions.append(({"model.remat": True}, "recompute activations"))
        mini, micro = settings.optimizer.minibatch, settings.optimizer.microbatch
        parts = [n for n in range(shards, micro // 2 + 1, shards) if mini % n == 0]
        if parts:
            fewer = {"optimizer.microbatch": parts[-1]}
            suggestions.append((fewer, "fewer rows at a time"))
    else:
        if slots := run.plan.slots // 2 * shards:
            suggestions.append(({"rollout.slots": slots}, "fewer episodes at a time"))
        if settings.rollout.layout == "replicated":
            layout = {"rollout.layout": "tensor"}
            suggestions.append((layout, "shard the sampler's weights"))
    shorter = settings.rollout.reply_tokens // 2
    if settings.rollout.window_turns:
        context = {"rollout.context": run.plan.context * 3 // 4}
        suggestions.append((context, "shorter rows, of fewer turns"))
    elif shorter:
        suggestions.append(
            ({"rollout.reply_tokens": shorter}, "shorter rows and cache")
        )
    return [
        (" ".join(f"--config.{key}={value}" for key, value in changes.items()), why)
        for changes, why in suggestions
        if _is_accepted(run, changes)
    ]


def _evaluated_at_a_time(settings: Settings) -> int:
    """Most episodes of an evaluation that are decoded at a time, of all devices."""
    chosen = settings.evaluation
    episodes = chosen.test_prompts * chosen.test_rollouts
    if settings.every.evaluate > 0:
        episodes = max(episodes, chosen.prompts * chosen.rollouts)
    return min(chosen.slots or episodes, episodes)


def _is_accepted(run: Run, changes: dict[str, Any]) -> bool:
    """Whether the run could be started with these leaves changed, by dotted key."""
    config, mesh = settings_lib.to_dict(run.settings), run.model.mesh
    for key, value in changes.items():
        section, _, leaf = key.rpartition(".")
        (config[section] if section else config)[leaf] = value
    try:
        changed = settings_lib.from_dict(config)
        if any(key.startswith("mesh.") for key in changes):
            sizes = settings_lib.check_devices(changed, mesh.size)
            model_lib.check_axes(run.model, sizes)
        else:
            settings_lib.check_even_split(changed, mesh.shape)
        trained = zip(run.tasks, run.tokens, strict=True)
        played = [(*pair, True) for pair in trained]
        played += [(*pair, False) for pair in run.evaluated]
        for task, tokens, is_training in played:
            context_checks.check_context(
                changed, run.model.config, task, tokens, is_training=is_training
            )
            if task.env.read_action is None:
                context_checks.check_reply(changed, tokens)
    except UserError:
        return False
    return True


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


def _temporaries(lowered: jax.stages.Lowered) -> int:
    """Bytes on one device besides arguments and results."""
    return lowered.compile().memory_analysis().temp_size_in_bytes


def _bytes(tree) -> int:
    """Of one device's part of a tree of ShapeDtypeStructs with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _sampler_copy(run: Run) -> int:
    """Bytes of the sampler's copy of the weights, on one device."""
    model, layout = run.model, run.settings.rollout.layout
    specs = meshes.rollout_specs(model.declared, model.mesh, layout)
    shapes = parameters.shapes(model.declared, model.dtype)
    return _bytes(placement.abstract(shapes, meshes.shardings(specs, model.mesh)))


def _cache(run: Run) -> int:
    """Bytes of the slots' keys and values on one device."""
    return 2 * run.model.config.layers * layer_keys(run)
