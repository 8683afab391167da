"""Console lines: aligned, narrow, and honest about what was not measured."""

import contextlib
import errno
import io
import os
import threading
import time

import pytest

from ragen_jax.reporting import console as console_lib

FULL = {
    "train/return": -10.1234,
    "train/success": 1.0,
    "validation/success": 0.4567,
    "filter/reward_std": 12.5,
    "rollout/entropy": 10.25,
    "rollout/reply_tokens": 1234.5,
    "rollout/valid_reply_rate": 1.0,
    "rollout/tokens_per_second": 123456.7,
    "time/rollout_seconds": 12345.6,
    "time/update_seconds": 999.9,
}


def test_a_line_holds_every_number_in_the_order_of_its_header():
    line = console_lib.iteration_line(12, 200, FULL, 7500.0)
    assert line.split() == [
        "12/200",
        "-10.123",
        "100.0%",
        "45.7%",
        "12.500",
        "10.250",
        "1234.5",
        "100.0%",
        "123,457",
        "12345.6",
        "999.9",
        "2h05m",
    ]
    assert console_lib.header(200).replace("group std", "std").split() == [
        "iteration",
        "reward",
        "success",
        "validation",
        "std",
        "entropy",
        "reply",
        "valid",
        "tokens/s",
        "rollout",
        "update",
        "left",
    ]


@pytest.mark.parametrize("total", [1, 200, 100_000])
def test_lines_end_where_their_header_ends_and_stay_under_120_columns(total):
    title = console_lib.header(total)
    line = console_lib.iteration_line(total, total, FULL, 99 * 86400.0)
    assert len(line) == len(title) < 120


def test_columns_end_under_their_titles():
    title, line = (
        console_lib.header(200),
        console_lib.iteration_line(1, 200, FULL, None),
    )
    for name, text in [
        ("reward", "-10.123"),
        ("validation", "45.7%"),
        ("update", "9.9"),
    ]:
        assert title.index(name) + len(name) == line.index(text) + len(text)


def test_what_was_not_measured_is_blank_and_moves_nothing():
    without = {k: v for k, v in FULL.items() if k != "validation/success"}
    full = console_lib.iteration_line(3, 10, FULL, 5.0)
    line = console_lib.iteration_line(3, 10, without, 5.0)
    assert line == full.replace("45.7%", "     ")


def test_the_time_left_follows_the_recent_median():
    assert console_lib.seconds_left([], 10) is None
    assert console_lib.seconds_left([100.0, 2.0, 3.0], 10) == 30.0
    # Of 30 iterations the 20 recent ones took 1 s, before that 50 s each.
    assert console_lib.seconds_left([50.0] * 10 + [1.0] * 20, 7) == 7.0
    assert console_lib.seconds_left([4.0], 0) == 0.0


def test_the_time_left_counts_validations_apart_from_iterations():
    # After a resume the only iteration known may be one that validated.
    assert console_lib.seconds_left([4.0], 50, [20.0], 5) == 50 * 4 + 5 * 20
    assert console_lib.seconds_left([4.0, 4.0], 8, [], 2) == 32.0
    assert console_lib.seconds_left([4.0], 8, [10.0, 30.0, 20.0], 1) == 52.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1m00s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (7500, "2h05m"),
        (86399, "23h59m"),
        (86400, "1d00h"),
        (273600, "3d04h"),
    ],
)
def test_durations_read_as_a_person_would_say_them(seconds, text):
    assert console_lib.duration(seconds) == text
    assert len(text) <= 7


def test_the_banner_aligns_its_names_and_wraps_long_texts():
    text = console_lib.banner(
        "ragen_jax", [("model", "tiny"), ("environment", "word " * 40 + "end")]
    )
    lines = text.splitlines()
    assert lines[:3] == ["ragen_jax", "---------", "  model        tiny"]
    assert lines[3].startswith("  environment  word word")
    assert lines[4].startswith("               word")
    assert max(map(len, lines)) < 120
    assert " ".join(lines[3:]).split()[1:] == ["word"] * 40 + ["end"]


def test_a_word_longer_than_a_line_is_kept_whole():
    path = "/" + "long" * 40
    lines = console_lib.banner("run", [("workdir", f"in {path}")]).splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["in", path]


