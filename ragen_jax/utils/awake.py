"""Time limits that count only the time in which this process may run.

The clocks go on while a process is suspended (SIGSTOP, as by Ctrl-Z or `scontrol
suspend`). So steps are counted here, of at most a second: a suspension of any length
falls into one of them.
"""

import math
import threading
from collections.abc import Callable


def comes_true(wait: Callable[[float], object], seconds: float) -> bool:
    """Waits until something is true, for so many seconds of this process being awake.

    Args:
      wait: takes seconds, such as `threading.Event.wait`; tells whether it is true.
      seconds: the limit.

    Returns:
      Whether it came true.
    """
    steps = max(50, math.ceil(seconds))
    return any(wait(seconds / steps) for _ in range(steps))


class Timer(threading.Timer):
    """A timer of threading's that leaves out the time of a suspension."""

    def run(self) -> None:
        if not comes_true(self.finished.wait, self.interval):
            self.function(*self.args, **self.kwargs)
        self.finished.set()
