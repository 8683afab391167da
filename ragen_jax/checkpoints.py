"""Checkpoints over Orbax: asynchronous, atomic, kept by recency and by score.

A run's checkpoints lie in WORKDIR/checkpoints, one folder a step. Orbax writes a folder
under a temporary name and renames it when all of it is there, so that a folder whose
name is a number is whole, whenever the process was killed:

  checkpoints/120/info/info.json   settings and metrics, readable without any array
  checkpoints/120/state/           the arrays, one entry for each leaf's dotted path

Leaves are saved under their paths as one flat table, so that optax's empty states and
named tuples need no rules of their own, and a part of a state can be read alone.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from ragen_jax.quiet import ignore_abandoned_reads
from ragen_jax.settings import UserError

FOLDER = "checkpoints"  # inside a workdir
_FORMAT = "ragen_jax checkpoint, version 1"
_INFO = Path("info") / "info.json"
_DELETING = ".deleting"  # renamed first: a deletion cut short must not look whole
_UNFINISHED = ".orbax-checkpoint-tmp"
_WRITE_ERRORS = (OSError, ValueError)  # TensorStore's "disk full" is a ValueError


class Found(NamedTuple):
    """A checkpoint on disk: the folder of steps, the step, and why this step."""

    directory: Path
    step: int
    which: str  # "best" or "last" of its run, or "given" when the path named the step


class Checkpoints:
    """The checkpoints of a run that is being trained. One writer to a folder.

    Under several jax processes every process makes one and calls the same methods in
    the same order; the folder must be on storage that all of them see. Who only reads
    (evaluation, export) uses `find`, `read_info` and `restore` of this module.
    """

    def __init__(self, directory: str | Path, *, keep_last: int, keep_best: int):
        """Opens the folder, makes it if needed, and clears what was left half-done.

        Args:
          directory: WORKDIR/checkpoints.
          keep_last: how many of the latest steps are kept, at least 1.
          keep_best: how many of the steps with the highest score are kept besides.
        """
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"need {keep_last=} >= 1 and {keep_best=} >= 0")
        self.directory = Path(directory).resolve()
        self._keep_last, self._keep_best = keep_last, keep_best
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            _clear_leftovers(self.directory)
        self._scores = scores(self.directory)
        self._pending: dict[int, float | None] = {}  # being written now
        # Folders made in the background keep their thread waiting, and the process
        # from ending, for minutes when a save is refused.
        options = ocp.AsyncOptions(create_directories_asynchronously=False)
        self._writer = ocp.AsyncCheckpointer(_handler(), async_options=options)

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

        The step counts as saved, and steps that are no longer kept are deleted, when
        `wait`, `close` or the next `save` has seen it finished. An error of the write
        is raised there too.

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
        if _agreed(step in self._scores):
            return False
        if score is not None and not np.isfinite(score):
            score = None
        record = {"format": _FORMAT, "step": step, "score": score, "info": dict(info)}
        json.dumps(record)  # A TypeError belongs here and not in the writer's thread.
        arguments = ocp.args.Composite(
            state=ocp.args.PyTreeSave(_flat_arrays(state)),
            info=ocp.args.JsonSave(record),
        )
        try:
            self._writer.save(self.directory / str(step), args=arguments)
        except _WRITE_ERRORS as error:
            raise self._unwritten(step, error) from error
        self._pending = {step: score}
        if wait:
            self.wait()
        return True

    def wait(self) -> None:
        """Returns when the started save is complete and what it replaces deleted."""
        pending, self._pending = self._pending, {}
        try:
            self._writer.wait_until_finished()
        except _WRITE_ERRORS as error:
            raise self._unwritten(*pending, error) from error
        if pending:
            self._scores |= pending
            keep = kept(self._scores, self._keep_last, self._keep_best)
            self._delete([step for step in self._scores if step not in keep])

    def latest_step(self) -> int | None:
        """The last complete step; None when there is none."""
        self.wait()
        return _agreed_step(max(self._scores, default=None))

    def best_step(self) -> int | None:
        """The complete step of the highest score, the later of equals; else None."""
        self.wait()
        return _agreed_step(best(self._scores))

    def read_info(self, step: int) -> dict[str, Any]:
        """The `info` that was saved with a step."""
        self.wait()
        return read_info(self.directory, step)

    def restore(self, step: int, abstract_state: Any) -> Any:
        """The state of a step on the devices that `abstract_state` asks for."""
        self.wait()
        return restore(self.directory, step, abstract_state)

    def delete_after(self, step: int) -> None:
        """Deletes every later step: a run that goes on from `step` leaves them."""
        self.wait()
        self._delete([later for later in self._scores if later > step])

    def close(self) -> None:
        """Waits for the save under way and ends Orbax's threads."""
        self.wait()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _unwritten(self, step: int, error: Exception) -> UserError:
        return UserError(
            f"Checkpoint {step} could not be written to {self.directory}"
            f" ({_brief(error)}); free space there or mend its permissions, then"
            " start the same command again."
        )

    def _delete(self, steps: Sequence[int]) -> None:
        for step in steps:
            del self._scores[step]
            if jax.process_index() == 0:
                folder = self.directory / str(step)
                doomed = folder.with_name(folder.name + _DELETING)
                os.rename(folder, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def kept(
    step_scores: Mapping[int, float | None], keep_last: int, keep_best: int
) -> set[int]:
    """The steps to keep: the last few, and the best few of those with a score."""
    by_score = _by_score(step_scores)
    return {*sorted(step_scores)[-keep_last:], *by_score[:keep_best]}


def best(step_scores: Mapping[int, float | None]) -> int | None:
    """The step of the highest score, the later of equals; None without any score."""
    return next(iter(_by_score(step_scores)), None)


def scores(directory: str | Path) -> dict[int, float | None]:
    """The complete steps in a folder of steps, in order, each with its score."""
    folders = [path for path in Path(directory).glob("*") if _is_checkpoint(path)]
    steps = sorted(int(path.name) for path in folders)
    return {step: _read_record(Path(directory) / str(step))["score"] for step in steps}


def find(path: str | Path) -> Found:
    """The checkpoint that a path means.

    Args:
      path: a workdir or its folder of checkpoints (the best step by validation
        success, or the last one where none has been evaluated), or one step's folder.

    Raises:
      UserError: when there is no such path, or no checkpoint of ragen_jax in it.
    """
    path = Path(path).expanduser().resolve()
    if not path.is_dir():
        raise UserError(
            f"There is no folder {path}; give the workdir of a run, or a step's folder"
            f" such as WORKDIR/{FOLDER}/100."
        )
    if _is_checkpoint(path):
        return Found(path.parent, int(path.name), "given")
    directory = path / FOLDER if (path / FOLDER).is_dir() else path
    step_scores = scores(directory)
    if (step := best(step_scores)) is not None:
        return Found(directory, step, "best")
    if step_scores:
        return Found(directory, max(step_scores), "last")
    raise UserError(
        f"{path} holds no complete ragen_jax checkpoint; give the workdir of a run that"
        " has saved one (every.checkpoint says how often), or a step's folder."
    )


def read_info(directory: str | Path, step: int) -> dict[str, Any]:
    """The `info` that was saved with a step; restores no array."""
    return _read_record(Path(directory) / str(step))["info"]


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
    _read_record(folder)
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = {
        path: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding or first
        )
        for path, leaf in _flat(abstract_state).items()
    }
    ignore_abandoned_reads()
    reader = ocp.Checkpointer(_handler())
    try:
        saved = reader.metadata(folder).item_metadata["state"].tree
        if difference := _difference(saved, wanted, partial):
            raise UserError(
                f"Checkpoint {folder} holds another state: {difference}; use the"
                f" settings that it was saved with (they are in {_INFO}), or start in"
                " an empty workdir."
            )
        arguments = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        restored = reader.restore(folder, args=ocp.args.Composite(state=arguments))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"Checkpoint {folder} cannot be read ({_brief(error)});"
            " delete that folder and use another step."
        ) from error
    finally:
        reader.close()
    structure = jax.tree.structure(abstract_state)
    return jax.tree.unflatten(structure, [restored["state"][path] for path in wanted])


