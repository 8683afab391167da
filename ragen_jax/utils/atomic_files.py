"""Atomic writes: files and folders that appear complete or not at all."""

import contextlib
import errno
import io
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

from ragen_jax.errors import UserError
from ragen_jax.utils import endings


@contextlib.contextmanager
def new_file(path: Path, *, binary: bool = False) -> Iterator[IO]:
    """A context with an open file, which becomes `path` when the context ends.

    The file is synced to disk before it replaces an older one, so that a kill leaves
    either the old file or the new one. If the block raises, or a signal ends the
    process within it, the old one stays and nothing else is left behind.

    Args:
      path: in an existing folder.
      binary: write bytes; else text in UTF-8.
    """
    check_replaceable(path)
    # In the same folder, so that it can be renamed; one per process.
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with endings.delete_on_exit(scratch):
        try:
            buffered = io.BufferedWriter(raw := _NamedFile(scratch, path))
            with buffered if binary else io.TextIOWrapper(buffered, "utf-8") as file:
                yield file
                file.flush()
                raw.sync()
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


class _NamedFile(io.FileIO):
    """A file whose errors of writing name it: the system's do not.

    Those of the block that writes it may be of something else, as of a connection.
    """

    def __init__(self, scratch: Path, path: Path):
        self._path = path
        with self._naming():
            super().__init__(scratch, "w")

    def write(self, data: Any, /) -> int:
        with self._naming():
            return super().write(data)

    def sync(self) -> None:
        with self._naming():
            os.fsync(self.fileno())

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self._path)
            raise


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A context with a folder to write into, which becomes `folder` when it ends.

    If the block raises, or a signal ends the process within it, nothing is left behind.

    Args:
      folder: absent or empty; its parents are created.

    Raises:
      UserError: if `folder` is not empty.
    """
    if folder.is_file() or (folder.exists() and any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; give a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In the same parent, so that it can be renamed.
    scratch = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    try:
        scratch.mkdir()  # Unlike a temporary folder, as open as the user's others.
        with endings.delete_on_exit(scratch):
            yield scratch
            if folder.exists():
                folder.rmdir()
            scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def remove(path: Path) -> None:
    """Deletes a folder, or a file or link in its place, as far as that is allowed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Has the disk hold a folder's entries: names of new files, renames, deletions.

    Raises:
      OSError: if the disk fails or is full. Where folders cannot be synced, as on some
        network file systems, nothing is done.
    """
    try:
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENOENT):
            raise


def check_replaceable(path: Path) -> None:
    """Raises UserError for a folder or a device, which must not be replaced."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device, not a file"
        raise UserError(f"{path} is {kind}: name a file")


def clear_scraps(folder: Path, names: Collection[str]) -> None:
    """Deletes temporary files of `new_file` whose processes have ended.

    Args:
      folder: to search; other files in it are left alone.
      names: of the files that `new_file` writes there.
    """
    for path in folder.iterdir():
        match = re.fullmatch(r"\.(.+)\.(\d+)", path.name)
        if match is None or match[1] not in names or path.is_dir():
            continue
        if not _is_alive(int(match[2])):
            path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # It belongs to another user.
    return True


def write_text(path: Path, text: str) -> None:
    """Writes a text file by `new_file`."""
    with new_file(path) as file:
        file.write(text)
