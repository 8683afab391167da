"""The flags of launch/study.py: what is refused, and what the list says of them."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import warm_process
from helpers.paths import ROOT
from helpers.study_records import study_file

from ragen_jax.errors import UserError
from ragen_jax.studies import study

STUDY_FILE = study_file("two", arms={"one": {}, "other": {"rollout.turns": 5}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(only="["), r"--only=\[ is not a regular expression .*: name arms"),
        (dict(only="a{99999999999}"), "--only=a.* is not a regular expression"),
        (dict(only="(" * 10**4), "--only=.* is not a regular expression"),
        (dict(seeds=["1_0"]), "--seeds=1_0: give different whole numbers"),
        (dict(seeds=["٣"]), "--seeds=٣: give different whole numbers"),
        (dict(seeds=["0", "-1"]), "--seeds=0,-1: give different whole numbers"),
        (dict(seeds=["4294967296"]), "--seeds=4294967296: give different whole"),
        (dict(folder="file"), "--folder=.*file is a file: name a folder"),
        (dict(folder="file/x"), "--folder=.*file/x: .*file is a file: name a folder"),
        (dict(pages="file"), "--pages=.*file is a file: name a folder"),
        (dict(pages="file/x"), "--pages=.*file/x: .*file is a file: name a folder"),
    ],
    ids=range(11),
)
def test_a_study_begins_nothing_where_a_flag_cannot_be_used(tmp_path, changes, message):
    (tmp_path / "file").write_text("")
    path = tmp_path / "kept.py"
    path.write_text(STUDY_FILE)
    for name in {"folder", "pages"} & set(changes):
        changes = {name: tmp_path / changes[name]}
    choice = study.Choice(str(path), tmp_path / "runs", tmp_path / "pages")
    with pytest.raises(UserError, match=message):
        study.prepare(dataclasses.replace(choice, **changes))


def test_a_flag_that_another_leaves_without_effect_is_refused(tmp_path):
    script = ROOT / "launch" / "study.py"
    ended = warm_process.attempt(script, ["--across", "--report"], tmp_path)
    assert ended.code == 2
    assert "--report has no effect with --across: leave one out" in ended.errors
    report = ["--study=thinking.py", "--report", "--run=0"]
    ended = warm_process.attempt(script, report, tmp_path)
    assert ended.code == 2
    assert "--run has no effect with --report: leave one out" in ended.errors
    for flag in ("--jobs=1", "--only=a"):
        ended = warm_process.attempt(script, [*report[:2], flag], tmp_path)
        assert ended.code == 2 and "no effect with --report" in ended.errors
    for flag in ("--report", "--jobs=3", "--retry_failed", "--run=3"):
        ended = warm_process.attempt(script, [report[0], "--list", flag], tmp_path)
        assert ended.code == 2 and "no effect with --list" in ended.errors


@pytest.fixture
def launch(tmp_path):
    """Runs a copy of launch/study.py, beside a train.py that does nothing but fail."""
    script = tmp_path / "study.py"
    script.write_text((ROOT / "launch" / "study.py").read_text())
    (tmp_path / "train.py").write_text("import sys; sys.exit('error: no luck')")
    given = ["--study=kept.py", "--folder=runs", "--pages=pages"]

    def launch(text, *arguments):
        text = text.replace("configs/", f"{ROOT}/configs/").replace("(0, 1)", "(0,)")
        (tmp_path / "kept.py").write_text(text)
        return warm_process.attempt(script, [*given, *arguments], tmp_path)

    return launch


@pytest.mark.parametrize("flag", ["--folder", "--pages"])
def test_a_study_whose_folder_cannot_be_written_trains_nothing(launch, flag):
    ended = launch(STUDY_FILE, f"{flag}=/proc/x")
    assert ended.code == 2 and "failed" not in ended.output
    assert f"{flag}=/proc/x cannot be written to" in ended.errors
    report = launch(STUDY_FILE, f"{flag}=/proc/x", "--report")
    assert report.code == (2 if flag == "--pages" else None)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"other": {', '"other": {"rollout.nosuch": 1, ', "arm 'other': unknown key"),
        ('"iterations": 2', '"iterations": "many"', "arm 'one': iterations = 'many'"),
        ("frozenlake.py", "frozen.py", "arm 'one': --config=.*there is no file"),
    ],
)
def test_an_arm_that_could_not_start_is_refused_before_any_run(launch, old, new, said):
    for wanted in ([], ["--list"]):
        ended = launch(STUDY_FILE.replace(old, new), *wanted)
        assert ended.code == 2 and re.search(said, ended.errors), ended.errors
        assert not [name for name in ended.made if name.startswith(("runs", "pages"))]


def test_a_study_whose_every_run_failed_says_so_in_its_exit_code(launch):
    ended = launch(STUDY_FILE)
    assert ended.code == 2 and "every run of this command failed" in ended.errors
    assert "pages/two.md" in ended.made and "wrote pages/two.md" in ended.output


def test_the_paths_of_a_study_may_begin_with_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "kept.py").write_text(STUDY_FILE)
    plan = study.prepare(study.Choice("~/kept.py", Path("~/runs"), Path("~/pages")))
    assert plan.folder == tmp_path / "runs" / "two"
    assert plan.choice.pages == tmp_path / "pages"


@pytest.mark.parametrize("scale", ["tiny", "smoke"])
def test_the_command_for_slurm_says_all_that_the_list_was_asked_for(tmp_path, scale):
    """And not the scale that is the default."""
    path = tmp_path / "my studies" / "kept.py"
    path.parent.mkdir()
    path.write_text(STUDY_FILE)
    choice = study.Choice(
        str(path),
        tmp_path / "ü",
        tmp_path / "pages",
        scale=scale,
        seeds=("1", "2"),
        only="on. *",
    )
    *_, line = study.listing(study.prepare(choice)).splitlines()
    sbatch, array, wrap = shlex.split(line.removeprefix("on SLURM: "))
    assert (sbatch, array) == ("sbatch", "--array=0-1")
    assert shlex.split(wrap.removeprefix("--wrap=")) == [
        "python",
        "launch/study.py",
        f"--study={path}",
        *(["--scale=smoke"] if scale == "smoke" else []),
        f"--folder={tmp_path / 'ü'}",
        f"--pages={tmp_path / 'pages'}",
        "--seeds=1,2",
        "--only=on. *",
        "--run=$SLURM_ARRAY_TASK_ID",
    ]


@pytest.mark.slow
def test_a_study_loads_neither_jax_nor_what_draws_to_list_its_runs(tmp_path):
    """Its runs are processes of their own; a user waits for the list."""
    (tmp_path / "kept.py").write_text(STUDY_FILE)
    command = [sys.executable, "-X", "importtime", ROOT / "launch" / "study.py"]
    ended = subprocess.run(
        [*command, f"--study={tmp_path}/kept.py", f"--pages={tmp_path}", "--list"],
        cwd=ROOT,  # Where its config is.
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "one-seed0" in ended.stdout
    loaded = {line.rsplit("|", 1)[-1].strip() for line in ended.stderr.splitlines()}
    assert "ragen_jax.studies.report" in loaded
    slow = {"jax", "flax", "optax", "transformers", "orbax", "matplotlib"}
    assert not loaded & slow
