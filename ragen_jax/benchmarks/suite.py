"""Runs a suite of measurements in stages, for a machine that is lent for a short time.

Each stage is a process with a time limit, and writes each result as soon as it has it.
A suite that was killed at any time continues when it is started again. It writes
OUT/STAGE.json (results), OUT/STAGE.log (output of the stage) and OUT/report.md (all
results so far). What the stages measure is in stages.py; gpu_suite.py calls this.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragen_jax.benchmarks import reasons
from ragen_jax.errors import UserError
from ragen_jax.utils import atomic_files

DONE, RUNNING = "done", "running"  # Any other state is a sentence about a failure.
# A key of `Result.made_with` in which results of one report may differ: after a fix of
# one stage there may be no time to repeat the others. The report names each one's code.
CODE = "code"
_FAILED = "failed: "  # how the state begins of a stage whose process says so
_GRACE = 15  # seconds between SIGTERM and SIGKILL
_LEAST = 60.0  # seconds that must be left for a stage to start
_TRIES = 3  # attempts at a stage that others need before they run without it
# The environment variable by which a stage knows the number of the suite's process.
PARENT = "RAGEN_JAX_SUITE"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One process of the suite."""

    name: str  # also of its files
    answers: str  # the question it answers, for messages and the report
    kind: str  # a key of stages.MEASURE
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    on_cpu: bool = False  # run it on a CPU even if there are GPUs
    others_need_it: bool = False  # so that it comes first, for _TRIES attempts


@dataclasses.dataclass
class Result:
    """The state and the results of a stage, as in its JSON file."""

    stage: str
    state: str = RUNNING  # or DONE, or what went wrong
    attempts: int = 0
    seconds: float = 0.0  # of the last attempt
    tables: dict[str, dict] = dataclasses.field(default_factory=dict)  # by title
    # Device, sizes and versions. Only results that have them in common are comparable.
    made_with: dict[str, str] = dataclasses.field(default_factory=dict)


