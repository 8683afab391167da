"""The suite of measurements: every stage in small, time-outs, and going on."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from helpers import runs
from helpers.absent import needs_compiler
from helpers.paths import ROOT

from ragen_jax.benchmarks import (
    gpu_suite,
    reasons,
    stages,
    suite,
    suite_sizes,
    training_runs,
)
from ragen_jax.benchmarks.suite import DONE, Result, Stage
from ragen_jax.errors import UserError
from ragen_jax.utils import folder_lock

STAGES = (Stage("quick", "?", "none"), Stage("stuck", "?", "none"))
# A stage in place of launch/benchmark.py: writes what it measures, and may get stuck.
SCRIPT = """\
import sys, time
from pathlib import Path
from ragen_jax.benchmarks import suite
out, name = Path(sys.argv[1]), sys.argv[2].removeprefix("--stage=")
def tables():
    yield "first", {"figure": 1.0}
    if name == "stuck":
        print("about to wait", flush=True)
        time.sleep(600)
    if name == "broken":
        raise RuntimeError("no such device")
    yield "second", {"figure": 2.0}
suite.measure(out, suite.Stage(name, "?", "none"), tables(), lambda *_: None)
"""


ATTENTION = "cuDNN's attention"
LENGTHS = ("128 tokens", "448 tokens", "448 tokens behind 170", "ALL tokens")
HERE = {"device": "1 x cpu", "jax": "0.10.2"}  # what results are made with


def run(out: Path, chosen, limit: float = 20.0) -> tuple[list[Result], list[str]]:
    lines: list[str] = []
    command = [sys.executable, "-c", SCRIPT, str(out)]
    return suite.run(out, chosen, command, limit, HERE, lines.append), lines


@pytest.mark.slow
def test_a_stage_that_is_stuck_is_ended_and_what_it_has_measured_is_kept(tmp_path):
    started = time.perf_counter()
    (stuck,), _ = run(tmp_path, STAGES[1:], limit=8.0)
    assert time.perf_counter() - started < 60
    assert stuck.state == "ended after 8 s, its limit"
    assert stuck.tables == {"first": {"figure": 1.0}}
    assert "about to wait" in (tmp_path / "stuck.log").read_text()
    assert "ended after 8 s, its limit" in (tmp_path / "report.md").read_text()


def test_no_stage_begins_that_would_not_end_in_the_time_of_all(tmp_path):
    lines: list[str] = []
    command = [sys.executable, "-c", "raise SystemExit('it has begun')"]
    suite.run(tmp_path, STAGES, command, 20.0, HERE, lines.append, total=70.0)
    assert lines == ["quick and the rest: no time left; start it again"]
    assert "## stuck: ?\n\nnot begun\n" in (tmp_path / "report.md").read_text()
    # One that does is told how long it has, should the suite be killed.
    command[-1] = "import sys\nraise SystemExit(sys.argv[-1])"
    suite.run(tmp_path, STAGES[:1], command, 600.0, HERE, lines.append, total=90.0)
    assert "failed: --stage_seconds=75" in lines[-1]


class Endless:
    """A process in place of a stage's: it fails, but the one named `cut` never ends."""

    def __init__(self, command, **_):
        self.is_cut = any("cut" in each for each in command)

    def wait(self, limit: float) -> int:
        if self.is_cut:
            raise subprocess.TimeoutExpired("stage", limit)
        return 1


def test_a_stage_cut_off_by_the_suites_end_is_the_first_of_the_next_call(
    tmp_path, monkeypatch
):
    """It has not failed, unless the next call could give it no more time."""
    monkeypatch.setattr(suite.subprocess, "Popen", Endless)
    monkeypatch.setattr(suite, "_end", lambda _: None)
    known = [Stage(name, "?", "none") for name in ("broken", "cut")]
    first: list[str] = []
    second: list[str] = []
    for lines, attempts, end in (
        (first, 0, "ended after 75 s, when the suite's time was over"),
        (second, 1, "ended after 75 s, its limit"),
    ):
        suite.run(tmp_path, known, [], 600.0, HERE, lines.append, total=90.0)
        found = suite.read(tmp_path, "cut")
        assert (found.attempts, found.state) == (attempts, end)
        assert found.state in (tmp_path / "report.md").read_text()
    begun = [line for line in second if line.endswith("...")]
    assert begun == ["cut: ? ...", "broken: ? ..."]


