"""A signal asks the run to save and end; the loop looks for it between iterations."""

import contextlib
import os
import signal
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
        self._received = True
        with contextlib.suppress(RuntimeError):  # It came in the midst of other output.
            self._tell("stopping after this iteration, with a saved state ...")
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
