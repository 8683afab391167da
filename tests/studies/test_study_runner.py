"""Runners of studies side by side: whose runs, and whose cores."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap

import pytest
from helpers.paths import ROOT

from ragen_jax.reporting.console import Console
from ragen_jax.studies import runner, start_record, study
from ragen_jax.studies.definition import Study, planned_runs
from ragen_jax.utils import folder_lock

STUDY = Study(
    name="two",
    question="?",
    source="nothing",
    config="configs/frozenlake.py",
    changes={},
    arms={"one": {}, "other": {}},
    seeds=(0,),
)
TRAIN = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[-1].removeprefix("--workdir="))
(folder / "started").touch()
if "one" in folder.name and {waits}:
    while not (folder / ".lock").exists():
        time.sleep(0.01)
    sys.exit("error: the folder is in use")
(folder / "test.json").write_text("{{}}")
"""


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Runs the study with a stand-in for launch/train.py: (failed, what was said)."""
    monkeypatch.setattr(runner, "_LOOK_EVERY", 0.02)
    monkeypatch.setattr(runner.gpus, "found", lambda: [])

    def go(train, jobs=1, **options):
        (tmp_path / "train.py").write_text(textwrap.dedent(train))
        out = io.StringIO()
        failed = runner.run_missing(
            planned_runs(STUDY),
            tmp_path,
            jobs=jobs,
            train=tmp_path / "train.py",
            console=Console(out),
            **options,
        )
        return failed, out.getvalue()

    return go


def test_a_run_that_trains_elsewhere_is_passed_over_and_no_failure(tmp_path, go):
    workdir = tmp_path / "one-seed0"
    workdir.mkdir()
    with folder_lock.held(workdir, "trains"):
        failed, said = go(TRAIN.format(waits=False))
    assert failed == [] and said.count("training elsewhere: one-seed0\n") == 1
    assert list(workdir.iterdir()) == []
    states = [runner.state_of(tmp_path, run) for run in planned_runs(STUDY)]
    assert states == ["missing", "finished"]
    assert go(TRAIN.format(waits=False))[1].count("finished  ") == 1


def test_a_run_that_began_elsewhere_while_ours_was_starting_is_no_failure(
    tmp_path, go, monkeypatch
):
    start, workdir = runner._start, tmp_path / "one-seed0"
    with contextlib.ExitStack() as other:

        def start_both(run, running, **options):
            item = start(run, running, **options)
            if run.arm == "one":
                other.enter_context(folder_lock.held(workdir, "trains"))
            return item

        monkeypatch.setattr(runner, "_start", start_both)
        failed, said = go(TRAIN.format(waits=True))
    assert failed == [] and said.count("training elsewhere: one-seed0\n") == 1
    assert (workdir / "started").exists()
    assert not (workdir / "study_failure.json").exists()


@pytest.mark.parametrize(
    "end", ["sys.exit(0)", "sys.exit(143)", "os.kill(os.getpid(), 15)"]
)
def test_a_run_that_somebody_stopped_is_resumed_by_the_next_command(tmp_path, go, end):
    failed, said = go(f"import os, sys\n{end}")
    assert failed == [] and said.count("stopped   one-seed0  (after ") == 1
    states = [runner.state_of(tmp_path, run) for run in planned_runs(STUDY)]
    assert states == ["missing", "missing"]
    assert go(TRAIN.format(waits=False))[1].count("finished  ") == 2


def test_a_core_that_the_system_has_taken_away_ends_no_study(go, monkeypatch):
    def refuse(process, cores):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(runner, "_claim_cores", lambda most, claims: [0])
    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    failed, said = go(TRAIN.format(waits=False))
    assert failed == [] and said.count("finished  ") == 2


def test_a_disk_that_is_full_leaves_what_a_run_was_started_with(
    tmp_path, go, monkeypatch
):
    resource = pytest.importorskip("resource")  # Not on Windows.
    start, (run, _) = runner._start, planned_runs(STUDY)
    workdir = tmp_path / "one-seed0"
    (workdir / "checkpoints" / "5").mkdir(parents=True)
    (workdir / "study_run.json").write_text(json.dumps(run.arguments()))

    def start_on_a_full_disk(*given, **options):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            return start(*given, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(runner, "_start", start_on_a_full_disk)
    failed, _ = go(TRAIN.format(waits=False))
    assert [run.arm for run in failed] == ["one", "other"]
    start_record.check(tmp_path / run.label, run)


def test_a_file_where_a_runs_folder_should_be_stops_no_other_run(tmp_path, go):
    (tmp_path / "one-seed0").write_text("")
    failed, said = go(TRAIN.format(waits=False))
    assert [run.arm for run in failed] == ["one"]
    line = next(line for line in said.splitlines() if line.startswith("failed"))
    assert "(not started)" in line and f"{tmp_path}/one-seed0 cannot be used" in line
    assert "move away what stands there" in line
    assert "finished  other-seed0" in said
    (tmp_path / "one-seed0").unlink()  # It never began: no flag is needed.
    assert go(TRAIN.format(waits=False))[0] == []


def test_a_run_whose_folder_vanished_fails_alone(tmp_path, go):
    vanish = "import shutil\nif 'one' in folder.name:\n    shutil.rmtree(folder)\n"
    head, tail = TRAIN.format(waits=False).split("if ", 1)
    failed, said = go(f"{head}{vanish}if {tail}")
    assert [run.arm for run in failed] == ["one"] and "finished  other-seed0" in said


def test_a_run_that_was_finished_elsewhere_meanwhile_is_not_started(
    tmp_path, go, monkeypatch
):
    start = runner._start

    def start_late(run, running, **options):
        if run.arm == "one":
            (tmp_path / "one-seed0").mkdir()
            (tmp_path / "one-seed0" / "test.json").write_text("{}")
        return start(run, running, **options)

    monkeypatch.setattr(runner, "_start", start_late)
    failed, said = go(TRAIN.format(waits=False))
    assert failed == [] and "finished elsewhere: one-seed0\n" in said
    assert not (tmp_path / "one-seed0" / "started").exists()


@pytest.fixture
def claims(tmp_path, monkeypatch):
    """Claims of cores on a machine on which nobody else has one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_core_belongs_to_one_runner_of_a_machine(claims, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 9}, raising=False)
    with contextlib.ExitStack() as first:
        assert runner._claim_cores(2, first) == [3, 5]
        assert runner._claim_cores(2, claims) == [9]
        assert runner._claim_cores(1, claims) == []
    assert runner._claim_cores(1, claims) == [3]


