"""Broadcasts of process 0's value, for decisions that all processes must take alike.

What each sees may differ, as files on a network folder do; and a process that takes
another branch than the rest waits for them for ever in the next collective. Every
process calls these functions, in the same order.
"""

import contextlib
import secrets
import time
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils


def agreed_number(number: int) -> int:
    """Process 0's `number`, an int32."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def agreed_flag(value: bool) -> bool:
    """Process 0's `value`."""
    return bool(agreed_number(int(value)))


def agreed_step(step: int | None) -> int | None:
    """Process 0's `step`: 0 or more, or None."""
    number = agreed_number(-1 if step is None else step)
    return None if number < 0 else number


def who_sees(folder: Path | None, seconds: float = 0.0) -> np.ndarray:
    """bool[processes]: who finds process 0's folder under the name it gives itself.

    Each host may have a folder of that name on a disk of its own. Where process 0 can
    write none of the marks by which this is told, nobody sees the folder.

    Args:
      folder: of this process; None: it has none.
      seconds: to wait for the mark, which network storage may show late.
    """
    number, is_first = secrets.randbits(31), jax.process_index() == 0
    if is_first and folder is not None:
        with contextlib.suppress(OSError):
            _mark(folder, number).touch()
    number = agreed_number(number)
    seen = folder is not None and _appears(_mark(folder, number), seconds)
    every = multihost_utils.process_allgather(np.bool_(seen))
    if is_first and folder is not None:
        with contextlib.suppress(OSError):
            _mark(folder, number).unlink(missing_ok=True)
    return np.atleast_1d(every)


def _appears(path: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _mark(folder: Path, number: int) -> Path:
    return folder / f".seen.{number}"
