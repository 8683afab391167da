"""Signals that end a run with a saved state; a watchdog for iterations that stall."""

import contextlib
import faulthandler
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from ragen_jax.parallel import heartbeat
from ragen_jax.utils import endings

# An iteration, and likewise a validation, is stalled, and the stacks are printed, after
# so many seconds:
STALLED_AT_FIRST = 3600.0  # it compiles, which can take half an hour
STALLED_AT_LEAST = 600.0
STALLED_TIMES = 10.0  # as long as the longest so far
STALLED_SAVING = 3600.0  # of no known length: it waits for the disk, and for others
PATIENCE = 3.0  # seconds in which the main thread may end by itself
_RESUMES = "the same command resumes from the last checkpoint"
_STOPPING = "stopping after this iteration, with a saved state ..."
# jax agrees on one more than the highest number that any process has asked with, and
# tells only who asks with just that: so numbers of questions, which never leave one
# out, unlike those of iterations after a resumption or a rollback.
_questions = itertools.count(1)


class StoppedAtOnce(Exception):  # noqa: N818  (a way out, no error)
    """A signal came while there was nothing to save."""


class InterruptHandler:
    """Turns SIGINT, SIGTERM and SIGHUP into a flag that is polled once an iteration.

    One process: its own handlers. Several: jax passes a SIGTERM that any process gets
    to all of them and names the question at which they stop together; the others are
    handed on as a SIGTERM. A second Ctrl-C raises KeyboardInterrupt in either case, and
    ends the process by force where the main thread cannot be interrupted, for it waits
    for a compiler or a device. Enter it in the main thread, after
    jax.distributed.initialize.
    """

    def __init__(self, report: Callable[[str], None]):
        """`report` shows the user at once that a signal was seen."""
        self._report = report
        self._received = False
        self._reported = threading.Event()
        self._left = threading.Event()  # the block, or the program
        self._insisted = False
        self._last_words = ""  # while there is nothing to save
        self._previous: dict[int, Any] = {}
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._several = jax.process_count() > 1
        # With several processes SIGTERM belongs to jax's own notifier.
        own = set(endings.heeded()) - ({signal.SIGTERM} if self._several else set())
        self._context.enter_context(endings.listening(self._hear))
        for number in own:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        self._left.set()
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._context.close()

    def should_stop(self) -> bool:
        """Whether to save now and end. Every process asks once in every iteration."""
        if not self._several:
            return self._received
        return multihost_utils.reached_preemption_sync_point(next(_questions))

    def ask(self) -> None:
        """Asks the run to stop as a SIGTERM does, without a word, in every process.

        One process sends itself none: after the block, which may be left at once, the
        thread that hears of it late would end the program.
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
        """Within it a signal ends the run at once, for its state is saved.

        It raises StoppedAtOnce; if the main thread has not left PATIENCE seconds later,
        it says `last_words` and ends the process. Several processes stop together: all
        call the function that the block is given, equally often.
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
        if self._received and number == signal.SIGINT:
            raise KeyboardInterrupt
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
                endings.leave(0)
        elif self._insisted and number == signal.SIGINT:
            if not self._left.wait(PATIENCE):
                endings.leave_by(number)
        elif not self._insisted:
            self._insisted = True
            if not self._left.wait(0.5) and not self._reported.is_set():
                self._reported.set()
                self._say(_STOPPING)

    def _say(self, words: str) -> None:
        """Shows words, which may come in the midst of other output, or find no room."""
        with contextlib.suppress(OSError, RuntimeError):
            self._report(words)


class StallWatchdog:
    """Prints what every thread is doing when a part of a run does not end in time.

    The run continues: it may only be slow. Or, with `ends`, the process ends with
    heartbeat.EXIT_CODE, and the others of the run end for want of it: devices that wait
    for one another in a collective wait for ever.

    The stacks are taken in a thread of Python and not by
    `faulthandler.dump_traceback_later`, which reads them while they change and can
    bring a running program down.
    """

    def __init__(self, *, ends: bool = False):
        self.ends = ends

    def __enter__(self) -> Self:
        self._timer = threading.Timer(0, self._ring)  # Not started.
        return self

    def __exit__(self, *exception: object) -> None:
        self.rest()

    def rest(self) -> None:
        """Stops the clock: nothing is under way."""
        self._timer.cancel()

    def expect_within(self, seconds: float, what: str = "an iteration") -> None:
        """Starts the clock again, for what has to end before the next call."""
        self._timer.cancel()
        self._timer = threading.Timer(seconds, self._ring, [seconds, what])
        self._timer.daemon = True
        self._timer.start()

    def _ring(self, seconds: float, what: str) -> None:
        late = f"{what} has not ended in {seconds:.4g} s"
        stderr = sys.__stderr__
        print(f"{late}; what each thread is doing:", file=stderr, flush=True)
        faulthandler.dump_traceback(file=stderr)
        if self.ends:
            line = f"error: {late} (safety.end_stalled): {_RESUMES}"
            endings.leave(heartbeat.EXIT_CODE, line, forced=True)


def stalled_after(durations: Sequence[float]) -> float:
    """Seconds after which one is stalled, given those of the ones before.

    Args:
      durations: of iterations or of validations, seconds.
    """
    if not durations:
        return STALLED_AT_FIRST
    # The first one compiled; it counts only while there is no other.
    longest = max(durations[1:] or durations)
    return max(STALLED_AT_LEAST, STALLED_TIMES * longest)
