"""A whole run: start or resume, iterate, validate, save, roll back, and report."""

import dataclasses
import errno
import functools
import os
import time
from collections.abc import Mapping
from pathlib import Path

import jax

from ragen_jax import starpo
from ragen_jax.diagnostics import episode_log, health
from ragen_jax.diagnostics import monitor as monitor_lib
from ragen_jax.envs.base import VALIDATION
from ragen_jax.errors import UserError
from ragen_jax.evaluation.evaluator import Evaluator
from ragen_jax.learning.train_state import TrainState
from ragen_jax.parallel.agreement import agreed_number
from ragen_jax.reporting import console as console_lib
from ragen_jax.reporting.console import Console
from ragen_jax.reporting.metrics import MetricsWriter
from ragen_jax.settings import Settings
from ragen_jax.training import (
    checkpoints,
    final_test,
    memory_plan,
    messages,
    resumed,
    room,
    validation,
    weights,
)
from ragen_jax.training import programs as programs_lib
from ragen_jax.training.checkpoints import Checkpoints
from ragen_jax.training.interrupts import (
    STALLED_SAVING,
    InterruptHandler,
    StallWatchdog,
    stalled_after,
)
from ragen_jax.training.programs import Compiled
from ragen_jax.training.run import Run
from ragen_jax.training.safety import problem, recent_gaps, unsound_rewards
from ragen_jax.training.workdir import (
    check_same_everywhere,
    claim_workdir,
    only_run,
)
from ragen_jax.utils import machine_errors, user_modules

# A rollback without a checkpoint to return to starts over if at most so many iterations
# are lost; later the run stops.
_MOST_RESTARTED = 20


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """Where a run writes, and its watch over signals and stalls."""

    checkpoints: Checkpoints
    metrics: MetricsWriter
    console: Console
    interrupts: InterruptHandler
    watchdog: StallWatchdog
    fingerprint: Mapping[str, str]  # of the model that the run began with
    workdir: Path
    code: Mapping[str, str]  # digest of each Python file that the settings name


def train(run: Run, workdir: Path, console: Console, command: str) -> None:
    """Trains until settings.iterations are done, or a signal asks to stop.

    Args:
      run: from `run.prepare`.
      workdir: passed `check_workdir`.
      console: for progress; a silent one on all processes but the first.
      command: that resumes the run, for the message after a signal.

    Raises:
      UserError: if another run trains in the workdir, if its checkpoints began with
        another model, or if training stopped itself: gradients not finite, nothing
        kept, or sampler and update disagreeing, for as long as the settings allow.
      BrokenPipeError: when it has saved because nobody reads the console any more.
    """
    try:
        with only_run(workdir, run.settings, console.line):
            _train_in_workdir(run, workdir, console, command)
    except OSError as error:
        if not (sentence := machine_errors.sentence(error)):
            raise
        # An error of an open file does not name it.
        where = "" if error.filename else f"{workdir}: "
        raise UserError(f"{where}{sentence}; {messages.last_saved(workdir)}") from error
    if console.is_gone and jax.process_count() == 1:  # Several end together, above.
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _train_in_workdir(run: Run, workdir: Path, console: Console, command: str) -> None:
    """`train`, once no other run trains in the workdir."""
    fingerprint = weights.model_fingerprint(run.model)
    check_same_everywhere(fingerprint)
    folder = workdir / checkpoints.FOLDER
    if steps := checkpoints.scores(folder):
        # Weights included: the KL term and the final test read them again.
        weights.check_same_model(run.model, folder, max(steps), fingerprint)
    console.line(messages.banner(run, workdir))
    claim_workdir(workdir, run.settings)
    keep = run.settings.checkpoint
    saved = Checkpoints(folder, keep_last=keep.keep_last, keep_best=keep.keep_best)
    with saved:
        room.check(workdir, run, saved.steps(), console.line)
        # Once, since user code is read when the run starts and not after a rollback.
        code = user_modules.digests(run.settings.files())
        train_on = functools.partial(
            _train_from_checkpoint,
            *(run, workdir, saved, fingerprint, code, console, command),
        )
        compiled = train_on()
        while compiled is not None:  # After a rollback to an earlier checkpoint.
            compiled = train_on(compiled)


