"""A small disk, a tmpfs, that tests fill; only root may mount one."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


def why_not() -> str:
    """Why no disk can be mounted here; "" if one can."""
    if not sys.platform.startswith("linux") or not shutil.which("mount"):
        return "this is not Linux, or has no mount"
    if os.geteuid() != 0:
        return "only root may mount a disk"
    with tempfile.TemporaryDirectory() as folder:
        tried = _mount(Path(folder), 1)
        if tried.returncode == 0:
            _unmount(Path(folder))
    return tried.stderr.strip()


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: float) -> Iterator[Path]:
    """Within it a folder is a disk of so many MiB, which is gone afterwards."""
    done = _mount(folder, mebibytes)
    assert done.returncode == 0, done.stderr
    try:
        yield folder
    finally:
        _unmount(folder)


def fill(path: Path, *, leave: int = 0) -> None:
    """Writes a file that takes all the room of its disk but so many bytes."""
    with path.open("wb", buffering=0) as file:
        for size in (65536, 4096):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size) == size:
                    pass
        file.truncate(max(0, file.tell() - leave))


def _mount(folder: Path, mebibytes: float) -> subprocess.CompletedProcess:
    options = f"size={int(mebibytes * 1024)}k"
    return subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )


def _unmount(folder: Path) -> None:
    # Lazily: a process that was killed may still be letting go of its files.
    subprocess.run(["umount", "-l", str(folder)], check=True)
