"""Training runs that stages of the GPU suite start, each in its own process."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ragen_jax.reporting import metrics

SCRIPTS = Path(__file__).parents[2] / "launch"
_LOOK_EVERY = 5.0  # seconds between two reads of a run's metrics
_GRACE = 10.0  # seconds between SIGTERM and SIGKILL; less than suite._GRACE


def follow(
    folder: Path, *arguments: str, programs: Path | None = None
) -> Iterator[list[dict]]:
    """Starts a training run; yields the metrics of its iterations whenever it has more.

    If the caller stops iterating, or raises, the run is ended.

    Args:
      folder: of the run, new.
      *arguments: of launch/train.py.
      programs: a folder for its compilation cache; None: the usual one.

    Raises:
      CalledProcessError: if the run fails.
    """
    command = [sys.executable, str(SCRIPTS / "train.py"), *arguments]
    variables = {"JAX_COMPILATION_CACHE_DIR": str(programs)} if programs else {}
    process = subprocess.Popen(
        [*command, f"--workdir={folder}"], env={**os.environ, **variables}
    )
    known = 0
    try:
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_EVERY)
            # Other lines are those of the test before and after training.
            records = [r for r in metrics.read(folder) if "train/success" in r]
            if len(records) > known:
                known = len(records)
                yield records
    finally:
        _end(process)
    if process.returncode or not known:
        raise subprocess.CalledProcessError(process.returncode or 1, command)


def train(folder: Path, *arguments: str, programs: Path | None = None) -> list[dict]:
    """Runs a training to its end and returns its metrics. Args: as for `follow`."""
    *_, records = follow(folder, *arguments, programs=programs)
    return records


def _end(process: subprocess.Popen) -> None:
    """Ends a run that is still going, first by SIGTERM."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