@pytest.mark.slow
def test_a_stage_that_fails_is_said_and_the_others_are_measured(tmp_path):
    (broken, quick), _ = run(tmp_path, (Stage("broken", "?", "none"), STAGES[0]))
    assert broken.state == "failed: RuntimeError: no such device"
    assert quick.state == DONE and list(quick.tables) == ["first", "second"]


# What JAX says of a failed program, and a script of this project before that.
FAILED = """\
Traceback (most recent call last):
  File "stage.py", line 2, in <module>
    raise ValueError("as code has it")
{error}
More of what is wrong.
--------------------
For simplicity, JAX has removed its internal frames from the traceback of the \
following exception. Set JAX_TRACEBACK_FILTERING=off to include these.
"""
OUT_OF_MEMORY = "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"
CALLED = "subprocess.CalledProcessError: Command '['python']' returned 1."


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (FAILED.format(error=OUT_OF_MEMORY), OUT_OF_MEMORY),
        (
            f"error: a run needs 90 GiB\nTraceback:\n{CALLED}",
            "error: a run needs 90 GiB",
        ),
        (f"Aborted\n{CALLED}\n", CALLED),
        ("F0000 Check failed: ok\n\n", "F0000 Check failed: ok"),
        ("\n", "nothing was said"),
    ],
)
def test_the_line_that_names_the_error_is_the_reason(said, reason):
    assert reasons.reason(said) == reason


def test_a_stage_shows_the_whole_traceback(tmp_path):
    script = "import os; raise SystemExit(os.environ['JAX_TRACEBACK_FILTERING'])"
    failing = [sys.executable, "-c", script]
    assert (
        suite._attempt(tmp_path, STAGES[0], failing, 60.0, HERE).state == "failed: off"
    )


@pytest.mark.slow
def test_what_is_done_is_not_done_again_and_what_was_tried_least_comes_first(tmp_path):
    known = {"first": {"figure": 7.0}}
    suite.write(tmp_path, Result("quick", DONE, 1, 5.0, known, HERE))
    # Cut off while it ran: it counts as tried, and waits behind one that was not.
    suite.write(tmp_path, Result("broken", suite.RUNNING, 1, made_with=HERE))
    chosen = (*STAGES[:1], Stage("broken", "?", "none"), Stage("other", "?", "none"))
    found, lines = run(tmp_path, chosen)
    order = [line.split(":")[0] for line in lines if line.endswith("...")]
    assert order == ["other", "broken"]
    assert found[0].tables == known
    assert [each.attempts for each in found] == [1, 2, 1]


@pytest.mark.parametrize(("attempts", "first"), [(2, "needed"), (3, "other")])
def test_a_stage_that_others_need_comes_first_until_it_was_tried_thrice(
    tmp_path, attempts, first
):
    """Else the others would run without what it was to find out, and count as done."""
    needed = Stage("needed", "?", "none", others_need_it=True)
    suite.write(tmp_path, Result("needed", suite.RUNNING, attempts, made_with=HERE))
    lines: list[str] = []
    command = [sys.executable, "-c", ""]
    chosen = (Stage("other", "?", "none"), needed)
    suite.run(tmp_path, chosen, command, 20.0, HERE, lines.append)
    assert lines[0] == f"{first}: ? ..."


def test_a_stage_that_others_need_is_tried_again_before_them(tmp_path):
    needed = Stage("needed", "?", "none", others_need_it=True)
    # Fails the first time alone.
    script = (
        "import pathlib, sys\n"
        "seen = pathlib.Path(sys.argv[1]) / 'seen'\n"
        "if 'needed' in sys.argv[2] and not seen.exists():\n"
        "    seen.touch()\n"
        "    sys.exit('too late')\n"
    )
    lines: list[str] = []
    command = [sys.executable, "-c", script, str(tmp_path)]
    chosen = (Stage("other", "?", "none"), needed)
    suite.run(tmp_path, chosen, command, 20.0, HERE, lines.append)
    told = [line.split(" (")[0] for line in lines if not line.endswith("...")]
    assert told == ["needed: failed: too late", "needed: done", "other: done"]


