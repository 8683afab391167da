"""A suite of measurements for a machine that is there for a short time.

Every stage is a process of its own with a limit. What it has measured is written before
the next begins, and within it as soon as it is known: a suite that is cut off, at any
time, goes on where it was when it is started again. Results are OUT/STAGE.json, what a
stage said OUT/STAGE.log, and what is known so far as a table OUT/report.md.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragen_jax.errors import UserError
from ragen_jax.utils import atomic_files

DONE, RUNNING = "done", "running"  # Other states are sentences.
# What two results may differ in: who mends a stage on a machine lent for half an hour
# has no time for the others once more. The report names each one's.
CODE = "code"
_GRACE = 15  # seconds from a request to end to the end
_LEAST = 60.0  # seconds: with less than that left no stage begins
# How the line begins that names an error, Python's or one of this project's scripts.
_ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception)\b|error: ")


@dataclasses.dataclass(frozen=True)
class Stage:
    """One process of the suite."""

    name: str  # of its files
    answers: str  # what it is for
    kind: str  # a key of stages.MEASURE
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    on_cpu: bool = False  # whether it leaves GPUs alone


@dataclasses.dataclass
class Result:
    """What is known of a stage."""

    stage: str
    state: str = RUNNING  # or DONE, or what went wrong
    attempts: int = 0
    seconds: float = 0.0  # of the last attempt
    tables: dict[str, dict] = dataclasses.field(default_factory=dict)
    # Device, sizes, versions: what another result must have in common with this one.
    made_with: dict[str, str] = dataclasses.field(default_factory=dict)


def read(out: Path, name: str) -> Result:
    """The result of a stage as it is on the disk, of no attempt if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Result(**json.loads((out / f"{name}.json").read_text()))
    return Result(name)


def write(out: Path, result: Result) -> None:
    """Puts a result on the disk, whole."""
    with atomic_files.new_file(out / f"{result.stage}.json") as file:
        file.write(json.dumps(dataclasses.asdict(result), indent=2) + "\n")


# The process of one stage -------------------------------------------------------------


def measure(
    out: Path,
    stage: Stage,
    tables: Iterable[tuple[str, dict]],
    show: Callable[[str, dict], None],
) -> None:
    """Writes each table of a stage as soon as it is known, over one of its title.

    What an earlier attempt has measured and this one has not yet stays.
    """
    result = read(out, stage.name)
    for title, figures in tables:
        result.tables[title] = figures
        write(out, result)
        show(title, figures)


# The process of the suite -------------------------------------------------------------


def run(
    out: Path,
    stages: Sequence[Stage],
    command: Sequence[str],
    limit: float,
    made_with: Mapping[str, str],
    status: Callable[[str], None],
    total: float = math.inf,
) -> list[Result]:
    """All stages that are not done, those that were tried least often first.

    What was measured with other things than these is put into a folder OUT/before_N,
    but for what other code has measured: it stays, and is said to be so.

    Args:
      out: a folder, made if it is not there. Its report.md is written after each stage.
      stages: of the suite.
      command: of a process that measures one stage, without --stage=NAME.
      limit: seconds of a stage.
      made_with: what stages are measured with now, by name.
      status: is given a line before and after each.
      total: seconds of all; a stage has no more than what is left of them.
    """
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + total
    _set_aside(out, stages, made_with, status)
    # A stage that never ends in time does not keep the others waiting.
    for stage in sorted(stages, key=lambda each: read(out, each.name).attempts):
        result = read(out, stage.name)
        if result.state == DONE:
            status(f"{stage.name}: {_done_before(out, result, made_with)}")
            continue
        left = end - _GRACE - time.monotonic()
        if left < _LEAST:
            status(f"{stage.name} and the rest: no time left; start the suite again")
            break
        status(f"{stage.name}: {stage.answers} ...")
        own = [*command, f"--stage={stage.name}"]
        result = _attempt(out, stage, own, min(limit, left), made_with)
        status(f"{stage.name}: {result.state} ({result.seconds:.0f} s)")
        _write_report(out, stages)
    return _write_report(out, stages)


