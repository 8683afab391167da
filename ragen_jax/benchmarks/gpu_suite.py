"""The command `launch/benchmark.py --suite=gpu`: runs the suite, or one stage of it.

suite.py runs stages as processes; each is this command again with --stage=NAME, which
measures as stages.py says.
"""

import contextlib
import functools
import importlib.metadata
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ragen_jax.benchmarks import reasons, stages, suite, suite_sizes
from ragen_jax.benchmarks.suite import Stage
from ragen_jax.errors import UserError
from ragen_jax.parallel import facts
from ragen_jax.studies import gpus
from ragen_jax.utils import endings, folder_lock, parents

_START = 180  # seconds in which JAX has to say what devices are here
_SPARE = 60  # seconds after its limit at which a stage ends itself if nobody else does


def run_suite(
    script: Path,
    out: str | None,
    stage: str | None,
    is_small: bool,
    limit: int,
    total: int,
    show: Callable[[str, dict], None],
    forecasts: str = "also",
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
      forecasts: "also", "no", or "only": those need no GPU, but what the stage "device"
        has written into `out`.

    Raises:
      UserError: if there is no such stage, no folder is given, another suite or stage
        uses it or the GPU, there is no GPU, or it does not answer.
    """
    if not out:
        raise UserError("--suite needs a folder for its results: add --out=DIR")
    started = time.monotonic()
    folder = Path(out).expanduser().absolute()
    sizes = suite_sizes.SMOKE if is_small else suite_sizes.FULL
    known = stages.stages(sizes)
    if stage:
        chosen = [suite.find(known, stage)]
    else:
        wanted = {"also": (False, True), "no": (False,), "only": (True,)}[forecasts]
        chosen = [each for each in known if each.on_cpu in wanted]
    on_cpu = all(each.on_cpu for each in chosen)
    needs_gpu = not (is_small or on_cpu)
    measure = functools.partial(_measure, folder, chosen[0], sizes, limit, show)
    if stage and suite.PARENT in os.environ:  # The suite does all that follows.
        parents.end_with(int(os.environ[suite.PARENT]))
        return measure(_places(folder, needs_gpu))
    made_with = _made_with(
        sizes, _forecast_for(folder) if on_cpu else _device(is_small)
    )
    if needs_gpu:
        # A stage where CUDA does not start fails, instead of measuring the CPU.
        os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
    folder.mkdir(parents=True, exist_ok=True)
    places = _places(folder, needs_gpu)
    with _held(places, "runs the suite"):
        with _measuring(places, "no stage yet"):
            pass  # Refuse to start while a stage of a killed suite holds GPU memory.
        if stage:
            suite.set_aside(folder, known, chosen, made_with, _status)
            _run_here(folder, chosen[0], known, made_with, lambda: measure(places))
        else:
            endings.raise_instead()  # So that a signal ends the running stage first.
            command = suite.command_line(script, folder, f"--smoke={is_small}")
            left = total - (time.monotonic() - started) if total else math.inf
            suite.run(folder, known, command, limit, made_with, _status, left, chosen)
    _status(f"report: {folder / 'report.md'}")


def _run_here(
    folder: Path,
    chosen: Stage,
    known: Sequence[Stage],
    made_with: Mapping[str, str],
    measure: Callable[[], None],
) -> None:
    """Runs one stage in this process, with the files that the suite would write."""
    if chosen.on_cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    suite.begin(folder, chosen, made_with)
    state, started = "ended by an error or a signal", time.perf_counter()
    try:
        measure()
        state = suite.DONE
    finally:
        result = suite.read(folder, chosen.name)
        result.state = state
        result.seconds = round(time.perf_counter() - started, 1)
        suite.write(folder, result)
        suite.write_report(folder, known)


def _measure(
    folder: Path,
    chosen: Stage,
    sizes: suite_sizes.Sizes,
    limit: int,
    show: Callable[[str, dict], None],
    places: Sequence[tuple[Path, str]],
) -> None:
    """Measures a stage in this process, for at most `limit` seconds and some."""
    folder.mkdir(parents=True, exist_ok=True)
    signal.alarm(limit + _SPARE)  # In case nobody ends the stage at its limit.
    if chosen.kind in stages.STARTS_RUNS:
        _raise_instead()
    measured = stages.measure(chosen, sizes, folder)
    with _measuring(places, chosen.name), contextlib.closing(measured) as tables:
        suite.measure(folder, chosen, tables, show)


def _raise_instead() -> None:
    """Lets signals raise, SIGALRM too, so that the stage ends its own processes first.

    Only for stages that wait for other processes: a computation on a device could not
    be interrupted this way.
    """
    endings.raise_instead()
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))


def _places(folder: Path, has_gpu: bool) -> list[tuple[Path, str]]:
    """Folders that one process takes at a time, each with what chooses another.

    Suites with different folders of results would also measure each other: so those of
    a user on one machine share a lock, unless their CUDA_VISIBLE_DEVICES differ. It
    does not keep out other users, nor "0" beside "0,1" or beside none.

    Args:
      folder: of the results.
      has_gpu: whether a GPU is measured.
    """
    places = [(folder, "--out")]
    if has_gpu:
        user = os.getuid() if hasattr(os, "getuid") else 0
        seen = re.sub(r"[^\w.-]", "_", os.environ.get(gpus.VARIABLE) or "all")
        shared = Path(tempfile.gettempdir()) / f"ragen_jax_suite.{user}" / seen
        shared.mkdir(parents=True, exist_ok=True)
        places.append((shared, gpus.VARIABLE))
    return places


def _held(
    places: Sequence[tuple[Path, str]], what: str
) -> contextlib.AbstractContextManager:
    """A context in which no other process holds one of `_places`.

    Args:
      places: to hold.
      what: this process does there, as "runs the suite"; for others' messages.

    Raises:
      UserError: naming the process that holds one.
    """
    with contextlib.ExitStack() as stack:
        for folder, chooser in places:
            folder.mkdir(exist_ok=True)
            stack.enter_context(folder_lock.held(folder, what, flag=chooser))
        return stack.pop_all()


def _measuring(
    places: Sequence[tuple[Path, str]], stage: str
) -> contextlib.AbstractContextManager:
    """A context in which no other process measures a stage. Errors as of `_held`.

    The suite holds the places themselves, so a stage holds a folder in each.
    """
    own = [(folder / ".stage", chooser) for folder, chooser in places]
    return _held(own, f"measures {stage}")


def _made_with(sizes: suite_sizes.Sizes, device: str) -> dict[str, str]:
    """What two results must have in common to be comparable; see `suite.run`."""
    return {
        "device": device,
        "sizes": repr(sizes),
        "jax": importlib.metadata.version("jax"),
        suite.CODE: facts.code_version(),
    }


def _forecast_for(folder: Path) -> str:
    """The devices that forecasts are for, as `_device` has named them there.

    Raises:
      UserError: if the stage "device" has not said what they are.
    """
    seen = suite.read(folder, "device").tables.get("device")
    if seen is None:
        raise UserError(
            f"{folder / 'device.json'} does not say what device to forecast for: run"
            " --stage=device where it is, and give its folder of results as --out"
        )
    return f"{seen['devices']} x {seen['kind']}"


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
    command = [sys.executable, "-c", script]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_START
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"JAX did not say within {_START} s which devices are here: see with"
            " nvidia-smi whether the driver answers and what else uses the GPU, then"
            " start it again"
        ) from None
    found = (answer.stdout.splitlines() or ["none none"])[-1]
    backend, _, device = found.partition(" ")
    if backend != "gpu" and not is_small:
        reason = f" ({reasons.reason(answer.stderr)})" if answer.stderr.strip() else ""
        raise UserError(
            f"--suite=gpu measures a GPU, and JAX's backend here is {backend}{reason}:"
            " install jax[cuda13] (drivers before 580: jax[cuda12]), or add --smoke for"
            " sizes that a CPU can take"
        )
    return device


def _status(line: str) -> None:
    print(line, flush=True)