def read(out: Path, name: str) -> Result:
    """Reads the result of a stage; one without attempts if there is no file."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Result(**json.loads((out / f"{name}.json").read_text(encoding="utf-8")))
    return Result(name)


def write(out: Path, result: Result) -> None:
    """Writes the result of a stage."""
    with atomic_files.new_file(out / f"{result.stage}.json") as file:
        file.write(json.dumps(dataclasses.asdict(result), indent=2) + "\n")


# The process of one stage -------------------------------------------------------------


def measure(
    out: Path,
    stage: Stage,
    tables: Iterable[tuple[str, dict]],
    show: Callable[[str, dict], None],
) -> None:
    """Writes each table of a stage as soon as it is measured.

    It replaces a table of the same title; other tables of earlier attempts stay.
    """
    result = read(out, stage.name)
    for title, figures in tables:
        result.tables[title] = figures
        write(out, result)
        show(title, figures)


def begin(out: Path, stage: Stage, made_with: Mapping[str, str]) -> Result:
    """Writes that a stage begins, and returns its result before.

    The attempt counts from now on, for this stage may be what kills the suite.
    """
    before = read(out, stage.name)
    begun = Result(stage.name, attempts=before.attempts + 1, tables=before.tables)
    write(out, dataclasses.replace(begun, made_with=dict(made_with)))
    return before


# The process of the suite -------------------------------------------------------------


def run(
    out: Path,
    stages: Sequence[Stage],
    command: Sequence[str],
    limit: float,
    made_with: Mapping[str, str],
    status: Callable[[str], None],
    total: float = math.inf,
    chosen: Sequence[Stage] | None = None,
) -> list[Result]:
    """Runs all stages that are not done yet, those with the fewest attempts first.

    A stage that others need comes before them, and is tried up to three times first,
    or until it fails twice in the same way.

    A stage that is cut off by `total` has not failed: the next call begins with it.

    Results with another `made_with` are moved aside first; see `set_aside`.

    Args:
      out: a folder, created if needed. Its report.md is written after each stage.
      stages: of the suite, all of which the report names.
      command: of a process that measures one stage, without --stage=NAME.
      limit: most seconds of a stage.
      made_with: as of the results that are measured now.
      status: called with a line before and after each stage.
      total: most seconds of the suite.
      chosen: the stages to run; None: all.
    """
    chosen = stages if chosen is None else chosen
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + total
    set_aside(out, stages, chosen, made_with, status)
    has_begun_one = False
    # So a stage that always runs into its limit does not block the others.
    for stage in sorted(chosen, key=lambda each: _turn(out, each)):
        result = read(out, stage.name)
        if result.state == DONE:
            status(f"{stage.name}: {_done_before(out, result, made_with)}")
            continue
        for _ in range(max(1, _TRIES - result.attempts) if stage.others_need_it else 1):
            left = end - _GRACE - time.monotonic()
            if left < _LEAST:
                status(f"{stage.name} and the rest: no time left; start it again")
                return write_report(out, stages)
            status(f"{stage.name}: {stage.answers} ...")
            # The first of a call has all the time that the next call could give it.
            is_short = left < limit and has_begun_one
            seconds, before = min(limit, left), result.state
            flags = f"--stage={stage.name}", f"--stage_seconds={math.ceil(seconds)}"
            result = _attempt(
                out, stage, [*command, *flags], seconds, made_with, is_short
            )
            has_begun_one = True
            status(f"{stage.name}: {result.state} ({result.seconds:.0f} s)")
            write_report(out, stages)
            is_again = result.state.startswith(_FAILED) and result.state == before
            if result.state == DONE or is_again:
                break
    return write_report(out, stages)


def _turn(out: Path, stage: Stage) -> tuple[bool, int]:
    """What stages are sorted by."""
    attempts = read(out, stage.name).attempts
    return not (stage.others_need_it and attempts < _TRIES), attempts


def _done_before(out: Path, result: Result, made_with: Mapping[str, str]) -> str:
    if result.made_with.get(CODE) == made_with.get(CODE):
        return "done before"
    file = out / f"{result.stage}.json"
    return f"done before, with other code (to measure it again, delete {file})"


def set_aside(
    out: Path,
    stages: Sequence[Stage],
    chosen: Sequence[Stage],
    made_with: Mapping[str, str],
    status: Callable[[str], None],
) -> None:
    """Moves results with another `made_with` to a new folder OUT/before_N.

    Those that differ only in CODE stay, and are reported as such. So do those of stages
    that are not chosen, unless one is that the others need.

    Args:
      out: the folder of results.
      stages: of the suite.
      chosen: those to be run.
      made_with: as of the results that are measured now.
      status: called with a line if any are moved.
    """
    has_needed = any(stage.others_need_it for stage in chosen)
    others: set[str] = set()  # the keys that differ
    names = []  # of the stages to move
    for stage in stages if has_needed else chosen:
        saved = read(out, stage.name).made_with
        differing = {key for key in made_with if saved.get(key) != made_with[key]}
        if (out / f"{stage.name}.json").exists() and differing - {CODE}:
            others |= differing
            names.append(stage.name)
    if not names:
        return
    number = 1
    while (folder := out / f"before_{number}").exists():
        number += 1
    folder.mkdir()
    for name in names:
        (out / f"{name}.json").rename(folder / f"{name}.json")
    status(
        f"measured before with another {', '.join(sorted(others))}, and again now:"
        f" {', '.join(names)} (what it was is in {folder})"
    )


def write_report(out: Path, stages: Sequence[Stage]) -> list[Result]:
    """Writes report.md, and returns the results so far."""
    results = [read(out, stage.name) for stage in stages]
    with atomic_files.new_file(out / "report.md") as file:
        file.write(report(stages, results))
    return results


def _attempt(
    out: Path,
    stage: Stage,
    command: Sequence[str],
    limit: float,
    made_with: Mapping[str, str],
    is_short: bool = False,
) -> Result:
    """Runs a stage's process, and returns what came of it.

    Args:
      out: the folder of results.
      stage: to run.
      command: of its process.
      limit: most seconds of it.
      made_with: as of the result.
      is_short: whether the stage has less time than it could have, so that coming to
        the end of it does not count as an attempt.
    """
    before = begin(out, stage, made_with)
    environment = dict(
        os.environ,
        PYTHONUNBUFFERED="1",
        JAX_TRACEBACK_FILTERING="off",  # Else a note on hidden frames ends the log.
        **{PARENT: str(os.getpid())},
    )
    if stage.on_cpu:
        environment["JAX_PLATFORMS"] = "cpu"
    started = time.perf_counter()
    with (out / f"{stage.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    result = read(out, stage.name)  # The stage has written its tables.
    result.seconds = round(time.perf_counter() - started, 1)
    result.state = DONE
    if code is None and is_short:
        result.state = f"ended after {limit:.0f} s, when the suite's time was over"
        result.attempts = before.attempts
    elif code is None:
        result.state = f"ended after {limit:.0f} s, its limit"
    elif code:
        log = out / f"{stage.name}.log"
        output = log.read_text(encoding="utf-8", errors="replace")
        result.state = _FAILED + reasons.reason(output)
    write(out, result)
    return result


def _end(process: subprocess.Popen) -> None:
    """Ends a stage and all processes that it started, first by SIGTERM."""
    for request in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, request)
        end = time.monotonic() + _GRACE
        while time.monotonic() < end:
            # A training run that the stage started may still be saving its state.
            if process.poll() is not None and not _is_left(process.pid):
                return
            time.sleep(0.1)


def _is_left(group: int) -> bool:
    """Whether any process of a process group still runs."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def command_line(script: Path, out: Path, *flags: str) -> list[str]:
    """The command of a stage's process, without --stage=NAME."""
    return [sys.executable, str(script), "--suite=gpu", f"--out={out}", *flags]


