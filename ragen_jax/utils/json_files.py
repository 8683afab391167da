"""Reads JSON files of unknown origin, with limits on size and nesting."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 100 * 2**20  # Five times the largest tokenizer.json of published models.


def read_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file.

    Raises:
      OSError: if it cannot be read.
      ValueError: if it is a pipe or a device, longer than MOST_BYTES, nested too
        deeply, or not a single JSON object.
    """
    check_regular(path, MOST_BYTES)
    return parse_object(path.read_bytes())


def parse_object(data: bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises ValueError if the text is anything else."""
    try:
        parsed = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise ValueError("not an object")
    return parsed


def check_regular(path: Path, most_bytes: int | None = None) -> None:
    """Checks that a path is a regular file of a sensible size.

    Args:
      path: to check; links are followed.
      most_bytes: the largest size allowed; None: any.

    Raises:
      OSError: if it does not exist, or is a folder.
      ValueError: if it is a pipe or a device, or too long.
    """
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is a pipe or a device")
    if most_bytes is not None and status.st_size > most_bytes:
        raise ValueError(f"it has {status.st_size} bytes, more than {most_bytes}")
