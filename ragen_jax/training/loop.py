"""The loop of a run: iterate, validate, watch over its health, save, stop, roll back.

`trainer` calls `train_to_end` with the state to continue from.
"""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

import jax

from ragen_jax import starpo
from ragen_jax.diagnostics import health
from ragen_jax.diagnostics import monitor as monitor_lib
from ragen_jax.diagnostics import rollbacks as rollbacks_lib
from ragen_jax.diagnostics.health import HealthState
from ragen_jax.envs.base import VALIDATION
from ragen_jax.errors import RunStopped
from ragen_jax.learning.train_state import TrainState
from ragen_jax.parallel.agreement import agreed_number
from ragen_jax.reporting import console as console_lib
from ragen_jax.reporting.console import Console
from ragen_jax.reporting.metrics import MetricsWriter
from ragen_jax.settings import Settings
from ragen_jax.training import memory_plan, messages, resumed, validation
from ragen_jax.training.checkpoints import Checkpoints
from ragen_jax.training.interrupts import (
    STALLED_SAVING,
    InterruptHandler,
    StallWatchdog,
    stalled_after,
)
from ragen_jax.training.profiling import Profiler
from ragen_jax.training.programs import Compiled
from ragen_jax.training.run import Run
from ragen_jax.training.safety import problem, recent_gaps, unsound_rewards

# A rollback without a checkpoint to return to starts over if at most so many iterations
# are lost; later the run stops.
_MOST_RESTARTED = 20


