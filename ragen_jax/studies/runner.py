"""Trains the missing runs of a study, each in a process of its own; all can resume.

Called by study.py. A run consists of one or two steps: training, then a diagnosis.
"""

import collections
import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ragen_jax.errors import UserError
from ragen_jax.reporting import console as console_lib
from ragen_jax.reporting import metrics
from ragen_jax.studies import failures, gpus, run_record, start_record
from ragen_jax.studies.definition import PlannedRun
from ragen_jax.utils import endings, folder_lock, workdir_files
from ragen_jax.utils.words import counted

FINISHED, FAILED, MISSING = "finished", "failed", "missing"
_TRAINING = "training"  # in another process, of another command
_LOOK_EVERY = 2.0  # seconds between two looks at running processes
_KILL_AFTER = 60.0  # seconds that an interrupted run has to save itself
T = TypeVar("T")
# Exit codes of a run that was stopped by a signal; 0 if it could save itself.
_STOPPED = {0, *endings.CODES.values(), *(-number for number in endings.CODES)}


@dataclasses.dataclass
class _Running:
    """A run whose process was started here."""

    run: PlannedRun
    workdir: Path
    process: subprocess.Popen
    core: int | None  # that it is bound to
    gpus: str | None  # its value of gpus.VARIABLE; None: inherited
    started: float  # seconds of time.monotonic
    steps: int  # that were missing when it started, this one included


def workdir_of(folder: Path, run: PlannedRun) -> Path:
    """Where a run of a study trains."""
    return folder / run.label


def state_of(folder: Path, run: PlannedRun) -> str:
    """FINISHED, FAILED or MISSING; a run that was killed is missing, and resumes."""
    workdir = workdir_of(folder, run)
    if not _missing_steps(workdir, run):
        return FINISHED
    return FAILED if (workdir / failures.FILE).is_file() else MISSING


def _missing_steps(
    workdir: Path, run: PlannedRun, train: Path = Path("train.py")
) -> list[list[str]]:
    """The steps that a run still needs, each a script and its arguments."""
    steps = []
    if not (workdir / workdir_files.TEST).is_file():
        steps.append([str(train), *run.arguments(), f"--workdir={workdir}"])
    out = workdir / run_record.DIAGNOSIS
    if run.diagnose and not out.is_file():
        script = [str(train.with_name("diagnose.py")), f"--checkpoint={workdir}"]
        steps.append([*script, *run.diagnose, f"--out={out}"])
    return steps


def run_missing(
    runs: Sequence[PlannedRun],
    folder: Path,
    *,
    jobs: int,
    train: Path,
    console: console_lib.Console,
    retry_failed: bool = False,
    one_core: bool = True,
) -> list[PlannedRun]:
    """Trains the unfinished runs, `jobs` at a time, and returns those that failed.

    A failed run is reported, its last line is kept in its folder, and the others go on;
    so do they where a run cannot be started, of which nothing is kept. A run that
    another process is training is skipped. An interrupt stops the runs, which save
    themselves, and is raised again.

    Args:
      runs: of one study, in the order of training.
      folder: of the study's workdirs.
      jobs: processes side by side; on GPUs at most one per GPU, with equally many GPUs
        each.
      train: launch/train.py.
      console: where progress is shown.
      retry_failed: whether runs that failed before are tried again.
      one_core: whether each run has one CPU device and is bound to a core that no
        other runner uses, if one is free and the system can bind processes.
    """
    states = {run: state_of(folder, run) for run in _unique(runs)}
    to_run = (MISSING, FAILED) if retry_failed else (MISSING,)
    queue = [run for run, state in states.items() if state in to_run]
    states |= {run: MISSING for run in queue}
    counts = collections.Counter(states.values())
    failed = ""
    if counts[FAILED]:
        failed = f", {counts[FAILED]} failed before (--retry_failed runs them again)"
    console.line(
        f"{counted(len(states), 'run')}: {counts[FINISHED]} finished, {len(queue)} to"
        f" run{failed}"
    )
    gpu_sets: list[str] = []
    if queue:
        jobs, gpu_sets = _divide_gpus(min(jobs, len(queue)), console)
    with contextlib.ExitStack() as claims:
        cores = _claim_cores(min(jobs, len(queue)), claims) if one_core else []
        environment = {"JAX_NUM_CPU_DEVICES": "1"} if one_core else {}
        start = functools.partial(
            _start,
            folder=folder,
            train=train,
            cores=cores,
            gpu_sets=gpu_sets,
            environment=environment,
        )
        _run_all(queue, states, jobs, start, console)
    return [run for run, state in states.items() if state == FAILED]


