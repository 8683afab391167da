"""Ends the process on a signal, at any moment, with one line and a known exit code.

Python runs signal handlers between two bytecodes of the main thread, so none runs while
that thread is in a long C call: an import, a compilation, a wait for a device. Here a
second thread is woken by every signal at once (`signal.set_wakeup_fd`) and calls the
policy of the innermost `listening` block. The launch scripts call `install` first;
training/interrupts.py saves a run's state by a policy of its own.
"""

import contextlib
import io
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, cast

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}  # 128 + number, as shells count
_LINES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):  # The terminal is gone. Windows has none.
    CODES[signal.SIGHUP], _LINES[signal.SIGHUP] = 129, "hung up"

_NOT_ON_WINDOWS = (
    "ragen_jax runs on Linux and macOS alone: start it in WSL2, the Linux of Windows"
)
_UNDER_WAY = 0.05  # seconds in which a write that another thread has begun ends
_UNAWAITED = "unawaited"  # the name of threads by `start_unawaited`

Policy = Callable[[int], None]  # takes a signal's number; runs in the second thread

_policies: list[Policy] = []  # The last one is in force.
_installed: list[bool] = []  # Not empty between `install` and `release`.
_watched: list[int] = []  # The write end of the wake-up pipe, once there is one.
_scratch: list[Path] = []  # Folders and files that `exit_at_once` deletes.
_last_calls: list[Callable[[int], None]] = []  # `exit_at_once` calls them last.
_ending = threading.Lock()  # Taken by the thread that ends the process.


def exit_at_once(code: int, line: str = "", *, forced: bool = False) -> NoReturn:
    """Ends the process at once, without waiting for its other threads.

    Python's normal exit waits for some threads and crashes others: one that compiles
    aborts the process with a dump. Without `install` or `forced`, as when this package
    is used as a library, it only raises SystemExit.

    Args:
      code: exit code.
      line: printed to stderr first, as the last that this process says there.
      forced: end the process even if `install` was not called.
    """
    ends = bool(_installed) or forced
    if ends and not _ending.acquire(blocking=False):
        threading.Event().wait()  # Another thread is ending the process.
    if line:
        with contextlib.suppress(OSError, ValueError):
            _say(line, last=ends)
    for stream in (sys.stdout, sys.stderr):
        # Another thread may hold the stream's lock, and a pipe may be closed.
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
            stream.flush()
    if not ends:
        sys.exit(code)
    for path in list(_scratch):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    for call in list(_last_calls):
        with contextlib.suppress(Exception):
            call(code)
    os._exit(code)


def _say(line: str, *, last: bool) -> None:
    """Prints to stderr. Raises OSError, or ValueError if it is closed.

    Args:
      line: what to print.
      last: whether nothing may follow or interrupt it, such as what a thread of JAX's
        says of a lost process before it aborts this one.
    """
    stream = sys.__stderr__
    if not last or stream is None or stream is not sys.stderr:
        print(line, file=sys.stderr)
        return
    stream.flush()
    shown = number = stream.fileno()
    with contextlib.suppress(OSError):  # Too many files are open.
        shown = os.dup(number)
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        time.sleep(_UNDER_WAY)
    os.write(shown, f"{line}\n".encode(stream.encoding, stream.errors or "strict"))


def before_exit(call: Callable[[int], None]) -> None:
    """Has `exit_at_once` call a function as the last thing before the process ends.

    Args:
      call: takes the exit code.
    """
    _last_calls.append(call)