@dataclasses.dataclass(frozen=True)
class OpenWorkdir:
    """A run's folder, and what its checkpoints say about the run besides its state."""

    path: Path
    checkpoints: Checkpoints
    fingerprint: Mapping[str, str]  # of the model that the run began with
    code: Mapping[str, str]  # digest of each Python file that the settings name


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Where a run writes, and its watch over signals and stalls."""

    workdir: OpenWorkdir
    metrics: MetricsWriter
    console: Console
    interrupts: InterruptHandler
    watchdog: StallWatchdog
    profiler: Profiler


@dataclasses.dataclass(frozen=True)
class Progress:
    """What an iteration hands to the next one besides the train state.

    Checkpoints hold the first two, so that a resumed run decides as it would have
    without the interruption.
    """

    health: HealthState
    gaps: list[float]  # nats, `update/logprob_gap` of the last iterations
    best: float  # highest validation success of a checkpoint; -1 without any
    # Seconds of each iteration of this process, and of its validation: 0 without one.
    durations: tuple[float, ...] = ()
    validations: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class _LoopContext:
    """What stays the same from iteration to iteration."""

    run: Run
    compiled: Compiled
    outputs: Outputs


class RolledBack(Exception):  # noqa: N818  (control flow, not an error)
    """All checkpoints after a healthy one were deleted; its text says why."""

    def __init__(self, why: str, to: int):
        super().__init__(why)
        self.to = to  # iteration


def train_to_end(
    run: Run, compiled: Compiled, state: TrainState, outputs: Outputs
) -> tuple[TrainState, bool]:
    """Iterates to the end (True) or until a signal comes (False).

    Raises:
      RunStopped: when the run stops itself, its state saved.
      RolledBack: when it has to continue from an earlier checkpoint.
    """
    begun, total = int(state.iteration), run.settings.iterations
    progress = _progress_at(run.settings, outputs.workdir, begun)
    context = _LoopContext(run, compiled, outputs)
    for iteration in range(begun + 1, total + 1):
        with outputs.profiler.step(iteration):
            started = time.perf_counter()
            state, values = _learn(context, state, progress, iteration)
            values |= _validate_if_due(context, state, progress, iteration)
            watched, decision = health.observe(
                progress.health, iteration, values, run.settings.health
            )
            values |= decision.metrics()
            progress = _after_iteration(progress, watched, state, values, started)
            _report(run, outputs, iteration, values, progress)
            outputs.watchdog.expect_within(STALLED_SAVING, "saving")
            reason = _problem(run, state, progress, values)
            reason = reason or _carry_out(run, outputs, iteration, decision)
            stops = outputs.interrupts.should_stop()
            score = values.get("validation/success")
            ends = bool(reason or stops)
            progress = _save_if_due(run, state, outputs, progress, score, ends)
            if reason:
                raise RunStopped(reason)
            if stops:
                return state, False
    outputs.watchdog.expect_within(STALLED_SAVING, "saving")
    outputs.workdir.checkpoints.wait()
    return state, True


def count_rollbacks(workdir: Path) -> int:
    """How many rollbacks the run has had; process 0 reads the file for all."""
    return agreed_number(len(rollbacks_lib.read_rollbacks(workdir)))


def _progress_at(settings: Settings, workdir: OpenWorkdir, iteration: int) -> Progress:
    """What the loop knows after `iteration`, of whose checkpoint it reads it."""
    saved, rollbacks = workdir.checkpoints, count_rollbacks(workdir.path)
    return Progress(
        health=resumed.health_state(saved, iteration, rollbacks, settings),
        gaps=resumed.gaps(saved, iteration),
        best=resumed.best_score(saved),
    )


def _learn(
    context: _LoopContext, state: TrainState, progress: Progress, iteration: int
) -> tuple[TrainState, dict[str, float]]:
    """The next state and the iteration's metrics, the monitor's among them."""
    run, outputs = context.run, context.outputs
    outputs.watchdog.expect_within(stalled_after(progress.durations))
    of_all = f"iteration {iteration}/{run.settings.iterations}"
    outputs.console.status(f"{of_all}: sampling and learning ...")
    programs, monitor = context.compiled.programs, context.compiled.monitor
    state, values, rollout = starpo.iterate(run, programs, state)
    if iteration == 1:
        outputs.console.line(messages.example(run, rollout))
    values |= monitor_lib.measure(monitor, run, rollout)
    folder = outputs.workdir.path
    monitor_lib.record(monitor, run, programs, state, rollout, folder, iteration)
    return state, values


def _validate_if_due(
    context: _LoopContext, state: TrainState, progress: Progress, iteration: int
) -> dict[str, float]:
    """The metrics `validation/...` where the iteration has a validation, else none."""
    run, outputs = context.run, context.outputs
    total = run.settings.iterations
    if not _is_due(iteration, run.settings.every.evaluate, total):
        return {}
    outputs.console.status(f"iteration {iteration}/{total}: validation ...")
    limit = stalled_after([seconds for seconds in progress.validations if seconds])
    outputs.watchdog.expect_within(limit, "a validation")
    return _validate(run, context.compiled, state)


def _validate(run: Run, compiled: Compiled, state: TrainState) -> dict[str, float]:
    """The metrics `validation/...` of the current actor, and the time they took."""
    started = time.perf_counter()
    programs, prompts = compiled.programs, run.settings.evaluation.prompts
    with jax.profiler.TraceAnnotation("validation"):
        actor = programs.merge(state.actor, programs.frozen)
        scores = validation.evaluate(
            run, compiled.validators, actor, split=VALIDATION, prompts=prompts
        )
    took = {"time/validation_seconds": time.perf_counter() - started}
    return validation.named("validation", scores) | took


def _after_iteration(
    progress: Progress,
    watched: HealthState,
    state: TrainState,
    values: dict[str, float],
    started: float,
) -> Progress:
    """`progress` with this iteration, which began at `started`, taken in."""
    seconds = time.perf_counter() - started
    validation_seconds = values.get("time/validation_seconds", 0.0)
    return dataclasses.replace(
        progress,
        health=watched,
        gaps=recent_gaps(progress.gaps, state, values["update/logprob_gap"]),
        durations=(*progress.durations, seconds),
        validations=(*progress.validations, validation_seconds),
    )


def _report(
    run: Run,
    outputs: Outputs,
    iteration: int,
    values: dict[str, float],
    progress: Progress,
) -> None:
    """Writes the iteration's metrics down, and shows its line where one is due."""
    values["time/iteration_seconds"] = progress.durations[-1]
    values["memory/peak_gib"] = memory_plan.peak_memory()
    outputs.metrics.write(iteration, values)
    if _is_due(iteration, run.settings.every.log, run.settings.iterations):
        _show(run, outputs.console, iteration, values, progress)


