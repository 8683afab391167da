"""Runs of a study whose own files, an environment or a hook, have changed since."""

import json
import shutil

import pytest
from helpers.paths import ROOT
from helpers.study_records import record, study_file

from ragen_jax import settings as settings_lib
from ragen_jax.errors import UserError
from ragen_jax.studies import arm_settings, runner, start_record, study
from ragen_jax.studies.definition import PlannedRun
from ragen_jax.utils import user_modules


@pytest.fixture
def hook(tmp_path):
    (tmp_path / "hook.py").write_text("# first\n")
    return tmp_path / "hook.py"


@pytest.fixture
def choice(tmp_path, hook):
    """Of a study whose two runs have finished and are on its page."""
    text = study_file(
        "kept",
        config=f"{ROOT}/configs/bandit.py",
        changes={"reward.hook": str(hook)},
        arms={"one": {}, "other": {"iterations": 2}},
        seeds=(0,),
    )
    (tmp_path / "kept.py").write_text(text)
    found = study.Choice(str(tmp_path / "kept.py"), tmp_path / "runs", tmp_path / "p")
    plan = study.prepare(found)
    for run in plan.runs:
        workdir = runner.workdir_of(plan.folder, run)
        workdir.mkdir(parents=True)
        start_record.write(workdir, run)
        (workdir / "test.json").write_text(json.dumps(record(0, [1.0]).test))
    study.write_page(plan)
    return found


def test_finished_runs_of_another_version_of_an_own_file_are_refused(choice, hook):
    plan = study.prepare(choice)
    hook.write_text("# second\n")
    said = (
        rf"^one-seed0 and other-seed0 were trained with another {hook} than the one"
        r" that is there now: restore it, or move the folders of such runs in .*/kept"
        r" away and choose other --pages than .*/p, whose data files have them too, to"
        r" make them again$"
    )
    with pytest.raises(UserError, match=said):
        study.prepare(choice)
    with pytest.raises(UserError, match=said):  # It was edited while the runs trained.
        study.write_page(plan)
    shutil.rmtree(plan.folder)  # They still are in the data file.
    with pytest.raises(UserError, match=said):
        study.prepare(choice)
    hook.write_text("# first\n")
    assert [study.prepare(choice).state_of(run) for run in plan.runs] == [
        "finished"
    ] * 2
    hook.unlink()  # Nothing is there to differ.
    study.prepare(choice)


def test_runs_of_before_digests_were_kept_still_count(choice, hook):
    plan = study.prepare(choice)
    data = json.loads((plan.pages / "kept.json").read_text())
    for item, run in zip(data["runs"], plan.runs, strict=True):
        assert list(item.pop("code")) == [str(hook)]
        path = runner.workdir_of(plan.folder, run) / start_record.FILE
        path.write_text(json.dumps(json.loads(path.read_text())["arguments"]))
    (plan.pages / "kept.json").write_text(json.dumps(data))
    hook.write_text("# second\n")
    again = study.prepare(choice)
    assert [again.state_of(run) for run in again.runs] == ["finished"] * 2
    study.write_page(again)
    data = json.loads((plan.pages / "kept.json").read_text())
    assert not any("code" in item for item in data["runs"])


def test_a_run_is_not_continued_with_another_version_of_its_environment(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)  # Where the config finds its environment.
    run = PlannedRun("one", 0, "docs/examples/coin_walk_config.py", {"seed": 0})
    start_record.write(tmp_path, run)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    env = "docs/examples/coin_walk.py"
    digest = user_modules.digest(ROOT / env)
    assert start_record.code(tmp_path) == {env: digest}
    monkeypatch.setattr(user_modules, "digest_if_there", lambda name: "")
    start_record.write(tmp_path, run)  # It is absent for a while, and not forgotten.
    assert start_record.code(tmp_path) == {env: digest}
    monkeypatch.setattr(user_modules, "digest_if_there", lambda name: "another")
    with pytest.raises(UserError, match=rf"was trained with another {env} than"):
        start_record.write(tmp_path, run)


def test_a_run_of_a_config_that_was_edited_since_is_refused(tmp_path):
    run = PlannedRun("one", 0, str(ROOT / "configs" / "bandit.py"), {"seed": 0})
    saved = settings_lib.to_dict(arm_settings.read(run))
    path = tmp_path / "settings.json"
    (tmp_path / "test.json").write_text("{}")
    del saved["reward"]["grounding_by"]  # It is newer than the run, and the default.
    path.write_text(json.dumps(saved))
    start_record.check(tmp_path, run)
    saved["loss"]["entropy"] = 0.5
    path.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"bandit.py has now: loss.entropy was 0.5 and"):
        start_record.check(tmp_path, run)
    saved["loss"]["entropy_of_another_version"] = 0.5
    path.write_text(json.dumps(saved))
    start_record.check(tmp_path, run)


@pytest.mark.parametrize("path", ["model", "model/weights.gguf"])
def test_a_model_has_another_digest_when_other_weights_lie_there(
    tmp_path, monkeypatch, path
):
    (tmp_path / "model").mkdir()
    named = tmp_path / path
    weights = named if named.suffix else named / "model.safetensors"
    weights.write_bytes(b"first")
    monkeypatch.setattr(user_modules, "digest", None)  # It would read the whole file.
    changes = {"seed": 0, "model.path": str(named)}
    run = PlannedRun("one", 0, str(ROOT / "configs" / "bandit.py"), changes)
    start_record.write(tmp_path, run)
    (tmp_path / "test.json").write_text("{}")
    code = start_record.code(tmp_path)
    assert list(code) == [str(named)]
    start_record.check_code({"one": code}, "train it again")
    weights.write_bytes(b"other")
    with pytest.raises(UserError, match=f"^one was trained with another {named} than"):
        start_record.check_code({"one": code}, "train it again")
    monkeypatch.undo()
    weights.unlink()  # Nothing is there to differ.
    start_record.check_code({"one": code}, "train it again")


def test_of_many_runs_a_message_names_the_first():
    code_of = {f"run{number}": {"env.py": "old"} for number in range(5)}
    code_of["new"] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_record, "_digest", lambda name: "new")
        with pytest.raises(UserError, match="^run0, run1, run2 and 2 more were"):
            start_record.check_code(code_of, "train them again")
