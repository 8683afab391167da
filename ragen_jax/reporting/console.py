"""The console output of a run: pure functions that format lines, and their writer.

Lines stay under 120 columns and align under `header`, which a long log repeats.
"""

import contextlib
import errno
import math
import os
import select
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

WIDTH = 119
HEADER_EVERY = 20  # lines
_RECENT = 20  # iterations from which the time left is estimated
_GAP = "  "
_PIECE = 1000  # characters, of up to 4 bytes each: fewer than a stream's buffer holds
OUTPUT = "the output"  # the name of the stream, in errors


class Column(NamedTuple):
    """One metric on the console."""

    title: str
    metric: str
    width: int
    format: str  # of Python's format(); the width is filled from the left


_COLUMNS = (
    Column("reward", "train/return", 7, "+.3f"),
    Column("success", "train/success", 7, ".1%"),
    Column("validation", "validation/success", 10, ".1%"),
    Column("group std", "filter/reward_std", 9, ".3f"),
    Column("entropy", "rollout/entropy", 7, ".3f"),
    Column("reply", "rollout/reply_tokens", 6, ".1f"),
    Column("valid", "rollout/valid_reply_rate", 6, ".1%"),
    Column("tokens/s", "rollout/tokens_per_second", 8, ",.0f"),
    Column("rollout", "time/rollout_seconds", 7, ".1f"),
    Column("update", "time/update_seconds", 7, ".1f"),
)
_LEFT = 7  # width of the column "left", the time left


def header(total: int) -> str:
    """The titles over `iteration_line`; times in seconds, lengths in tokens.

    Args:
      total: iterations of the run.
    """
    titles = [column.title.rjust(column.width) for column in _COLUMNS]
    return _GAP.join(
        ["iteration".rjust(_iteration_width(total)), *titles, "left".rjust(_LEFT)]
    )


def iteration_line(
    iteration: int, total: int, metrics: Mapping[str, Any], seconds_left: float | None
) -> str:
    """One finished iteration under `header`; what was not measured is left blank.

    Args:
      iteration: finished iterations, 0..total.
      total: iterations of the run.
      metrics: of this iteration, by the names in metrics.py.
      seconds_left: until the end of the run; None while unknown.
    """
    cells = [_cell(column, metrics.get(column.metric)) for column in _COLUMNS]
    left = "" if seconds_left is None else duration(seconds_left)
    place = f"{iteration}/{total}".rjust(_iteration_width(total))
    return _GAP.join([place, *cells, left.rjust(_LEFT)]).rstrip()


def seconds_left(
    durations: Sequence[float],
    remaining: int,
    validations: Sequence[float] = (),
    validations_remaining: int = 0,
) -> float | None:
    """The time that remains, from the median of recent iterations and validations.

    A median, as an iteration may compile, or the machine may be busy. Validations count
    apart, as few iterations validate, and the first one after a resume may do so.

    Args:
      durations: seconds of each iteration so far, without its validation.
      remaining: iterations to go.
      validations: seconds of each validation so far.
      validations_remaining: validations to go; they count 0 until one is timed.
    """
    if not durations:
        return None
    left = remaining * statistics.median(durations[-_RECENT:])
    if validations:
        left += validations_remaining * statistics.median(validations[-_RECENT:])
    return left


def duration(seconds: float) -> str:
    """Seconds in at most seven characters: 12 s, 3m20s, 2h05m, 3d04h."""
    whole = round(seconds)
    for unit, smaller, size, part in (
        ("d", "h", 86400, 3600),
        ("h", "m", 3600, 60),
        ("m", "s", 60, 1),
    ):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02d}{smaller}"
    return f"{whole} s"


