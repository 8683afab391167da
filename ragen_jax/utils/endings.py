"""Ends of the process: by a signal at any moment, with one line and a known exit code.

Python runs its handlers of signals between two bytecodes of the main thread, which is
no moment at all while that thread imports, compiles or waits for a device. A thread
hears of each signal at once instead, through `signal.set_wakeup_fd`, and does what the
innermost `listening` block says.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}  # 128 + number, as shells count
_LINES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):  # The terminal is gone. Windows has none.
    CODES[signal.SIGHUP], _LINES[signal.SIGHUP] = 129, "hung up"

_COMPILER = "compiler"  # a thread's name

Policy = Callable[[int], None]  # of a signal's number; runs in the watching thread

_policies: list[Policy] = []
_installed: list[bool] = []  # whether the process is a script's own
_watched: list[int] = []  # the pipe's end that signals are written to
_scratch: list[Path] = []  # folders that go with the process
_farewells: list[Callable[[], None]] = []  # said before it is gone


def leave(code: int, line: str = "", *, forced: bool = False) -> NoReturn:
    """Ends the process now, whatever its other threads do, where a script said so.

    Python's own end waits for some threads and pulls the interpreter away from under
    others: one that compiles then aborts the process with a dump.
    """
    if line:
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        # Another thread may hold the stream's lock, and a pipe may be closed.
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
            stream.flush()
    if not (_installed or forced):
        sys.exit(code)
    for folder in list(_scratch):
        shutil.rmtree(folder, ignore_errors=True)
    for say in list(_farewells):
        with contextlib.suppress(Exception):
            say()
    os._exit(code)


def on_leaving(farewell: Callable[[], None]) -> None:
    """Has `leave` call a function as the last thing before the process ends."""
    _farewells.append(farewell)


@contextlib.contextmanager
def discarding(folder: Path) -> Iterator[None]:
    """Within it the end of the process by `leave` takes the folder along.

    Such an end runs no `finally` of the main thread: a model half written, which may
    have gigabytes, would stay.
    """
    _scratch.append(folder)
    try:
        yield
    finally:
        _scratch.remove(folder)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder that is gone after the block, and with a process that ends in it.

    Args:
      prefix: of its name.
    """
    with tempfile.TemporaryDirectory(prefix=prefix) as name, discarding(Path(name)):
        yield Path(name)


def start_compiling(compile_program: Callable[[], None]) -> None:
    """Compiles in a thread, for which a process that ends does not wait."""
    threading.Thread(target=compile_program, name=_COMPILER, daemon=True).start()


def is_compiling() -> bool:
    """Whether such a thread is at it: `leave` is then the only clean way out."""
    return any(thread.name == _COMPILER for thread in threading.enumerate())


def heeded() -> list[int]:
    """The signals of CODES that end this process: no SIGHUP where `nohup` began it."""
    may_be_ignored = CODES.keys() - {signal.SIGINT, signal.SIGTERM}
    ignored = {n for n in may_be_ignored if signal.getsignal(n) == signal.SIG_IGN}
    return [number for number in CODES if number not in ignored]


def install() -> None:
    """Lets the signals of `heeded` end the process in one line, from now on.

    For the first line of a script: before the imports, which take seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _watch()
    if not _installed:
        _policies.insert(0, leave_by)
        _installed.append(True)
    for number in heeded():
        signal.signal(number, _nothing)  # A default one would end it without a word.


def release() -> None:
    """Takes `install` back: the signals do what they do in any Python program."""
    _policies.clear()
    _installed.clear()
    for number in heeded():
        is_interrupt = number == signal.SIGINT
        default = signal.default_int_handler if is_interrupt else signal.SIG_DFL
        signal.signal(number, default)


class Terminated(KeyboardInterrupt):
    """A SIGTERM, or a lost terminal, where `raise_instead` was called."""


def raise_instead() -> None:
    """Takes `install` back: signals raise, and who started processes ends them first.

    SIGINT raises KeyboardInterrupt, the others its subclass Terminated.
    """

    def terminate(_number: int, _frame: object) -> NoReturn:
        raise Terminated

    release()
    for number in set(heeded()) - {signal.SIGINT}:
        signal.signal(number, terminate)


def leave_by(number: int) -> None:
    """Ends the process as a signal asks for."""
    if number in CODES:
        leave(CODES[signal.Signals(number)], _LINES[signal.Signals(number)])


@contextlib.contextmanager
def listening(policy: Policy) -> Iterator[None]:
    """Within it `policy` hears of each signal that Python handles, at once.

    In the main thread; elsewhere it hears of none. The handlers themselves stay the
    caller's own affair.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _watch()
    _policies.append(policy)
    try:
        yield
    finally:
        _policies.remove(policy)


def _nothing(_number: int, _frame: object) -> None:
    """The thread does what is to be done."""


def _watch() -> None:
    """Starts the thread, once, and lets signals be written to its pipe."""
    if not _watched:
        read, write = os.pipe()
        os.set_blocking(write, False)
        _watched.append(write)
        threading.Thread(target=_listen, args=(read,), daemon=True).start()
    signal.set_wakeup_fd(_watched[0], warn_on_full_buffer=False)


def _listen(read: int) -> None:
    while received := os.read(read, 1):
        if _policies:
            _policies[-1](received[0])
