"""The studies of configs/studies: each arm is a run that could start."""

import dataclasses
import json

import pytest
from helpers.paths import ROOT

from ragen_jax import settings as settings_lib
from ragen_jax.envs import registry
from ragen_jax.errors import UserError
from ragen_jax.studies import (
    archive,
    arm_settings,
    definition,
    runner,
    start_record,
    study,
)
from ragen_jax.studies.definition import planned_runs

STUDIES = sorted((ROOT / "configs" / "studies").glob("*.py"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_curve_is_kept_for_other_studies_that_plan_the_same_runs(path):
    assert set(definition.load(path).curves) <= set(archive.ARCHIVED_METRICS)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_run_of_every_study_could_start(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    found_study = definition.load(path)
    assert found_study.name == path.stem, (
        "the page would have another name than the file"
    )
    for scale in definition.SCALES:
        found = {}
        for run in planned_runs(found_study, scale=scale, seeds=(0,)):
            settings = found[run.arm] = arm_settings.read(run)
            settings_lib.check_devices(settings, 1)
            # What a finished run's settings are compared with.
            folder = runner.workdir_of(tmp_path / scale, run)
            folder.mkdir(parents=True)
            saved = json.dumps(settings_lib.to_dict(settings))
            (folder / "settings.json").write_text(saved)
            (folder / "test.json").write_text("{}")
            start_record.check(folder, run)
            for task in (*settings.tasks(), *settings.evaluated_tasks()):
                registry.make(task.name, task.options)
        is_paper = {s.model.path != "tiny" for s in found.values()}
        assert is_paper == {scale == "paper"}
        arms = [settings_lib.to_dict(settings) for settings in found.values()]
        for index, one in enumerate(arms):
            assert one not in arms[:index], "two arms have the same settings"
        if scale == "tiny":
            check_labels(found_study, found)


@pytest.mark.parametrize("left", ["test.json", "checkpoints/10/state"])
def test_a_run_of_an_arm_that_was_edited_since_is_neither_taken_for_it_nor_continued(
    tmp_path, left
):
    (run,) = planned_runs(
        definition.load(ROOT / "configs" / "studies" / "slip.py"), seeds=(0,)
    )[:1]
    folder = runner.workdir_of(tmp_path, run)
    folder.mkdir(parents=True)
    saved = settings_lib.to_dict(arm_settings.read(run))
    (folder / "settings.json").write_text(json.dumps(saved))
    (folder / left).parent.mkdir(parents=True, exist_ok=True)
    (folder / left).write_text("{}")
    started = [*reversed(run.arguments()), *run.diagnose]  # The order is no change.
    (folder / "study_run.json").write_text(json.dumps(started))
    start_record.check(folder, run)
    started.append("--config.loss.entropy=0.1")  # A change that the arm no longer has.
    (folder / "study_run.json").write_text(json.dumps(started))
    with pytest.raises(UserError, match="made with --config.loss.entropy=0.1, and the"):
        start_record.check(folder, run)
    (folder / left).unlink()
    if (folder / left).parent != folder:
        (folder / left).parent.rmdir()
    start_record.check(folder, run)  # Nothing is there that could be continued.


def test_the_arms_of_the_slip_sweep_slip_as_often_as_their_names_say():
    runs = planned_runs(definition.load(ROOT / "configs" / "studies" / "slip.py"))
    assert len(runs) == 42
    for run in runs:
        percent = float(run.arm.split()[1])
        options = dict(arm_settings.read(run).env.options)
        assert options["success_probability"] == pytest.approx(1 - percent / 100)


def test_a_listing_ends_with_an_array_job_of_the_same_runs(tmp_path):
    path = ROOT / "configs" / "studies" / "reuse.py"
    choice = study.Choice(
        path=str(path), folder=tmp_path, pages=tmp_path, only="dit.*-1"
    )
    plan = study.prepare(dataclasses.replace(choice, seeds=("0", "4")))
    *lines, array = study.listing(plan).splitlines()
    assert [line.split()[:2] for line in lines] == [
        [str(number), "missing"] for number in range(4)
    ]
    assert lines[1].split()[2] == "Bandit_Online_10-seed0"
    assert "sbatch --array=0-3 " in array
    one = study.prepare(dataclasses.replace(plan.choice, run=3))
    assert [run.label for run in one.runs] == ["Bandit_Online_10-seed4"]
    step = runner.workdir_of(plan.folder, plan.runs[2]) / "checkpoints" / "10"
    step.mkdir(parents=True)
    states = [line.split()[1] for line in study.listing(plan).splitlines()[:-1]]
    assert states == ["missing", "missing", "begun", "missing"]


def test_the_list_of_studies_names_each_with_its_number_of_runs():
    page = (ROOT / "docs" / "studies" / "README.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| [")]
    listed = {row[1].split("]")[0].strip(" ["): int(row[4]) for row in rows}
    assert listed == {
        path.stem: len(planned_runs(definition.load(path))) for path in STUDIES
    }


def check_labels(chosen, found):
    """Measures of one environment of several name one that every arm evaluates on."""
    names = (*chosen.measures, *(claim.measure for claim in chosen.claims))
    wanted = {name.partition("/")[2] for name in names} - {""}
    for settings in found.values():
        assert wanted <= {task.label for task in settings.evaluated_tasks()}


def test_a_study_at_the_papers_scale_takes_the_papers_variant(monkeypatch):
    monkeypatch.chdir(ROOT)
    reuse = definition.load("configs/studies/reuse.py")
    run = planned_runs(reuse, scale="paper")[1]
    assert run.config == "configs/bandit.py:paper"
    settings = arm_settings.read(run)
    assert settings.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert settings.optimizer.reuse == 2 and settings.iterations == 100
