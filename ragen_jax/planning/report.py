"""Makes the plan of a run on absent devices, and formats it as text.

`make` and `text` are what `launch/train.py --plan --target=...` calls.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version

import jax

from ragen_jax.errors import UserError
from ragen_jax.models.io.sources import Source
from ragen_jax.parallel import mesh as meshes
from ragen_jax.planning import compiling, programs, roofline
from ragen_jax.planning.compiling import ROLLOUT, UPDATE, Program
from ragen_jax.planning.devices import Gpu
from ragen_jax.planning.model import ShapeSource
from ragen_jax.planning.programs import Block, Collective
from ragen_jax.planning.roofline import Iteration, RolloutParts
from ragen_jax.planning.target import Target, fraction_variable, memory_fraction
from ragen_jax.planning.work import Costs
from ragen_jax.settings import Settings
from ragen_jax.training import memory_plan, validation
from ragen_jax.training import programs as programs_lib
from ragen_jax.training import run as run_lib
from ragen_jax.training.memory_plan import Needs
from ragen_jax.training.run import Run

_MIB, _GIB, _GIGA, _TERA = 2**20, 2**30, 1e9, 1e12
_LARGE = _MIB  # bytes from which a collective is listed
_MOST_LINES = 12  # of the list of collectives


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory and time of a run on a target, found without running it."""

    run: Run
    target: Target
    compiled: dict[str, Program]  # by name
    trees: dict[str, Block]  # the same programs, parsed
    needs: Needs  # memory
    parts: RolloutParts | None  # costs of the rollout's passes; None: not of a GPU
    # An estimate for each mean reply length; of a TPU none.
    iterations: tuple[Iteration, ...]


