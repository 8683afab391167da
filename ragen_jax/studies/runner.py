"""The runner of a study: what is missing, each run a process of its own, resumable."""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ragen_jax.errors import UserError
from ragen_jax.reporting import console as console_lib
from ragen_jax.reporting import metrics
from ragen_jax.studies import gpus, measures
from ragen_jax.studies.definition import PlannedRun
from ragen_jax.utils import atomic_files, endings, folder_lock

FINISHED, FAILED, MISSING = "finished", "failed", "missing"
_TRAINING = "training"  # by another process
_LOG, _FAILURE = "study.log", "study_failure.json"
_SETTINGS = "settings.json"  # as launch/train.py leaves them
_ARGUMENTS = "study_run.json"  # what a run was started with
_LOOK_EVERY = 2.0  # seconds between two looks at running processes
_KILL_AFTER = 60.0  # seconds that a run has to save itself
# Codes of a run that somebody stopped: one that could save itself ends with 0.
_STOPPED = {0, *endings.CODES.values(), *(-number for number in endings.CODES)}


@dataclasses.dataclass
class _Running:
    run: PlannedRun
    workdir: Path
    process: subprocess.Popen
    core: int | None
    gpus: str | None
    started: float
    steps: int  # that were missing when it started


def workdir_of(folder: Path, run: PlannedRun) -> Path:
    """Where a run of a study trains."""
    return folder / run.label


def state_of(folder: Path, run: PlannedRun) -> str:
    """FINISHED, FAILED or MISSING; a run that was killed is missing, and resumes."""
    workdir = workdir_of(folder, run)
    if not _missing_steps(workdir, run):
        return FINISHED
    return FAILED if (workdir / _FAILURE).is_file() else MISSING


def check_begun(folder: Path, run: PlannedRun) -> None:
    """Raises UserError if what was begun or finished in a workdir is another run.

    A folder is named after its arm, whose changes may have been edited since.
    """
    workdir = workdir_of(folder, run)
    if not ((workdir / "test.json").is_file() or _has_checkpoint(workdir)):
        return
    if (workdir / _ARGUMENTS).is_file():
        was = json.loads((workdir / _ARGUMENTS).read_text())
        gone = [argument for argument in was if argument not in _arguments(run)]
        new = [argument for argument in _arguments(run) if argument not in was]
        if gone or new:
            raise UserError(
                f"{workdir} was made with {' '.join(gone) or 'less'}, and the study now"
                f" asks for {' '.join(new) or 'less'}: move the folder away to make"
                " the run again"
            )
    if not (workdir / _SETTINGS).is_file():
        return
    # Of a folder from before that file was written, only what it asks for today.
    settings = json.loads((workdir / _SETTINGS).read_text())
    for key, wanted in json.loads(json.dumps(dict(run.changes))).items():
        found = settings
        for part in key.split("."):
            found = found.get(part, wanted) if isinstance(found, dict) else wanted
        if found != wanted:
            raise UserError(
                f"{workdir} was trained with {key}={found}, and the study now asks for"
                f" {key}={wanted}: move the folder away to make the run again"
            )


def _has_checkpoint(workdir: Path) -> bool:
    steps = workdir / "checkpoints"
    return steps.is_dir() and any(entry.name.isdecimal() for entry in steps.iterdir())


def _arguments(run: PlannedRun) -> list[str]:
    """All that makes the run, of training and of its diagnosis."""
    return [*run.arguments(), *run.diagnose]


