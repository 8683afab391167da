"""Ends a process with the one that started it, however that ends; on Linux alone."""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with(parent: int) -> None:
    """Has the kernel send SIGTERM to this process when its parent ends.

    What it counts from is the end of the thread that started this process, so that
    should be the parent's main thread.

    Args:
      parent: the number of the process that started this one.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # Another C library.
        number = ctypes.c_ulong(signal.SIGTERM)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # It had ended before.
        os.kill(os.getpid(), signal.SIGTERM)
