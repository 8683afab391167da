"""The suite of measurements, as launch/benchmark.py offers it."""

import signal
from collections.abc import Callable
from pathlib import Path

from ragen_jax.benchmarks import stages, suite
from ragen_jax.errors import UserError
from ragen_jax.utils import atomic_files

_SPARE = 60  # seconds that a stage has after its limit to be ended in


def run_suite(
    script: Path,
    out: str | None,
    stage: str | None,
    is_small: bool,
    limit: int,
    show: Callable[[str, dict], None],
) -> None:
    """The whole suite, each stage in a process, or one stage in this process.

    Args:
      script: that calls this.
      out: a folder for the results.
      stage: a name of one; None: all.
      is_small: sizes that a CPU can take.
      limit: seconds of a stage.
      show: is given a stage's tables as they are measured.

    Raises:
      UserError: if there is no such stage, or no folder is given.
    """
    if not out:
        raise UserError("--suite needs a folder for its results: add --out=DIR")
    folder, sizes = Path(out).absolute(), stages.SMOKE if is_small else stages.FULL
    known = stages.stages(sizes)
    if stage:
        chosen = suite.find(known, stage)
        folder.mkdir(parents=True, exist_ok=True)
        signal.alarm(limit + _SPARE)  # Whatever becomes of the suite's process.
        suite.measure(folder, chosen, stages.measure(chosen, sizes, folder), show)
        return
    flags = (f"--smoke={is_small}", f"--stage_seconds={limit}")
    command = suite.command_line(script, folder, *flags)
    results = suite.run(folder, known, command, limit, _status)
    with atomic_files.new_file(folder / "report.md") as file:
        file.write(suite.report(known, results))
    _status(f"report: {folder / 'report.md'}")


def _status(line: str) -> None:
    print(line, flush=True)
