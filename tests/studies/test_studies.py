"""Studies: what runs, and what happens when a run fails or is interrupted."""

import io
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from helpers.paths import ROOT
from helpers.study_records import STUDY

from ragen_jax.errors import UserError
from ragen_jax.reporting.console import Console
from ragen_jax.studies import definition, failures, runner, study_checks
from ragen_jax.studies.definition import Claim, Study, planned_runs
from ragen_jax.studies.run_record import read_run


def test_a_grid_goes_seed_by_seed_with_an_arms_changes_over_the_studys():
    runs = planned_runs(STUDY)
    assert [(r.arm, r.seed) for r in runs] == [
        ("one", 0),
        ("other, too", 0),
        ("one", 1),
        ("other, too", 1),
    ]
    assert runs[2].arguments() == [
        "--config=configs/frozenlake.py",
        "--config.iterations=10",
        "--config.seed=1",
    ]
    assert runs[1].config == "configs/bandit.py"
    assert runs[1].label == "other_too-seed0"
    smoke = planned_runs(STUDY, scale="smoke", only="one")
    assert [(r.seed, r.changes["iterations"]) for r in smoke] == [(0, 1)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(name="Two"), "small letters"),
        (dict(arms={}), "no arm"),
        (dict(seeds=(1, 1)), "repeat"),
        (dict(arms={"a b": {}, "a, b": {}}), "one folder name"),
        (dict(measures=("test_sucess",)), "is unknown: did you mean test_success"),
        (dict(measures=("drop/a",)), r"with /LABEL.* test_gain\): did you mean drop"),
        (dict(measures=("xyz",)), "'xyz' is unknown: choose one of .*, test_success"),
        (dict(claims=(Claim("x", "nobody"),)), "arm of a claim 'nobody'"),
        (dict(claims=(Claim("x", "one", relation="equal"),)), "relation"),
        # Another type than the field's.
        (dict(name=5), "study 5: name is 5: give a text"),
        (dict(question=None), "question is None: give a text"),
        (dict(notes=5), "notes is 5: give a text"),
        (dict(arms=["a", "b"]), r"arms is \['a', 'b'\]: give a dict of dicts"),
        (dict(arms={"a": None}), r"arms\['a'\] is None: give a dict of settings"),
        (dict(arms={"a": {"iterations": {1}}}), r"\['a'\] sets iterations to \{1\}"),
        (dict(arms={"a": {"config": 5}}), "sets config to 5: give a text"),
        (dict(paper_arms=("one",)), "paper_arms is .*: give a dict of dicts"),
        (dict(changes=None), "changes is None: give a dict of settings"),
        (dict(paper={5: 1}), "paper is .*: give a dict of settings"),
        (dict(seeds=3), "seeds is 3: give a tuple of whole numbers"),
        (dict(seeds=(-1,)), "seeds is .*: give a tuple of whole numbers from 0 to"),
        (dict(seeds=(2**32,)), "seeds is .*: give a tuple of whole numbers from 0"),
        (dict(seeds=(0.5,)), "seeds is .*: give a tuple of whole numbers"),
        (dict(measures=(5,)), r"measures is \(5,\): give a tuple of texts"),
        (dict(claims=(("x", "one"),)), r"claims\[0\] is .*: give a Claim"),
        (dict(claims=(Claim("x", "one", margin="x"),)), r"\[0\]: margin is 'x': give"),
        (dict(claims=(Claim("x", "one", margin=math.nan),)), "margin is nan: give"),
        (dict(claims=(Claim("x", 5),)), "left is 5: give the label of an arm"),
        # What would have no effect, or fail behind the training.
        (dict(arms={"a": {"seed": 5}}), r"arms\['a'\] sets the seed, to no effect"),
        (dict(smoke={"seed": 5}), "smoke sets the seed, to no effect"),
        (dict(paper_arms={"b": {}}), "arm of paper_arms 'b' is unknown"),
        (dict(diagnose="--samples=3"), "diagnose is '--samples=3': give a tuple of"),
        (dict(diagnose=("--sample=3",)), "give a tuple of flags of launch/diagnose"),
        (dict(diagnose=("--out=x",)), "give a tuple of flags of launch/diagnose"),
        (dict(name="across"), "across.md is another page"),
        (dict(name="readme"), "readme.md is another page"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused_in_a_sentence(changes, message):
    with pytest.raises(UserError, match=message):
        definition.check(Study(**{**vars(STUDY), **changes}))


def test_a_study_may_have_every_flag_of_a_diagnosis_but_those_that_it_sets_itself():
    files = ("launch/diagnose.py", "ragen_jax/cli/trust.py")
    text = "".join((ROOT / file).read_text() for file in files)
    names = re.findall(r'DEFINE_\w+\(\s*"([\w-]+)"', text)
    assert {"samples", "trust-code"} < set(names)
    forms = ("--{}", "--no{}", "--{}=3", "--{}=quantile")
    taken = {
        name
        for name in names
        if any(study_checks.is_diagnose_flag(form.format(name)) for form in forms)
    }
    assert taken == set(names) - {"checkpoint", "out"}


TRAIN = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[-1].removeprefix("--workdir="))
if "--config.seed=1" in sys.argv and "frozenlake" in sys.argv[1]:
    print("error: no luck")
    sys.exit(2)
