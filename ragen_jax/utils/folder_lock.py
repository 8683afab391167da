"""A lock on a folder, which the operating system frees when its process ends."""

import contextlib
import errno
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ragen_jax.errors import UserError

try:
    import fcntl
except ImportError:  # Not a POSIX system: folders are not locked.
    fcntl = None  # type: ignore[assignment]

FILE = ".lock"
# The file system has no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# Of the lock's name: a link, or what is no regular file.
_NO_FILE = (errno.ELOOP, errno.ENXIO)
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)  # Another process holds it.


@contextlib.contextmanager
def held(folder: Path, what: str, flag: str = "--workdir") -> Iterator[bool]:
    """A context in which this process alone holds the folder.

    The lock is `flock` on FILE in the folder. It ends with the process, however that
    ends; a leftover file does not matter. On NFS and Lustre it holds across hosts if
    they are mounted with locks.

    Args:
      folder: an existing one.
      what: this process does there, as "trains"; for messages of other processes.
      flag: the flag that names the folder; for the message of this process.

    Yields:
      False if the file system has no locks, so that the folder is not protected.

    Raises:
      UserError: naming the host and process that hold the folder, or saying why it
        cannot be written to.
    """
    path = folder / FILE
    while True:
        try:
            file = _open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise UserError(
                    f"{path} is a link, a pipe or a device, not the lock of a run:"
                    " move it away, or choose another folder"
                ) from error
            raise UserError(
                f"{path} cannot be written ({error.strerror}): choose a writable"
                " folder on a disk with free space"
            ) from error
        with file:
            is_locked = _take(file, folder, what, flag)
            # The last holder deletes the file: this may have locked a deleted one.
            if not _is_still(path, file):
                continue
            try:
                yield is_locked
            finally:
                path.unlink(missing_ok=True)
            return


def is_held(folder: Path) -> bool:
    """Whether another process holds the folder now; False if that cannot be known.

    It writes nothing. If a dead process left its file, this takes a shared lock on it
    for a moment, during which `held` would fail in another process.

    Args:
      folder: which need not exist.
    """
    if fcntl is None:
        return False
    try:
        file = _open(folder / FILE, os.O_RDONLY)
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _TAKEN
    return False


def _open(path: Path, flags: int) -> IO[str]:
    """Opens a regular file for reading, and without waiting or following a link.

    Raises:
      OSError: if it cannot be opened, with an errno of _NO_FILE if it is no such file.
    """
    # Not every system has the two.
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    number = os.open(path, flags, 0o666)
    is_regular = stat.S_ISREG(os.fstat(number).st_mode)
    if not is_regular:
        os.close(number)
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), str(path))
    return os.fdopen(number, "r", encoding="utf-8")


def _is_still(path: Path, file: IO[str]) -> bool:
    """Whether `path` still names the open file."""
    with contextlib.suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _take(file: IO[str], folder: Path, what: str, flag: str) -> bool:
    """Locks the file and writes the holder into it. Args, errors: as of `held`."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        if error.errno not in _TAKEN:
            raise
        raise UserError(
            f"{folder} is in use: {_holder(file, what)}; wait for it, end it, or"
            f" choose another {flag}"
        ) from None
    with contextlib.suppress(OSError):  # A full disk does not undo the lock.
        os.ftruncate(file.fileno(), 0)
        entry = {"host": socket.gethostname(), "process": os.getpid(), "what": what}
        # Unbuffered: a failed write would be repeated, and raise, on closing the file.
        os.write(file.fileno(), (json.dumps(entry) + "\n").encode())
    return True


def _holder(file: IO[str], what: str) -> str:
    """A clause that names the holder, from the file, and what it does there.

    If the file does not say, the holder is assumed to do `what`.
    """
    file.seek(0)
    try:
        entry = json.loads(file.read(10_000))
        return (
            f"process {entry['process']} on host {entry['host']} {entry['what']} there"
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"another process {what} there"
