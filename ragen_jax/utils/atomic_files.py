"""Files and folders that appear whole or not at all."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from ragen_jax.errors import UserError
from ragen_jax.utils import endings


@contextlib.contextmanager
def new_file(path: Path, *, binary: bool = False) -> Iterator[IO]:
    """Within the block an open file to write to, which then becomes `path`.

    It is on disk before it takes the place of an older one, so that a kill leaves the
    old file or the new one. If the block fails the old one stays.

    Args:
      path: in a folder that exists.
      binary: whether bytes are written, or text in UTF-8.
    """
    check_replaceable(path)
    # Beside it, so that it can be renamed; each process has its own.
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    mode, encoding = ("wb", None) if binary else ("w", "utf-8")
    try:
        with scratch.open(mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Within the block a folder to write into, which then becomes `folder`.

    If the block fails, or a signal ends the process in it, nothing is left of it.

    Args:
      folder: must not exist, or be empty; parents are made.

    Raises:
      UserError: if `folder` holds anything.
    """
    if folder.is_file() or (folder.exists() and any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; give a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, so that it can be renamed.
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        with endings.discarding(scratch):
            yield scratch
            if folder.exists():
                folder.rmdir()
            os.chmod(scratch, 0o755)  # A temporary folder is its owner's alone.
            scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def check_replaceable(path: Path) -> None:
    """Raises UserError for a folder or a device, which a file must not replace."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device, not a file"
        raise UserError(f"{path} is {kind}: name a file")


def clear_scraps(folder: Path, names: Collection[str]) -> None:
    """Deletes what processes that are gone were writing into a folder.

    Args:
      folder: where nobody writes those files now. A user's own may lie there, too.
      names: of the files that `new_file` makes there.
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
        pass  # Somebody else's.
    return True


def write_text(path: Path, text: str) -> None:
    """Writes a text file whole, or not at all."""
    with new_file(path) as file:
        file.write(text)
