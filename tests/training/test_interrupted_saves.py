"""What a save that did not end well leaves on disk: all that was whole before it."""

import os
import shutil

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from ragen_jax.errors import UserError
from ragen_jax.training import checkpoint_files
from ragen_jax.training.checkpoints import FOLDER, Checkpoints

STATE = {"x": jnp.arange(3, dtype=jnp.float32)}


@pytest.fixture
def directory(tmp_path):
    return tmp_path / FOLDER


def _open(directory):
    return Checkpoints(directory, keep_last=1, keep_best=0)


def _while_copying(error, monkeypatch, saved):
    async def async_save(*_, **__):
        raise error

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "async_save", async_save)


def _in_the_background(error, monkeypatch, saved):
    def write_digests(folder):
        raise error

    monkeypatch.setattr(checkpoint_files, "write_digests", write_digests)


def _while_waiting(error, monkeypatch, saved):
    """Once: Python then takes the thread that was waited for as ended."""
    errors = [None, error]  # Before the save, too, there is a wait.

    def wait_until_finished():
        if errors and (first := errors.pop(0)) is not None:
            raise first

    monkeypatch.setattr(saved._writer, "wait_until_finished", wait_until_finished)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (_while_copying, KeyboardInterrupt()),
        (_while_copying, MemoryError("host")),
        (_in_the_background, MemoryError("host")),
        (_in_the_background, RuntimeError("boom")),
        (_while_waiting, KeyboardInterrupt()),
    ],
)
def test_whatever_ends_a_save_the_step_before_it_stays(
    place, error, directory, monkeypatch
):
    with pytest.raises(type(error)), _open(directory) as saved:
        saved.save(1, STATE, {}, score=None, wait=True)
        place(error, monkeypatch, saved)
        saved.save(2, STATE, {}, score=None, wait=True)
    assert 1 in checkpoint_files.scores(directory)
    assert 2 not in saved.steps()


def test_an_error_in_the_block_deletes_no_step_for_the_one_being_written(directory):
    with pytest.raises(RuntimeError, match="boom"), _open(directory) as saved:
        saved.save(1, STATE, {}, score=None, wait=True)
        saved.save(2, STATE, {}, score=None)
        raise RuntimeError("boom")
    assert list(checkpoint_files.scores(directory)) == [1, 2]
    with _open(directory) as saved:  # Deleted with the next.
        saved.save(3, STATE, {}, score=None)
    assert list(checkpoint_files.scores(directory)) == [3]


def test_a_step_that_is_not_there_when_it_should_be_replaces_none(
    directory, monkeypatch
):
    with _open(directory) as saved:
        saved.save(1, STATE, {}, score=None, wait=True)
        monkeypatch.setattr(saved._writer, "save", lambda *_, **__: None)
        with pytest.raises(UserError, match="Checkpoint 2 could not .*, 1 is whole"):
            saved.save(2, STATE, {}, score=None, wait=True)
    assert list(checkpoint_files.scores(directory)) == [1]


def test_all_of_a_step_is_on_disk_before_an_older_one_is_deleted(
    directory, monkeypatch
):
    """A loss of power may cost whatever was not synced, and all that was deleted."""
    synced, deleted, fsync = set(), [], os.fsync

    def record(number):
        synced.add(os.fstat(number).st_ino)
        fsync(number)

    with _open(directory) as saved:
        saved.save(1, STATE, {}, score=None, wait=True)
        monkeypatch.setattr(os, "fsync", record)

        def delete(folder):
            new = directory / "2"
            late = ("_CHECKPOINT_METADATA", "commit_success.txt")  # Not read.
            places = [p for p in new.rglob("*") if p.name not in late]
            deleted.append(
                (
                    folder.name,
                    [
                        str(p)
                        for p in (directory, new, *places)
                        if p.stat().st_ino not in synced
                    ],
                )
            )

        monkeypatch.setattr(checkpoint_files, "delete", delete)
        saved.save(2, STATE, {}, score=None, wait=True)
    assert deleted == [("1", [])]


def test_no_step_is_called_whole_when_its_disk_is_gone(directory):
    with pytest.raises(UserError, match="and that folder is gone; bring it back, then"):
        with _open(directory) as saved:
            saved.save(1, STATE, {}, score=None, wait=True)
            shutil.rmtree(directory)
            raise saved._unwritten(2, FileNotFoundError("gone"))