def find(stages: Sequence[Stage], name: str) -> Stage:
    """The stage of a name.

    Raises:
      UserError: if there is none.
    """
    for stage in stages:
        if stage.name == name:
            return stage
    raise UserError(
        f"--stage={name}: the suite has no such stage: choose one of"
        f" {', '.join(stage.name for stage in stages)}"
    )


# A table for a person -----------------------------------------------------------------


def report(stages: Sequence[Stage], results: Sequence[Result]) -> str:
    """The text of report.md: measured beside forecast, then all tables by stage."""
    return "\n".join([*_comparison(results), "", *_everything(stages, results)]) + "\n"


# Figures that measured and forecast tables have in common (stages.py).
_COMPARED = (
    "iteration, s",
    "rollout, s",
    "update, s",
    "decode passes",
    "message passes",
    "peak memory, GiB",
)


def _comparison(results: Sequence[Result]) -> Iterator[str]:
    yield "# Measured beside the forecast of `--plan`"
    yield ""
    yield "| stage | figure | measured | forecast | measured / forecast |"
    yield "|---|---|---|---|---|"
    tables = {result.stage: result.tables for result in results}
    for name, measured in tables.items():
        forecast = tables.get(f"forecast_{name}", {}).get("forecast", {})
        for figure in _COMPARED:
            values = (measured.get("iteration", {}).get(figure), forecast.get(figure))
            if all(isinstance(value, int | float) and value for value in values):
                one, other = values
                yield (
                    f"| {name} | {figure} | {one:,.3f} | {other:,.3f} |"
                    f" {one / other:.2f} |"
                )


def _everything(stages: Sequence[Stage], results: Sequence[Result]) -> Iterator[str]:
    for stage, result in zip(stages, results, strict=True):
        yield f"## {stage.name}: {stage.answers}"
        yield ""
        tried = f"attempt {result.attempts}, " if result.attempts > 1 else ""
        code = result.made_with.get(CODE)
        by = f", code {code}" if code else ""
        begun = f"{result.state} ({tried}{result.seconds:.0f} s{by})"
        has_begun = result.attempts or result.state != RUNNING
        yield begun if has_begun else "not begun"
        yield ""
        for title, figures in result.tables.items():
            yield f"| {title} | |"
            yield "|---|---|"
            for name, value in figures.items():
                shown = value if isinstance(value, str) else f"{value:,.4g}"
                yield f"| {name} | {shown} |"
            yield ""
