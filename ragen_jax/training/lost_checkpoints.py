"""Refuses a run whose checkpoints have vanished, or could not be saved later."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragen_jax.errors import UserError
from ragen_jax.settings import Settings
from ragen_jax.training import checkpoint_files as files


def check_link(directory: Path) -> None:
    """Raises UserError if a folder of steps is a link to what is not there."""
    if directory.is_symlink() and not directory.exists():
        raise UserError(
            f"{directory} is a link to {directory.readlink()}, which is not there:"
            " mount it or bring it back, or begin in another --workdir"
        )


def check_names(directory: Path, foreign: Sequence[str]) -> None:
    """Raises UserError for a file, a pipe or a dangling link with the name of a step.

    The save of that step would fail, and so again after each start.

    Args:
      directory: the folder of steps.
      foreign: of its `checkpoint_files.Survey`.
    """
    for name in foreign:
        if files.step_of(place := directory / name) is not None:
            raise UserError(
                f"{place} is no folder but has the name of a step, which cannot be"
                " saved there: move it away, then start the same command again"
            )


def check(
    workdir: Path,
    found: files.Survey,
    saved: Mapping[str, Any],
    settings: Settings,
    recorded: Sequence[Mapping[str, Any]],
    rollbacks: Sequence[Mapping[str, Any]],
) -> None:
    """Refuses a workdir whose metrics tell of a saved step, where none is left.

    A run that was killed before its first step was complete begins again. While that
    one is written the run goes on, up to the next save, which waits for it. So what
    tells is a record behind that, or one of the final test, which comes after a save.

    Args:
      workdir: of the run.
      found: in its folder of checkpoints.
      saved: the settings that the run had, as in its settings.json.
      settings: those of now. How often is saved may have changed.
      recorded: the run's metrics.
      rollbacks: the run's. One to the very beginning has deleted all steps.

    Raises:
      UserError: naming the iteration that the records reach.
    """
    folder = workdir / files.FOLDER
    if found.scores or found.damaged or files.set_aside(folder):
        return  # Damaged ones are reported when the run resumes.
    reached = max((record["iteration"] for record in recorded), default=0)
    last = rollbacks[-1] if rollbacks else {"to": 1}
    if last["to"] == 0 and reached <= last["from"]:
        return
    was_tested = any(name.startswith("test/") for one in recorded for name in one)
    if was_tested or reached > _second_save(saved, settings):
        raise UserError(
            f"{workdir} has metrics up to iteration {reached}, but its checkpoints are"
            f" gone from {folder}: restore them from a copy, or begin in another"
            " --workdir"
        )


def _second_save(saved: Mapping[str, Any], settings: Settings) -> int:
    """The iteration by which a run that goes on has a complete step."""
    every = saved.get("every")
    was = every.get("checkpoint") if isinstance(every, dict) else None
    total = saved.get("iterations")
    known = [settings.every.checkpoint, was if isinstance(was, int) else 0]
    if 0 in known:  # It saves at its end alone.
        return max(settings.iterations, total if isinstance(total, int) else 0)
    return 2 * max(known)