def _show(
    run: Run,
    console: Console,
    iteration: int,
    values: dict[str, float],
    progress: Progress,
) -> None:
    """Prints the iteration's line, with the time left."""
    total, every = run.settings.iterations, run.settings.every.evaluate
    durations, validations = progress.durations, progress.validations
    without_validation = [d - v for d, v in zip(durations, validations, strict=True)]
    measured = [seconds for seconds in validations if seconds]
    left = console_lib.seconds_left(
        without_validation[1:],  # The first compiled.
        total - iteration,
        measured[1:] or measured,  # Likewise; counted while there is no other.
        _due_later(iteration, every, total),
    )
    line = console_lib.iteration_line(iteration, total, values, left)
    console.iteration(line, total)
    console.once(unsound_rewards(run.settings, values["filter/reward_std"]))


def _problem(
    run: Run, state: TrainState, progress: Progress, values: dict[str, float]
) -> str:
    """Why the run has to stop after this iteration, or ""."""
    spread, valid = values["filter/reward_std"], values["rollout/valid_reply_rate"]
    cut = values["rollout/cut_replies"]
    return problem(run.settings, state, progress.gaps, spread, valid, cut)


def _carry_out(
    run: Run, outputs: Outputs, iteration: int, decision: health.Decision
) -> str:
    """Warns or rolls back, as the monitor decided; returns why to stop, or "".

    Raises:
      RolledBack: when an earlier checkpoint is now the last one.
    """
    if decision.action == health.WARN:
        outputs.console.line(f"warning: {decision.sentence}")
    if decision.action != health.ROLLBACK:
        return decision.sentence if decision.action == health.STOP else ""
    saved = outputs.workdir.checkpoints
    step = saved.latest_step(decision.healthy_until) or 0
    if not step and iteration > _MOST_RESTARTED:
        return (
            f"{decision.sentence}; no checkpoint that is kept is from iteration"
            f" {decision.healthy_until} or before, the last ahead of its signs:"
            " training stops; begin another run with a higher checkpoint.keep_last, or"
            " with a lower optimizer.actor_lr"
        )
    sentence = f"{decision.sentence}: {health.remedy_sentence(run.settings, step)}"
    if jax.process_index() == 0:
        folder, remedy = outputs.workdir.path, run.settings.health.remedy
        rollbacks_lib.note_rollback(folder, iteration, step, sentence, remedy)
    saved.delete_after(step)
    raise RolledBack(sentence, step)


def _save_if_due(
    run: Run,
    state: TrainState,
    outputs: Outputs,
    progress: Progress,
    score: float | None,
    ends: bool,
) -> Progress:
    """Saves a checkpoint where one is due; returns the progress with its score.

    Args:
      run, state, outputs, progress: after the iteration.
      score: its validation success; None without a validation.
      ends: whether the run ends here, by a signal or by itself.
    """
    settings, iteration = run.settings, int(state.iteration)
    keeps_best = settings.checkpoint.keep_best > 0
    # Also one that is as good: a rollback returns to the last of equal bests.
    is_best = keeps_best and score is not None and score >= progress.best
    # Always at the end, so that a resumed run sees that it is finished.
    is_last = iteration == settings.iterations
    is_due = _is_due(iteration, settings.every.checkpoint, settings.iterations)
    if not (is_due or is_last or is_best or ends):
        return progress
    outputs.metrics.sync()  # A resumed run writes none of the records up to here.
    workdir = outputs.workdir
    info = resumed.info(settings, iteration, score, progress.gaps, progress.health)
    info |= dict(model=workdir.fingerprint, code=workdir.code)
    info |= dict(dtype=run.model.dtype.name)
    workdir.checkpoints.save(iteration, state, info, score=score, wait=ends)
    best = max(progress.best, -1.0 if score is None else score)
    return dataclasses.replace(progress, best=best)


def _due_later(iteration: int, every: int, total: int) -> int:
    """How many later iterations `_is_due` names."""
    if every <= 0 or iteration >= total:
        return 0
    return total // every - iteration // every + (total % every != 0)


def _is_due(iteration: int, every: int, total: int) -> bool:
    """Whether something done each `every` iterations (0: never) is done after this."""
    return every > 0 and (iteration % every == 0 or iteration == total)
