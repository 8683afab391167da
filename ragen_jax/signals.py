"""What comes to a run from outside its loop: a signal to end, and a clock that sees it
stall."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


class Signals:
    """Turns SIGINT and SIGTERM into a flag that is polled once an iteration.

    One process: its own handlers. Several: jax passes a SIGTERM that any process gets
    to all of them and names the iteration at which they stop together; a Ctrl-C is
    handed on as a SIGTERM. A second Ctrl-C raises KeyboardInterrupt in either case.
    Enter it in the main thread, after jax.distributed.initialize.
    """

    def __init__(self, tell: Callable[[str], None]):
        """`tell` says to the user at once that a Ctrl-C was seen."""
        self._tell = tell
        self._received = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._several = jax.process_count() > 1
        # With several processes SIGTERM belongs to jax's own notifier.
        own = (signal.SIGINT,) if self._several else (signal.SIGINT, signal.SIGTERM)
        for number in own:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def should_stop(self, iteration: int) -> bool:
        """Whether to save now and end. Every process asks once in every iteration."""
        if not self._several:
            return self._received
        return multihost_utils.reached_preemption_sync_point(iteration)

    def _handle(self, number: int, _frame: object) -> None:
        if self._received and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self._received:
            # It may come in the midst of other output.
            with contextlib.suppress(RuntimeError):
                self._tell("stopping after this iteration, with a saved state ...")
        self._received = True
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)


class StallWatch:
    """Prints what every thread is doing when an iteration does not end in time.

    The run goes on: it may only be slow. The stacks are taken in a thread of Python
    and not by `faulthandler.dump_traceback_later`, which reads them while they change
    and can bring a running program down.
    """

    def __enter__(self) -> Self:
        self._timer = threading.Timer(0, _print_stacks)  # Not started.
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()

    def expect_within(self, seconds: float) -> None:
        """Starts the clock anew."""
        self._timer.cancel()
        self._timer = threading.Timer(seconds, _print_stacks, [seconds])
        self._timer.daemon = True
        self._timer.start()


def _print_stacks(seconds: float) -> None:
    print(
        f"an iteration has not ended in {seconds:.4g} s; what each thread is doing:",
        file=sys.__stderr__,
        flush=True,
    )
    faulthandler.dump_traceback(file=sys.__stderr__)
