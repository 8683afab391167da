"""Signals that end a run with a saved state; a watchdog for iterations that stall."""

import contextlib
import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from ragen_jax.parallel import heartbeat
from ragen_jax.utils import awake, endings

# Seconds after which an iteration or a validation counts as stalled: the first one
# compiles, which can take half an hour; a later one, the larger of the two.
STALLED_AT_FIRST = 3600.0
STALLED_AT_LEAST = 600.0
STALLED_TIMES = 10.0  # not seconds: times the longest so far
STALLED_SAVING = 3600.0  # a save waits for the disk, and for other processes
_JUDGED_WITHIN = 0.1  # seconds in which the listening thread has heard a signal
PATIENCE = 3.0  # seconds that the main thread has to end by itself after a signal
# Seconds in which further signals belong to the first: a terminal that is closed and a
# process manager send several.
ONE_REQUEST = 0.5
_RESUMES = "the same command resumes from the last checkpoint"
_STOPPING = "stopping after this iteration, with a saved state ..."
# Arguments of jax's `reached_preemption_sync_point`. After a signal it fixes one more
# than the highest that any process has passed, and returns True for exactly that
# number. So calls are counted, without a gap; iteration numbers jump after a rollback.
_questions = itertools.count(1)


class StoppedAtOnce(Exception):  # noqa: N818  (control flow, not an error)
    """A signal came while there was nothing to save."""