def make(
    settings: Settings,
    source: Source,
    target: Target,
    *,
    replies: Sequence[float] = (),
    names: Sequence[str] = (),
    status: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compiles the programs of a run, which takes minutes and gigabytes of host memory.

    Args:
      settings: of the run.
      source: of the model; its weights are not read.
      target: the devices.
      replies: mean reply lengths, in tokens, for which to estimate an iteration of
        GPUs; none: 1/8, 3/8 and all of `rollout.reply_tokens`.
      names: of the programs to compile besides ROLLOUT and UPDATE, as for
        `compiling.lower`; none: all.
      status: called with a line of progress before each program.

    Raises:
      UserError: if devices, model, environments and settings do not fit together, a TPU
        has too little memory, or times are wanted for TPUs.
    """
    if replies and not isinstance(target.device, Gpu):
        raise UserError(
            "--target-replies: times are estimated for GPUs alone: leave it out"
        )
    program_names = (*names, ROLLOUT, UPDATE) if names else ()
    compiled, record = {}, None
    with target.tracing():
        run = run_lib.prepare(settings, source=source)
        for traced in compiling.lower(run, program_names):
            status(f"compiling {traced.name} for {target.device.title} ...")
            if traced.name == ROLLOUT:
                record = programs_lib.record_shapes(run, traced.lowered)
            compiled[traced.name] = compiling.compile_program(target, traced)
    return assemble(run, target, compiled, record, replies)


def assemble(
    run: Run,
    target: Target,
    compiled: dict[str, Program],
    record,
    replies: Sequence[float] = (),
) -> Plan:
    """Makes the plan from compiled programs, ROLLOUT and UPDATE at least.

    Args: as for `make`; `record` from `programs_lib.record_shapes`.
    """
    trees = {name: programs.read(each.text) for name, each in compiled.items()}
    with target.tracing():
        needs = memory_plan.count(
            run,
            record,
            sampling=compiled[ROLLOUT].temporary,
            learning=compiled[UPDATE].temporary,
            available=target.available,
            evaluation={
                name: each.temporary
                for name, each in compiled.items()
                if name.startswith(validation.KINDS)
            },
        )
    device, per_host = target.device, target.count // target.hosts
    if not isinstance(device, Gpu):
        return Plan(run, target, compiled, trees, needs, None, ())
    costs = Costs(device.figures, per_host, device.l2_cache)
    parts = roofline.read_rollout(run, trees[ROLLOUT], costs)
    most = run.settings.rollout.reply_tokens
    lengths = replies or (most / 8, most * 3 / 8, most)
    iterations = tuple(
        roofline.estimate(run, parts, trees[UPDATE], costs, reply) for reply in lengths
    )
    return Plan(run, target, compiled, trees, needs, parts, iterations)


def text(plan: Plan) -> str:
    """The plan as text for the console."""
    sections = [_heading(plan), _memory(plan), _programs(plan)]
    if plan.parts is not None:
        sections.append(_passes(plan, plan.parts))
    sections += [_faults(plan), _collectives(plan)]
    if plan.parts is not None:
        sections.append(_iterations(plan))
    return "\n\n".join("\n".join(section) for section in sections)


def _heading(plan: Plan) -> Iterator[str]:
    target, run = plan.target, plan.run
    hosts = f"{target.hosts} host{'s' if target.hosts > 1 else ''}"
    yield f"{target.count} x {target.device.title} on {hosts}; none is used"
    yield f"mesh {meshes.describe(run.model.mesh)}, {run.model.dtype}"
    yield (
        f"{run.plan.slots} slots on each device, rows of {run.plan.context} tokens,"
        f" cache lengths {', '.join(map(str, run.plan.buckets))}"
    )
    if isinstance(run.model.source, ShapeSource):
        yield (
            f"model: the shape of {run.model.source.shape}; texts are tokenized by"
            " tiny's tokenizer, with which rows are longer than with the model's own"
        )
    yield f"compiled by XLA of jax {jax.__version__}, {_compiler(plan)}"


def _compiler(plan: Plan) -> str:
    if isinstance(plan.target.device, Gpu):
        return "without autotuning"
    return f"libtpu {version('libtpu')}; times are estimated for GPUs alone"


def _memory(plan: Plan) -> Iterator[str]:
    yield memory_plan.report(plan.run, plan.needs)
    if not isinstance(plan.target.device, Gpu):
        return
    whole, share = plan.target.device.memory, memory_fraction()
    yield (
        f"(Available is what JAX allocates, {share:.0%} of {whole / _MIB:,.1f};"
        f" {fraction_variable()} changes it.)"
    )
    total = plan.needs.total
    # A CUDA graph of the whole rollout needs memory besides what JAX allocates.
    most = 0.88 if plan.run.settings.rollout.cuda_graph else 0.92
    if total > plan.target.available and total < most * whole:
        yield f"  {fraction_variable()}={most} would make it fit as it is."


def _programs(plan: Plan) -> Iterator[str]:
    yield "memory of each program, GiB on one device"
    titles = ("arguments", "temporary", "peak", "compile, s")
    yield f"  {'':28s} {' '.join(f'{title:>10s}' for title in titles)}"
    for name, each in plan.compiled.items():
        sizes = (each.arguments, each.temporary, each.peak)
        columns = " ".join(f"{size / _GIB:10.2f}" for size in sizes)
        yield f"  {name:28s} {columns} {each.seconds:10.1f}"


def _passes(plan: Plan, parts: RolloutParts) -> Iterator[str]:
    yield "cost of each pass of the rollout, on one device"
    titles = f"{'GB moved':>10s} {'within L2':>10s} {'GFLOP':>10s} {'ms':>8s}"
    yield f"  {'':28s} {'kernels':>8s} {titles}"
    buckets = plan.run.plan.buckets
    named = {"start: levels and prompts": parts.start}
    for index in range(len(parts.decode)):
        bucket = buckets[index] if len(parts.decode) > 1 else buckets[-1]
        full, empty = (roofline.decode_at(parts, index, x) for x in (1.0, 0.0))
        named[f"decode, cache of {bucket}"] = full
        if empty != full:  # The kernel reads only the filled part of each slot.
            named["  20% of it filled"] = roofline.decode_at(parts, index, 0.2)
    named["environment step and extend"] = parts.extend
    for name, each in named.items():
        yield (
            f"  {name:28s} {each.kernels:8.0f} {each.bytes / _GIGA:10.3f}"
            f" {each.cached / _GIGA:10.3f} {each.operations / _GIGA:10.1f}"
            f" {1000 * each.seconds:8.3f}"
        )


def _faults(plan: Plan) -> Iterator[str]:
    """What a compiler could have made slow."""
    with plan.target.tracing():
        least = memory_plan.layer_keys(plan.run)
    copies = programs.copies_in_loops(plan.trees[ROLLOUT], least)
    verdict = f"{len(copies)} in each round, which is a fault" if copies else "none"
    yield f"copies of a layer's cache in the rollout's loops: {verdict}"
    fused = programs.fused_attention(plan.trees[UPDATE]) or "none"
    yield f"fused attention in the update: {fused}"


def _collectives(plan: Plan) -> Iterator[str]:
    inside = programs.collectives_in_loops(plan.trees[ROLLOUT])
    yield "collectives"
    yield f"  in the rollout's loops: {len(inside) or 'none'}"
    vocabulary = plan.run.model.config.vocabulary
    large = programs.large_vocabulary_collectives(plan.trees[UPDATE], vocabulary)
    yield (
        "  over 1 MiB in the update's loops over the vocabulary:"
        f" {len(large) or 'none'}"
    )
    counts: collections.Counter = collections.Counter()
    for name, tree in plan.trees.items():
        for place, each in _walk(tree, ""):
            if each.bytes >= _LARGE:
                key = (each.bytes, name, each.kind, *sorted(each.dtypes), place)
                counts[key] += 1
    for key, count in sorted(counts.items(), reverse=True)[:_MOST_LINES]:
        size, name, kind, *dtypes, place = key
        yield (
            f"  {name:10s} {kind:14s} {'+'.join(dtypes):5s} {size / _MIB:8.1f} MiB"
            f" x {count:<3d} {place or 'once'}"
        )
    if len(counts) > _MOST_LINES:
        yield f"  and {len(counts) - _MOST_LINES} smaller kinds"


def _iterations(plan: Plan) -> Iterator[str]:
    yield (
        "estimate of one iteration, from its compiled programs and the device's data"
        " sheet"
    )
    work = f"{'s':>8s} {'TB moved':>9s} {'TFLOP':>8s}"
    yield f"  {'':23s} {'rollout':>8s} {'':18s}   {'update':>8s}"
    yield (
        f"  {'reply':>6s} {'decodes':>8s} {'extends':>7s} {work}   {work}"
        f" {'GB exchanged':>13s} {'total, s':>12s} {'sampled/s':>12s}"
    )
    for each in plan.iterations:
        columns = "   ".join(
            f"{part.seconds:8.2f} {part.bytes / _TERA:9.2f}"
            f" {part.operations / _TERA:8.1f}"
            for part in (each.rollout, each.update)
        )
        exchanged = each.rollout.exchanged + each.update.exchanged
        yield (
            f"  {each.reply:6.0f} {each.passes.decodes:8d} {each.passes.extends:7d}"
            f" {columns} {exchanged / _GIGA:13.2f} {each.seconds:12.2f}"
            f" {each.tokens / each.rollout.seconds:12,.0f}"
        )
    yield roofline.assumptions()


def _walk(block: Block, place: str) -> Iterator[tuple[str, Collective]]:
    """Yields (loops around it, collective) for each collective.

    Of a conditional, such as one on the rows' length, only the branch with most bytes.

    Args:
      block: to walk through.
      place: the loops around it, "" or as "loop > loop of 24".
    """
    for each in block.collectives:
        yield place, each
    for inner in block.loops:
        times = "loop" if inner.trips is None else f"loop of {inner.trips}"
        yield from _walk(inner.body, f"{place} > {times}" if place else times)
    for choice in block.choices:
        branches = (list(_walk(branch, place)) for branch in choice.branches)
        yield from max(branches, key=lambda each: sum(c.bytes for _, c in each))
