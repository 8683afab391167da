"""Checkpoints over Orbax: asynchronous, atomic, kept by recency and by score.

A run's checkpoints lie in WORKDIR/checkpoints, one folder a step. Orbax writes a folder
under a temporary name and renames it when all of it is there, so that a folder whose
name is a number is whole, whenever the process was killed:

  checkpoints/120/info/info.json   settings and metrics, readable without any array
  checkpoints/120/state/LEAF/      an array's parts, for each leaf's dotted path
  checkpoints/120/digests.json     size and checksum of each file, verified on restoring

Leaves are saved under their paths as one flat table, so that optax's empty states and
named tuples need no rules of their own, and a part of a state can be read alone. What
needs no array is in checkpoint_files.py.
"""

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from ragen_jax.errors import UserError
from ragen_jax.parallel import distributed
from ragen_jax.parallel.agreement import agreed_flag, agreed_step
from ragen_jax.training import checkpoint_checks as checks
from ragen_jax.training import checkpoint_files as files
from ragen_jax.training import checkpoint_leaves as leaves
from ragen_jax.training import lost_checkpoints
from ragen_jax.training.checkpoint_files import (
    FOLDER,
    DamagedError,
    Found,
    find,
    read_info,
    scores,
    survey,
)
from ragen_jax.training.checkpoint_scores import best, kept, latest
from ragen_jax.training.interrupts import STALLED_SAVING
from ragen_jax.training.quiet import ignore_abandoned_parts, ignore_what_is_reported
from ragen_jax.utils import atomic_files, machine_errors

__all__ = [
    "FOLDER",
    "Checkpoints",
    "DamagedError",
    "Found",
    "best",
    "find",
    "kept",
    "read_info",
    "restore",
    "scores",
    "survey",
]

_MOST_ERRORS = 10  # of one save: it has fewer threads
_WRITE_ERRORS = (OSError, ValueError)  # TensorStore's "disk full" is a ValueError


