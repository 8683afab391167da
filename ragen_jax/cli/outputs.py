"""Whether what --out names can be written, before anything expensive starts."""

import os
import tempfile
from pathlib import Path

from ragen_jax.cli.startup import local_path, make_workdir, user_mistakes
from ragen_jax.errors import UserError
from ragen_jax.utils import atomic_files, workdir_files


def check_out(path: str) -> Path:
    """The path of --out, after checking that a file can be written there.

    Raises:
      UserError: if it is a folder, a device, a file that a run keeps, or nothing can be
        written there.
    """
    out = local_path("out", path)
    with user_mistakes():
        _exists(out)
        atomic_files.check_replaceable(out)
    refuse_files_of_a_run(out)
    try:
        make_workdir(str(out.parent))
    except UserError as error:
        raise UserError(
            f"--out={path} cannot be written ({error.__cause__}): name a file in a"
            " folder that is writable, on a disk with free space"
        ) from None
    return out


def check_out_folder(path: str) -> Path:
    """The path of --out, after checking that a new folder can be made there.

    Raises:
      UserError: if it holds anything, is a file, stands among a run's checkpoints, or
        cannot be made.
    """
    out = local_path("out", path)
    refuse_files_of_a_run(out)
    with user_mistakes():
        if _exists(out) and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"--out={path} exists and is not empty: name a new folder")
    place = next(folder for folder in out.parents if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UserError(
            f"--out={path} cannot be written ({error.strerror}): name a new folder in"
            " one that is writable, on a disk with free space"
        ) from None
    return out


def _exists(path: Path) -> bool:
    """`Path.exists`, but raises the errors that it hides.

    Such as those of circular links and of names that are too long.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):  # Its parent is checked later.
        return False
    return True


def refuse_files_of_a_run(out: Path) -> None:
    """Raises UserError for a file that a run keeps, or a place among its checkpoints.

    A run is known by its settings.
    """
    with user_mistakes():  # A part of a run may be a link that leads elsewhere.
        places = {Path(os.path.abspath(out)), out.resolve()}
    for place, workdir in [(p, parent) for p in places for parent in p.parents]:
        name = place.relative_to(workdir).parts[0]
        if name in workdir_files.KEPT and (workdir / workdir_files.SETTINGS).exists():
            raise UserError(
                f"--out={out} would change what the run in {workdir} keeps: name"
                " another path"
            )
