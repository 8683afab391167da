"""The record of a run's rollbacks: from and to which iterations, and why.

Read without JAX, as by a study; `trainer` and `loop` roll back.
"""

import json
from pathlib import Path
from typing import Any

from ragen_jax.errors import UserError
from ragen_jax.settings import Settings
from ragen_jax.utils import json_files
from ragen_jax.utils.atomic_files import new_file

FILE = "rollbacks.json"  # in a workdir


def read_rollbacks(workdir: Path) -> list[dict[str, Any]]:
    """The rollbacks of a run, in order; [] if it never rolled back.

    Raises:
      UserError: if the file is damaged. The settings to continue with follow from the
        number of rollbacks, so none may be assumed instead.
    """
    path = workdir / FILE
    if not path.exists():
        return []
    try:
        parsed = json_files.read(path)
        is_sound = isinstance(parsed, list) and all(map(is_rollback, parsed))
    except ValueError:
        is_sound = False
    if not is_sound:
        raise UserError(
            f"{path} is not readable as a run's rollbacks, which say with what settings"
            " it continues: restore that file from a copy, or begin again in another"
            " --workdir"
        )
    return parsed


def is_rollback(entry: Any) -> bool:
    """Whether it is an entry as `note_rollback` writes them."""
    if not isinstance(entry, dict):
        return False
    # Earlier versions did not record the remedy.
    texts = entry.get("why"), entry.get("remedy", "")
    numbers = entry.get("from"), entry.get("to")
    return all(isinstance(text, str) for text in texts) and all(
        isinstance(number, int) and 0 <= number < 2**31 for number in numbers
    )


def note_rollback(workdir: Path, at: int, to: int, sentence: str, remedy: str) -> None:
    """Adds a rollback from iteration `at` to `to`.

    To be called before the later checkpoints are deleted, so that none goes unrecorded.
    """
    new = {"from": at, "to": to, "why": sentence, "remedy": remedy}
    rollbacks = [*read_rollbacks(workdir), new]
    path = workdir / FILE
    with new_file(path) as file:
        file.write(json.dumps(rollbacks, indent=2) + "\n")


def check_remedy(workdir: Path, settings: Settings) -> None:
    """Raises UserError if the run rolled back under another `health.remedy` than now.

    Resuming finds its settings by applying the remedy once for each rollback.
    """
    now = settings.health.remedy
    # Earlier versions did not record the remedy; it is taken to be today's.
    earlier = {one.get("remedy", now) for one in read_rollbacks(workdir)} - {now}
    if earlier:
        raise UserError(
            f"health.remedy was {min(earlier)!r} when the run in {workdir} rolled back"
            f" and is {now!r}: go back to {min(earlier)!r}, or choose another --workdir"
        )
