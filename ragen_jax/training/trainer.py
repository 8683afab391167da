"""A whole run: start or resume, train to the end or a rollback, and the final test.

`launch/train.py` calls `train`; `loop.py` is what happens in each iteration.
"""

from pathlib import Path

import jax

from ragen_jax.diagnostics import episode_log
from ragen_jax.diagnostics import rollbacks as rollbacks_lib
from ragen_jax.errors import UserError
from ragen_jax.learning.train_state import TrainState
from ragen_jax.parallel import gloo_groups, program_cache
from ragen_jax.parallel.agreement import agreed_number
from ragen_jax.reporting import metrics
from ragen_jax.reporting.console import Console
from ragen_jax.reporting.metrics import MetricsWriter
from ragen_jax.settings import Settings
from ragen_jax.training import (
    checkpoints,
    disk_space,
    final_test,
    loop,
    messages,
    resumed,
    weights,
)
from ragen_jax.training import programs as programs_lib
from ragen_jax.training.checkpoints import Checkpoints
from ragen_jax.training.interrupts import (
    STALLED_AT_FIRST,
    InterruptHandler,
    StallWatchdog,
)
from ragen_jax.training.loop import OpenWorkdir, Outputs, RolledBack
from ragen_jax.training.profiling import Profiler
from ragen_jax.training.programs import Compiled
from ragen_jax.training.run import Run, texts_fingerprint
from ragen_jax.training.workdir import (
    check_same_everywhere,
    check_same_texts,
    claim_workdir,
    only_run,
)
from ragen_jax.utils import machine_errors, user_modules


def train(
    run: Run,
    workdir: Path,
    console: Console,
    command: str,
    traced: range = range(0),
) -> None:
    """Trains until settings.iterations are done, or a signal asks to stop.

    Args:
      run: from `run.prepare`.
      workdir: passed `check_workdir`.
      console: for progress; a silent one on all processes but the first.
      command: that resumes the run, for the message after a signal.
      traced: iterations of which process 0 writes a trace (profiling.py).

    Raises:
      UserError: if another run trains in the workdir, if its checkpoints began with
        another model, or if training stopped itself (RunStopped): gradients not
        finite, nothing kept, or sampler and update disagreeing, for as long as the
        settings allow; or as the monitor decided, after a collapse.
      OSError: when it has saved because the console cannot be written to any more; a
        BrokenPipeError if nobody reads it.
    """
    try:
        with only_run(workdir, run.settings, console.line):
            program_cache.keep_in(workdir)
            _train_in_workdir(run, workdir, console, command, traced)
    except OSError as error:
        if not (sentence := machine_errors.sentence(error)):
            raise
        # An error of an open file does not name it.
        where = "" if error.filename else f"{workdir}: "
        raise UserError(f"{where}{sentence}; {messages.last_saved(workdir)}") from error
    # Several processes end together, above, where nobody reads any more; where nothing
    # can be written, the others take over this one's code.
    is_unread = isinstance(console.lost, BrokenPipeError)
    if console.lost and (jax.process_count() == 1 or not is_unread):
        raise console.lost


def _train_in_workdir(
    run: Run, workdir: Path, console: Console, command: str, traced: range
) -> None:
    """`train`, once no other run trains in the workdir."""
    fingerprint = weights.model_fingerprint(run.model)
    check_same_everywhere(fingerprint)
    if jax.process_count() > 1:
        evaluated = [tokens for _, tokens in run.evaluated]
        check_same_texts(texts_fingerprint((run.tokens, evaluated)))
    gloo_groups.connect(run.model.mesh)
    folder = workdir / checkpoints.FOLDER
    if steps := checkpoints.scores(folder):
        # Weights included: the KL term and the final test read them again.
        weights.check_same_model(run.model, folder, max(steps), fingerprint)
    console.line(messages.banner(run, workdir))
    claim_workdir(workdir, run.settings)
    keep = run.settings.checkpoint
    saved = Checkpoints(
        folder,
        keep_last=keep.keep_last,
        keep_best=keep.keep_best,
        every=run.settings.every.checkpoint or 1,  # 0: none is due, all count.
    )
    with saved:
        disk_space.check(workdir, run, saved.steps(), console.line)
        # Once, since user code is read when the run starts and not after a rollback.
        code = user_modules.digests(run.settings.files())
        open_workdir = OpenWorkdir(workdir, saved, fingerprint, code)
        profiler = Profiler(
            traced if jax.process_index() == 0 else range(0), workdir, console.line
        )
        with StallWatchdog(ends=run.settings.safety.end_stalled) as watchdog:
            compiled, again = None, True
            while again:  # Once, and once more after each rollback.
                compiled, again = _train_from_checkpoint(
                    run, open_workdir, console, command, watchdog, profiler, compiled
                )


