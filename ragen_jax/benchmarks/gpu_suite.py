"""The suite of measurements, as launch/benchmark.py offers it."""

import contextlib
import importlib.metadata
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ragen_jax.benchmarks import stages, suite
from ragen_jax.errors import UserError
from ragen_jax.parallel import facts
from ragen_jax.utils import endings, folder_lock

_SPARE = 60  # seconds that a stage has after its limit to be ended in


def run_suite(
    script: Path,
    out: str | None,
    stage: str | None,
    is_small: bool,
    limit: int,
    total: int,
    show: Callable[[str, dict], None],
) -> None:
    """The whole suite, each stage in a process, or one stage in this process.

    Args:
      script: that calls this.
      out: a folder for the results.
      stage: a name of one; None: all.
      is_small: sizes that a CPU can take.
      limit: seconds of a stage.
      total: seconds of the whole suite; 0: any.
      show: is given a stage's tables as they are measured.

    Raises:
      UserError: if there is no such stage, no folder is given, another suite or stage
        uses it, or no GPU is here.
    """
    if not out:
        raise UserError("--suite needs a folder for its results: add --out=DIR")
    folder = Path(out).expanduser().absolute()
    sizes = stages.SMOKE if is_small else stages.FULL
    known = stages.stages(sizes)
    if stage:
        chosen = suite.find(known, stage)
        folder.mkdir(parents=True, exist_ok=True)
        signal.alarm(limit + _SPARE)  # Whatever becomes of the suite's process.
        if chosen.kind in stages.STARTS_RUNS:
            _raise_instead()
        measured = stages.measure(chosen, sizes, folder)
        with _measuring(folder), contextlib.closing(measured) as tables:
            suite.measure(folder, chosen, tables, show)
        return
    device = _device(is_small)
    flags = (f"--smoke={is_small}", f"--stage_seconds={limit}")
    command = suite.command_line(script, folder, *flags)
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock.held(folder, "runs the suite", flag="--out"):
        with _measuring(folder):
            pass  # No stage has outlived its suite: it would have the GPU's memory.
        endings.raise_instead()  # The stage that runs is ended first.
        made_with = _made_with(sizes, device)
        suite.run(folder, known, command, limit, made_with, _status, total or math.inf)
    _status(f"report: {folder / 'report.md'}")


def _raise_instead() -> None:
    """Lets signals raise, that of the alarm too: what the stage started ends first.

    For a stage that waits for other processes. A computation on a device would not be
    interrupted.
    """
    endings.raise_instead()
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))


@contextlib.contextmanager
def _measuring(folder: Path) -> Iterator[None]:
    """Within it no other process measures a stage there.

    Raises:
      UserError: naming the process that does.
    """
    own = folder / ".stage"
    own.mkdir(exist_ok=True)
    with folder_lock.held(own, "measures a stage", flag="--out"):
        yield


def _made_with(sizes: stages.Sizes, device: str) -> dict[str, str]:
    """What makes two results figures of the same thing."""
    return {
        "device": device,
        "sizes": repr(sizes),
        "jax": importlib.metadata.version("jax"),
        suite.CODE: facts.code_version(),
    }


def _device(is_small: bool) -> str:
    """The devices of this machine, in words.

    JAX falls back to the CPU silently where its GPU's plugin or driver is missing. It
    is asked in a process of its own: this one would keep the GPU's memory to itself.

    Args:
      is_small: a machine without a GPU will do. Else the suite would take it days.

    Raises:
      UserError: if it will not.
    """
    script = (
        "import jax; d = jax.devices();"
        " print(jax.default_backend(), len(d), 'x', d[0].device_kind)"
    )
    asked = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    found = (asked.stdout.splitlines() or ["none none"])[-1]
    backend, _, device = found.partition(" ")
    if backend != "gpu" and not is_small:
        said = f" ({suite.reason(asked.stderr)})" if asked.stderr.strip() else ""
        raise UserError(
            f"--suite=gpu measures a GPU, and JAX's backend here is {backend}{said}:"
            " install jax[cuda13] (drivers before 580: jax[cuda12]), or add --smoke for"
            " sizes that a CPU can take"
        )
    return device


def _status(line: str) -> None:
    print(line, flush=True)