def _missing_steps(
    workdir: Path, run: PlannedRun, train: Path = Path("train.py")
) -> list[list[str]]:
    """What a run still needs, script and arguments: training, then its diagnosis."""
    steps = []
    if not (workdir / "test.json").is_file():
        steps.append([str(train), *run.arguments(), f"--workdir={workdir}"])
    out = workdir / measures.DIAGNOSIS
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
    """Runs what is not finished, `jobs` at a time, and returns the runs that failed.

    A failed run is reported, its last line kept in its folder, and the others run; one
    whose workdir another process trains in is passed over. An interrupt stops the runs,
    which save themselves, and is raised again.

    Args:
      runs: of one study, the next first.
      folder: of the study's workdirs.
      jobs: processes side by side; on GPUs each has as many of its own as the others,
        and there are no more than GPUs.
      train: launch/train.py.
      console: where progress is shown.
      retry_failed: run those again that failed before.
      one_core: each run has one CPU device, and a core that no other runner has, where
        there is one and the system lets processes be bound.
    """
    states = {run: state_of(folder, run) for run in _unique(runs)}
    wanted = (MISSING, FAILED) if retry_failed else (MISSING,)
    queue = [run for run, state in states.items() if state in wanted]
    states |= {run: MISSING for run in queue}
    done = list(states.values()).count(FINISHED)
    console.line(f"{len(states)} runs: {done} finished, {len(queue)} to run")
    jobs, shares = _share_gpus(min(jobs, len(states)), console) if queue else (jobs, [])
    with contextlib.ExitStack() as claims:
        cores = _claim_cores(min(jobs, len(queue)), claims) if one_core else []
        environment = {"JAX_NUM_CPU_DEVICES": "1"} if one_core else {}
        start = functools.partial(
            _start,
            folder=folder,
            train=train,
            cores=cores,
            shares=shares,
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
    """Empties the queue; states are those of all runs, and end as those are."""
    running: list[_Running] = []
    try:
        while queue or running:
            while queue and len(running) < jobs:
                run = queue.pop(0)
                begun = start(run, running)
                if isinstance(begun, _Running):
                    running.append(begun)
                else:
                    states[run] = _say_elsewhere(run, begun, console)
            time.sleep(_LOOK_EVERY)
            for item in [item for item in running if item.process.poll() is not None]:
                running.remove(item)
                more = start(item.run, running) if _is_halfway(item) else None
                if isinstance(more, _Running):
                    running.append(more)
                else:
                    states[item.run] = _finish(item, console)
            console.status(_progress(running, states, len(queue)))
    except BaseException:
        _stop(running)
        raise


def _unique(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    return list({run.label: run for run in runs}.values())


def _share_gpus(jobs: int, console: console_lib.Console) -> tuple[int, list[str]]:
    """How many runs side by side, and what each sees of the GPUs if they are several.

    A run takes most of a GPU's memory for itself: a second one would fail there.
    """
    found = gpus.found()
    shares = gpus.shares(found, jobs)
    if found and len(found) < jobs:
        here = "1 GPU is" if len(found) == 1 else f"{len(found)} GPUs are"
        most = "one run" if len(found) == 1 else f"{len(found)} runs"
        console.line(f"{here} here: {most} at a time instead of {jobs}")
    # One run alone sees all that its starter sees.
    return len(shares) or jobs, shares if len(shares) > 1 else []


def _claim_cores(most: int, claims: contextlib.ExitStack) -> list[int]:
    """The first cores that no other runner of this user has; ours until `claims` ends.

    Each is a lock on a folder of the machine's, which any death of this process frees.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    claimed: list[int] = []
    for core in sorted(os.sched_getaffinity(0)):
        if len(claimed) == most:
            break
        name = f"ragen_jax-{os.getuid()}-core{core}"
        folder = Path(tempfile.gettempdir()) / name
        with contextlib.suppress(OSError, UserError):  # Then it is not ours.
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
    shares: Sequence[str],
    environment: Mapping[str, str],
) -> _Running | str:
    """Starts the next step of a run; its state if it trains or was finished elsewhere.

    It is bound to the first core that no running one has, if there is one, and sees the
    first share of the GPUs that none has, if they are shared.
    """
    workdir = workdir_of(folder, run)
    steps = _missing_steps(workdir, run, train)
    if not steps or folder_lock.is_held(workdir):
        return _TRAINING if steps else FINISHED
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / _FAILURE).unlink(missing_ok=True)
    if steps[0][0] == str(train):
        record = json.dumps(_arguments(run)) + "\n"
        atomic_files.write_text(workdir / _ARGUMENTS, record)
    share = next((s for s in shares if s not in {item.gpus for item in running}), None)
    own = {} if share is None else {gpus.VARIABLE: share}
    with open(workdir / _LOG, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, *steps[0]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment, **own},
            start_new_session=True,  # An interrupt of the terminal reaches only us.
        )
    taken = {item.core for item in running}
    core = next((core for core in cores if core not in taken), None)
    if core is not None:
        with contextlib.suppress(OSError):  # The system has taken that core from us.
            os.sched_setaffinity(process.pid, {core})
    return _Running(run, workdir, process, core, share, time.monotonic(), len(steps))


def _say_elsewhere(run: PlannedRun, state: str, console: console_lib.Console) -> str:
    console.line(f"{state} elsewhere: {run.label}")
    return state


def _is_halfway(item: _Running) -> bool:
    """Whether a run that ended has one of several steps behind it."""
    left = _missing_steps(item.workdir, item.run)
    return item.process.returncode == 0 and 0 < len(left) < item.steps


def _finish(item: _Running, console: console_lib.Console) -> str:
    """Reports a run that ended, and returns its state.

    MISSING, which the next command resumes, for one that a signal of somebody else's
    has stopped.
    """
    code, label = item.process.returncode, item.run.label
    took = console_lib.duration(time.monotonic() - item.started)
    if code == 0 and not _missing_steps(item.workdir, item.run):
        console.line(f"finished  {label}  ({took})")
        return FINISHED
    if folder_lock.is_held(item.workdir):  # It began there while ours was starting.
        return _say_elsewhere(item.run, _TRAINING, console)
    if code in _STOPPED:
        console.line(f"stopped   {label}  (after {took}): the same command resumes it")
        return MISSING
    words = (item.workdir / _LOG).read_text(errors="replace").strip().splitlines()
    last = words[-1] if words else ""
    record = {"exit_code": code, "last_line": last}
    (item.workdir / _FAILURE).write_text(json.dumps(record) + "\n")
    console.line(f"failed    {label}  (exit code {code} after {took}): {last}")
    return FAILED


def _progress(
    running: Sequence[_Running], states: Mapping[PlannedRun, str], queued: int
) -> str:
    done = list(states.values()).count(FINISHED)
    parts, left = [], []
    for item in running:
        try:
            records = metrics.read(item.workdir) if item.workdir.is_dir() else []
        except UserError:  # The run's own affair, which says so when it reads them.
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
    """Asks every run to save itself, and ends those that do not in time."""
    for item in running:
        if item.process.poll() is None:
            item.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + _KILL_AFTER
    for item in running:
        try:
            item.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            item.process.kill()
