"""Runners of studies side by side: whose runs, and whose cores."""

import contextlib
import io
import textwrap

import pytest

from ragen_jax.reporting.console import Console
from ragen_jax.studies import runner
from ragen_jax.studies.definition import Study, planned_runs
from ragen_jax.utils import folder_lock

STUDY = Study(
    name="two",
    question="?",
    source="nothing",
    config="configs/frozenlake.py",
    changes={},
    arms={"one": {}, "other": {"seed": 5}},
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

    def go(train, **options):
        (tmp_path / "train.py").write_text(textwrap.dedent(train))
        out = io.StringIO()
        failed = runner.run_missing(
            planned_runs(STUDY),
            tmp_path,
            jobs=1,
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

        def start_both(run, *rest):
            item = start(run, *rest)
            if run.arm == "one":
                other.enter_context(folder_lock.held(workdir, "trains"))
            return item

        monkeypatch.setattr(runner, "_start", start_both)
        failed, said = go(TRAIN.format(waits=True))
    assert failed == [] and said.count("training elsewhere: one-seed0\n") == 1
    assert (workdir / "started").exists()
    assert not (workdir / "study_failure.json").exists()
