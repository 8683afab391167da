"""The compiled programs of an iteration; what they take, and compiling them ahead."""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ragen_jax.diagnostics import monitor as monitor_lib
from ragen_jax.diagnostics.monitor import Monitor
from ragen_jax.evaluation.evaluator import Evaluator
from ragen_jax.learning.forward import UpdatePlan
from ragen_jax.learning.summary import iteration_values, summarize, summarize_tasks
from ragen_jax.learning.train_state import NO_UPDATES, UpdateArgs
from ragen_jax.models.parameters import Parameters
from ragen_jax.parallel import backend_choices
from ragen_jax.parallel import mesh as meshes
from ragen_jax.rollout import rollout as rollout_lib
from ragen_jax.rollout.rollout import Rollout, RolloutArgs
from ragen_jax.rollout.tasks import common_opening
from ragen_jax.settings import Settings
from ragen_jax.starpo import Programs, make_update
from ragen_jax.training import weights
from ragen_jax.training.run import Run
from ragen_jax.utils import endings

# Row lengths that the update is compiled for: so many, or fewer that lie so far apart.
_UPDATE_LENGTHS, _UPDATE_STEP = 3, 128


def make_programs(run: Run, *, loads: bool = True) -> Programs:
    """Compiles nothing yet.

    Args:
      run: what is static.
      loads: whether to read the frozen weights that the programs are given.
    """
    model = run.model
    frozen = weights.load_frozen(model) if loads else {}
    reference: Parameters = {}
    if loads and run.settings.has_reference:
        reference = frozen or weights.load_parameters(model)
    penalty, environments = run.settings.reward.format_penalty, len(run.tasks)

    def summaries(rollout: Rollout):
        rows, episodes = rollout.rows, rollout.episodes
        by_task = summarize_tasks(episodes, environments) if environments > 1 else {}
        too_long = tuple(rollout.too_long.sum(axis=0))
        return summarize(rows, episodes, penalty), by_task, too_long

    def report(counts, learned, seen, passes, actor_lr):
        slot_passes = run.plan.slots * passes.total()
        return iteration_values(
            run.settings, counts, learned, seen, slot_passes, actor_lr
        )

    return Programs(
        rollout=rollout_lib.make_rollout(run.context, run.plan),
        update=make_update(update_plan(run)),
        summarize=jax.jit(summaries),
        report=jax.jit(report),
        merge=weights.make_merge(model),
        frozen=frozen,
        reference=reference,
    )


def share_programs(one: Settings, other: Settings) -> bool:
    """Whether runs of the same shapes and these settings need the same programs.

    The actor's learning rate is given at each call.
    """
    rate = dataclasses.replace(other.optimizer, actor_lr=one.optimizer.actor_lr)
    return one == dataclasses.replace(other, optimizer=rate)