def _train_from_checkpoint(
    run: Run,
    workdir: OpenWorkdir,
    console: Console,
    command: str,
    watchdog: StallWatchdog,
    profiler: Profiler,
    compiled: Compiled | None,
) -> tuple[Compiled | None, bool]:
    """Trains from the last checkpoint to the end, a signal or a rollback.

    Args:
      run, workdir, console, command, watchdog, profiler: of the process.
      compiled: the programs of before a rollback, if there was one.

    Returns:
      The programs, if any were needed, and whether to call it again: after a rollback.
    """
    rollbacks, settings = loop.count_rollbacks(workdir.path), run.settings
    run = resumed.remedied_run(run, rollbacks)
    watchdog.expect_within(STALLED_AT_FIRST, "the start")
    _end_rollback(workdir.checkpoints, workdir.path, rollbacks)
    state = _start(run, settings, workdir, console)
    iteration = int(state.iteration)
    watchdog.expect_within(STALLED_AT_FIRST, "compiling")
    compiled = _compile_if_needed(run, iteration, compiled)
    is_first = jax.process_index() == 0
    if is_first:
        episode_log.trim(workdir.path, iteration, console.line)
        console.once(metrics.lacking(workdir.path, iteration))
    writer = MetricsWriter(
        workdir.path, is_writer=is_first, first_iteration=iteration + 1
    )
    with (
        writer,
        InterruptHandler(console.line) as interrupts,
        console.on_lost_reader(interrupts.ask),
    ):
        outputs = Outputs(workdir, writer, console, interrupts, watchdog, profiler)
        try:
            is_finished = True
            with profiler.after(iteration):
                if compiled is not None:
                    state, is_finished = loop.train_to_end(
                        run, compiled, state, outputs
                    )
        except RolledBack as rollback:
            console.line(str(rollback))
            # Asked now, since the next InterruptHandler knows nothing of a signal
            # before.
            is_stopped = interrupts.should_stop()
            if is_stopped:
                console.line(messages.saved(rollback.to, command))
            return compiled, not is_stopped
        last_words = messages.saved(int(state.iteration), command)
        if is_finished:
            base = compiled and compiled.base
            is_finished = final_test.report(run, state, base, outputs, last_words)
        if not is_finished:
            console.line(last_words)
    return compiled, False


def _compile_if_needed(
    run: Run, iteration: int, compiled: Compiled | None
) -> Compiled | None:
    """The run's programs: those of before a rollback where they fit, else compiled.

    None where all iterations are done, so that nothing has to be compiled.
    """
    if iteration >= run.settings.iterations:
        return None
    if compiled is not None and programs_lib.share_programs(
        compiled.settings, run.settings
    ):
        return compiled
    return programs_lib.compile_run(run, compiled)


def _end_rollback(saved: Checkpoints, workdir: Path, rollbacks: int) -> None:
    """Finishes a rollback that was noted and then killed: deletes later checkpoints.

    Raises:
      UserError: if the last checkpoint knows of more rollbacks than are noted: the run
        would continue without the remedies of those.
    """
    noted = rollbacks_lib.read_rollbacks(workdir)
    target = agreed_number(noted[-1]["to"] if noted else -1)
    newest = saved.latest_step()
    if newest is None:
        return
    # A checkpoint that was saved after the rollback counts it.
    known = saved.read_info(newest).get("health", {}).get("rollbacks", 0)
    if known > rollbacks:
        raise UserError(
            f"{saved.directory / str(newest)} knows of more rollbacks than"
            f" {workdir / rollbacks_lib.FILE}, {known} instead of {rollbacks}:"
            " restore that file from a copy, or begin again in another --workdir"
        )
    if 0 <= target < newest and known < rollbacks:
        saved.delete_after(target)


def _start(
    run: Run, settings: Settings, workdir: OpenWorkdir, console: Console
) -> TrainState:
    """The state to continue with. `settings` are those before any rollback's remedy."""
    saved = workdir.checkpoints
    restored = saved.restore_newest(weights.abstract_state(run), console.line)
    if restored is None:
        return weights.new_state(run)
    iteration, state = restored
    total = run.settings.iterations
    console.line(f"resuming after iteration {iteration}")
    info = saved.read_info(iteration)
    where = str(saved.directory / str(iteration))
    resumed.check_settings(settings, info, where)
    resumed.check_health(info, where)
    was = info.get("settings", {})
    warnings = (
        # Not run.settings, in which a remedy has fixed optimizer.schedule_updates.
        messages.changed_schedule(settings, was.get("iterations")),
        resumed.changed_evaluation(run.settings, was),
        resumed.changed_code(workdir.code, info.get("code", {})),
        resumed.changed_dtype(run.model.dtype.name, info.get("dtype")),
    )
    for warning in filter(None, warnings):
        console.line(warning)
    if iteration > total:
        console.line(messages.beyond(iteration, total))
    return state