def _handler() -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(),
        info=ocp.JsonCheckpointHandler(filename=_INFO.name),
    )


def _by_score(step_scores: Mapping[int, float | None]) -> list[int]:
    """Steps with a score, the best first, of equals the later first."""
    scored = [step for step, score in step_scores.items() if score is not None]
    return sorted(scored, key=lambda step: (step_scores[step], step), reverse=True)


def _flat(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path, such as `actor.layers.query.kernel`."""
    leaves = jax.tree.leaves_with_path(tree)
    table = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in leaves
    }
    if len(table) < len(leaves):
        raise ValueError("two leaves of the state have the same dotted path")
    return table


def _flat_arrays(state: Any) -> dict[str, jax.Array]:
    table = _flat(state)
    for path, leaf in table.items():
        if not isinstance(leaf, jax.Array) or jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            raise TypeError(f"{path} is {type(leaf).__name__}, not a plain jax.Array")
        if leaf.size == 0:
            raise ValueError(f"{path} is empty, which Orbax cannot save")
    return table


def _difference(
    saved: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct], partial: bool
) -> str:
    """The first leaf in which two flat states differ, in words; "" when in none."""
    for path, leaf in wanted.items():
        if path not in saved:
            return f"{path} is missing there"
        there, here = (
            f"{np.dtype(side.dtype).name}{list(side.shape)}"
            for side in (saved[path], leaf)
        )
        if there != here:
            return f"{path} is {there} there and {here} here"
    extra = [] if partial else [path for path in saved if path not in wanted]
    return f"{extra[0]} is there and not here" if extra else ""


def _brief(error: Exception) -> str:
    """An error's first line; of a long one the two ends, the cause being the last."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line if len(line) <= 200 else f"{line[:80]} ... {line[-115:]}"


def _is_checkpoint(path: Path) -> bool:
    return path.name.isdigit() and (path / _INFO).is_file()


def _read_record(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UserError(
            f"There is no checkpoint {folder}; the steps in {folder.parent} are"
            f" {', '.join(map(str, scores(folder.parent))) or 'none'}."
        )
    try:
        record = json.loads((folder / _INFO).read_text())
    except (OSError, ValueError):
        record = None
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise UserError(
            f"{folder} is not a ragen_jax checkpoint (no {_INFO} that says"
            f" '{_FORMAT}'); give a workdir or a step's folder of this program."
        )
    return record


def _clear_leftovers(directory: Path) -> None:
    for path in directory.iterdir():
        if _UNFINISHED in path.name or path.name.endswith(_DELETING):
            shutil.rmtree(path, ignore_errors=True)


def _agreed(value: bool) -> bool:
    return bool(_agreed_number(int(value)))


def _agreed_step(step: int | None) -> int | None:
    number = _agreed_number(-1 if step is None else step)
    return None if number < 0 else number


def _agreed_number(number: int) -> int:
    """Process 0's number: network folders may look different to each process."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))
