"""Errors of the machine that the user can fix, such as a full disk or a bad path.

Wherever they are raised, the commands end with `sentence`, not with a traceback.
"""

import contextlib
import errno
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

# What the user can do, by errno.
REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, for your quota is used up",
    errno.EFBIG: "files may not grow so large there: raise that limit (ulimit -f)",
    errno.EROFS: "choose a place that can be written to",
    errno.EACCES: "fix its permissions, or choose a place that you may write to",
    errno.EPERM: "fix its permissions, or choose a place that you may write to",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "its links lead in a circle: choose another path",
    errno.ENOENT: "bring it back if it was moved, deleted or unmounted, or choose"
    " another path",
    errno.EEXIST: "it is a file, not a folder: choose another path",
    errno.EISDIR: "it is a folder: name a file",
    errno.ENOTDIR: "a part of its path is not a folder: choose another path",
    errno.ENXIO: "it is a device: name a file",
    errno.ENODEV: "it is a device: name a file",
    errno.EIO: "the disk, or the connection to it, fails: choose another place",
    errno.ESTALE: "the network's file system was mounted again: start again",
    errno.EMFILE: "too many files are open: raise that limit (ulimit -n)",
}
# How Rust libraries end the messages of their own errors.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_PACKAGE = Path(__file__).parent.parent
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _where(error: BaseException) -> str:
    """As " in update (optimize.py)": the last function of this package in it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).is_relative_to(_PACKAGE)]
    return f" in {own[-1].name} ({Path(own[-1].filename).name})" if own else ""


def sentence(error: BaseException) -> str:
    """What is wrong and what to do; "" for an error that the user cannot fix."""
    if needs_more_memory(error):
        return (
            f"memory is full{_where(error)} ({brief(error)}): lower what is computed at"
            " once, as rollout.slots, evaluation.slots, optimizer.microbatch or the"
            " number of prompts; launch/train.py --plan tells what takes it"
        )
    if isinstance(error, RuntimeError):
        # `Path.expanduser` and `Path.resolve` raise plain RuntimeErrors.
        text = str(error)
        if "home directory" in text:
            return "a path begins with ~ and a user who is not known here: write it out"
        if "Symlink loop" in text:
            return f"{text}: its links lead in a circle: choose another path"
        return ""
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return "a path has a null character in it: choose another path"
    if not isinstance(error, OSError) or error.errno not in REMEDIES:
        return ""
    where = error.filename2 or error.filename
    reason = os.strerror(error.errno)
    place = f"{os.fsdecode(where)}: " if isinstance(where, str | bytes) else ""
    return f"{place}{reason}: {REMEDIES[error.errno]}"


def needs_more_memory(error: BaseException) -> bool:
    """Whether the host's or a device's memory is full: NumPy's and JAX's errors.

    JAX's is a RuntimeError, and known by its text, as JAX is not imported here. Other
    resources may be exhausted, too.
    """
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return (
        isinstance(error, RuntimeError | ValueError)
        and text.startswith("RESOURCE_EXHAUSTED")
        and re.search("memory|allocat", text, re.IGNORECASE) is not None
    )


def brief(error: BaseException) -> str:
    """An error's first line, a long one without its middle: the cause is at the end."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line if len(line) <= 200 else f"{line[:80]} ... {line[-115:]}"


@contextlib.contextmanager
def as_os_errors(path: Path) -> Iterator[None]:
    """A context that turns Rust libraries' errors of system calls into OSErrors.

    safetensors and tokenizers raise other classes, for a full disk for example.

    Args:
      path: of the file that is written, which an error of writing does not name.

    Raises:
      OSError: in place of such an error, with its errno.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # Else it has a text of its own.
            error.filename = error.filename or str(path)
        raise
    except Exception as error:
        match = _OS_ERROR.search(str(error))
        if match is None:
            raise
        number = int(match[1])
        raise OSError(number, os.strerror(number), str(path)) from error
