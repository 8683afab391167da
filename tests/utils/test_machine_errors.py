"""Errors of the machine, whoever raises them."""

import errno
import re
import subprocess
import sys

import jax
import pytest

from ragen_jax.utils import atomic_files, machine_errors

# Files may not grow beyond 4 KiB here, as on a disk that is full.
WRITES = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from ragen_jax.utils import atomic_files, machine_errors
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
path = Path(sys.argv[1])
def save():
    with machine_errors.as_os_errors(path):
        save_file({"x": np.zeros(100_000, np.float32)}, path / "model.safetensors")
def write():
    with machine_errors.as_os_errors(path):
        (path / "config.json").write_text("x" * 10_000)
def replace():
    atomic_files.write_text(path / "a.json", "x" * 10_000)
for attempt in (save, write, replace):
    try:
        attempt()
    except OSError as error:
        print(machine_errors.sentence(error))
"""


def test_a_full_disk_is_told_alike_by_all_that_write_and_the_file_is_named(
    tmp_path,
):
    done = subprocess.run(
        [sys.executable, "-c", WRITES, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stdout == "".join(
        f"{place}: File too large: files may not grow so large there: raise that"
        " limit (ulimit -f)\n"
        for place in (tmp_path, tmp_path, tmp_path / "a.json")
    ), done.stderr
    assert not [path for path in tmp_path.iterdir() if "a.json" in path.name]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), r"memory is full \(MemoryError\): lower what"),
        (MemoryError("Unable to allocate 8 GiB"), r"\(Unable to allocate 8 GiB\): low"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nMore"),
            r"memory is full \(RESOURCE_EXHAUSTED: Out of memory.\): .*--plan tells",
        ),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: the message is long"), "^$"),
        (jax.errors.JaxRuntimeError("INTERNAL: memory is corrupt"), "^$"),
    ],
)
def test_full_memory_is_told_with_what_needs_less(error, words):
    assert re.search(words, machine_errors.sentence(error))


def test_what_is_no_failed_system_call_stays_as_it_is(tmp_path):
    with pytest.raises(KeyError), machine_errors.as_os_errors(tmp_path):
        raise KeyError("x")
    with (
        pytest.raises(OSError, match="No space") as caught,
        machine_errors.as_os_errors(tmp_path),
    ):
        raise Exception("No space left on device (os error 28)")  # noqa: TRY002
    assert caught.value.errno == errno.ENOSPC


def test_a_folder_that_was_unmounted_is_named_and_is_to_be_brought_back(tmp_path):
    with pytest.raises(OSError) as caught:
        atomic_files.write_text(tmp_path / "gone" / "curves.png", "x")
    assert machine_errors.sentence(caught.value) == (
        f"{tmp_path / 'gone' / 'curves.png'}: No such file or directory: bring it back"
        " if it was moved, deleted or unmounted, or choose another path"
    )