def test_a_stage_that_fails_twice_in_the_same_way_is_not_tried_a_third_time(tmp_path):
    needed = Stage("needed", "?", "none", others_need_it=True)
    script = "import sys\nif 'needed' in sys.argv[1]: sys.exit('no such kernel')\n"
    lines: list[str] = []
    command = [sys.executable, "-c", script]
    chosen = (Stage("other", "?", "none"), needed)
    suite.run(tmp_path, chosen, command, 20.0, HERE, lines.append)
    told = [line.split(" (")[0] for line in lines if not line.endswith("...")]
    assert told == [*["needed: failed: no such kernel"] * 2, "other: done"]


def test_an_attempt_that_measures_less_loses_nothing_of_the_one_before(tmp_path):
    stage = STAGES[0]
    known = {"first": {"figure": 1.0}, "second": {"figure": 2.0}}
    before = Result("quick", "ended after 8 s, its limit", 1, 8.0, known, HERE)
    suite.write(tmp_path, before)
    failing = [sys.executable, "-c", "raise SystemExit('no such device')"]
    found = suite._attempt(tmp_path, stage, failing, 60.0, HERE)
    assert found.tables == known and found.attempts == 2 and found.made_with == HERE
    assert found.state == "failed: no such device"
    again = [("first", {"figure": 3.0})]
    suite.measure(tmp_path, stage, again, lambda *_: None)
    tables = suite.read(tmp_path, "quick").tables
    assert tables == {"first": {"figure": 3.0}, "second": {"figure": 2.0}}


def test_what_was_made_on_another_device_is_set_aside_and_measured_again(tmp_path):
    there = HERE | {"device": "1 x NVIDIA H100 80GB HBM3"}
    for made_with in (there, HERE):  # The first trial must not replace what was there.
        suite.write(tmp_path, Result("quick", DONE, 1, 5.0, {}, made_with))
        lines: list[str] = []
        command = [sys.executable, "-c", ""]
        other = HERE if made_with is there else there
        suite.run(tmp_path, STAGES[:1], command, 20.0, other, lines.append)
        assert lines[0].startswith(
            "measured before with another device, and again now:"
        )
        assert "quick: done before" not in lines
        assert suite.read(tmp_path, "quick").made_with == other
    kept = [suite.read(tmp_path / f"before_{number}", "quick") for number in (1, 2)]
    assert [each.made_with for each in kept] == [there, HERE]


def test_what_other_code_has_measured_stays_and_is_said_to_be_so(tmp_path):
    known = {"first": {"figure": 1.0}}
    suite.write(tmp_path, Result("quick", DONE, 1, 5.0, known, HERE | {"code": "a0b1"}))
    lines: list[str] = []
    now = HERE | {"code": "c2d3"}
    suite.run(tmp_path, STAGES[:1], ["false"], 20.0, now, lines.append)
    file = tmp_path / "quick.json"
    assert lines == [
        f"quick: done before, with other code (to measure it again, delete {file})"
    ]
    assert suite.read(tmp_path, "quick").tables == known
    assert "done (5 s, code a0b1)" in (tmp_path / "report.md").read_text()


def test_results_of_small_sizes_are_not_those_of_large_ones():
    small, full = (
        gpu_suite._made_with(x, "1 x gpu")
        for x in (suite_sizes.SMOKE, suite_sizes.FULL)
    )
    assert {key for key in full if full[key] != small[key]} == {"sizes"}
    assert full["device"] == "1 x gpu" and full["jax"] == jax.__version__


def test_results_of_a_checkout_are_those_of_another_that_lies_elsewhere():
    for sizes in (suite_sizes.FULL, suite_sizes.SMOKE):
        assert str(ROOT) not in str(gpu_suite._made_with(sizes, "1 x gpu"))


# A stage that has started a run, which does not end when it is asked to.
STARTING = """\
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "print('ready', flush=True); "
                  "import time; time.sleep(120)"])
signal.signal(signal.SIGTERM, signal.SIG_DFL)
time.sleep(120)
"""