def _run_all(
    queue: list[PlannedRun],
    states: dict[PlannedRun, str],
    jobs: int,
    start: Callable[[PlannedRun, Sequence[_Running]], _Running | str],
    console: console_lib.Console,
) -> None:
    """Trains the queued runs, and updates the states in place as they end.

    Args:
      queue: runs to train; empty in the end.
      states: of all runs.
      jobs: processes side by side.
      start: `_start` of a run, given those that are running.
      console: where progress is shown.
    """
    running: list[_Running] = []
    try:
        while queue or running:
            while queue and len(running) < jobs:
                run = queue.pop(0)
                states[run] = _begin(run, running, start, console)
            time.sleep(_LOOK_EVERY)
            for item in [item for item in running if item.process.poll() is not None]:
                running.remove(item)
                if _is_halfway(item):
                    states[item.run] = _begin(item.run, running, start, console)
                else:
                    states[item.run] = _finish(item, console)
            console.status(_progress(running, states, len(queue)))
    except BaseException:
        _stop(running)
        raise


def _begin(
    run: PlannedRun,
    running: list[_Running],
    start: Callable[[PlannedRun, Sequence[_Running]], _Running | str],
    console: console_lib.Console,
) -> str:
    """Starts the next step of a run; returns its state, reported if it does not run.

    Args: as of `_run_all`; `running` gets the run.
    """
    try:
        started = start(run, running)
    except (OSError, UserError) as error:
        # Such as a file where its folder should be: the other runs can do without it.
        why = failures.why_not_started(error)
        console.line(f"failed    {run.label}  (not started): {why}")
        return FAILED
    if isinstance(started, _Running):
        running.append(started)
        return MISSING
    return _report_elsewhere(run, started, console)


def _unique(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs, of those with one folder only the last."""
    return list({run.label: run for run in runs}.values())


def _divide_gpus(jobs: int, console: console_lib.Console) -> tuple[int, list[str]]:
    """(runs side by side, the GPUs of each; [] if runs inherit this process's).

    A run allocates most of a GPU's memory, so a second one on it would fail.
    """
    names = gpus.found()
    gpu_sets = gpus.split(names, jobs)
    if names and len(names) < jobs:
        here = "1 GPU is" if len(names) == 1 else f"{len(names)} GPUs are"
        most = "one run" if len(names) == 1 else f"{len(names)} runs"
        console.line(f"{here} here: {most} at a time instead of {jobs}")
    # A single run inherits all GPUs that this process sees.
    return len(gpu_sets) or jobs, gpu_sets if len(gpu_sets) > 1 else []


def _claim_cores(most: int, claims: contextlib.ExitStack) -> list[int]:
    """Claims the first free cores, until `claims` closes; [] if none can be bound.

    A claim is a lock on a folder in the temporary folder, shared by all runners of this
    user. The system releases it however this process ends.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    claimed: list[int] = []
    for core in sorted(os.sched_getaffinity(0)):
        if len(claimed) == most:
            break
        name = f"ragen_jax-{os.getuid()}-core{core}"
        folder = Path(tempfile.gettempdir()) / name
        with contextlib.suppress(OSError, UserError):  # Another runner has it.
            folder.mkdir(mode=0o700, exist_ok=True)
            is_own = folder.lstat().st_uid == os.getuid()
            if is_own and claims.enter_context(
                folder_lock.held(folder, "runs a study")
            ):
                claimed.append(core)
    return claimed


def _start(
    run: PlannedRun,
    running: Sequence[_Running],
    *,
    folder: Path,
    train: Path,
    cores: Sequence[int],
    gpu_sets: Sequence[str],
    environment: Mapping[str, str],
) -> _Running | str:
    """Starts the next step of a run; or returns its state if another process has it.

    The step is bound to the first of `cores` that no running process has, if any, and
    sees the first of the `gpu_sets` that none has, if any.
    """
    workdir = workdir_of(folder, run)
    steps = _missing_steps(workdir, run, train)
    if not steps or folder_lock.is_held(workdir):
        return _TRAINING if steps else FINISHED
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / failures.FILE).unlink(missing_ok=True)
    if steps[0][0] == str(train):
        start_record.write(workdir, run)
    free_gpus = _first_free(gpu_sets, [item.gpus for item in running])
    variables = {} if free_gpus is None else {gpus.VARIABLE: free_gpus}
    with open(workdir / failures.LOG, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, *steps[0]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment, **variables},
            start_new_session=True,  # Ctrl-C in the terminal reaches only the runner.
        )
    core = _first_free(cores, [item.core for item in running])
    if core is not None:
        with contextlib.suppress(OSError):  # The core is no longer available.
            os.sched_setaffinity(process.pid, {core})
    now = time.monotonic()
    return _Running(run, workdir, process, core, free_gpus, now, len(steps))