def test_a_core_is_not_claimed_in_another_users_folder(claims, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert runner._claim_cores(1, claims) == []


WHERE = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[-1].removeprefix("--workdir="))
time.sleep(0.2)
found = sorted(os.sched_getaffinity(0)), os.environ.get("JAX_NUM_CPU_DEVICES")
(folder / "test.json").write_text(json.dumps(found))
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores are Linux's")
def test_runs_are_bound_to_the_first_core_that_nobody_holds(
    tmp_path, go, claims, monkeypatch
):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    every = sorted(os.sched_getaffinity(0))
    runner._claim_cores(1, claims)
    go(WHERE)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*/test.json")]
    assert found == [[every[1:2] or every, "1"]] * 2


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores are Linux's")
def test_runs_for_gpus_have_every_core_and_as_many_devices_as_they_will(
    tmp_path, go, claims, monkeypatch
):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    go(WHERE, one_core=False)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*/test.json")]
    assert found == [[sorted(os.sched_getaffinity(0)), None]] * 2


# Fails where a run that sees one of its GPUs runs at the same time.
ALONE = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[-1].removeprefix("--workdir="))
seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
for name in seen.split(","):
    (folder.parent / f"taken_{name}").touch(exist_ok=False)
time.sleep(0.5)
for name in seen.split(","):
    (folder.parent / f"taken_{name}").unlink()
(folder / "test.json").write_text(seen)
"""


@pytest.mark.parametrize(
    ("names", "jobs", "seen"),
    [
        (["0"], 2, ["all", "all"]),
        (["0", "1", "2"], 2, ["0", "1"]),
        (["0", "1"], 1, ["all", "all"]),
    ],
)
def test_runs_side_by_side_have_gpus_of_their_own(
    tmp_path, go, monkeypatch, names, jobs, seen
):
    monkeypatch.setattr(runner.gpus, "found", lambda: names)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    failed, said = go(ALONE, jobs=jobs, one_core=False)
    assert failed == []
    paths = (tmp_path / f"{arm}-seed0" / "test.json" for arm in STUDY.arms)
    assert sorted(path.read_text() for path in paths) == seen
    assert ("1 GPU is here: one run at a time" in said) == (len(names) < jobs)


@pytest.mark.parametrize(
    ("scale", "names", "one_core"),
    [("tiny", [], True), ("tiny", ["0"], False), ("paper", [], False)],
)
def test_runs_have_one_core_each_where_there_is_no_gpu_and_none_is_meant(
    tmp_path, monkeypatch, scale, names, one_core
):
    given = {}
    monkeypatch.setattr(study.gpus, "found", lambda: names)
    monkeypatch.setattr(
        runner, "run_missing", lambda *_, **options: given.update(options) or []
    )
    path = ROOT / "configs" / "studies" / "thinking.py"
    choice = study.Choice(str(path), tmp_path / "runs", tmp_path, scale)
    study.run(
        study.prepare(choice),
        jobs=1,
        retry_failed=False,
        train=tmp_path,
        console=Console(io.StringIO()),
    )
    assert given["one_core"] == one_core


def test_the_time_left_is_that_of_the_run_that_ends_last(tmp_path):
    runs = [
        dataclasses.replace(run, changes={**run.changes, "iterations": 10})
        for run in planned_runs(STUDY)
    ]
    running = []
    for run, done in zip(runs, (4, 8), strict=True):
        workdir = tmp_path / run.label
        workdir.mkdir()
        lines = [
            # The first compiles, and does not count.
            {"iteration": i, "time/iteration_seconds": 2.0 if i > 1 else 60.0}
            for i in range(1, done + 1)
        ]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (workdir / "metrics.jsonl").write_text(text)
        running.append(runner._Running(run, workdir, None, None, None, 0.0, 1))
    states = dict.fromkeys(runs, runner.MISSING)
    assert runner._progress(running, states, 3) == (
        "0/2 finished; one-seed0 4/10, other-seed0 8/10; 12 s for these, 3 runs behind"
    )


def test_a_run_that_does_not_end_on_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr(runner, "_KILL_AFTER", 0.1)
    code = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\n"
    code += "print('deaf', flush=True)\ntime.sleep(60)"
    deaf = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with deaf:
        assert deaf.stdout.readline() == b"deaf\n"
        runner._stop([runner._Running(None, None, deaf, None, None, 0.0, 1)])
        assert deaf.wait(30) == -signal.SIGKILL
