"""Room on the disk, asked for where a run is going to save."""

import math
import re
import shutil
from types import SimpleNamespace

import jax
import pytest
from helpers import runs

from ragen_jax.errors import UserError
from ragen_jax.training import disk_space, weights


@pytest.fixture
def leave(monkeypatch):
    """Lets every disk have so many bytes free."""

    def disk(free: int) -> None:
        usage = SimpleNamespace(total=10**12, used=10**12 - free, free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)

    return disk


def test_a_checkpoint_takes_what_the_arrays_of_a_state_take():
    run = runs.prepare()
    arrays = jax.tree.leaves(weights.new_state(run))
    assert disk_space.state_bytes(run) == sum(array.nbytes for array in arrays)


def test_room_for_one_checkpoint_is_needed_and_for_all_that_are_kept_is_advised(
    tmp_path, leave
):
    """Files take 85 % of the arrays' bytes at least; one more lies there while saving.

    Of two last and one best that is four, of which two are there.
    """
    kept = dict(checkpoint__keep_last=2, checkpoint__keep_best=1)
    run = runs.prepare(iterations=9, **kept)
    least, said = 0.85 * disk_space.state_bytes(run), []
    leave(math.ceil(2 * least))
    disk_space.check(tmp_path, run, [3, 4], said.append)
    assert said == []
    leave(math.floor(2 * least))
    disk_space.check(tmp_path, run, [3, 4], said.append)
    disk_space.check(tmp_path, run, [1, 2, 3, 4, 5, 6], said.append)  # One comes.
    assert len(said) == 1
    shown = f"{2 * disk_space.state_bytes(run) / 2**20:.1f} MiB"
    assert re.search(rf"; 2 more checkpoints .* take about {shown}$", said[0])
    leave(math.floor(least))
    remedy = "free space there or choose another --workdir"
    with pytest.raises(UserError, match=remedy):
        disk_space.check(tmp_path, run, [], said.append)


def test_room_is_asked_of_the_disk_that_the_checkpoints_are_on(tmp_path, monkeypatch):
    run, asked = runs.prepare(iterations=2), []
    full = SimpleNamespace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: asked.append(place) or full)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "scratch")
    with pytest.raises(UserError, match=rf"^{tmp_path / 'scratch'} has 0.0 MiB"):
        disk_space.check(tmp_path / "run", run, [], print)
    assert asked == [tmp_path / "scratch"]


def test_a_run_of_few_iterations_is_not_warned_of_more_checkpoints(tmp_path, leave):
    run = runs.prepare(iterations=2, checkpoint__keep_last=9)
    said = []
    leave(math.ceil(2 * 0.85 * disk_space.state_bytes(run)))
    disk_space.check(tmp_path, run, [], said.append)
    assert said == []


def test_a_run_whose_iterations_are_done_asks_for_no_room(tmp_path, leave):
    leave(0)
    run = runs.prepare(iterations=4)
    with pytest.raises(UserError, match="free space there"):
        disk_space.check(tmp_path, run, [2, 3], print)
    disk_space.check(tmp_path, run, [3, 4], print)
    disk_space.check(tmp_path, run, [6], print)  # It has fewer iterations now.
