"""Room on the disk for a run's checkpoints, estimated before the first iteration."""

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from ragen_jax.errors import UserError
from ragen_jax.training import messages, weights
from ragen_jax.training.checkpoint_files import FOLDER
from ragen_jax.training.run import Run

_COMPRESSED = 0.85  # lower bound of (bytes of a checkpoint's files) / (bytes of state)
_MIB, _GIB = 2**20, 2**30


def check(
    workdir: Path, run: Run, saved: Sequence[int], report: Callable[[str], None]
) -> None:
    """Refuses a disk without room for one checkpoint; warns if all do not fit.

    A run whose iterations are done saves none.

    Args:
      workdir: that exists.
      run: whose state is going to be saved.
      saved: steps of the checkpoints that are there already.
      report: shows a warning.

    Raises:
      UserError: with the room that is needed and the room that there is.
    """
    if max(saved, default=0) >= run.settings.iterations:  # The test alone is missing.
        return
    place = workdir / FOLDER  # Which may be a link to another disk.
    place = place.resolve() if place.is_symlink() else workdir
    keep, free = run.settings.checkpoint, shutil.disk_usage(place).free
    size = state_bytes(run)
    if free < _COMPRESSED * size:
        remedy = "free space there or choose another --workdir"
        if saved:
            remedy = f"free space there; {messages.last_saved(workdir)}"
        raise UserError(
            f"{place} has {_shown(free)} of room, and one checkpoint of this run"
            f" takes about {_shown(size)}: {remedy}"
        )
    # One more than are kept: the oldest goes when the newest is whole.
    most = min(keep.keep_last + keep.keep_best + 1, run.settings.iterations)
    more = max(1, most - len(saved))
    if free < _COMPRESSED * size * more:
        report(
            f"warning: {place} has {_shown(free)} of room; {more} more"
            f" checkpoints (checkpoint.keep_last = {keep.keep_last}, keep_best ="
            f" {keep.keep_best}) take about {_shown(more * size)}"
        )


def state_bytes(run: Run) -> int:
    """Bytes of a run's whole state: weights and moments of actor and critic."""
    leaves = jax.tree.leaves(weights.abstract_state(run))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _shown(size: float) -> str:
    """Bytes in the unit that shows them."""
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"