@pytest.mark.slow
def test_with_a_stage_ends_what_it_has_started(monkeypatch):
    monkeypatch.setattr(suite, "_GRACE", 1.0)
    process = subprocess.Popen(
        [sys.executable, "-c", STARTING], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout.readline() == b"ready\n"
    suite._end(process)
    # The end of what both could write, when both are gone.
    ended, _, _ = select.select([process.stdout], [], [], 2.0)
    assert process.poll() is not None
    assert ended and process.stdout.read() == b""
    process.stdout.close()


# launch/benchmark.py in small, whose stages write their number down and wait.
LAUNCHED = """\
import os, sys, time
from pathlib import Path
from ragen_jax.utils import endings
endings.install()
from ragen_jax.benchmarks import gpu_suite
out = Path(__file__).parent / "out"
def waits(*_):
    (out / "number").write_text(str(os.getpid()))
    os.rename(out / "number", out / "stage")
    time.sleep(60)
    yield "figures", {}
gpu_suite.stages.MEASURE["device"] = waits
stage = "device" if "--stage=device" in sys.argv else None
gpu_suite.run_suite(Path(__file__), str(out), stage, True, 60, 0, print)
"""
# A stage's process that trains, in place of launch/benchmark.py --stage=default_run.
TRAINS = """\
import sys
from pathlib import Path
from ragen_jax.utils import endings
endings.install()
from ragen_jax.benchmarks import gpu_suite, training_runs
gpu_suite._device = lambda _: "1 x cpu"
training_runs.SCRIPTS = Path(__file__).parent / "launch"
out = str(Path(__file__).parent / "out")
gpu_suite.run_suite(Path(__file__), out, "default_run", True, 60, 0, print)
"""
WAITS = """\
import os, pathlib, time
out = pathlib.Path(__file__).parents[1] / "out"
(out / "number").write_text(str(os.getpid()))
os.rename(out / "number", out / "stage")
time.sleep(60)
"""


def started(folder: Path, script: str) -> tuple[subprocess.Popen, int]:
    """The process of a script, and the number of what it has started."""
    (folder / "script.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, str(folder / "script.py")], stderr=subprocess.DEVNULL
    )
    while not (folder / "out" / "stage").exists():
        assert process.poll() is None
        time.sleep(0.05)
    return process, int((folder / "out" / "stage").read_text())


def is_there(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_with_the_suite_ends_its_stage(tmp_path, number):
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux tells a process that its parent was killed")
    process, _ = started(tmp_path, LAUNCHED)
    with pytest.raises(UserError, match="runs the suite there; .* another --out"):
        gpu_suite.run_suite(Path("x"), str(tmp_path / "out"), None, True, 1, 0, print)
    process.send_signal(number)
    assert process.wait(60) != 0
    # Of a suite that was killed, which could not wait for it, the stage ends at once.
    end = time.monotonic() + 20 * (number == signal.SIGKILL)
    while folder_lock.is_held(tmp_path / "out" / ".stage"):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGALRM, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_with_a_stage_that_trains_ends_its_run(tmp_path, number):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "train.py").write_text(WAITS)
    process, training = started(tmp_path, TRAINS)
    process.send_signal(number)
    assert process.wait(60) != 0
    assert not is_there(training)


@pytest.mark.parametrize(
    ("is_small", "other", "chooser"),
    [(True, "a", "--out"), (False, "b", "CUDA_VISIBLE_DEVICES")],
)
def test_a_stage_that_outlived_its_suite_keeps_the_next_from_beginning(
    tmp_path, monkeypatch, is_small, other, chooser
):
    """On a GPU also one with another folder, of which it would take memory and time."""
    monkeypatch.setattr(gpu_suite, "_device", lambda _: "1 x gpu")
    monkeypatch.setattr(gpu_suite.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "a").mkdir()
    places = gpu_suite._places(tmp_path / "a", has_gpu=not is_small)
    refused = f"measures replies_150 there; .* another {chooser}"
    with (
        gpu_suite._measuring(places, "replies_150"),
        pytest.raises(UserError, match=refused),
    ):
        out = str(tmp_path / other)
        gpu_suite.run_suite(Path("none"), out, None, is_small, 1, 0, print)


def test_a_driver_that_does_not_answer_is_said_to_be_so(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "_START", 0.01)
    with pytest.raises(UserError, match=r"did not say within 0\.01 s which devices"):
        gpu_suite.run_suite(Path("none"), str(tmp_path), None, True, 1, 0, print)


def test_the_report_puts_what_was_measured_beside_the_forecast():
    chosen = (
        Stage("replies_50", "?", "iterations"),
        Stage("forecast_replies_50", "?", ""),
    )
    measured = {
        "iteration": {"rollout, s": 3.0, "update, s": 0.0, "decode passes": 640}
    }
    forecast = {"forecast": {"rollout, s": 2.0, "decode passes": 640, "device": "x"}}
    results = [
        Result("replies_50", DONE, 1, 5.0, measured),
        Result("forecast_replies_50", "ended after 8 s, its limit", 2, 8.0, forecast),
    ]
    written = suite.report(chosen, results)
    assert "| replies_50 | rollout, s | 3.000 | 2.000 | 1.50 |" in written
    assert "| replies_50 | decode passes | 640.000 | 640.000 | 1.00 |" in written
    assert "update, s | 0" not in written.split("##")[0]
    assert "ended after 8 s, its limit (attempt 2, 8 s)" in written


def test_every_stage_of_the_suite_has_its_measurement_and_a_name_of_its_own(tmp_path):
    for sizes in (suite_sizes.FULL, suite_sizes.SMOKE):
        chosen = stages.stages(sizes)
        assert {stage.kind for stage in chosen} == set(stages.MEASURE)
        assert len({stage.name for stage in chosen}) == len(chosen)
        for stage in chosen:
            if stage.kind in ("iterations", "forecast"):
                settings = stages._settings(sizes, tmp_path, stage)
                assert settings.rollout.reply_tokens == stage.options["reply"]
    with pytest.raises(UserError, match="choose one of device, replies_6"):
        suite.find(chosen, "devise")


@pytest.mark.parametrize("stage", [None, "device"])
@pytest.mark.parametrize(
    ("is_small", "users", "found"),
    [(False, None, "cuda,cpu"), (False, "cuda", "cuda"), (True, None, None)],
)
def test_a_stage_for_which_cuda_does_not_start_does_not_take_the_cpu(
    tmp_path, monkeypatch, is_small, users, found, stage
):
    monkeypatch.setenv("JAX_PLATFORMS", users or "")
    if users is None:
        monkeypatch.delenv("JAX_PLATFORMS")
    seen = []
    monkeypatch.setattr(gpu_suite.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpu_suite, "_device", lambda is_small: "1 x gpu")
    monkeypatch.setattr(gpu_suite.endings, "raise_instead", lambda: None)
    look = lambda *_: seen.append(os.environ.get("JAX_PLATFORMS"))
    monkeypatch.setattr(suite, "run", look)
    monkeypatch.setattr(gpu_suite, "_measure", look)
    gpu_suite.run_suite(Path("none"), str(tmp_path), stage, is_small, 1, 0, print)
    assert seen == [found]


@pytest.mark.parametrize("stage", [None, "attention"])
def test_a_machine_without_a_gpu_is_refused_before_any_stage_begins(
    tmp_path, monkeypatch, stage
):
    asked = subprocess.CompletedProcess([], 0, stdout="cpu 8 x cpu\n", stderr="")
    monkeypatch.setattr(gpu_suite.subprocess, "run", lambda *_, **__: asked)
    with pytest.raises(UserError, match="JAX's backend here is cpu"):
        gpu_suite.run_suite(Path("none"), str(tmp_path), stage, False, 1, 0, print)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measures a stage alone, or the suite in small; returns what ran and its report.

    In place of the stages' figures and processes.
    """
    begun: list[str] = []

    def attempt(out, stage, command, limit, made_with, is_short):
        begun.append(stage.name)
        result = Result(stage.name, DONE, 1, made_with=made_with)
        suite.write(out, result)
        return result

    monkeypatch.setattr(suite, "_attempt", attempt)
    monkeypatch.setattr(gpu_suite, "_device", lambda _: "1 x NVIDIA H200")
    monkeypatch.setattr(gpu_suite.endings, "raise_instead", lambda: None)
    monkeypatch.setattr(gpu_suite.signal, "alarm", lambda _: None)
    figures = {"kind": "NVIDIA H200", "backend": "gpu", "devices": 1}
    tables = lambda stage, *_: ((name, figures) for name in [stage.name])
    monkeypatch.setattr(gpu_suite.stages, "measure", tables)

    def measure(stage=None, forecasts="also") -> tuple[list[str], str]:
        monkeypatch.setenv("JAX_PLATFORMS", "")
        monkeypatch.delenv("JAX_PLATFORMS")
        begun.clear()
        given = (str(tmp_path), stage, True, 60, 0, lambda *_: None, forecasts)
        gpu_suite.run_suite(Path("none"), *given)
        return list(begun), (tmp_path / "report.md").read_text()

    return measure


def test_a_stage_run_by_itself_counts_in_the_report_and_for_the_next_suite(
    measured, tmp_path
):
    _, written = measured("device")
    assert "done (0 s" in written.split("## replies_6")[0]
    begun, _ = measured()
    assert begun and "device" not in begun
    assert not list(tmp_path.glob("before_*"))
    # One that ends early is begun again.
    with pytest.MonkeyPatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(gpu_suite.suite, "measure", lambda *_: 1 / 0)
        measured("device")
    assert "ended by an error" in (tmp_path / "report.md").read_text()
    assert measured()[0] == ["device"]


def test_forecasts_are_made_without_the_gpu_that_they_are_for(
    measured, tmp_path, monkeypatch
):
    with pytest.raises(UserError, match="device.json does not say what device"):
        measured(forecasts="only")
    measured("device")
    on_gpu, _ = measured(forecasts="no")
    monkeypatch.setattr(gpu_suite, "_device", lambda _: 1 / 0)
    version = gpu_suite.importlib.metadata.version
    monkeypatch.setattr(gpu_suite.importlib.metadata, "version", lambda _: "another")
    measured("forecast_replies_6")
    assert os.environ.get("JAX_PLATFORMS") == "cpu"
    on_cpu, written = measured(forecasts="only")
    known = stages.stages(suite_sizes.SMOKE)
    needing = [each.name for each in known if not each.on_cpu]
    assert ["device", *on_gpu] == needing
    assert {*on_gpu, *on_cpu} | {"device", "forecast_replies_6"} == {
        each.name for each in known
    }
    assert not {*on_gpu, "forecast_replies_6"} & {*on_cpu}
    # What was measured with another jax stays, and the device is the one it names.
    monkeypatch.setattr(gpu_suite.importlib.metadata, "version", version)
    assert not list(tmp_path.glob("before_*")) and "not begun" not in written
    for name in (*on_gpu, *on_cpu, "forecast_replies_6"):
        assert suite.read(tmp_path, name).made_with["device"] == "1 x NVIDIA H200"


def test_the_folder_of_results_may_be_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(gpu_suite, "_device", lambda _: "1 x cpu")
    monkeypatch.setattr(gpu_suite.signal, "alarm", lambda _: None)
    monkeypatch.setattr(gpu_suite.stages, "measure", lambda *_: (x for x in ()))
    gpu_suite.run_suite(Path("none"), "~/day", "device", True, 1, 0, print)
    assert [each.name for each in tmp_path.iterdir()] == ["day"]


def test_what_jax_said_is_in_the_refusal(tmp_path, monkeypatch):
    said = "Traceback:\nRuntimeError: the driver is older than CUDA\n"
    asked = subprocess.CompletedProcess([], 1, stdout="", stderr=said)
    monkeypatch.setattr(gpu_suite.subprocess, "run", lambda *_, **__: asked)
    reason = r"is none \(RuntimeError: the driver is older than CUDA\): install"
    with pytest.raises(UserError, match=reason):
        gpu_suite.run_suite(Path("none"), str(tmp_path), None, False, 1, 0, print)


# A training run in place of launch/train.py: 3 iterations, the test's own line.
TRAINING = """\
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[-1].removeprefix("--workdir="))
folder.mkdir()
names = ["train/success", "update/logprob_gap", "update/logprob_gap_max"]
with (folder / "metrics.jsonl").open("w") as file:
    for iteration in range(1, 4):
        record = {"iteration": iteration} | dict.fromkeys(names, iteration)
        print(json.dumps(record), file=file, flush=True)
        if iteration == 2 and "stuck" in str(folder):
            time.sleep(60)
    print(json.dumps({"iteration": 3, "test/success": 1.0}), file=file)
