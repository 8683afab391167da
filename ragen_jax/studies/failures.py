"""Why a run of a study failed, kept in its folder and shown on the study's page.

And what a run warned of, which is shown where the study runs.
"""

import contextlib
import json
from pathlib import Path

from ragen_jax.errors import UserError
from ragen_jax.studies import record_checks
from ragen_jax.utils import atomic_files

LOG = "study.log"  # what the run printed
FILE = "study_failure.json"
_MOST_WARNINGS = 3  # An alarm can warn in every iteration.


def keep(workdir: Path, exit_code: int) -> str:
    """Keeps why a run failed, where that can be written; returns its log's last line.

    Args:
      workdir: of the run; it may be gone.
      exit_code: of its process.
    """
    lines = _log_lines(workdir)
    last = lines[-1] if lines else ""
    record = {"exit_code": exit_code, "last_line": last}
    # One folder that cannot be written to must not end the other runs.
    with contextlib.suppress(OSError, UserError):
        atomic_files.write_text(workdir / FILE, json.dumps(record) + "\n")
    return last


def warnings(workdir: Path) -> list[str]:
    """The first different warnings that a run printed, as lines."""
    told = (line for line in _log_lines(workdir) if line.startswith("warning: "))
    return list(dict.fromkeys(told))[:_MOST_WARNINGS]


def _log_lines(workdir: Path) -> list[str]:
    """What a run printed; [] where that cannot be read."""
    with contextlib.suppress(OSError):
        log = (workdir / LOG).read_text(encoding="utf-8", errors="replace")
        return log.strip().splitlines()
    return []


def why(workdir: Path) -> str:
    """Why a run failed, as `keep` kept it: its exit code and its log's last line.

    Raises:
      UserError: if the file is damaged.
    """
    failure = record_checks.read_json(
        workdir / FILE, "a run's failure", record_checks.check_object
    )
    return f"exit code {failure.get('exit_code')}: {failure.get('last_line')}"


def why_not_started(error: OSError | UserError) -> str:
    """Why a run could not be started, and what to do, by what it raised."""
    if isinstance(error, UserError):
        return str(error)
    return (
        f"{error.filename or 'its folder'} cannot be used ({error.strerror or error}):"
        " move away what stands there, or see that it is writable, on a disk with free"
        " space"
    )
