"""The compiled programs of an iteration, their abstract arguments, and compile-ahead.

`make_programs` defines `starpo.Programs`; the trainer calls `compile_run`, which
compiles them before their first call.
"""

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
from ragen_jax.learning.summary import (
    Summaries,
    iteration_values,
    summarize,
    summarize_tasks,
)
from ragen_jax.learning.train_state import NO_UPDATES, UpdateArgs
from ragen_jax.learning.update_plan import UpdatePlan
from ragen_jax.models.parameters import Parameters
from ragen_jax.parallel import backend_choices
from ragen_jax.parallel import mesh as meshes
from ragen_jax.rollout import rollout as rollout_lib
from ragen_jax.rollout.rollout import Rollout
from ragen_jax.rollout.tasks import common_opening
from ragen_jax.rollout.types import RolloutArgs
from ragen_jax.settings import Settings
from ragen_jax.starpo import Programs, make_update
from ragen_jax.training import validation, weights
from ragen_jax.training.run import Run
from ragen_jax.utils import endings

# The update is compiled for at most so many row lengths, at least so far apart.
_UPDATE_LENGTHS, _UPDATE_STEP = 3, 128


def make_programs(run: Run, *, loads: bool = True) -> Programs:
    """The programs of a run; each compiles when it is first called or lowered.

    Args:
      run: what is static.
      loads: whether to read the frozen weights; without them only for lowering.
    """
    model = run.model
    frozen = weights.load_frozen(model) if loads else {}
    reference: Parameters = {}
    if loads and run.settings.has_reference:
        reference = frozen or weights.load_parameters(model)
    reward, environments = run.settings.reward, len(run.tasks)

    def summaries(rollout: Rollout) -> Summaries:
        rows, episodes = rollout.rows, rollout.episodes
        by_task = summarize_tasks(episodes, environments) if environments > 1 else {}
        too_long = tuple(rollout.too_long.sum(axis=0))
        return Summaries(summarize(rows, episodes, reward), by_task, too_long)

    def report(counts, uses, means, passes, actor_lr):
        slot_passes = run.plan.slots * passes.total()
        return iteration_values(
            run.settings, counts, uses, means, slot_passes, actor_lr
        )

    return Programs(
        rollout=rollout_lib.make_rollout(run.rollout_context, run.plan),
        update=make_update(update_plan(run)),
        summarize=jax.jit(summaries),
        report=jax.jit(report),
        merge=weights.make_merge(model),
        frozen=frozen,
        reference=reference,
    )


def share_programs(one: Settings, other: Settings) -> bool:
    """Whether the settings differ at most in the actor's learning rate.

    That one is an argument of the update, so the same programs serve both.
    """
    rate = dataclasses.replace(other.optimizer, actor_lr=one.optimizer.actor_lr)
    return one == dataclasses.replace(other, optimizer=rate)


def update_lengths(run: Run) -> tuple[int, ...]:
    """Row lengths, in tokens, that the update is compiled for; rising."""
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


def abstract_rollout_arguments(run: Run) -> tuple:
    """The arguments of `Programs.rollout` as ShapeDtypeStructs, to lower it with."""
    rollout_args = RolloutArgs(
        seed=_scalar(run, jnp.uint32),
        split=_scalar(run, jnp.int32),
        iteration=_scalar(run, jnp.int32),
        first_prompt=_scalar(run, jnp.int32),
        temperature=_scalar(run, jnp.float32),
        policy_version=_scalar(run, jnp.int32),
    )
    return weights.abstract_parameters(run.model), run.tokens, rollout_args


def abstract_update_arguments(
    run: Run, sampling: jax.stages.Lowered | jax.stages.Compiled
) -> tuple:
    """The arguments of `Programs.update` as ShapeDtypeStructs, to lower it with.

    Args:
      run: what is static.
      sampling: the rollout, lowered or compiled for `abstract_rollout_arguments`.
    """
    model = weights.abstract_parameters(run.model)
    frozen = {} if run.model.adapters is None else model
    reference = model if run.settings.has_reference else {}
    state, record = weights.abstract_state(run), record_shapes(run, sampling)
    update_args = UpdateArgs(
        seed=_scalar(run, jnp.uint32),
        actor_lr=_scalar(run, jnp.float32),
        use=_scalar(run, jnp.int32),
        earlier=jax.tree.map(lambda _: _scalar(run, jnp.int32), NO_UPDATES),
    )
    return state, frozen, reference, record.rows, record.episodes, update_args