"""


@pytest.fixture
def training(tmp_path, monkeypatch):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "train.py").write_text(TRAINING)
    monkeypatch.setattr(training_runs, "SCRIPTS", tmp_path / "launch")
    monkeypatch.setattr(training_runs, "_LOOK_EVERY", 0.2)
    return tmp_path


def test_a_runs_iterations_are_measured_and_not_its_test(training):
    run, two = Stage("run", "?", "learns"), Stage("two", "?", "twice")
    found = dict(stages._learns(suite_sizes.SMOKE, training, run))
    assert found == {
        "log-probability gap, nats": {"mean": 2.0, "largest": 3},
        "success": {"first half": 1.0, "second half": 2.5},
        "last iteration": {"iteration": 3, "train/success": 3},
    }
    twice = dict(stages._twice(suite_sizes.SMOKE, training, two))
    assert twice["two runs"]["iterations"] == 3
    assert twice["two runs"]["figures that differ"] == 0


ROWS = [f"rows of {length}, with gradients" for length in LENGTHS]
ROWS.append("rows of 448 tokens, without gradients")


@pytest.mark.parametrize(
    ("outcomes", "model", "rollout"),
    [
        (dict.fromkeys([*ROWS, "decoding", "messages"], "works"), "auto", "auto"),
        ({"state": "not asked for on this device"}, "auto", "auto"),
        ({ROWS[0]: "fails: no such plan"} | dict.fromkeys(ROWS[1:], "works")
         | {"decoding": "works", "messages": "works"}, "xla", "auto"),
        (dict.fromkeys([*ROWS, "decoding"], "works") | {"messages": "not finite"},
         "auto", "xla"),
        # The second form has ended its process.
        ({ROWS[0]: "works"}, "xla", "xla"),
        (None, "xla", "xla"),
    ],
)  # fmt: skip
def test_stages_do_without_an_attention_that_was_seen_to_fail(
    training, outcomes, model, rollout
):
    """For all of them would fail."""
    if outcomes and "state" not in outcomes:
        models = {"14 heads of 64": "2624", "8 heads of 16": "640"}
        outcomes = {
            f"{form}, {heads}".replace("ALL", context): said
            for form, said in outcomes.items()
            for heads, context in models.items()
        }
    tables = {"at best": {}} | ({} if outcomes is None else {ATTENTION: outcomes})
    suite.write(training, Result("device", DONE, 1, tables=tables))
    for stage in stages.stages(suite_sizes.FULL):
        if stage.kind in ("iterations", "forecast") and "changes" not in stage.options:
            found = stages._settings(suite_sizes.FULL, training, stage)
            chosen = (found.model.attention, found.rollout.decode_attention)
            assert chosen == (model, rollout)
    # A training run is told so, and the table says so.
    heard = training / "heard"
    script = f"import sys\nopen({str(heard)!r}, 'a').write(' '.join(sys.argv))\n"
    (training / "launch" / "train.py").write_text(script + TRAINING)
    run = Stage("run", "?", "learns")
    found = dict(stages._learns(suite_sizes.FULL, training, run))
    wanted = {"model.attention": model, "rollout.decode_attention": rollout}
    wanted = {key: value for key, value in wanted.items() if value == "xla"}
    assert found.get("without what fails here", {}) == wanted
    said = heard.read_text()
    assert all(f"--config.{key}=xla" in said for key in wanted)
    assert said.count("=xla") == len(wanted)


def test_two_runs_that_are_compared_share_no_compiled_program(training):
    folders = training / "folders"
    script = f"""\
