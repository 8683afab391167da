"""JSON files of others, read within limits."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 100 * 2**20  # The largest tokenizer.json of a published model is a fifth.


def read_object(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
      OSError: if it cannot be read.
      ValueError: if it is a pipe or a device, too long, nested too deeply, or holds
        anything but one JSON object.
    """
    check_regular(path, MOST_BYTES)
    return parse_object(path.read_bytes())


def parse_object(data: bytes) -> dict[str, Any]:
    """The object that a text holds. Raises ValueError if there is none."""
    try:
        parsed = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise ValueError("not an object")
    return parsed


def check_regular(path: Path, most_bytes: int | None = None) -> None:
    """Refuses what has no end, or a later one than is sensible.

    Args:
      path: of a file; links are followed.
      most_bytes: that the file may have; None: any.

    Raises:
      OSError: if there is none, or it is a folder.
      ValueError: if it is a pipe or a device, or too long.
    """
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is a pipe or a device")
    if most_bytes is not None and found.st_size > most_bytes:
        raise ValueError(f"it has {found.st_size} bytes, more than {most_bytes}")