def _done_before(out: Path, result: Result, made_with: Mapping[str, str]) -> str:
    if result.made_with.get(CODE) == made_with.get(CODE):
        return "done before"
    file = out / f"{result.stage}.json"
    return f"done before, with other code (to measure it again, delete {file})"


def _set_aside(
    out: Path,
    stages: Sequence[Stage],
    made_with: Mapping[str, str],
    status: Callable[[str], None],
) -> None:
    """Moves results that were made with other things out of the way."""
    others: set[str] = set()
    names = []
    for stage in stages:
        was = read(out, stage.name).made_with
        differing = {key for key in made_with if was.get(key) != made_with[key]}
        if (out / f"{stage.name}.json").exists() and differing - {CODE}:
            others |= differing
            names.append(stage.name)
    if not names:
        return
    numbers = itertools.count(1)
    folder = next(f for n in numbers if not (f := out / f"before_{n}").exists())
    folder.mkdir()
    for name in names:
        (out / f"{name}.json").rename(folder / f"{name}.json")
    status(
        f"measured before with another {', '.join(sorted(others))}, and again now:"
        f" {', '.join(names)} (what it was is in {folder})"
    )


def _write_report(out: Path, stages: Sequence[Stage]) -> list[Result]:
    """Writes what is known so far, and returns it."""
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
) -> Result:
    before = read(out, stage.name)
    # Counted before it starts: what kills the suite may be this stage.
    attempts = before.attempts + 1
    begun = Result(stage.name, attempts=attempts, tables=before.tables)
    write(out, dataclasses.replace(begun, made_with=dict(made_with)))
    environment = dict(
        os.environ,
        PYTHONUNBUFFERED="1",
        JAX_TRACEBACK_FILTERING="off",  # A note on hidden frames would end the log.
    )
    if stage.on_cpu:
        environment["JAX_PLATFORMS"] = "cpu"
    started = time.perf_counter()
    with (out / f"{stage.name}.log").open("w") as log:
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
    result = read(out, stage.name)  # With what it has measured so far.
    result.seconds = round(time.perf_counter() - started, 1)
    result.state = DONE
    if code is None:
        result.state = f"ended after {limit:.0f} s, its limit"
    elif code:
        said = (out / f"{stage.name}.log").read_text(errors="replace")
        result.state = f"failed: {reason(said)}"
    write(out, result)
    return result


def _end(process: subprocess.Popen) -> None:
    """Ends a stage and what it has started, if any of it still runs."""
    for request in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, request)
        end = time.monotonic() + _GRACE
        while time.monotonic() < end:
            # The stage may be gone and a run that it started still be saving itself.
            if process.poll() is not None and not _is_left(process.pid):
                return
            time.sleep(0.1)


def _is_left(group: int) -> bool:
    """Whether a group has a process yet."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def reason(said: str) -> str:
    """The line of a failed process's output that says best why it failed.

    The last one that names an error, or else the last one. That a process which this
    one had called failed too (CalledProcessError) says less than what that one said.
    """
    lines = [line.rstrip() for line in said.splitlines()]
    lines = [
        line
        for line in lines
        if line.strip(" -") and not line.startswith("For simplicity, JAX")
    ]
    named = [line for line in lines if _ERROR.match(line)]
    named = [line for line in named if "CalledProcessError" not in line]
    return (named or lines or ["nothing was said"])[-1].strip()[:300]


def command_line(script: Path, out: Path, *flags: str) -> list[str]:
    """Of the processes of a suite's stages."""
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
    """OUT/report.md: measured beside forecast, then all figures by stage."""
    return "\n".join([*_comparison(results), "", *_everything(stages, results)]) + "\n"


# By the names of both tables, see stages.py.
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
        yield begun if result.attempts else "not begun"
        yield ""
        for title, figures in result.tables.items():
            yield f"| {title} | |"
            yield "|---|---|"
            for name, value in figures.items():
                shown = value if isinstance(value, str) else f"{value:,.4g}"
                yield f"| {name} | {shown} |"
            yield ""