def _train_from_checkpoint(
    run: Run,
    workdir: Path,
    saved: Checkpoints,
    fingerprint: Mapping[str, str],
    code: Mapping[str, str],
    console: Console,
    command: str,
    compiled: Compiled | None = None,
) -> Compiled | None:
    """Trains from the last checkpoint to the end, where it returns None.

    Or to a rollback, where it returns the programs to call it with again.
    """
    rollbacks, settings = _count_rollbacks(workdir), run.settings
    run = monitor_lib.remedied_run(run, rollbacks)
    _end_rollback(saved, workdir, rollbacks)
    state = _start(run, settings, saved, code, console)
    done = int(state.iteration)
    is_over = done >= run.settings.iterations
    fits = compiled is not None and programs_lib.share_programs(
        compiled.settings, run.settings
    )
    if not fits and not is_over:
        compiled = programs_lib.compile_run(run, compiled)
    is_first = jax.process_index() == 0
    if is_first:
        episode_log.trim(workdir, done)
    writer = MetricsWriter(workdir, is_writer=is_first, first_iteration=done + 1)
    with (
        writer,
        InterruptHandler(console.line) as interrupts,
        console.on_lost_reader(interrupts.ask),
        StallWatchdog(ends=run.settings.safety.end_stalled) as watchdog,
    ):
        outputs = _Outputs(
            saved, writer, console, interrupts, watchdog, fingerprint, workdir, code
        )
        try:
            if compiled is None:  # All iterations are done: nothing is compiled.
                is_finished = True
            else:
                state, is_finished = _iterate(run, compiled, state, outputs)
                watchdog.rest()
        except _RolledBack as rollback:
            console.line(str(rollback))
            # Asked now, since the next InterruptHandler knows nothing of a signal
            # before.
            if not interrupts.should_stop():
                return compiled
            console.line(messages.saved(rollback.to, command))
            return None
        last_words = messages.saved(int(state.iteration), command)
        if is_finished:
            is_finished = final_test.report(
                run, state, workdir, writer, console, interrupts, last_words
            )
        if not is_finished:
            console.line(last_words)
    return None


class _RolledBack(Exception):  # noqa: N818  (control flow, not an error)
    """All checkpoints after a healthy one were deleted; its text says why."""

    def __init__(self, why: str, to: int):
        super().__init__(why)
        self.to = to  # iteration


def _end_rollback(saved: Checkpoints, workdir: Path, rollbacks: int) -> None:
    """Finishes a rollback that was noted and then killed: deletes later checkpoints.

    Raises:
      UserError: if the last checkpoint knows of more rollbacks than are noted: the run
        would continue without the remedies of those.
    """
    noted = monitor_lib.read_rollbacks(workdir)
    target = agreed_number(noted[-1]["to"] if noted else -1)
    newest = saved.latest_step()
    if newest is None:
        return
    # A checkpoint that was saved after the rollback counts it.
    known = saved.read_info(newest).get("health", {}).get("rollbacks", 0)
    if known > rollbacks:
        raise UserError(
            f"{saved.directory / str(newest)} knows of more rollbacks than"
            f" {workdir / monitor_lib.ROLLBACKS}, {known} instead of {rollbacks}:"
            " restore that file from a copy, or begin again in another --workdir"
        )
    if 0 <= target < newest and known < rollbacks:
        saved.delete_after(target)


def _start(
    run: Run,
    settings: Settings,
    saved: Checkpoints,
    code: Mapping[str, str],
    console: Console,
) -> TrainState:
    """The state to continue with. `settings` are those before any rollback's remedy."""
    found = saved.restore_newest(weights.abstract_state(run), console.line)
    if found is None:
        return weights.new_state(run)
    done, total = found[0], run.settings.iterations
    console.line(f"resuming after iteration {done}")
    info = saved.read_info(done)
    was = info.get("settings", {})
    warnings = (
        # Not run.settings, in which a remedy has fixed optimizer.schedule_updates.
        messages.changed_schedule(settings, was.get("iterations")),
        resumed.changed_evaluation(run.settings, was),
        resumed.changed_code(code, info.get("code", {})),
    )
    for warning in filter(None, warnings):
        console.line(warning)
    if done > total:
        console.line(messages.beyond(done, total))
    return found[1]