import os
with open({str(folders)!r}, "a") as file:
    print(os.environ["JAX_COMPILATION_CACHE_DIR"], file=file)
"""
    (training / "launch" / "train.py").write_text(script + TRAINING)
    list(stages._twice(suite_sizes.SMOKE, training, Stage("two", "?", "twice")))
    one, other = folders.read_text().split()
    # Another attempt would find them, and then they go.
    assert one != other
    assert all(Path(each).parent == training for each in (one, other))
    assert not any(Path(each).exists() for each in (one, other))


def test_what_a_run_has_measured_is_known_before_it_ends(training):
    tables = stages._learns(suite_sizes.SMOKE, training, Stage("stuck", "?", "learns"))
    started = time.perf_counter()
    for title, figures in tables:
        if title == "last iteration" and figures["iteration"] == 2:
            break
    assert time.perf_counter() - started < 30
    tables.close()


def test_a_run_that_fails_is_an_error(training):
    (training / "launch" / "train.py").write_text("raise SystemExit(3)")
    with pytest.raises(subprocess.CalledProcessError):
        list(stages._learns(suite_sizes.SMOKE, training, Stage("run", "?", "learns")))


ALSO_REFUSED = [
    (["--env=sokoban", "--config=configs/sokoban.py"], "--env reads no --config"),
    (["--stage=attention"], "--stage is the suite's: add --suite=gpu"),
    (["--suite=gpu", "--env=all"], "--env has no effect with --suite"),
    (["--suite=gpu", "--stage=device", "--forecasts=no"], "--forecasts has no effect"),
    (["--forecasts=only"], "--forecasts is the suite's: add --suite=gpu"),
    (["--instruments", "--turns=2"], "--turns has no effect with --instruments"),
]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--suite=gpu", "--config.model.attention=xla"], "--suite reads no --config"),
        (["--smoke", "--env=all"], "--smoke is the suite's: add --suite=gpu"),
        (["--env=all", "--peers"], "--peers has no effect with --env"),
        *(
            pytest.param(flags, message, marks=pytest.mark.slow)
            for flags, message in ALSO_REFUSED
        ),
    ],
)
def test_a_flag_that_would_change_nothing_is_refused(tmp_path, flags, message):
    command = [*flags, f"--out={tmp_path / 'out'}"]
    process = runs.start(command, ROOT / "launch" / "benchmark.py")
    code, _, problems = runs.finish(process)
    assert code == 2 and f"error: {message}" in problems
    assert list(tmp_path.iterdir()) == []


def launched(out: Path, *flags: str) -> str:
    command = ["--suite=gpu", f"--out={out}", "--smoke", *flags]
    process = runs.start(command, ROOT / "launch" / "benchmark.py")
    code, output, problems = runs.finish(process)
    assert code == 0, problems
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "figures"),
    [
        ("device", {"at best": "read, GB/s"}),
        (
            "attention",
            {
                "plain operations": "valid entries, GB/s",
                "with lengths, by JAX's own operations": "a layer, us",
            },
        ),
        ("replies_6", {"iteration": "rollout, s"}),
        (
            "default_run",
            {
                "log-probability gap, nats": "largest",
                "last iteration": "time/update_seconds",
            },
        ),
    ],
)
def test_a_stage_measures_this_machine(tmp_path, stage, figures):
    launched(tmp_path, f"--stage={stage}")
    tables = json.loads((tmp_path / f"{stage}.json").read_text())["tables"]
    assert all(tables[title][name] > 0 for title, name in figures.items())
    if stage == "attention":
        for figures in tables.values():
            assert figures["largest difference to the first"] < 1e-4
    if stage == "replies_6":
        # Random weights end no reply: each of its turns takes six passes and a chunk.
        assert tables["iteration"]["mean reply, tokens"] > 5


def test_without_a_device_there_is_no_forecast_of_another(tmp_path):
    stage = suite.find(stages.stages(suite_sizes.SMOKE), "forecast_replies_6")
    with pytest.raises(UserError, match="the stage device has not said"):
        list(stages.measure(stage, suite_sizes.SMOKE, tmp_path))


@pytest.mark.parametrize("kind", ["NVIDIA H100 PCIe", "NVIDIA GH200 480GB"])
def test_a_device_that_is_not_described_has_no_other_devices_forecast(tmp_path, kind):
    found = {"device": {"kind": kind, "backend": "gpu", "devices": 1}}
    suite.write(tmp_path, Result("device", DONE, 1, 5.0, found))
    stage = suite.find(stages.stages(suite_sizes.SMOKE), "forecast_replies_6")
    ((_, figures),) = stages.measure(stage, suite_sizes.SMOKE, tmp_path)
    assert figures == {
        "state": f"unmeasured: no description of {kind} in planning/device_data"
    }


@pytest.mark.slow
@needs_compiler
def test_a_stage_has_a_forecast_from_programs_compiled_for_a_gpu(tmp_path):
    here = {"device": {"kind": "cpu", "backend": "cpu", "devices": 1}}
    suite.write(tmp_path, Result("device", DONE, 1, 5.0, here))
    launched(tmp_path, "--stage=forecast_replies_6")
    found = json.loads((tmp_path / "forecast_replies_6.json").read_text())
    forecast = found["tables"]["forecast"]
    assert forecast["device"].startswith("1 x NVIDIA H100")
    # Two turns of six tokens at the least, in chunks of 4.
    assert forecast["decode passes"] >= 2 * 8 and forecast["decode passes"] % 4 == 0
    assert forecast["iteration, s"] == pytest.approx(
        forecast["rollout, s"] + forecast["update, s"]
    )
