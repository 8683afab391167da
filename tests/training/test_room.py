"""Room on the disk, asked for where a run is going to save."""

import shutil
from types import SimpleNamespace

import pytest
from helpers import runs

from ragen_jax.errors import UserError
from ragen_jax.training import room


def test_a_run_whose_iterations_are_done_asks_for_no_room(tmp_path, monkeypatch):
    full = SimpleNamespace(total=10**9, used=10**9, free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    run = runs.prepare(iterations=4)
    with pytest.raises(UserError, match="free space there"):
        room.check(tmp_path, run, [2, 3], print)
    room.check(tmp_path, run, [3, 4], print)
    room.check(tmp_path, run, [6], print)  # It has been given fewer iterations since.
