"""Folders that appear whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ragen_jax.settings import UserError


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Within the block a folder to write into, which then becomes `folder`.

    If the block fails nothing is left of it.

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
        yield scratch
        if folder.exists():
            folder.rmdir()
        os.chmod(scratch, 0o755)  # A temporary folder is its owner's alone.
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