def _scalar(run: Run, dtype) -> jax.ShapeDtypeStruct:
    """A scalar, replicated on all devices."""
    replicated = NamedSharding(run.model.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct((), dtype, sharding=replicated)


def record_shapes(
    run: Run, sampling: jax.stages.Lowered | jax.stages.Compiled
) -> Rollout:
    """The rollout's result as ShapeDtypeStructs, with shardings.

    Args: as for `abstract_update_arguments`.
    """
    by_rows = NamedSharding(run.model.mesh, meshes.ROWS)
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=by_rows),
        sampling.out_info,
    )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A run's compiled programs, kept over rollbacks that change no shape."""

    settings: Settings  # that they were compiled for
    programs: Programs
    validators: dict[str, Evaluator]
    monitor: Monitor

    @property
    def base(self) -> Parameters:
        """The weights of `model.path`, under adapters or as reference, or {}."""
        return self.programs.frozen or self.programs.reference


def compile_run(run: Run, earlier: Compiled | None) -> Compiled:
    """Compiles a run's programs, after a rollback with the `earlier` frozen weights.

    Reading those again would put a second copy beside the first in memory.
    """
    evaluation = run.settings.evaluation
    made = make_programs(run, loads=earlier is None)
    if earlier is not None:
        old = earlier.programs
        made = dataclasses.replace(made, frozen=old.frozen, reference=old.reference)
    evaluators = {}
    if run.settings.every.evaluate > 0:
        evaluators = validation.make_evaluators(
            run, rollouts=evaluation.rollouts, prompts=evaluation.prompts
        )
    programs, validators = compile_ahead(run, made, evaluators)
    monitor = monitor_lib.make_monitor(run, run.model.tokenizer, update_plan(run))
    monitor = compile_indicators(run, programs, monitor)
    return Compiled(run.settings, programs, validators, monitor)


def compile_ahead(
    run: Run, programs: Programs, evaluators: Mapping[str, Evaluator]
) -> tuple[Programs, dict[str, Evaluator]]:
    """Programs and evaluators that compile before their first call.

    Where the backend prefers it, all compile now. Else the rollout does, the update
    compiles in a thread while the first episodes are sampled, and evaluators when they
    are first called. With several processes nothing is compiled ahead, so that all
    compile in the same order.
    """
    if jax.process_count() > 1:
        return programs, dict(evaluators)
    arguments = abstract_rollout_arguments(run)
    parameters, _, rollout_args = arguments
    sampling = programs.rollout.lower(*arguments)
    all_first = backend_choices.choices().compiles_all_first
    update = _Ahead(programs.update, abstract_update_arguments(run, sampling))
    evaluating = {
        label: _Ahead(one.rollout, (parameters, one.tokens, rollout_args))
        for label, one in (evaluators if all_first else {}).items()
    }

    if not all_first:
        endings.start_unawaited(update.compile)
    ahead = dataclasses.replace(programs, rollout=sampling.compile(), update=update)
    if all_first:
        for program in (update, *evaluating.values()):
            program.compile()
    return ahead, {
        label: dataclasses.replace(one, rollout=evaluating.get(label, one.rollout))
        for label, one in evaluators.items()
    }


def compile_indicators(run: Run, programs: Programs, monitor: Monitor) -> Monitor:
    """The monitor with its per-iteration measurements compiled, now or in a thread.

    Called once the rollout has compiled, when a second core is free. With several
    processes it is not compiled ahead, as in `compile_ahead`. The scores of recorded
    episodes compile ahead only where the backend prefers that all do.

    Args:
      run: what is static.
      programs: from `compile_ahead`.
      monitor: of the run.
    """
    health = run.settings.health
    all_first = backend_choices.choices().compiles_all_first
    if jax.process_count() > 1:
        return monitor
    if health.record_every and all_first:
        *arguments, _ = abstract_update_arguments(run, programs.rollout)
        score = _Ahead(monitor.score, tuple(arguments))
        score.compile()
        monitor = dataclasses.replace(monitor, score=score)
    if not health.indicators:
        return monitor
    record = record_shapes(run, programs.rollout)
    measure = _Ahead(
        monitor.measure, (record.rows, record.episodes, monitor_lib.tables(run))
    )
    if all_first:
        measure.compile()
    else:
        endings.start_unawaited(measure.compile)
    return dataclasses.replace(monitor, measure=measure)


class _Ahead:
    """A program that another thread may compile; a call waits until it is compiled."""

    def __init__(self, program: Any, arguments: tuple):
        self._program, self._arguments = program, arguments
        self._compiled: concurrent.futures.Future = concurrent.futures.Future()

    def compile(self) -> None:
        """To be called once, in any thread."""
        try:
            compiled = self._program.lower(*self._arguments).compile()
            return_free_memory()
            self._compiled.set_result(compiled)
        except BaseException as error:  # Raised again at the first call.
            self._compiled.set_exception(error)

    def __call__(self, *arguments):
        return self._compiled.result()(*arguments)


def return_free_memory() -> None:
    """Returns memory that the compiler has freed to the system, if glibc is in use.

    glibc would keep it: 1.6 of the 2.5 GiB that a run on a CPU held after compiling its
    update, before the update's own arrays came on top.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
