"""Finished runs in a study's data file."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.study_records import STUDY, record, study_file

from ragen_jax.errors import UserError
from ragen_jax.studies import archive, measures, study
from ragen_jax.studies.definition import PlannedRun, planned_runs
from ragen_jax.studies.run_record import RunRecord

STUDY_FILE = study_file("kept", curves=("own/curve",))


def test_a_page_keeps_its_runs_where_their_workdirs_are_gone(tmp_path):
    path = tmp_path / "kept.py"
    path.write_text(STUDY_FILE)
    folder, pages = tmp_path / "runs", tmp_path / "pages"
    choice = study.Choice(path=str(path), folder=folder, pages=pages)
    workdir = folder / "kept" / "one-seed0"
    workdir.mkdir(parents=True)
    made = record(0, [1.0, 0.0], success=(0.25,), **{"own/curve": (1.5, 2.123456789)})
    lines = [json.dumps(row) for row in made.records]
    (workdir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (workdir / "test.json").write_text(json.dumps(made.test))
    first = study.write_page(study.prepare(choice)).read_text()

    shutil.rmtree(folder)
    plan = study.prepare(choice)
    states = [plan.state_of(run) for run in plan.runs]
    assert states == ["finished", "missing"]
    assert study.write_page(plan).read_text() == first
    curve = plan.record_of(plan.runs[0]).series("own/curve")
    assert curve[1].tolist() == [1.5, 2.12346]
    # A page is of all seeds, and keeps runs that the study no longer plans.
    other = study.prepare(dataclasses.replace(choice, seeds=("1",)))
    assert [run.seed for run in other.runs] == [1]
    assert study.write_page(other).read_text() == first
    path.write_text(STUDY_FILE.replace("seeds=(0, 1)", "seeds=(3,)"))
    study.write_page(study.prepare(choice))
    assert [item["seed"] for item in archive.entries(pages / "kept.json")] == [0]
    # The same arguments in another study are the same run; another seed is not.
    path.write_text(STUDY_FILE.replace('"kept"', '"again"'))
    again = study.prepare(choice)
    assert [again.state_of(run) for run in again.runs] == states


def test_a_run_that_was_saved_more_often_and_diagnosed_is_the_same_unless_it_rolls_back(
    tmp_path,
):
    def planned(*diagnose, **changes):
        changes = {key.replace("__", "."): value for key, value in changes.items()}
        return PlannedRun("one", 0, "configs/bandit.py", changes, diagnose)

    def is_there(run):
        return archive.key(run) in archive.read(tmp_path)

    def keep(run):
        item = archive.entry(run, record(0, [1.0]), ())
        (tmp_path / "a.json").write_text(json.dumps({"runs": [item]}))

    saving = dict(every__checkpoint=10, checkpoint__keep_last=20)
    keep(planned("--all", iterations=9, **saving))
    assert is_there(planned(iterations=9))
    assert is_there(planned("--all", iterations=9, **saving))
    assert not is_there(planned("--all", iterations=9))  # Others would be measured.
    assert not is_there(planned("--all", "--nogradients", iterations=9, **saving))
    assert not is_there(planned(iterations=8, **saving))
    rollback = dict(health__on_collapse="rollback")
    keep(planned(**rollback, **saving))
    assert is_there(planned(**rollback, **saving))
    assert not is_there(planned(**rollback))
    # The config may roll back by itself.
    config = tmp_path / "own.py"
    config.write_text(
        f"import importlib.util, sys\nsys.path.insert(0, {str(ROOT / 'configs')!r})\n"
        "import bandit\n\n\ndef get_config():\n    config = bandit.get_config()\n"
        "    config.health.on_collapse = 'rollback'\n    return config\n"
    )
    few, many = (
        PlannedRun("one", 0, str(config), {"checkpoint.keep_last": count})
        for count in (2, 20)
    )
    assert archive.key(few) != archive.key(many)
    item = archive.entry(few, record(0, [1.0]), ())
    config.write_text("raise SystemExit('a data file names it, and nobody else')")
    archive._on_collapse.cache_clear()
    assert archive.key_of(item)[0] == tuple(sorted(few.arguments()))


def test_a_run_in_two_data_files_has_the_curves_of_both_if_it_was_trained_once(
    tmp_path,
):
    run = planned_runs(STUDY)[0]

    def keep(name, levels, **series):
        item = archive.entry(run, record(0, levels, **series), series)
        (tmp_path / f"{name}.json").write_text(json.dumps({"runs": [item]}))

    def found(own=""):
        made = archive.read(tmp_path, own)[archive.key(run)]
        curves = {name: made.series(name)[1].tolist() for name in ("a/a", "b/b")}
        return made.test["after"]["success"], curves

    keep("a", [1.0, 0.0], **{"a/a": (1.5, 2.5)})
    keep("b", [1.0, 0.0], **{"b/b": (3.5,)})
    assert found() == found("a") == (0.5, {"a/a": [1.5, 2.5], "b/b": [3.5]})
    # Trained twice: a study shows its own results.
    keep("b", [1.0, 1.0], **{"b/b": (3.5,)})
    assert found("a") == (0.5, {"a/a": [1.5, 2.5], "b/b": []})
    assert found("b") == found() == (1.0, {"a/a": [], "b/b": [3.5]})


def test_a_run_that_came_into_the_data_file_meanwhile_is_not_lost(tmp_path):
    path = tmp_path / "kept.py"
    path.write_text(STUDY_FILE)
    pages = tmp_path / "pages"
    plans = [
        study.prepare(study.Choice(str(path), tmp_path / folder, pages))
        for folder in ("here", "elsewhere")
    ]
    for number, plan in enumerate(plans):
        workdir = plan.folder / f"one-seed{number}"
        workdir.mkdir(parents=True)
        made = record(number, [1.0, 0.0], success=(0.25,))
        (workdir / "metrics.jsonl").write_text('{"iteration": 1}\n')
        (workdir / "test.json").write_text(json.dumps(made.test))
        page = study.write_page(plan).read_text()
    seeds = [item["seed"] for item in archive.entries(pages / "kept.json")]
    assert seeds == [0, 1]
    assert "| one | 2 |" in page


def test_a_page_shows_the_seeds_that_an_earlier_command_added(tmp_path):
    path = tmp_path / "kept.py"
    path.write_text(STUDY_FILE)
    choice = study.Choice(str(path), tmp_path / "runs", tmp_path / "pages")
    more = study.prepare(dataclasses.replace(choice, seeds=("7",)))
    workdir = more.folder / "one-seed7"
    workdir.mkdir(parents=True)
    made = record(7, [1.0, 0.0], success=(0.25,))
    (workdir / "metrics.jsonl").write_text('{"iteration": 1}\n')
    (workdir / "test.json").write_text(json.dumps(made.test))
    first = study.write_page(more).read_text()
    assert "| one | 1 |" in first
    assert "--seeds=0,1,7" in first

    plan = study.prepare(choice)
    assert [run.seed for run in plan.runs] == [0, 1]
    assert study.write_page(plan).read_text() == first

    # A small scale plans one seed: the page of two names them.
    small = dataclasses.replace(choice, scale="smoke", pages=tmp_path / "small")
    assert "--seeds" not in study.write_page(study.prepare(small)).read_text()
    both = study.prepare(dataclasses.replace(small, seeds=("0", "1")))
    assert "--scale=smoke --seeds=0,1" in study.write_page(both).read_text()


def test_a_run_of_an_arm_that_was_edited_since_is_not_taken_for_the_new_one(tmp_path):
    path, folder = tmp_path / "kept.py", tmp_path / "runs"
    path.write_text(STUDY_FILE)
    choice = study.Choice(str(path), folder, tmp_path / "pages")
    workdir = folder / "kept" / "one-seed0"
    workdir.mkdir(parents=True)
    saved = {"seed": 0, "iterations": 2, "optimizer": {"actor_lr": 1e-4}}
    (workdir / "settings.json").write_text(json.dumps(saved))
    (workdir / "test.json").write_text(json.dumps(record(0, [1.0]).test))
    plan = study.prepare(choice)
    assert [plan.state_of(run) for run in plan.runs] == ["finished", "missing"]
    edited = STUDY_FILE.replace('{"one": {}}', '{"one": {"optimizer.actor_lr": 3e-4}}')
    path.write_text(edited)
    with pytest.raises(UserError, match=r"one-seed0 was trained with .*=0\.0001, and"):
        study.prepare(choice)


def test_every_measure_can_be_taken_of_an_archived_run():
    rng = np.random.default_rng(0)
    series = {name: tuple(rng.random(40)) for name in archive.ARCHIVED_METRICS}
    success = np.concatenate([np.linspace(0.1, 1, 20), np.linspace(1, 0, 20)])
    series["train/success"] = series["filter/reward_std"] = tuple(success)
    series["health/level"] = (0,) * 30 + (2,) * 10
    series["rollout/entropy"] = tuple(success)  # From little to much.
    series["update/actor_grad_norm"] = (0.1,) * 20 + tuple(rng.random(20) + 1)
    series["health/distinct_thoughts"] = (0.5,) * 30 + (0.1,) * 10
    made = record(3, rng.random(20) < 0.5, **series)
    diagnoses = [
        {
            "step": step,
            "text": {"success": x},
            "information": {
                "trajectory/token/mutual": x * x,
                "trajectory/token/zscore": -x,
                "trajectory/token/conditional_entropy": entropy,
            },
        }
        for step, x, entropy in ((1, 0.1, 2), (2, 0.4, 1), (3, 0.9, 3))
    ]
    made = RunRecord(3, made.records, made.test, diagnoses)
    run = planned_runs(STUDY)[0]
    item = json.loads(json.dumps(archive.entry(run, made, ())))
    kept = archive._record(item)
    for name in measures.MEASURES:
        value = measures.value(made, name)
        assert math.isfinite(value), name
        assert math.isclose(measures.value(kept, name), value, rel_tol=1e-5), name
    last = dict(
        last_success="train/success",
        last_return="train/return",
        last_entropy="rollout/entropy",
        last_reply_tokens="rollout/reply_tokens",
        last_reward_std="filter/reward_std",
        last_valid="rollout/valid_reply_rate",
        last_grounded="rollout/grounded",
        last_distinct_thoughts="health/distinct_thoughts",
        last_grad_norm="update/actor_grad_norm",
    )
    for name, metric in last.items():
        assert measures.value(made, name) == np.mean(series[metric][-4:]), name
    of = dict(mutual_correlation=1.0, zscore_correlation=-1.0, entropy_correlation=0.5)
    for name, value in of.items():
        assert measures.value(made, name) == pytest.approx(value)


def test_a_data_file_that_is_none_is_named(tmp_path):
    (tmp_path / "x.json").write_text('{"runs": [{}]}')
    with pytest.raises(UserError, match=r"x\.json is not the data of a study"):
        archive.read(tmp_path)


def test_a_page_of_before_runs_were_kept_is_not_overwritten(tmp_path):
    (tmp_path / "kept.py").write_text(STUDY_FILE)
    choice = study.Choice(str(tmp_path / "kept.py"), tmp_path / "runs", tmp_path)
    (tmp_path / "kept.json").write_text('{"study": "kept"}')
    with pytest.raises(UserError, match=r"kept\.json keeps no runs.*move it away"):
        study.prepare(choice)
