"""The command `launch/benchmark.py --suite=gpu`: runs the suite, or one stage of it.

suite.py runs stages as processes; each is this command again with --stage=NAME, which
measures as stages.py says.
"""

import contextlib
import importlib.metadata
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ragen_jax.benchmarks import stages, suite, suite_sizes
from ragen_jax.errors import UserError
from ragen_jax.parallel import facts
from ragen_jax.utils import endings, folder_lock

_SPARE = 60  # seconds after its limit at which a stage ends itself if nobody else does


def run_suite(
    script: Path,
    out: str | None,
    stage: str | None,
    is_small: bool,
    limit: int,
    total: int,
    show: Callable[[str, dict], None],
) -> None:
    """Runs the whole suite, each stage in its own process, or one stage in this one.

    Args:
      script: the path of launch/benchmark.py.
      out: the folder for results; must be given.
      stage: the only stage to run; None: all.
      is_small: use sizes for a CPU.
      limit: most seconds of a stage.
      total: most seconds of the whole suite; 0: any.
      show: called with (title, figures) for each table as it is measured.

    Raises:
      UserError: if there is no such stage, no folder is given, another suite or stage
        uses it, or there is no GPU.
    """
    if not out:
        raise UserError("--suite needs a folder for its results: add --out=DIR")
    folder = Path(out).expanduser().absolute()
    sizes = suite_sizes.SMOKE if is_small else suite_sizes.FULL
    known = stages.stages(sizes)
    if stage:
        chosen = suite.find(known, stage)
        folder.mkdir(parents=True, exist_ok=True)
        signal.alarm(limit + _SPARE)  # In case the suite's process was killed.
        if chosen.kind in stages.STARTS_RUNS:
            _raise_instead()
        measured = stages.measure(chosen, sizes, folder)
        with _measuring(folder), contextlib.closing(measured) as tables:
            suite.measure(folder, chosen, tables, show)
        return
    device = _device(is_small)
    if not is_small:
        # A stage where CUDA does not start fails, instead of measuring the CPU.
        os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
    command = suite.command_line(script, folder, f"--smoke={is_small}")
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock.held(folder, "runs the suite", flag="--out"):
        with _measuring(folder):
            pass  # Refuse to start while a stage of a killed suite holds GPU memory.
        endings.raise_instead()  # So that a signal ends the running stage first.
        made_with = _made_with(sizes, device)
        suite.run(folder, known, command, limit, made_with, _status, total or math.inf)
    _status(f"report: {folder / 'report.md'}")


def _raise_instead() -> None:
    """Lets signals raise, SIGALRM too, so that the stage ends its own processes first.

    Only for stages that wait for other processes: a computation on a device could not
    be interrupted this way.
    """
    endings.raise_instead()
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))


@contextlib.contextmanager
def _measuring(folder: Path) -> Iterator[None]:
    """A context in which no other process measures a stage into the folder.

    Raises:
      UserError: naming the process that does.
    """
    own = folder / ".stage"
    own.mkdir(exist_ok=True)
    with folder_lock.held(own, "measures a stage", flag="--out"):
        yield


def _made_with(sizes: suite_sizes.Sizes, device: str) -> dict[str, str]:
    """What two results must have in common to be comparable; see `suite.run`."""
    return {
        "device": device,
        "sizes": repr(sizes),
        "jax": importlib.metadata.version("jax"),
        suite.CODE: facts.code_version(),
    }


def _device(is_small: bool) -> str:
    """The number and kind of this machine's devices, as text.

    JAX is started in another process: in this one it would keep the GPU's memory from
    the stages.

    Args:
      is_small: whether a CPU is enough. In full size the suite would take days on one.

    Raises:
      UserError: if it is not, and JAX has no GPU, as without its plugin or a driver.
    """
    script = (
        "import jax; d = jax.devices();"
        " print(jax.default_backend(), len(d), 'x', d[0].device_kind)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    found = (answer.stdout.splitlines() or ["none none"])[-1]
    backend, _, device = found.partition(" ")
    if backend != "gpu" and not is_small:
        reason = f" ({suite.reason(answer.stderr)})" if answer.stderr.strip() else ""
        raise UserError(
            f"--suite=gpu measures a GPU, and JAX's backend here is {backend}{reason}:"
            " install jax[cuda13] (drivers before 580: jax[cuda12]), or add --smoke for"
            " sizes that a CPU can take"
        )
    return device


def _status(line: str) -> None:
    print(line, flush=True)