@contextlib.contextmanager
def delete_on_exit(path: Path) -> Iterator[None]:
    """A context in which `exit_at_once` deletes a folder or file before it ends.

    It runs no `finally` block of the main thread, so that gigabytes of a partly written
    model would otherwise stay on disk.
    """
    _scratch.append(path)
    try:
        yield
    finally:
        _scratch.remove(path)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A context with a new folder, deleted at its end or by `exit_at_once`.

    Args:
      prefix: of the folder's name.
    """
    with tempfile.TemporaryDirectory(prefix=prefix) as name, delete_on_exit(Path(name)):
        yield Path(name)


def start_unawaited(work: Callable[[], None]) -> threading.Thread:
    """Starts work in a daemon thread, such as compiling, that no end waits for."""
    thread = threading.Thread(target=work, name=_UNAWAITED, daemon=True)
    thread.start()
    return thread


def has_unawaited() -> bool:
    """Whether such a thread runs: then only `exit_at_once` ends the process cleanly."""
    return any(thread.name == _UNAWAITED for thread in threading.enumerate())


def ending_signals() -> list[int]:
    """The signals of CODES that should end this process: no SIGHUP under `nohup`."""
    may_be_ignored = CODES.keys() - {signal.SIGINT, signal.SIGTERM}
    ignored = {n for n in may_be_ignored if signal.getsignal(n) == signal.SIG_IGN}
    return [number for number in CODES if number not in ignored]


def open_closed_streams() -> None:
    """Gives the process the standard streams that it was started without.

    As by `script.py >&-`, where Python's stream is None. Called before other files are
    opened: the next of them would get a stream's number, and what libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            if stream.fileno() == number:
                os.set_inheritable(number, True)  # As such a stream usually is.
            setattr(sys, name, stream)


def replace_unprintable_characters() -> None:
    """Prints a question mark for a character that the terminal cannot show.

    And reads a replacement character for bytes that are no text.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # Not a file's.
            cast(io.TextIOWrapper, stream).reconfigure(errors="replace")


def install() -> None:
    """From now on, the signals of `ending_signals` end the process with one line.

    Scripts call it before their slow imports. On Windows, whose signals and locks are
    others, it ends them.
    """
    open_closed_streams()
    if sys.platform == "win32":
        print(f"error: {_NOT_ON_WINDOWS}", file=sys.stderr)
        sys.exit(2)
    if threading.current_thread() is not threading.main_thread():
        return
    _watch()
    if not _installed:
        _policies.insert(0, exit_on_signal)
        _installed.append(True)
    for number in ending_signals():
        signal.signal(number, _nothing)  # The default action would print nothing.


def take_signals_back() -> None:
    """Undoes what a library did to the signals after `install`, if that was called.

    JAX takes SIGTERM for itself when it connects processes, and then only notes it.
    """
    if _installed:
        install()


def release() -> None:
    """Undoes `install`: signals again do what they do in any Python program."""
    _policies.clear()
    _installed.clear()
    for number in ending_signals():
        is_interrupt = number == signal.SIGINT
        default = signal.default_int_handler if is_interrupt else signal.SIG_DFL
        signal.signal(number, default)


class Terminated(KeyboardInterrupt):
    """Raised for SIGTERM and SIGHUP after `raise_instead`."""


def raise_instead() -> None:
    """Undoes `install` and lets signals raise in the main thread.

    SIGINT raises KeyboardInterrupt, the others its subclass Terminated. For scripts
    that start other processes and have to end them first.
    """

    def terminate(_number: int, _frame: object) -> NoReturn:
        raise Terminated

    release()
    for number in set(ending_signals()) - {signal.SIGINT}:
        signal.signal(number, terminate)


def exit_on_signal(number: int, more: str = "") -> None:
    """The policy of `install`: ends the process with the signal's line and code.

    Args:
      number: of the signal.
      more: follows in the line.
    """
    if number in CODES:
        line = _LINES[signal.Signals(number)]
        exit_at_once(
            CODES[signal.Signals(number)], "; ".join(filter(None, (line, more)))
        )


@contextlib.contextmanager
def listening(policy: Policy) -> Iterator[None]:
    """A context in which `policy` is called at once for each signal Python handles.

    It has no effect outside the main thread. It does not replace the signals' handlers.
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
    """A handler that leaves the work to the second thread."""


def _watch() -> None:
    """Starts the second thread, once, and has signals written to its pipe."""
    if not _watched:
        read, write = os.pipe()
        os.set_blocking(write, False)
        _watched.append(write)
        threading.Thread(target=_listen, args=(read,), daemon=True).start()
    signal.set_wakeup_fd(_watched[0], warn_on_full_buffer=False)


def _listen(read: int) -> None:
    """The second thread: calls the policy in force for each signal from the pipe."""
    while received := os.read(read, 1):
        if _policies:
            _policies[-1](received[0])
