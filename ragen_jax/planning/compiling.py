"""Lowers and compiles every program of a run for absent devices; report.py calls it."""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ragen_jax.errors import UserError
from ragen_jax.planning.target import Target
from ragen_jax.training import programs as programs_lib
from ragen_jax.training import validation
from ragen_jax.training.run import Run

ROLLOUT, UPDATE, SUMMARY, MERGE = "rollout", "update", "summary", "merge"


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program; sizes are bytes on one device."""

    # ROLLOUT, UPDATE, SUMMARY or MERGE; or one of `validation.KINDS`, a space, and a
    # task's label
    name: str
    text: str  # optimized HLO
    seconds: float  # compile time
    arguments: int
    temporary: int
    peak: int  # arguments, results and temporaries when they need most


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program that is traced and lowered, but not compiled."""

    name: str
    lowered: jax.stages.Lowered


def lower(run: Run, names: Sequence[str] = ()) -> Iterator[Lowered]:
    """Lowers the programs of a run.

    Args:
      run: prepared within `Target.tracing`, which must still be active.
      names: of the wanted programs; none: all. One of `validation.KINDS` without a
        label means those of all tasks.
    """
    programs = programs_lib.make_programs(run, loads=False)
    parameters, _, rollout_args = programs_lib.abstract_rollout_arguments(run)
    sampling = programs.rollout.lower(
        parameters, _abstract(run, run.tokens), rollout_args
    )
    wanted = lambda name: not names or name in names  # noqa: E731
    if wanted(ROLLOUT):
        yield Lowered(ROLLOUT, sampling)
    update = programs_lib.abstract_update_arguments(run, sampling)
    if wanted(UPDATE):
        yield Lowered(UPDATE, programs.update.lower(*update))
    if wanted(SUMMARY):
        record = programs_lib.record_shapes(run, sampling)
        yield Lowered(SUMMARY, programs.summarize.lower(record))
    if wanted(MERGE) and run.model.adapters is not None:
        state, frozen = update[:2]
        yield Lowered(MERGE, programs.merge.lower(state.actor, frozen))
    kinds = [kind for kind in validation.KINDS if wanted(kind)]
    for name, evaluator in validation.programs_of(run, kinds):
        tokens = _abstract(run, evaluator.tokens)
        yield Lowered(name, evaluator.rollout.lower(parameters, tokens, rollout_args))


def compile_program(target: Target, traced: Lowered) -> Program:
    """Compiles one program for the target, which can take minutes.

    Raises:
      UserError: if a TPU has too little memory for it.
    """
    started = time.perf_counter()
    try:
        compiled = target.compile(traced.lowered)
    except UserError as error:
        raise UserError(f"for the {traced.name} {error}") from error
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    return Program(
        name=traced.name,
        text=compiled.as_text(),
        seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        peak=memory.peak_memory_in_bytes,
    )


def _abstract(run: Run, tree):
    """The tree as ShapeDtypeStructs, replicated on every device of the mesh."""
    whole = NamedSharding(run.model.mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree
    )