class InterruptHandler:
    """Turns SIGINT, SIGTERM and SIGHUP into a flag that is polled once an iteration.

    With several processes jax passes a SIGTERM of any of them on to all and chooses the
    call of `should_stop` at which they stop together; other signals are turned into a
    SIGTERM. A second Ctrl-C, later than ONE_REQUEST after the first signal, raises
    KeyboardInterrupt, or ends the process by force if the main thread is stuck in a
    compiler or a device. Enter it in the main thread,
    after jax.distributed.initialize.
    """

    def __init__(self, report: Callable[[str], None]):
        """`report` prints a line, at once when a signal arrives."""
        self._report = report
        self._received = False
        self._interrupted = False  # whether the main thread has handled a SIGINT
        self._reported = threading.Event()
        self._left = threading.Event()  # set when the `with` block is left
        # Of the listening thread, which knows when signals come:
        self._first_at: float | None = None  # seconds of time.monotonic
        self._heard_interrupt = False
        self._insists = threading.Event()  # set by a second SIGINT
        self._last_words = ""  # not "" inside `nothing_to_save`
        self._previous: dict[int, Any] = {}
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._several = jax.process_count() > 1
        # With several processes SIGTERM belongs to jax's own notifier.
        own = set(endings.ending_signals()) - (
            {signal.SIGTERM} if self._several else set()
        )
        # The handlers first: a signal in between sets the flag, and may end the
        # process, since the policy of before is in force.
        for number in own:
            self._previous[number] = signal.signal(number, self._handle)
        self._context.enter_context(endings.listening(self._hear))
        return self

    def __exit__(self, *exception: object) -> None:
        # First, so that a signal from here on meets the policy of before: nobody asks
        # `should_stop` any more.
        self._context.close()
        self._left.set()
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def should_stop(self) -> bool:
        """Whether to save now and end. Every process asks once in every iteration."""
        if not self._several:
            # Heard but not handled: it came just before the handlers were in place.
            return self._received or self._first_at is not None
        return multihost_utils.reached_preemption_sync_point(next(_questions))

    def ask(self) -> None:
        """Asks the run to stop like a SIGTERM, silently, in every process.

        A single process sends itself no signal: the listening thread could hear of it
        after the block was left, and end the program.
        """
        self._reported.set()
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        elif self._last_words and threading.current_thread() is threading.main_thread():
            raise StoppedAtOnce
        else:
            self._received = True

    @contextlib.contextmanager
    def nothing_to_save(self, last_words: str) -> Iterator[Callable[[], None]]:
        """Within it the state is saved already: a signal raises StoppedAtOnce.

        If the main thread has not left PATIENCE seconds later, it prints `last_words`
        and ends the process. Several processes stop together, at a call of the function
        that the block is given; all have to call it equally often.
        """

        def check() -> None:
            if self.should_stop():
                raise StoppedAtOnce

        if not self._several:
            check()
            self._last_words = last_words
        try:
            yield check
        finally:
            self._last_words = ""

    def _handle(self, number: int, _frame: object) -> None:
        """In the main thread, as soon as it runs Python."""
        if number == signal.SIGINT:
            # The other thread judges, as this one may be late; it may just be about to.
            if self._interrupted and self._insists.wait(_JUDGED_WITHIN):
                raise KeyboardInterrupt
            self._interrupted = True
        is_first, self._received = not self._received, True
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._last_words:
            raise StoppedAtOnce
        if is_first and not self._reported.is_set():
            self._reported.set()
            self._say(_STOPPING)

    def _hear(self, number: int) -> None:
        """In a thread of its own, whatever the main thread does."""
        if number not in endings.CODES:
            return
        if words := self._last_words:
            if not self._left.wait(PATIENCE):
                self._say(words)
                endings.exit_at_once(0)
        elif self._is_insisting(number):
            self._insists.set()
            if not self._left.wait(PATIENCE):
                endings.exit_on_signal(number)

    def _is_insisting(self, number: int) -> bool:
        """Whether a signal is the second SIGINT, and not one of the first request."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            # In a thread of its own, so that this one hears when the next signal comes.
            late = threading.Timer(0.5, self._confirm)
            late.daemon = True
            late.start()
        is_interrupt = number == signal.SIGINT
        again = is_interrupt and self._heard_interrupt
        self._heard_interrupt |= is_interrupt
        return again and now - self._first_at >= ONE_REQUEST

    def _confirm(self) -> None:
        """Says that a signal was heard, where the main thread has not come to it."""
        if not self._left.is_set() and not self._reported.is_set():
            self._reported.set()
            self._say(_STOPPING)

    def _say(self, words: str) -> None:
        """Shows words, which may come in the midst of other output, or find no room."""
        with contextlib.suppress(OSError, RuntimeError):
            self._report(words)


class StallWatchdog:
    """Prints the stacks of all threads when a part of a run takes too long.

    The run continues, since it may only be slow. With `ends` the process exits instead,
    with heartbeat.EXIT_CODE, and the run's other processes follow: devices that wait
    for one another in a collective would wait for ever. The time in which the process
    is suspended does not count.

    A Python thread takes the stacks: `faulthandler.dump_traceback_later` reads them
    while they change, and can crash a running program.
    """

    def __init__(self, *, ends: bool = False):
        self.ends = ends

    def __enter__(self) -> Self:
        self._timer = awake.Timer(0, self._ring)  # Not started.
        return self

    def __exit__(self, *exception: object) -> None:
        self.rest()

    def rest(self) -> None:
        """Stops the clock: nothing is under way."""
        self._timer.cancel()

    def expect_within(self, seconds: float, what: str = "an iteration") -> None:
        """Restarts the clock: `what` should end before the next call."""
        self._timer.cancel()
        self._timer = awake.Timer(seconds, self._ring, [seconds, what])
        self._timer.daemon = True
        self._timer.start()

    def _ring(self, seconds: float, what: str) -> None:
        late = f"{what} has not ended in {seconds:.4g} s"
        stderr = sys.__stderr__
        print(f"{late}; what each thread is doing:", file=stderr, flush=True)
        faulthandler.dump_traceback(file=stderr)
        if self.ends:
            line = f"error: {late} (safety.end_stalled): {_RESUMES}"
            endings.exit_at_once(heartbeat.EXIT_CODE, line, forced=True)


def stalled_after(durations: Sequence[float]) -> float:
    """Seconds after which the next iteration or validation counts as stalled.

    Args:
      durations: seconds of the ones before.
    """
    if not durations:
        return STALLED_AT_FIRST
    # The first one compiled; it counts only while there is no other.
    longest = max(durations[1:] or durations)
    return max(STALLED_AT_LEAST, STALLED_TIMES * longest)
