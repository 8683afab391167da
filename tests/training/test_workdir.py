"""What a start does to the folder of a run."""

import json
import os
import subprocess
import sys

import pytest
from helpers import runs

from ragen_jax.diagnostics import rollbacks
from ragen_jax.errors import UserError
from ragen_jax.reporting import metrics
from ragen_jax.training.checkpoints import Checkpoints
from ragen_jax.training.workdir import check_workdir, claim_workdir, only_run
from ragen_jax.utils import folder_lock

TESTED = {"test/success": 0.5}


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
        (
            "settings.json",
            '{"seed": %s}' % ("[" * 800 + "]" * 800),
            "restore it from a copy",
        ),
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


@pytest.mark.parametrize(
    "name",
    [
        "settings.json",
        "metrics.jsonl",
        "curves.png",
        "episodes.jsonl.gz",
        "rollbacks.json",
        "test.json",
    ],
)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused(make, name, tmp_path):
    claim_workdir(tmp_path, runs.settings())
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(UserError, match=f"{name} is a folder, a pipe or a device, wh"):
        check_workdir(tmp_path, runs.settings())


@pytest.mark.parametrize("is_claimed", [True, False])
def test_checkpoints_on_a_disk_that_is_not_mounted_are_waited_for(is_claimed, tmp_path):
    if is_claimed:
        claim_workdir(tmp_path, runs.settings())
    (tmp_path / "checkpoints").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match="is a link to .*unmounted, which is not there"):
        check_workdir(tmp_path, runs.settings())
    with pytest.raises(UserError, match="is a link to .*unmounted, which is not there"):
        Checkpoints(tmp_path / "checkpoints", keep_last=1, keep_best=0)
    assert not (tmp_path / "unmounted").exists()


def recorded(workdir, reached, **last):
    records = [{"iteration": number} for number in range(1, reached + 1)]
    records[-1] |= last
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (workdir / metrics.FILE).write_text(lines)


@pytest.mark.parametrize(
    ("every", "reached", "last"),
    [(3, 7, {}), (3, 50, {}), (100, 50, TESTED), (0, 50, TESTED)],
)
def test_a_run_whose_checkpoints_have_vanished_does_not_begin_again(
    every, reached, last, tmp_path
):
    now = runs.settings(every__checkpoint=every, iterations=50)
    claim_workdir(tmp_path, now)
    recorded(tmp_path, reached, **last)
    before = (tmp_path / metrics.FILE).read_bytes()
    said = f"has metrics up to iteration {reached}, but its checkpoints are gone from"
    with pytest.raises(UserError, match=said), only_run(tmp_path, now, print):
        pass
    assert (tmp_path / metrics.FILE).read_bytes() == before
    (tmp_path / "checkpoints" / "3.damaged").mkdir(parents=True)
    check_workdir(tmp_path, now)  # The resumed run tells of it.


@pytest.mark.parametrize(
    ("every", "then", "reached"), [(3, 3, 6), (3, 10, 20), (100, 3, 50), (0, 3, 50)]
)
def test_a_run_that_was_killed_before_its_first_step_was_whole_begins_again(
    every, then, reached, tmp_path
):
    """The second save waits for the first one, which is written in the background."""
    claim_workdir(tmp_path, runs.settings(every__checkpoint=every, iterations=50))
    recorded(tmp_path, reached)
    check_workdir(tmp_path, runs.settings(every__checkpoint=then, iterations=50))


def test_a_run_that_was_killed_in_a_rollback_to_its_beginning_begins_again(tmp_path):
    now = runs.settings(every__checkpoint=3, iterations=50)
    claim_workdir(tmp_path, now)
    recorded(tmp_path, 15)
    rollbacks.note_rollback(tmp_path, 15, 0, "a collapse", now.health.remedy)
    check_workdir(tmp_path, now)
    recorded(tmp_path, 16)
    with pytest.raises(UserError, match="but its checkpoints are gone from"):
        check_workdir(tmp_path, now)
