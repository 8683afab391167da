"""Whether a step of a run can be read: all processes come to one verdict.

A process that took another branch than the rest would leave them waiting for it in the
next collective; and process 0 alone renames what is damaged.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from ragen_jax.errors import UserError
from ragen_jax.training import checkpoint_files as files

# What a process tells the others: this, the number of the first damaged file, or one of
# the numbers below. The least counts.
_WHOLE = 2**31 - 1
_DAMAGED, _UNREADABLE = -1, -2


def verify(folder: Path, leaves: Collection[str] | None) -> bool:
    """Whether a step has digests, by which its files were verified.

    Each process reads its share of the files.

    Args:
      folder: of the step.
      leaves: of the state, that are going to be read; None: all.

    Raises:
      UserError: in every process, if one cannot read a file.
      DamagedError: in every process, if a file is not as it was written.
    """
    index, count = jax.process_index(), jax.process_count()
    number, has_digests, names = _WHOLE, False, []
    error: UserError | None = None
    try:
        has_digests = files.has_digests(folder)
        if has_digests:
            names = sorted(files.read_digests(folder))
            is_mine = lambda number: number % count == index
            damaged = files.damaged_file(folder, leaves, is_mine)
            if damaged is not None:
                number, error = names.index(damaged[0]), files.damage(folder, *damaged)
    except files.DamagedError as found:
        number, error = _DAMAGED, found
    except UserError as found:
        number, error = _UNREADABLE, found
    if count > 1:
        error = _of_all(folder, names, number, error)
    if error is not None:
        raise error
    return has_digests


def _of_all(
    folder: Path, names: Sequence[str], number: int, error: UserError | None
) -> UserError | None:
    """The error that all processes raise; this one has come to `number` and `error`."""
    every = np.atleast_1d(multihost_utils.process_allgather(np.int32(number)))
    first, process = int(every.min()), int(every.argmin())
    if first == number:
        return error
    if first == _UNREADABLE:
        return UserError(
            f"process {process} cannot read checkpoint {folder}, and its output says"
            " why: let every host read it, then start the same command again"
        )
    if first == _DAMAGED or first >= len(names):
        return files.DamagedError(
            f"Checkpoint {folder} is damaged, as process {process} sees it; delete that"
            " folder and use another step."
        )
    return files.damage(folder, names[first], "is not as it was written")