def _first_free(items: Sequence[T], taken: Sequence[T | None]) -> T | None:
    """The first item that is not taken; None without one."""
    return next((item for item in items if item not in taken), None)


def _report_elsewhere(run: PlannedRun, state: str, console: console_lib.Console) -> str:
    """Reports a run that another process trains or has finished; returns its state."""
    console.line(f"{state} elsewhere: {run.label}")
    return state


def _is_halfway(item: _Running) -> bool:
    """Whether a run whose process ended well has finished a step and needs another."""
    left = _missing_steps(item.workdir, item.run)
    return item.process.returncode == 0 and 0 < len(left) < item.steps


def _finish(item: _Running, console: console_lib.Console) -> str:
    """Reports a run that ended, and returns its state.

    A run that a signal from elsewhere has stopped is MISSING: the next command resumes
    it.
    """
    code, label = item.process.returncode, item.run.label
    took = console_lib.duration(time.monotonic() - item.started)
    if code == 0 and not _missing_steps(item.workdir, item.run):
        console.line(f"finished  {label}  ({took})")
        for warning in failures.warnings(item.workdir):
            console.line(f"          {warning}")
        return FINISHED
    if folder_lock.is_held(item.workdir):  # Another process was faster to start it.
        return _report_elsewhere(item.run, _TRAINING, console)
    if code in _STOPPED:
        console.line(f"stopped   {label}  (after {took}): the same command resumes it")
        return MISSING
    last = failures.keep(item.workdir, code)
    console.line(f"failed    {label}  (exit code {code} after {took}): {last}")
    return FAILED


def _progress(
    running: Sequence[_Running], states: Mapping[PlannedRun, str], queued: int
) -> str:
    """The status line: runs finished, where each running one is, and the time left."""
    done = list(states.values()).count(FINISHED)
    parts: list[str] = []  # of the line, one for each running run
    left: list[float] = []  # seconds until each ends, where that can be estimated
    for item in running:
        try:
            records = metrics.read(item.workdir) if item.workdir.is_dir() else []
        except UserError:  # Damaged; the run reports that itself when it reads them.
            records = []
        iterations = item.run.changes.get("iterations")
        last = records[-1]["iteration"] if records else 0
        parts.append(f"{item.run.label} {last}/{iterations or '?'}")
        if records and iterations:
            durations = [r.get("time/iteration_seconds") or 0.0 for r in records[1:]]
            if durations:
                left.append(sum(durations) / len(durations) * (iterations - last))
    text = f"{done}/{len(states)} finished; {', '.join(parts) or 'none running'}"
    if left:
        text += f"; {console_lib.duration(max(left))} for these, {queued} runs behind"
    return text


def _stop(running: Sequence[_Running]) -> None:
    """Asks every run to save itself and end, and kills those that take too long."""
    for item in running:
        if item.process.poll() is None:
            item.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + _KILL_AFTER
    for item in running:
        try:
            item.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            item.process.kill()