(folder / "test.json").write_text(json.dumps({"after": {"success": 1}}))
print("ran", sys.argv[1:])
for number in (1, 1, 2, 3, 4):
    print(f"warning: nothing was learned, {number}")
"""


def test_what_is_missing_runs_and_a_failed_run_does_not_stop_the_rest(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(runner, "_LOOK_EVERY", 0.02)
    train = tmp_path / "train.py"
    train.write_text(textwrap.dedent(TRAIN))
    folder, out = tmp_path / "runs", io.StringIO()

    def go(**options):
        return runner.run_missing(
            planned_runs(STUDY),
            folder,
            jobs=2,
            train=train,
            console=Console(out),
            **options,
        )

    failed = go()
    assert [run.label for run in failed] == ["one-seed1"]
    states = [runner.state_of(folder, run) for run in planned_runs(STUDY)]
    assert states == ["finished", "finished", "failed", "finished"]
    assert "failed    one-seed1  (exit code 2" in out.getvalue()
    assert "error: no luck" in out.getvalue()
    # A finished run's first three warnings, each once.
    told = [f"warning: nothing was learned, {number}" for number in (1, 2, 3)]
    lines = [line.strip() for line in out.getvalue().splitlines()]
    finished = [i for i, line in enumerate(lines) if line.startswith("finished")]
    assert len(finished) == 3
    assert all(lines[i + 1 : i + 4] == told for i in finished)
    assert out.getvalue().count("warning: ") == 9
    assert failures.why(folder / failed[0].label) == "exit code 2: error: no luck"
    out.seek(0)
    out.truncate()
    assert [run.label for run in go()] == ["one-seed1"]
    line, *_ = out.getvalue().splitlines()
    assert line == (
        "4 runs: 3 finished, 0 to run, 1 failed before (--retry_failed runs them again)"
    )
    train.write_text(train.read_text().replace("sys.exit(2)", "pass"))
    assert go(retry_failed=True) == []
    assert "ran" in (folder / "one-seed1" / "study.log").read_text()


DIAGNOSE = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1].removeprefix("--checkpoint="))
assert sys.argv[2] == "--all" and (folder / "test.json").is_file()
pathlib.Path(sys.argv[3].removeprefix("--out=")).write_text("[]")
"""


def test_a_run_that_is_to_be_diagnosed_is_finished_after_that(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_LOOK_EVERY", 0.02)
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    (tmp_path / "diagnose.py").write_text(textwrap.dedent(DIAGNOSE))
    study = Study(**{**vars(STUDY), "diagnose": ("--all",), "seeds": (0,)})
    runs, folder = planned_runs(study), tmp_path / "runs"
    out = io.StringIO()
    failed = runner.run_missing(
        runs, folder, jobs=1, train=tmp_path / "train.py", console=Console(out)
    )
    assert failed == [] and out.getvalue().count("finished  ") == 2
    workdir = folder / runs[0].label
    measured = workdir / "study_diagnosis.json"
    assert measured.read_text() == "[]"
    # What a user measured there with other flags is not the study's.
    other = workdir / "diagnosis.json"
    other.write_text('[{"step": 1}]')
    assert read_run(workdir, 0).diagnoses == []
    measured.unlink()
    assert runner.state_of(folder, runs[0]) == runner.MISSING
    assert read_run(workdir, 0).diagnoses == ()


SAVING = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[-1].removeprefix("--workdir="))
signal.signal(signal.SIGTERM, lambda *_: sys.exit((folder / "saved").touch()))
(folder / "started").touch()
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_to_a_study_lets_its_runs_save_themselves(tmp_path, number, code):
    """By launch/study.py itself, in a copy beside another train.py."""
    shutil.copy(ROOT / "launch" / "study.py", tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(SAVING))
    study = ROOT / "configs" / "studies" / "thinking.py"
    process = subprocess.Popen(
        [sys.executable, tmp_path / "study.py", f"--study={study}", "--jobs=1"]
        + [f"--folder={tmp_path}/runs", f"--pages={tmp_path}/pages"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (started := list(tmp_path.glob("runs/*/*/started"))):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in errors
    assert (started[0].parent / "saved").exists()
