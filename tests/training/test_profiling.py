"""Traces of iterations: which are taken, when they end, and where they are."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from ragen_jax.training import profiling
from ragen_jax.training.profiling import Profiler


@pytest.fixture
def traces(monkeypatch):
    """What is done to a profiler that writes nothing."""
    done = []
    start = lambda folder, **_: done.append("start")
    monkeypatch.setattr(jax.profiler, "start_trace", start)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: done.append("stop"))
    return done


def play(profiler, done, begun, end, stops_in=None):
    """The iterations after `begun`, up to `end` or to one that fails."""
    with profiler.after(begun):
        for iteration in range(begun + 1, end + 1):
            with profiler.step(iteration):
                done.append(iteration)
                if iteration == stops_in:
                    raise InterruptedError


def test_a_trace_holds_its_iterations_alone_and_its_line_says_how_to_open_it(tmp_path):
    lines, double = [], jax.jit(lambda x: 2 * x)
    profiler = Profiler(range(2, 4), tmp_path, lines.append)
    with profiler.after(0):
        for iteration in range(1, 5):
            with profiler.step(iteration):
                double(jnp.ones(4)).block_until_ready()
    (said,), folder = lines, tmp_path / profiling.FOLDER
    assert f"the trace of iterations 2 to 3 is in {folder}: pip install xprof" in said
    assert f"\n  xprof --port 8791 {folder}\n" in said
    (trace,) = folder.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    marks = [one["args"] for one in events if one.get("name") == "iteration"]
    assert [mark["step_num"] for mark in marks] == ["2", "3"]


@pytest.mark.parametrize(
    ("begun", "end", "expected"),
    [
        (0, 6, [1, 2, "start", 3, 4, "stop", 5, 6]),
        (0, 4, [1, 2, "start", 3, 4, "stop"]),  # A run of so many.
        (0, 3, [1, 2, "start", 3, "stop"]),  # A signal came.
        (0, 2, [1, 2]),
        (2, 6, [3, "start", 4, "stop", 5, 6]),  # The first one compiles.
        (3, 6, [4, 5, 6]),
    ],
)
def test_the_iterations_asked_for_are_traced_without_the_first_of_a_start(
    begun, end, expected, traces, tmp_path
):
    lines = []
    play(Profiler(range(3, 5), tmp_path, lines.append), traces, begun, end)
    assert traces == expected
    told = "none comes after iteration 4, the first of this start"
    assert any(told in line for line in lines) == (begun == 3)


def test_a_trace_ends_with_a_run_that_fails_and_is_not_begun_again(traces, tmp_path):
    profiler = Profiler(range(3, 5), tmp_path, lambda _: None)
    with pytest.raises(InterruptedError):
        play(profiler, traces, 0, 6, stops_in=3)
    play(profiler, traces, 1, 6)  # As after a rollback.
    assert traces == [1, 2, "start", 3, "stop", 2, 3, 4, 5, 6]


def test_training_outlives_a_trace_that_cannot_be_written(
    traces, tmp_path, monkeypatch
):
    def fail():
        raise RuntimeError("no space\nleft")

    lines = []
    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    play(Profiler(range(2, 3), tmp_path, lines.append), traces, 0, 3)
    assert traces == [1, "start", 2, 3]
    folder = tmp_path / profiling.FOLDER
    assert lines == [f"{folder}: the trace could not be written (no space left)"]