def _iterate(
    run: Run, compiled: Compiled, state: TrainState, outputs: _Outputs
) -> tuple[TrainState, bool]:
    """Iterates to the end (True) or until a signal comes (False)."""
    settings, saved = run.settings, outputs.checkpoints
    total, keeps_best = settings.iterations, settings.checkpoint.keep_best > 0
    programs, monitor = compiled.programs, compiled.monitor
    durations: list[float] = []  # Seconds of each iteration.
    validated: list[float] = []  # Of its validation; 0 where it had none.
    workdir, begun = outputs.workdir, int(state.iteration)
    rollbacks = _count_rollbacks(workdir)
    health_now = resumed.health_state(saved, begun, rollbacks, settings)
    best, gaps = resumed.best_score(saved), resumed.gaps(saved, begun)
    for done in range(begun + 1, total + 1):
        started = time.perf_counter()
        outputs.watchdog.expect_within(stalled_after(durations))
        outputs.console.status(f"iteration {done}/{total}: sampling and learning ...")
        state, values, rollout = starpo.iterate(run, programs, state)
        if done == 1:
            outputs.console.line(messages.example(run, rollout))
        values |= monitor_lib.measure(monitor, run, rollout)
        monitor_lib.record(monitor, run, programs, state, rollout, workdir, done)
        score = None
        if _is_due(done, settings.every.evaluate, total):
            outputs.console.status(f"iteration {done}/{total}: validation ...")
            limit = stalled_after([seconds for seconds in validated if seconds])
            outputs.watchdog.expect_within(limit, "a validation")
            values |= _validate(run, compiled.validators, programs, state)
            score = values["validation/success"]
        validated.append(values.get("time/validation_seconds", 0.0))
        health_now, decision = health.observe(health_now, done, values, settings.health)
        values |= decision.metrics()
        durations.append(time.perf_counter() - started)
        values["time/iteration_seconds"] = durations[-1]
        values["memory/peak_gib"] = memory_plan.peak_memory()
        outputs.metrics.write(done, values)
        if _is_due(done, settings.every.log, total):
            _show(run, outputs, done, values, durations, validated)
        outputs.watchdog.expect_within(STALLED_SAVING, "saving")
        gaps = recent_gaps(gaps, state, values["update/logprob_gap"])
        spread, valid = values["filter/reward_std"], values["rollout/valid_reply_rate"]
        reason = problem(settings, state, gaps, spread, valid)
        reason = reason or _carry_out(run, outputs, done, decision)
        stops = outputs.interrupts.should_stop()
        is_best = score is not None and score > best and keeps_best
        # Always at the end, so that a resumed run sees that it is finished.
        due = _is_due(done, settings.every.checkpoint, total) or done == total
        if due or is_best or reason or stops:
            info = resumed.info(settings, done, score, gaps, health_now)
            info |= dict(model=outputs.fingerprint, code=outputs.code)
            saved.save(done, state, info, score=score, wait=bool(reason or stops))
            best = max(best, -1.0 if score is None else score)
        if reason:
            raise UserError(reason)
        if stops:
            return state, False
    outputs.watchdog.expect_within(STALLED_SAVING, "saving")
    saved.wait()
    return state, True


def _carry_out(
    run: Run, outputs: _Outputs, done: int, decision: health.Decision
) -> str:
    """Warns or rolls back, as the monitor decided; returns why to stop, or "".

    Raises:
      _RolledBack: when an earlier checkpoint is now the last one.
    """
    if decision.action == health.WARN:
        outputs.console.line(f"warning: {decision.sentence}")
    if decision.action != health.ROLLBACK:
        return decision.sentence if decision.action == health.STOP else ""
    step = outputs.checkpoints.latest_step(decision.healthy_until) or 0
    if not step and done > _MOST_RESTARTED:
        return (
            f"{decision.sentence}; no checkpoint that is kept is from iteration"
            f" {decision.healthy_until} or before, the last ahead of its signs:"
            " training stops; begin another run with a higher checkpoint.keep_last, or"
            " with a lower optimizer.actor_lr"
        )
    sentence = f"{decision.sentence}: {health.remedy_sentence(run.settings, step)}"
    if jax.process_index() == 0:
        remedy = run.settings.health.remedy
        monitor_lib.note_rollback(outputs.workdir, done, step, sentence, remedy)
    outputs.checkpoints.delete_after(step)
    raise _RolledBack(sentence, step)


def _count_rollbacks(workdir: Path) -> int:
    """How many rollbacks the run has had; process 0 reads the file for all."""
    return agreed_number(len(monitor_lib.read_rollbacks(workdir)))


def _validate(
    run: Run,
    validators: dict[str, Evaluator],
    programs: starpo.Programs,
    state: TrainState,
) -> dict[str, float]:
    """The metrics `validation/...` of the current actor, and the time they took."""
    started = time.perf_counter()
    actor = programs.merge(state.actor, programs.frozen)
    prompts = run.settings.evaluation.prompts
    scores = validation.evaluate(
        run, validators, actor, split=VALIDATION, prompts=prompts
    )
    took = {"time/validation_seconds": time.perf_counter() - started}
    return validation.named("validation", scores) | took


def _show(
    run: Run,
    outputs: _Outputs,
    done: int,
    values: dict[str, float],
    durations: list[float],
    validated: list[float],
) -> None:
    """Prints the iteration's line, with the time left."""
    total, every = run.settings.iterations, run.settings.every.evaluate
    alone = [d - v for d, v in zip(durations, validated, strict=True)]
    validations = [v for v in validated if v]
    left = console_lib.seconds_left(
        alone[1:],  # The first compiled.
        total - done,
        validations[1:] or validations,  # Likewise; counted while there is no other.
        sum(_is_due(later, every, total) for later in range(done + 1, total + 1)),
    )
    line = console_lib.iteration_line(done, total, values, left)
    outputs.console.iteration(line, total)
    outputs.console.once(unsound_rewards(values["filter/reward_std"]))


def _is_due(done: int, every: int, total: int) -> bool:
    return every > 0 and (done % every == 0 or done == total)