def banner(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """A table of a run's facts, a name and a text each, long texts wrapped.

    Args:
      title: the first line.
      rows: such as ("model", "tiny, 1.0 M parameters").
    """
    names = max((len(name) for name, _ in rows), default=0)
    lines = [title, "-" * min(len(title), WIDTH)]
    for name, text in rows:
        first, *rest = _wrap(text, WIDTH - names - 4)
        lines.append(f"  {name.ljust(names)}{_GAP}{first}")
        lines += [" " * (names + 4) + line for line in rest]
    return "\n".join(lines)


def before_after(
    before: Mapping[str, float | None],
    after: Mapping[str, float | None],
    rows: Sequence[tuple[str, str]],
) -> str:
    """A table of evaluations before and after training, with standard errors.

    The change's standard error is sqrt(before^2 + after^2): as if the two evaluations
    were independent, which overstates it where they share prompts.

    Args:
      before: evaluation by name, `<name>_standard_error` beside `<name>`, None where
        it is not known.
      after: likewise.
      rows: pairs of title and name; a name that one side lacks is left out.
    """
    table = [("", "before", "after", "change")]
    for title, name in rows:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            continue
        kind = ".1%" if _is_rate(name) else ".3f"
        error = f"{name}_standard_error"
        errors = [side.get(error) for side in (before, after)]
        known = [error for error in errors if error is not None]
        both = math.hypot(*known) if len(known) == 2 else None
        change = new - old
        table.append(
            (
                title,
                _with_error(old, errors[0], kind),
                _with_error(new, errors[1], kind),
                _with_error(change, both, "+" + kind),
            )
        )
    widths = [max(len(row[index]) for row in table) for index in range(4)]
    return "\n".join(
        _GAP.join(
            [row[0].ljust(widths[0])]
            + [
                cell.rjust(width)
                for cell, width in zip(row[1:], widths[1:], strict=True)
            ]
        ).rstrip()
        for row in table
    )


class Console:
    """Writes lines to a stream, and on a terminal a status line that it replaces."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._status = 0  # characters of the status now on the last line
        self._lines = 0  # iteration lines so far
        self._said: set[str] = set()  # lines written by `once`
        self._notice: Callable[[], None] | None = None
        # Why nothing more is written, once that failed within `on_lost_reader`.
        self.lost: OSError | None = None

    @contextlib.contextmanager
    def on_lost_reader(self, notice: Callable[[], None]) -> Iterator[None]:
        """A context in which losing the stream calls `notice`, once.

        The other end of a pipe may be closed, as when Ctrl-C also ends `tee`, the
        terminal may be gone, or the disk of a log may be full. Nothing more is written
        then. Outside the context this raises an OSError that names the output.
        """
        self._notice = notice
        if self.lost is not None:
            notice()
        try:
            yield
        finally:
            self._notice = None

    def line(self, text: str) -> None:
        """Writes a line, over the status if there is one."""
        self._write(self._wiped() + text + "\n")

    def once(self, text: str) -> None:
        """Writes a line, unless it is empty or this method wrote it before."""
        if text and text not in self._said:
            self._said.add(text)
            self.line(text)

    def status(self, text: str) -> None:
        """Shows what is being done now; writes nothing into a pipe or a file."""
        if self._is_terminal:
            wiped = self._wiped()
            text = text[:WIDTH]
            self._write(wiped + text)
            self._status = len(text)

    def iteration(self, line: str, total: int) -> None:
        """Writes an iteration's line, under its header every so often."""
        if self._lines % HEADER_EVERY == 0:
            self.line(header(total))
        self._lines += 1
        self.line(line)

    def _write(self, text: str) -> None:
        if self.lost is not None:
            return
        try:
            self._put(text)
        except OSError as error:
            is_hung_up = self._is_terminal and error.errno == errno.EIO
            number = errno.EPIPE if is_hung_up else error.errno
            # Of EPIPE, Python makes a BrokenPipeError.
            lost = OSError(number, os.strerror(number or 0), OUTPUT)
            if self._notice is None:
                raise lost from error
            self.lost = lost
            self._notice()

    def _put(self, text: str) -> None:
        """Writes text and flushes it, also into a full pipe that does not block.

        Such a pipe keeps what it has no room for in the stream's buffer, whose size no
        piece may exceed.
        """
        for start in range(0, len(text), _PIECE):
            with contextlib.suppress(BlockingIOError):
                self._stream.write(text[start : start + _PIECE])
            while True:
                try:
                    self._stream.flush()
                    break
                except BlockingIOError:
                    select.select([], [self._stream.fileno()], [])

    def _wiped(self) -> str:
        """The characters that erase the status line; "" if there is none."""
        blank = "\r" + " " * self._status + "\r" if self._status else ""
        self._status = 0
        return blank


def _iteration_width(total: int) -> int:
    return max(len("iteration"), 2 * len(str(total)) + 1)


def _cell(column: Column, value: Any) -> str:
    text = "" if value is None else format(float(value), column.format)
    return text.rjust(column.width)


def _with_error(value: float, error: float | None, kind: str) -> str:
    text = format(value, kind)
    return text if error is None else f"{text} ± {format(error, kind.lstrip('+'))}"


def _is_rate(name: str) -> bool:
    last = name.rsplit("/", 1)[-1]
    return last in ("success", "valid_reply_rate") or last.startswith("pass_at_")


def _wrap(text: str, width: int) -> list[str]:
    """Breaks text into lines of at most `width`; a longer word has its own line."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if len(joined) > width and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = joined
    return lines