def test_before_and_after_stand_with_their_standard_errors():
    before = {
        "validation/success": 0.1,
        "validation/success_standard_error": 0.03,
        "validation/turns": 4.0,
        "validation/return": 0.5,
    }
    after = {
        "validation/success": 0.5,
        "validation/success_standard_error": 0.04,
        "validation/turns": 2.5,
    }
    rows = [
        ("success", "validation/success"),
        ("turns", "validation/turns"),
        ("return", "validation/return"),
    ]
    # sqrt(0.03^2 + 0.04^2) = 0.05
    assert console_lib.before_after(before, after, rows).splitlines() == [
        "               before         after         change",
        "success  10.0% ± 3.0%  50.0% ± 4.0%  +40.0% ± 5.0%",
        "turns           4.000         2.500         -1.500",
    ]


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_the_status_replaced_by_the_next_line():
    stream = _Terminal()
    console = console_lib.Console(stream)
    console.status("rollout 10/80")
    console.status("update")
    console.line("done")
    console.line("next")
    assert _screen(stream.getvalue()) == ["done", "next", ""]


def test_a_status_never_wraps_the_terminal():
    stream = _Terminal()
    console_lib.Console(stream).status("x" * 500)
    assert len(stream.getvalue()) == console_lib.WIDTH


def test_a_pipe_sees_whole_lines_only():
    stream = io.StringIO()
    console = console_lib.Console(stream)
    console.status("rollout 10/80")
    console.line("done")
    assert stream.getvalue() == "done\n"


def test_the_header_comes_back_after_a_screenful():
    stream = io.StringIO()
    console = console_lib.Console(stream)
    for number in range(console_lib.HEADER_EVERY + 1):
        console.iteration(f"line {number}", 200)
    lines = stream.getvalue().splitlines()
    title = console_lib.header(200)
    assert [i for i, line in enumerate(lines) if line == title] == [
        0,
        console_lib.HEADER_EVERY + 1,
    ]


def _screen(text):
    """What a terminal shows: a carriage return goes back to overwrite."""
    rows = []
    for row in text.split("\n"):
        shown = ""
        for part in row.split("\r"):
            shown = part + shown[len(part) :]
        rows.append(shown.rstrip())
    return rows


def test_who_outlives_the_reader_of_a_pipe_is_told_once_and_writes_no_more():
    read, write = os.pipe()
    told: list[str] = []
    with contextlib.suppress(BrokenPipeError), os.fdopen(write, "w") as stream:
        console = console_lib.Console(stream)
        console.line("heard")
        assert os.read(read, 100) == b"heard\n"
        os.close(read)
        with console.on_lost_reader(lambda: told.append("gone")):
            console.line("unheard")
            console.line("unheard")
        assert told == ["gone"] and console.lost is not None
        console.line("unheard")
        with console.on_lost_reader(lambda: told.append("gone before")):
            console.line("unheard")
        assert told == ["gone", "gone before"]


def test_a_full_disk_is_an_output_lost_like_a_reader_and_named(monkeypatch):
    def write(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    stream, told = io.StringIO(), []
    monkeypatch.setattr(stream, "write", write)
    console = console_lib.Console(stream)
    with pytest.raises(OSError, match="No space left on device: 'the output'"):
        console.line("unheard")
    with console.on_lost_reader(lambda: told.append("gone")):
        console.line("unheard")
    assert told == ["gone"] and console.lost.errno == errno.ENOSPC


def test_a_closed_pipe_is_an_error_to_who_does_not_outlive_it():
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(BrokenPipeError), os.fdopen(write, "w") as stream:
        with pytest.raises(BrokenPipeError):
            console_lib.Console(stream).line("unheard")


def test_a_full_pipe_that_does_not_block_is_waited_for_and_loses_nothing():
    read, write = os.pipe()
    os.set_blocking(write, False)
    lines = [f"{number} " + "x" * 3000 + "é" for number in range(200)]
    heard = bytearray()

    def listen():
        time.sleep(0.1)  # Until the pipe is full.
        while piece := os.read(read, 5000):
            heard.extend(piece)

    thread = threading.Thread(target=listen)
    thread.start()
    with os.fdopen(write, "w", encoding="utf-8") as stream:
        console = console_lib.Console(stream)
        for line in lines:
            console.line(line)
    thread.join()
    os.close(read)
    assert heard.decode().splitlines() == lines
