"""A disk that is full, or fills while a run goes on: one sentence, and nothing lost.

On a small disk of its own (a tmpfs), which another file fills at a chosen moment.
"""

import io

import pytest
from helpers import full_disk, runs

from ragen_jax.errors import UserError
from ragen_jax.reporting import console as console_lib
from ragen_jax.training import trainer

pytestmark = [
    pytest.mark.slow,  # Compiles a run.
    pytest.mark.skipif(bool(full_disk.why_not()), reason=full_disk.why_not()),
]


@pytest.fixture(scope="module")
def run():
    runs.share_compilations()
    return runs.prepare(checkpoint__keep_last=2)


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    runs.train(run, workdir)
    return workdir


@pytest.fixture
def disk(tmp_path):
    with full_disk.small_disk(tmp_path, mebibytes=6) as folder:
        yield folder


class Filling(io.StringIO):
    """A console that fills the disk when it is told how an iteration went."""

    def __init__(self, iteration: int, path, leave: int):
        super().__init__()
        self._sign, self._path, self._leave = f"  {iteration}/4  ", path, leave

    def write(self, text: str) -> int:
        if self._sign in text:
            full_disk.fill(self._path, leave=self._leave)
        return super().write(text)


def refusal(run, workdir, console=None) -> str:
    workdir.mkdir(exist_ok=True)
    with pytest.raises(UserError) as caught:
        trainer.train(
            run, workdir, console_lib.Console(console or io.StringIO()), runs.COMMAND
        )
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("room", [0, 100_000])
def test_a_run_is_refused_on_a_disk_without_room(run, disk, room):
    full_disk.fill(disk / "filler", leave=room)
    told = refusal(run, disk / "run")
    assert "free space there" in told and str(disk / "run") in told
    left = {path.name for path in (disk / "run").iterdir()}
    assert left <= {"checkpoints", "settings.json"}


@pytest.mark.parametrize(
    ("iteration", "room"), [(1, 0), (3, 0), (3, 65_536), (3, 500_000)]
)
def test_a_disk_that_fills_ends_the_run_and_with_room_it_ends_in_the_same_bits(
    run, whole, disk, iteration, room, capfd
):
    workdir, filler = disk / "run", disk / "filler"
    console = Filling(iteration, filler, room)
    told = refusal(run, workdir, console)
    assert str(workdir) in told and "Traceback" not in capfd.readouterr().err
    saved = list(range(1, iteration))
    last = f"{saved[-1]} is whole" if saved else "none is saved yet"
    assert last in told and "start the same command again" in told
    assert runs.steps(workdir) == saved
    assert {p.name for p in (workdir / "checkpoints").iterdir()} == set(map(str, saved))
    told = refusal(run, workdir)
    assert (
        f"the last whole checkpoint is {saved[-1]}" if saved else "free space"
    ) in told
    filler.unlink()
    assert "gain on the same levels" in runs.train(run, workdir)
    runs.assert_same_leaves(runs.leaves(whole, 4), runs.leaves(workdir, 4))
    assert runs.records(workdir) == runs.records(whole)
    assert (workdir / "test.json").read_text() == (whole / "test.json").read_text()
    assert not [p.name for p in workdir.iterdir() if p.name.startswith(".")]


def test_a_process_ends_in_one_line_and_with_code_2(disk):
    workdir = disk / "run"
    process = runs.start(runs.arguments(workdir, iterations=500))
    runs.wait_until(lambda: (workdir / "checkpoints" / "3").exists(), process)
    full_disk.fill(disk / "filler")
    code, _, errors = runs.finish(process)
    assert (code, errors.count("\n")) == (2, 1), errors
    assert errors.startswith("error: ") and "whole" in errors
    assert runs.steps(workdir)[-1] >= 3