class Checkpoints:
    """The checkpoints of a run that is being trained. One writer to a folder.

    Under several jax processes every process makes one and calls the same methods in
    the same order; the folder must be on storage that all of them see. Who only reads
    (evaluation, export) uses `find`, `read_info` and `restore` of this module.
    """

    def __init__(
        self, directory: str | Path, *, keep_last: int, keep_best: int, every: int = 1
    ):
        """Opens the folder, makes it if needed, and clears what was left half-done.

        Args:
          directory: WORKDIR/checkpoints.
          keep_last: how many of the latest steps that are due are kept, at least 1; the
            newest of all is kept as well.
          keep_best: how many of the steps with the highest score are kept besides.
          every: steps that are due are its multiples, at least 1.

        Raises:
          UserError: if a file or a link has the name of a step, or the folder is a link
            to none.
        """
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"need {keep_last=} >= 1 and {keep_best=} >= 0")
        lost_checkpoints.check_link(Path(directory))
        self.directory = Path(directory).resolve()
        chosen = {"keep_best": keep_best, "every": every}
        self._keep = functools.partial(kept, keep_last=keep_last, **chosen)
        self._latest = functools.partial(latest, **chosen)
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            files.clear_leftovers(self.directory)
        self._scores, self._damaged, self._foreign = survey(self.directory)
        lost_checkpoints.check_names(self.directory, self._foreign)
        self._pending: dict[int, float | None] = {}  # the save under way: its score
        self._writing = -1  # the step whose files are being written
        ignore_what_is_reported()
        ignore_abandoned_parts()
        # Created in the background, folders would keep the process from ending for
        # minutes after a save that is refused.
        options = ocp.AsyncOptions(
            timeout_secs=round(STALLED_SAVING),  # for the processes to meet
            create_directories_asynchronously=False,
            post_finalization_callback=self._write_digests,
        )
        self._writer = ocp.AsyncCheckpointer(leaves.handler(), async_options=options)

    def save(
        self,
        step: int,
        state: Any,
        info: Mapping[str, Any],
        *,
        score: float | None,
        wait: bool = False,
    ) -> bool:
        """Starts to write one step; returns once the arrays may be donated.

        The step counts as saved, and steps no longer kept are deleted, when `wait`,
        `close` or the next `save` has seen it finished; they raise its error, too.

        Args:
          step: finished iterations, the name of the folder.
          state: a pytree whose leaves are jax.Arrays: no typed PRNG keys, none empty.
          info: anything JSON can hold: settings, iteration, metrics.
          score: validation success, higher is better; None when not evaluated.
          wait: whether to return only when the step is complete on disk.

        Returns:
          Whether anything was written: a step that is already saved stays as it is.

        Raises:
          UserError: when this or the previous step cannot be written.
        """
        self.wait()
        if agreed_flag(step in self._scores):
            return False
        if score is not None and not np.isfinite(score):
            score = None
        record = dict(format=files.FORMAT, step=step, score=score, info=dict(info))
        json.dumps(record)  # A TypeError belongs here and not in the writer's thread.
        arguments = ocp.args.Composite(
            state=ocp.args.PyTreeSave(leaves.flat_arrays(state)),
            info=ocp.args.JsonSave(record),
        )
        self._writing = step
        try:
            self._writer.save(self.directory / str(step), args=arguments)
        except _WRITE_ERRORS as error:
            self._settle()
            raise self._unwritten(step, error) from error
        # Only now: if Ctrl-C or another error ends `save`, there is no such step.
        self._pending = {step: score}
        if wait:
            self.wait()
        return True

    def wait(self) -> None:
        """Waits until the started save is complete; deletes steps no longer kept."""
        for step, score in self._finish().items():
            if not agreed_flag(files.is_there(self.directory / str(step))):
                raise self._unwritten(step, FileNotFoundError("it is not there"))
            self._scores[step] = score
            if jax.process_index() == 0:  # The new name is on disk first.
                atomic_files.sync_folder(self.directory)
            keep = self._keep(self._scores)
            self._delete([step for step in self._scores if step not in keep])

    def _finish(self) -> dict[int, float | None]:
        """Waits for the started save, if there is one: {step: score}, or {}."""
        # Cleared first: if the wait is interrupted, the step does not count as saved.
        pending, self._pending = self._pending, {}
        error = self._settle()
        if pending and error is not None:
            (step,) = pending
            raise self._unwritten(step, error) from error
        return pending

    def _settle(self) -> Exception | None:
        """Waits until Orbax writes nothing any more; returns its first error.

        Its several threads can each fail; each wait raises one of their errors.
        """
        errors: list[Exception] = []
        while len(errors) < _MOST_ERRORS:
            try:
                self._writer.wait_until_finished()
                break
            except _WRITE_ERRORS as error:
                errors.append(error)
        return next(iter(errors), None)

    def steps(self) -> list[int]:
        """The complete steps, in order."""
        return sorted(self._scores)

    def latest_step(self, until: int | None = None) -> int | None:
        """The last complete step, or the one to return to; see checkpoint_scores."""
        self.wait()
        return agreed_step(self._latest(self._still_there(), until))

    def best_step(self) -> int | None:
        """The complete step of the highest score, the later of equals; else None."""
        self.wait()
        return agreed_step(best(self._still_there()))

    def _still_there(self) -> dict[int, float | None]:
        """Scores of the complete steps, without those deleted by hand meanwhile."""
        folders = {step: self.directory / str(step) for step in self._scores}
        return {s: score for s, score in self._scores.items() if folders[s].is_dir()}

    def read_info(self, step: int) -> dict[str, Any]:
        """The `info` that was saved with a step."""
        self.wait()
        return read_info(self.directory, step)

    def restore(self, step: int, abstract_state: Any) -> Any:
        """The state of a step on the devices that `abstract_state` asks for."""
        self.wait()
        return restore(self.directory, step, abstract_state)

    def restore_newest(
        self, abstract_state: Any, report: Callable[[str], None]
    ) -> tuple[int, Any] | None:
        """The last undamaged step and its state; None if there is no step.

        Each damaged step is renamed and reported, once: after a rollback this is called
        again, and a step of that number may have been saved anew.

        Raises:
          UserError: if nothing is whole, or a state does not fit.
        """
        foreign, self._foreign = self._foreign, []
        damaged, self._damaged = self._damaged, {}
        for name in foreign:
            report(f"{self.directory / name} is not a step's folder: it is ignored")
        for step, sentence in damaged.items():
            self._set_aside(step, sentence, report)
        while (step := self.latest_step()) is not None:
            try:
                return step, self.restore(step, abstract_state)
            except DamagedError as error:
                self._set_aside(step, str(error), report)
        # Damaged steps that were renamed now or at an earlier start.
        if agreed_flag(bool(files.set_aside(self.directory))):
            raise UserError(
                f"{self.directory} holds no whole checkpoint: restore one from a copy,"
                " or begin again in another --workdir"
            )
        return None

    def _set_aside(
        self, step: int, sentence: str, report: Callable[[str], None]
    ) -> None:
        """Renames a damaged step, to make room for a later save of the same step."""
        self._scores.pop(step, None)
        # The sentence without its remedy, which is for a folder that keeps its name.
        for advice in ("; delete that folder", ": give the folder"):
            sentence = sentence.partition(advice)[0]
        folder = self.directory / str(step)
        name = f"{step}{files.DAMAGED}"
        report(f"warning: {sentence}; set aside as {name}")
        if jax.process_index() == 0:
            atomic_files.remove(folder.with_name(name))
            os.rename(folder, folder.with_name(name))

    def delete_after(self, step: int) -> None:
        """Deletes every later step, damaged or not: a run resumes from `step`."""
        self.wait()
        gone = {later: self.directory / str(later) for later in self._damaged}
        self._damaged = {s: why for s, why in self._damaged.items() if s <= step}
        if jax.process_index() == 0:
            # Before the complete steps: as long as one of those is left, a process that
            # is killed here finishes the deletion when it is started again.
            for later, folder in (
                *gone.items(),
                *files.set_aside(self.directory).items(),
            ):
                if later > step:
                    atomic_files.remove(folder)
        self._delete([later for later in self._scores if later > step])

    def close(self) -> None:
        """Waits for the save under way and ends Orbax's threads."""
        self.wait()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
            return
        # The error may have cut the save short: no older step is deleted for it.
        self._finish()
        self._writer.close()

    def _write_digests(self) -> None:
        """Writes a step's last file, just before Orbax renames the folder."""
        if jax.process_index() == 0:
            (folder,) = self.directory.glob(f"{self._writing}{files.UNFINISHED}*")
            files.write_digests(folder)

    def _unwritten(self, step: int, error: Exception) -> UserError:
        """The error for a step that could not be written; deletes what was."""
        distributed.wait_for_verdict()  # The cause may be a lost process.
        if jax.process_index() == 0 and self.directory.is_dir():
            files.clear_leftovers(self.directory)
        last = max(self._still_there(), default=None)
        good = "none is saved yet" if last is None else f"{last} is whole"
        remedy = "free space there or fix its permissions"
        if not self.directory.is_dir():
            good, remedy = "and that folder is gone", "bring it back"
        return UserError(
            f"Checkpoint {step} could not be written to {self.directory}"
            f" ({machine_errors.brief(error)}), {good}; {remedy}, then start the same"
            " command again."
        )

    def _delete(self, steps: Sequence[int]) -> None:
        for step in steps:
            del self._scores[step]
            if jax.process_index() == 0:
                files.delete(self.directory / str(step))