def update_lengths(run: Run) -> tuple[int, ...]:
    """Tokens of a row that the update is compiled for, the shortest first."""
    context = run.plan.context
    first = min(tokens.first_capacity for tokens in run.tokens)
    step = max(_UPDATE_STEP, -(-(context - first) // _UPDATE_LENGTHS))
    lengths = {
        min(backend_choices.row_length(length), context)
        for length in (*range(first + step, context, step), context)
    }
    return tuple(sorted(lengths))


def update_plan(run: Run) -> UpdatePlan:
    """What the update of a run is compiled for."""
    model = run.model
    return UpdatePlan(
        run.settings,
        model.config,
        model.mesh,
        model.dtype,
        run.state_shardings,
        update_lengths(run),
        prefix=common_opening(run.tokens),
        assemble=weights.assembler(model.adapters),
    )


def rollout_arguments(run: Run) -> tuple:
    """What `Programs.rollout` takes, without the arrays."""
    call = RolloutArgs(
        seed=_scalar(run, jnp.uint32),
        split=_scalar(run, jnp.int32),
        iteration=_scalar(run, jnp.int32),
        first_prompt=_scalar(run, jnp.int32),
        temperature=_scalar(run, jnp.float32),
        policy_version=_scalar(run, jnp.int32),
    )
    return weights.abstract_parameters(run.model), run.tokens, call


def update_arguments(run: Run, sampling: jax.stages.Lowered) -> tuple:
    """What `Programs.update` takes, without the arrays.

    Args:
      run: what is static.
      sampling: the rollout, lowered for `rollout_arguments`.
    """
    model = weights.abstract_parameters(run.model)
    frozen = {} if run.model.adapters is None else model
    reference = model if run.settings.has_reference else {}
    state, record = weights.abstract_state(run), record_shapes(run, sampling)
    given = UpdateArgs(
        seed=_scalar(run, jnp.uint32),
        actor_lr=_scalar(run, jnp.float32),
        use=_scalar(run, jnp.int32),
        earlier=jax.tree.map(lambda _: _scalar(run, jnp.int32), NO_UPDATES),
    )
    return state, frozen, reference, record.rows, record.episodes, given


def _scalar(run: Run, dtype) -> jax.ShapeDtypeStruct:
    """One number, on every device."""
    whole = NamedSharding(run.model.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct((), dtype, sharding=whole)


def record_shapes(run: Run, sampling: jax.stages.Lowered) -> Rollout:
    """What the rollout returns, without the arrays. Args as for `update_arguments`."""
    shared = NamedSharding(run.model.mesh, meshes.ROWS)
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=shared),
        sampling.out_info,
    )


def compile_ahead(
    run: Run, programs: Programs, evaluators: Mapping[str, Evaluator]
) -> tuple[Programs, dict[str, Evaluator]]:
    """The same, compiled: all of them first, or the update in a thread of its own.

    Which of both suits the backend; the thread compiles while the first episodes are
    sampled. Without this each program would compile when it is first called, as several
    processes do, one program after the other, in the same order.
    """
    if jax.process_count() > 1:
        return programs, dict(evaluators)
    parameters, _, call = rollout_arguments(run)
    sampling = programs.rollout.lower(*rollout_arguments(run))
    all_first = backend_choices.choices().compiles_all_first
    update = _Ahead(programs.update, update_arguments(run, sampling))
    evaluating = {
        label: _Ahead(one.rollout, (parameters, one.tokens, call))
        for label, one in (evaluators if all_first else {}).items()
    }

    if not all_first:
        endings.start_compiling(update.compile)
    ahead = dataclasses.replace(programs, rollout=sampling.compile(), update=update)
    if all_first:
        for program in (update, *evaluating.values()):
            program.compile()
    return ahead, {
        label: dataclasses.replace(one, rollout=evaluating.get(label, one.rollout))
        for label, one in evaluators.items()
    }


def compile_indicators(run: Run, programs: Programs, monitor: Monitor) -> Monitor:
    """The same, with what each iteration measures compiled, or in a thread that does.

    To be called when the rollout has compiled: until the update has, too, there is
    nothing else for a second core to do. Several processes compile in the same order.

    Args:
      run: what is static.
      programs: from `compile_ahead`.
      monitor: of the run.
    """
    if jax.process_count() > 1 or not run.settings.health.indicators:
        return monitor
    record = record_shapes(run, programs.rollout)
    arguments = (record.rows, record.episodes, monitor_lib.tables(run))
    measure = _Ahead(monitor.measure, arguments)
    if backend_choices.choices().compiles_all_first:
        measure.compile()
    else:
        endings.start_compiling(measure.compile)
    return dataclasses.replace(monitor, measure=measure)


class _Ahead:
    """A program that is compiled, perhaps by another thread; a call waits for it."""

    def __init__(self, program: Any, arguments: tuple):
        self._program, self._arguments = program, arguments
        self._compiled: concurrent.futures.Future = concurrent.futures.Future()

    def compile(self) -> None:
        """Once, in whatever thread."""
        try:
            compiled = self._program.lower(*self._arguments).compile()
            return_free_memory()
            self._compiled.set_result(compiled)
        except BaseException as error:  # Raised where the program is first called.
            self._compiled.set_exception(error)

    def __call__(self, *given):
        return self._compiled.result()(*given)


def return_free_memory() -> None:
    """Hands what the compiler has freed back to the system, where glibc is in use.

    It keeps such memory to itself otherwise: 1.6 of the 2.5 GiB that a run on a CPU
    held when its update was compiled, and then the update's own arrays came on top.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
