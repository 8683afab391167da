"""A lock on a folder, held by the operating system and freed by any death."""

import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ragen_jax.errors import UserError

try:
    import fcntl
except ImportError:  # Not a POSIX system: there is no such lock.
    fcntl = None  # type: ignore[assignment]

FILE = ".lock"
# A file system that has no locks, or none that reach other hosts.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)  # by another process


@contextlib.contextmanager
def held(folder: Path, what: str, flag: str = "--workdir") -> Iterator[bool]:
    """Within it no other process holds the folder; whether the system could lock it.

    The lock is `flock` on FILE in the folder. It is gone as soon as the process is, in
    whatever way it ends; a file that stays means nothing by itself. NFS and Lustre
    pass it on to other hosts if they are mounted with locks; where there are none, the
    folder is not protected, and the value is False.

    Args:
      folder: that exists.
      what: is done there; for the message to others.
      flag: that named the folder; for the message of who comes second.

    Raises:
      UserError: naming the host and the process that hold it, or why nothing can be
        written there.
    """
    path = folder / FILE
    while True:
        try:
            file = path.open("a+")
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror}): choose a folder of yours"
                " on a disk with room"
            ) from error
        with file:
            is_locked = _take(file, folder, what, flag)
            if not _is_still(path, file):  # Its last holder took it away just now.
                continue
            try:
                yield is_locked
            finally:
                path.unlink(missing_ok=True)
            return


def is_held(folder: Path) -> bool:
    """Whether another process holds the folder now; False where nothing can tell.

    Nothing is written there. Where a holder died, this look has the lock for a moment,
    in which `held` would be refused; where none ever was, or it ended, it has not.

    Args:
      folder: that need not exist.
    """
    if fcntl is None:
        return False
    try:
        file = (folder / FILE).open()
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _TAKEN
    return False


def _is_still(path: Path, file: IO[str]) -> bool:
    """Whether an open file is the one that has the name."""
    with contextlib.suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _take(file: IO[str], folder: Path, what: str, flag: str) -> bool:
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
    with contextlib.suppress(OSError):  # A full disk: the lock is held all the same.
        file.truncate(0)
        own = {"host": socket.gethostname(), "process": os.getpid(), "what": what}
        # Past the file's buffer, which would try it again when the file is closed.
        os.write(file.fileno(), (json.dumps(own) + "\n").encode())
    return True


def _holder(file: IO[str], what: str) -> str:
    """Who holds the lock, as it wrote itself down; it does `what` if it did not."""
    file.seek(0)
    try:
        own = json.loads(file.read(10_000))
        return f"process {own['process']} on host {own['host']} {own['what']} there"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"another process {what} there"
