"""Reads JSON files of unknown origin, with limits on size and nesting."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 100 * 2**20  # Five times the largest tokenizer.json of published models.
MOST_LEVELS = 100  # Functions that walk through what was read call themselves.


def read(path: Path) -> Any:
    """Reads the JSON value in a file.

    Raises:
      OSError: if it cannot be read.
      ValueError: if it is a pipe or a device, longer than MOST_BYTES, nested too
        deeply, or not a single JSON value.
    """
    return parse(read_bytes(path, MOST_BYTES))


def read_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file.

    Raises:
      OSError, ValueError: as `read`, and for any other value.
    """
    return _object(read(path))


def parse_object(data: bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises ValueError if the text is anything else."""
    return _object(parse(data))


def parse(data: bytes) -> Any:
    """Parses a JSON value. Raises ValueError if it is none, or nested too deeply."""
    try:
        parsed = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [parsed]
    for _ in range(MOST_LEVELS):
        branches = (node for node in level if isinstance(node, dict | list))
        level = [
            child
            for node in branches
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return parsed
    raise ValueError("it is nested too deeply")


def _object(parsed: Any) -> dict[str, Any]:
    if not isinstance(parsed, dict):
        raise ValueError("not an object")
    return parsed


def read_bytes(path: Path, most_bytes: int | None = None) -> bytes:
    """The bytes of a regular file. Args, errors: as of `check_regular`."""
    check_regular(path, most_bytes)
    return path.read_bytes()


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