def restore(
    directory: str | Path, step: int, abstract_state: Any, *, partial: bool = False
) -> Any:
    """The saved state of one step, on any mesh.

    Args:
      directory: a folder of steps.
      step: which of them.
      abstract_state: the state's pytree with a jax.ShapeDtypeStruct for each leaf; its
        `sharding` says where the array goes, None is the first device.
      partial: whether the checkpoint may hold more leaves than are asked for, such as
        the critic and the optimizers when only the actor is evaluated.

    Returns:
      The same pytree of jax.Arrays, bit for bit as saved.

    Raises:
      UserError: when the step is absent or unreadable, or a leaf differs in path,
        shape or dtype.
    """
    folder = Path(directory).resolve() / str(step)
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    requested = {
        path: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding or first
        )
        for path, leaf in leaves.flat(abstract_state).items()
    }
    has_digests = checks.verify(folder, requested if partial else None)
    ignore_abandoned_parts()
    # The handler itself: a Checkpointer would also want metadata that is not needed.
    reader, place = ocp.PyTreeCheckpointHandler(), epath.Path(folder / files.STATE)
    try:
        saved = reader.metadata(place).tree
        if difference := leaves.difference(saved, requested, partial):
            raise UserError(
                f"Checkpoint {folder} holds another state: {difference}; use the"
                f" settings that it was saved with (they are in {files.INFO}), or start"
                " in an empty workdir."
            )
        arguments = ocp.args.PyTreeRestore(
            item=requested,
            restore_args=ocp.checkpoint_utils.construct_restore_args(requested),
            partial_restore=True,
        )
        restored = reader.restore(place, args=arguments)
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # Orbax raises a bare Exception, too.
        distributed.wait_for_verdict()  # The cause may be a lost process.
        # After verification it is not damage: this machine or its disk cannot read it.
        # And the other processes may have read it.
        is_damage = not has_digests and jax.process_count() == 1
        kind = DamagedError if is_damage else UserError
        raise kind(
            f"Checkpoint {folder} cannot be read ({machine_errors.brief(error)});"
            " delete that folder and use another step."
        ) from error
    finally:
        reader.close()
    structure = jax.tree.structure(abstract_state)
    return jax.tree.unflatten(structure, [restored[path] for path in requested])
