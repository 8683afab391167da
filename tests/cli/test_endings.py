"""Signals, pipes and terminals: one line and a known exit code, whenever they come."""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import runs
from helpers.paths import ROOT

from ragen_jax.utils import endings

# A script whose main thread cannot run a handler of Python's: it waits in C.
WAITING = """
import ctypes, signal, sys
from ragen_jax.utils import endings
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests may run behind nohup.
endings.install()
print("installed", flush=True)
for _ in range(60):  # A signal ends the one call, not the loop.
    ctypes.CDLL(None).sleep(60)
"""
# A run's handler, and a main thread held by C code that no signal ends, as a compiler
# holds it. Another thread says so: a signal before that would be handled in Python.
COMPILING = """
import hashlib, sys, threading
from ragen_jax.utils import endings
endings.install()
from ragen_jax.training import interrupts
def compile():
    threading.Timer(0.5, print, ["installed"], {"flush": True}).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**30)
with interrupts.InterruptHandler(lambda line: print(line, flush=True)) as handler:
    if sys.argv[1] == "test":
        with handler.nothing_to_save("last words"):
            compile()
    compile()
"""
# A folder half written, as a model's is, a file, and a folder of passing files.
WRITING = """
import pathlib, sys, time
from ragen_jax.utils import atomic_files, endings
endings.install()
folder = pathlib.Path(sys.argv[1])
with atomic_files.new_folder(folder) as scratch, endings.temporary_folder("x") as other:
    for each in (scratch, other):
        (each / "model.safetensors").write_bytes(b"half")
    with atomic_files.new_file(folder.with_name("turns.jsonl")):
        print("installed", flush=True)
        time.sleep(60)
"""
# A script that ends on a signal while the last calls of another end are under way.
ENDING = """
import signal, sys, time
from ragen_jax.utils import endings
endings.install()
endings.before_exit(lambda code: (print("installed", flush=True), time.sleep(2)))
endings.exit_on_signal(signal.SIGINT)
"""
# A script that ends while another thread writes to stderr, as JAX's threads do.
CHATTERING = """
import os, threading, time
from ragen_jax.utils import endings
endings.install()
endings.before_exit(lambda code: time.sleep(0.5))
def chatter():
    while True:
        os.write(2, b"chatter\\n")
threading.Thread(target=chatter, daemon=True).start()
print("installed", flush=True)
time.sleep(0.1)
endings.exit_at_once(75, "error: a peer is lost")
"""


def start(script: str, *arguments: str, **variables: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
    )
    assert process.stdout.readline() == "installed\n"
    return process


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "interrupted\n"),
        (signal.SIGTERM, 143, "terminated\n"),
        (signal.SIGHUP, 129, "hung up\n"),
    ],
)
def test_a_signal_ends_a_script_at_any_moment_in_one_line(number, code, line):
    process = start(WAITING)
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (code, "", line)


def test_a_signal_while_a_script_ends_adds_no_line():
    process = start(ENDING)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (130, "", "interrupted\n")


def test_the_line_that_a_script_ends_with_is_whole_and_the_last():
    """A thread of JAX's speaks at that moment, of what the line explains."""
    process = start(CHATTERING)
    *before, last = process.communicate(timeout=30)[1].splitlines()
    assert (process.returncode, last) == (75, "error: a peer is lost")
    assert set(before) == {"chatter"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_of_what_is_half_written_nothing_is_left_by_a_signal(tmp_path, number):
    process = start(WRITING, str(tmp_path / "model"), TMPDIR=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == endings.CODES[number]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_whose_main_thread_is_compiling():
    process = start(COMPILING, "train")
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().startswith("stopping after this iteration")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_a_signal_ends_the_final_test_though_its_main_thread_is_busy():
    process = start(COMPILING, "test")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (0, "last words\n", "")


SPEAKING = """
import sys
from ragen_jax.utils import endings
endings.install()
from ragen_jax.cli import startup
from ragen_jax.errors import UserError
endings.replace_unprintable_characters()
with startup._ending_in_one_sentence():
    for _ in range(int(sys.argv[1])):
        print("√" * 1000)
    if len(sys.argv) > 2:
        raise UserError("no √ in a\\npath")
"""


def speak(
    *arguments: str, shell: tuple[str, ...] = (), **options
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*shell, sys.executable, "-c", SPEAKING, *arguments],
        cwd=ROOT,
        check=False,
        env={
            **os.environ,
            "PYTHONIOENCODING": "ascii",
            "PYTHONUNBUFFERED": "",  # What is in a buffer at the end counts, too.
            "JAX_PLATFORMS": "cpu",
        },
        **{"stderr": subprocess.PIPE, **options},
    )


def test_a_terminal_without_the_characters_shows_what_it_can():
    done = speak("1", "fail", stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, b"?" * 1000 + b"\n")
    assert done.stderr == b"error: no ? in a\\npath\n"


def test_a_closed_pipe_ends_quietly():
    read, write = os.pipe()
    os.close(read)
    done = speak("1000", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_mistake_that_nobody_reads_of_ends_with_its_code():
    read, write = os.pipe()
    os.close(read)
    done = speak("0", "fail", stdout=subprocess.DEVNULL, stderr=write)
    os.close(write)
    assert done.returncode == 2


def test_a_process_without_streams_is_given_silent_ones():
    done = speak("1", "fail", shell=("sh", "-c", 'exec "$0" "$@" <&- >&-'))
    assert (done.returncode, done.stderr) == (2, b"error: no ? in a\\npath\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
def test_an_output_without_room_is_told():
    with open("/dev/full", "wb") as full:
        done = speak("1000", stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: the output cannot be written (No space")


def test_on_windows_a_script_ends_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(endings.sys, "platform", "win32")
    with pytest.raises(SystemExit) as caught:
        endings.install()
    assert caught.value.code == 2 and not endings._installed
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ragen_jax runs on Linux") and "WSL2" in line


# Says that its observations are shorter than they are.
LYING = """
import dataclasses
from ragen_jax.envs.frozen_lake import env as lake
Settings = lake.FrozenLake
def make(settings):
    honest = lake.make(settings)
    shorter = lambda lengths: honest.longest_observation(lengths) // 2
    return dataclasses.replace(honest, longest_observation=shorter)
"""


@pytest.mark.slow
def test_a_mistake_found_while_another_thread_compiles_ends_in_one_line(tmp_path):
    """What was seen is not learned from; a compiler's thread has no last word."""
    (tmp_path / "lying.py").write_text(LYING)
    changes = dict(env__name=str(tmp_path / "lying.py"), every__evaluate=0)
    # Nothing kept from other tests: the update is not compiled when the error comes.
    process = runs.start(
        runs.arguments(tmp_path / "run", **changes),
        more={"JAX_ENABLE_COMPILATION_CACHE": "false"},
    )
    code, _, errors = runs.finish(process)
    lines = [line for line in errors.splitlines() if "PyTorch" not in line]
    assert code == 2 and len(lines) == 1, errors
    assert "shows more tokens than its longest_observation allows" in lines[0]
    assert runs.steps(tmp_path / "run") == []
