"""What a start does to the folder of a run."""

import subprocess
import sys

import pytest
from helpers import runs

from ragen_jax.errors import UserError
from ragen_jax.reporting import metrics
from ragen_jax.training.workdir import check_workdir, claim_workdir, only_run
from ragen_jax.utils import folder_lock


def test_a_start_clears_a_dead_runs_half_files_and_no_file_of_the_users(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ours = {
        f".{name}.{gone.pid}"
        for name in (
            "settings.json",
            "metrics.jsonl",
            "curves.png",
            "episodes.jsonl.gz",
            "rollbacks.json",
            "test.json",
        )
    }
    # The last is being written by another host, perhaps.
    theirs = {f".env.{gone.pid}", ".zshrc.20231201", f".diagnosis.json.{gone.pid}"}
    for name in ours | theirs:
        (tmp_path / name).touch()
    with only_run(tmp_path, runs.settings(), print):
        assert folder_lock.is_held(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} - {".lock"} == theirs


def test_a_run_that_came_and_went_since_the_workdir_was_checked_is_not_trained_over(
    tmp_path,
):
    own, other = runs.settings(), runs.settings(seed=7)
    check_workdir(tmp_path, own)
    claim_workdir(tmp_path, other)
    (tmp_path / metrics.FILE).write_text('{"iteration": 1}\n')
    with (
        pytest.raises(UserError, match="a run made with other settings: seed was 7"),
        only_run(tmp_path, own, print),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("settings.json", '{"seed"', "restore it from a copy"),
        ("settings.json", "[]", "restore it from a copy"),
        ("settings.json", '{"seed": 0, "new": {"key": 1}}', "take the one that wrote"),
        ("metrics.jsonl", '{"iteration": 1, "train/success": "1"}\n', "Line 1 of"),
    ],
)
def test_a_damaged_file_is_named_before_a_run_begins(tmp_path, name, text, words):
    (tmp_path / "checkpoints").mkdir()
    claim_workdir(tmp_path, runs.settings())
    (tmp_path / metrics.FILE).write_text('{"iteration": 1}\n')
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        check_workdir(tmp_path, runs.settings())
    assert words in str(caught.value)
    assert (tmp_path / name).read_text() == text
