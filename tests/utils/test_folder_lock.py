"""One holder of a folder at a time, whatever becomes of the one before."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from ragen_jax.errors import UserError
from ragen_jax.utils import atomic_files, folder_lock

HOLD = """
import sys, time
from pathlib import Path
from ragen_jax.utils import folder_lock
with folder_lock.held(Path(sys.argv[1]), "trains"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_the_second_is_told_host_and_process_of_the_first(tmp_path, holder):
    with pytest.raises(UserError) as caught, folder_lock.held(tmp_path, "trains"):
        pass
    assert str(caught.value) == (
        f"{tmp_path} is in use: process {holder.pid} on host {socket.gethostname()}"
        " trains there; wait for it, end it, or choose another --workdir"
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_any_death_frees_the_folder(tmp_path, holder, number):
    holder.send_signal(number)
    holder.wait()
    assert (tmp_path / folder_lock.FILE).exists()  # It means nothing by itself.
    with folder_lock.held(tmp_path, "trains") as is_locked:
        assert is_locked
    assert list(tmp_path.iterdir()) == []


def test_a_look_says_whether_a_folder_is_held_and_leaves_it_as_it_was(tmp_path, holder):
    file = tmp_path / folder_lock.FILE
    text = file.read_text()
    assert folder_lock.is_held(tmp_path) and file.read_text() == text
    holder.kill()
    holder.wait()
    assert not folder_lock.is_held(tmp_path) and file.read_text() == text
    assert not folder_lock.is_held(tmp_path / "none")


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 9999])
def test_a_lock_whose_file_says_nothing_still_holds(tmp_path, holder, text):
    (tmp_path / folder_lock.FILE).write_text(text)
    with pytest.raises(UserError, match="another process trains there; wait"):
        with folder_lock.held(tmp_path, "trains"):
            pass


@pytest.mark.slow
def test_of_many_that_try_at_once_only_one_is_inside(tmp_path):
    script = """
import sys, time
from pathlib import Path
from ragen_jax.errors import UserError
from ragen_jax.utils import folder_lock
inside, taken = Path(sys.argv[1]) / "inside", 0
(Path(sys.argv[1]) / "locked").mkdir(exist_ok=True)
end = time.monotonic() + 2
while time.monotonic() < end:
    try:
        with folder_lock.held(Path(sys.argv[1]) / "locked", "trains"):
            inside.open("x").close()  # Fails if another is inside.
            taken += 1
            inside.unlink()
    except UserError:
        pass
print(taken)
"""
    tried = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    ended = [process.communicate(timeout=60) for process in tried]
    assert [errors for _, errors in ended] == ["", "", ""]
    assert sum(int(output) for output, _ in ended) > 3


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / folder_lock.FILE).mkdir()
    with pytest.raises(UserError, match=r"\.lock cannot be written \(Is a directory\)"):
        with folder_lock.held(tmp_path, "trains"):
            pass


def test_scraps_of_processes_that_are_gone_are_cleared_and_of_others_kept(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = (f".settings.json.{gone.pid}", f".a.{os.getpid()}", "settings.json", ".b.c")
    for name in names:
        (tmp_path / name).touch()
    atomic_files.clear_scraps(tmp_path, ["settings.json", "a", "b"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("mine.txt")])
def test_a_lock_that_is_no_file_is_refused_and_what_it_leads_to_is_left(make, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    make(tmp_path / folder_lock.FILE)
    with pytest.raises(UserError, match=r"\.lock is a link, a pipe or a device, not"):
        with folder_lock.held(tmp_path, "trains"):
            pass
    assert not folder_lock.is_held(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"
