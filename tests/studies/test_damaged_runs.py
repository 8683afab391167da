"""What a study says of a run's files that are damaged, or hold something else."""

import json
import os

import pytest

from ragen_jax.errors import UserError
from ragen_jax.studies import archive, runner, study
from ragen_jax.studies.definition import planned_runs
from ragen_jax.studies.run_record import RunRecord, read_run

STUDY = """
from ragen_jax.studies.definition import Study


def get_study():
    return Study(
        name="one", question="?", source="none", config="configs/frozenlake.py",
        changes={"iterations": 1}, arms={"a": {}}, seeds=(0,),
        measures=("test_success", "test_gain", "seconds", "mutual_correlation"),
    )
"""
SIDE = {"success": 0.5}
TEST = {"before": SIDE, "after": SIDE, "gain": 0.0, "after_by_level": [0.0, 1.0]}
DIAGNOSIS = [{"step": 1, "text": SIDE, "information": {"trajectory/token/mutual": 1}}]


@pytest.fixture
def choice(tmp_path):
    (tmp_path / "one.py").write_text(STUDY)
    (tmp_path / "pages").mkdir()
    return study.Choice(str(tmp_path / "one.py"), tmp_path / "runs", tmp_path / "pages")


@pytest.fixture
def workdir(choice):
    """Of a run that the study counts as finished."""
    plan = study.prepare(choice)
    folder = runner.workdir_of(plan.folder, plan.runs[0])
    folder.mkdir(parents=True)
    (folder / "test.json").write_text(json.dumps(TEST))
    (folder / "study_diagnosis.json").write_text(json.dumps(DIAGNOSIS))
    (folder / "metrics.jsonl").write_text('{"iteration": 1, "train/success": 0.5}\n')
    return folder


def refusal(choice) -> str:
    with pytest.raises(UserError) as caught:
        study.write_page(study.prepare(choice))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *(("", "cut off"), ('{"after": {"succ', "cut off"), ("[" * 10**5, "cut off")),
        *(("null", "no object"), ("[]", "no object"), ("{}", "no result")),
        ('{"rooms": 3}', "rooms is no object"),
        ('{"rooms": {"after": 3}}', r"rooms\.after is no object"),
        ('{"after": {}}', r"after\.success is no number"),
        ('{"after": {"success": "much"}}', r"after\.success is no number"),
        ('{"after": {"success": 1}, "gain": "much"}', "gain is no number"),
        (json.dumps(TEST | {"after_by_level": "01"}), "after_by_level is no list"),
        (json.dumps(TEST | {"before_by_level": [1.0]}), "differ in length"),
    ],
    ids=range(13),
)
def test_a_damaged_test_table_is_named_with_what_is_wrong(choice, workdir, text, why):
    (workdir / "test.json").write_text(text)
    said = refusal(choice)
    assert str(workdir / "test.json") in said and "restore it from a copy" in said
    assert why.replace("\\", "") in said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("study_diagnosis.json", "[{"),
        ("study_diagnosis.json", "{}"),
        ("study_diagnosis.json", "[3]"),
        ("study_diagnosis.json", '[{"step": 1, "information": {}}]'),
        ("study_diagnosis.json", '[{"text": {"success": 1}, "information": null}]'),
        ("study_diagnosis.json", '[{"text": {"success": "much"}}]'),
        ("settings.json", '{"iterations"'),
        ("settings.json", "[]"),
        ("study_run.json", '["--config'),
        ("study_run.json", "3"),
        ("study_run.json", "[3]"),
        ("study_run.json", '{"arguments": [], "code": [3]}'),
        ("study_run.json", '{"code": {}}'),
        ("metrics.jsonl", '{"iteration": 1, "train/success": "much"}\n'),
        ("metrics.jsonl", '{"iteration": 1, "train/success": [1]}\n'),
    ],
)
def test_any_other_damaged_file_of_a_run_is_named(choice, workdir, name, text):
    (workdir / name).write_text(text)
    assert name in refusal(choice)


def test_numbers_that_a_run_does_not_know_are_no_damage(choice, workdir):
    unknown = {"before": {"success": None}, "after": {"success": None}, "gain": None}
    (workdir / "test.json").write_text(json.dumps(unknown))
    (workdir / "metrics.jsonl").unlink()
    assert study.write_page(study.prepare(choice)).is_file()
    assert read_run(workdir, 0).test == unknown


ROLLBACK = {"from": 2, "to": 1, "why": "a collapse", "remedy": "filter"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": "0"}, "seed of run 0: it is no whole number"),
        ({"seed": [1]}, "seed of run 0"),
        ({"arm": 3}, "arm of run 0: it is no text"),
        ({"arguments": "abc"}, "arguments of run 0"),
        ({"series": {"x": [[1, 2], [1]]}}, "x has lists of two lengths"),
        ({"series": {"x": [[1], ["a"]]}}, "x is not of numbers"),
        ({"series": {"x": [[1], [float("nan")]]}}, "x is not of numbers"),
        ({"series": {"x": [[1], [10**400]]}}, "x is not of numbers"),
        ({"series": {"x": [["a"], [1]]}}, "x has no whole iterations"),
        ({"series": {"x": [[10**30], [1]]}}, "x has no whole iterations"),
        ({"test": None}, "test of run 0: it is no object"),
        ({"diagnoses": None}, "diagnoses of run 0: it is no list"),
        ({"diagnoses": [{"step": 1, "text": 3}]}, "text of a checkpoint is no object"),
        ({"diagnoses": [{"text": {"success": 1}}]}, "a checkpoint has no step"),
        ({"code": {"env.py": 3}}, "code of run 0: it is no object of digests"),
        ({"rollbacks": [{}]}, "rollbacks of run 0"),
        ({"rollbacks": [ROLLBACK | {"why": 2.0}]}, "rollbacks of run 0"),
        ({"rollbacks": [ROLLBACK | {"remedy": []}]}, "rollbacks of run 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_data_of_another_kind_are_named_with_their_run(choice, change, why):
    planned = planned_runs(study.prepare(choice).study)[0]
    record = RunRecord(0, [{"iteration": 1, "train/success": 0.5}], TEST, DIAGNOSIS)
    item = archive.entry(planned, record, ())
    path = choice.pages / "one.json"
    path.write_text(json.dumps({"runs": [item | {"rollbacks": [ROLLBACK]}]}))
    assert archive.read(choice.pages)
    path.write_text(json.dumps({"runs": [item | change]}))
    said = refusal(choice)
    assert str(path) in said and why in said


@pytest.mark.parametrize("text", ["[]", '{"runs": 3}', '{"runs"', "[" * 10**5])
def test_a_file_that_is_no_data_is_left_as_it_is(choice, text):
    path = choice.pages / "other.json"
    path.write_text(text)
    assert "move it away, or restore it" in refusal(choice)
    assert path.read_text() == text


def test_a_pipe_among_the_data_files_is_refused_and_not_waited_for(choice):
    os.mkfifo(choice.pages / "aa.json")
    assert "aa.json is not the data of a study (it is a pipe" in refusal(choice)
