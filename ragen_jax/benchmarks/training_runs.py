"""Training runs that a stage of the suite starts, each a process of its own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ragen_jax.reporting import metrics

SCRIPTS = Path(__file__).parents[2] / "launch"
_LOOK_EVERY = 5.0  # seconds between two looks at what a run has measured
_GRACE = 10.0  # seconds that a run has to save itself; the suite waits 15 for a stage


def follow(
    folder: Path, *arguments: str, programs: Path | None = None
) -> Iterator[list[dict]]:
    """The iterations of a training run in a new folder, anew when there are more.

    However the caller ends, the run ends with it.

    Args:
      folder: of the run.
      *arguments: of launch/train.py.
      programs: a folder for its compiled programs; None: where all runs have them.

    Raises:
      CalledProcessError: if the run fails.
    """
    command = [sys.executable, str(SCRIPTS / "train.py"), *arguments]
    own = {"JAX_COMPILATION_CACHE_DIR": str(programs)} if programs else {}
    process = subprocess.Popen(
        [*command, f"--workdir={folder}"], env={**os.environ, **own}
    )
    known = 0
    try:
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_EVERY)
            # Besides, the test before and after training has a line of its own.
            records = [r for r in metrics.read(folder) if "train/success" in r]
            if len(records) > known:
                known = len(records)
                yield records
    finally:
        _end(process)
    if process.returncode or not known:
        raise subprocess.CalledProcessError(process.returncode or 1, command)


def train(folder: Path, *arguments: str, programs: Path | None = None) -> list[dict]:
    """All iterations of such a run, once it has ended."""
    *_, records = follow(folder, *arguments, programs=programs)
    return records


def _end(process: subprocess.Popen) -> None:
    """Ends a run that nobody wants to know more of."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
