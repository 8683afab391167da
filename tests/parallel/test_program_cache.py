"""The cache of compiled programs of several processes."""

import os
import socket
import subprocess
import sys

import jax
import pytest
from helpers.paths import CONFIGS, ROOT
from jax.experimental.compilation_cache import compilation_cache

from ragen_jax.parallel import program_cache

# A start as launch/train.py has it; says whether programs are kept, and are looked for.
STARTED = """
import runpy
import sys
from absl import flags
from ragen_jax.cli import startup
from ragen_jax.parallel import distributed
from ragen_jax.settings import reader

flags.FLAGS(["started", *sys.argv[1:]])
startup.enable_compilation_cache()
config = runpy.run_path({config!r})["get_config"]()
startup.start_jax(reader.from_dict(config.to_dict()))

import jax
from jax._src import compilation_cache

print(jax.config.jax_compilation_cache_dir)
print(compilation_cache._get_cache(jax.local_devices()[0].client) is not None)
distributed.finish()
""".format(config=str(CONFIGS / "frozenlake.py"))


def start(folders) -> list[tuple[list[str], str]]:
    """What each process prints, and its warnings."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", STARTED, f"--coordinator=127.0.0.1:{port}",
             "--processes=2", f"--process={index}"],
            env=os.environ | own | {"JAX_COMPILATION_CACHE_DIR": str(folder)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index, folder in enumerate(folders)
    ]  # fmt: skip
    said = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    # Gloo, too, prints to standard output.
    return [(out.split()[-2:], err) for out, err in said]


@pytest.fixture
def kept():
    """A function that says where programs are kept; put back at the end."""
    before = jax.config.jax_compilation_cache_dir
    yield lambda: jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.mark.parametrize(("name", "processes"), [("gpu", 2), ("gpu", 1), ("cpu", 2)])
def test_several_processes_on_gpus_keep_programs_in_their_runs_own_folder(
    kept, tmp_path, monkeypatch, name, processes
):
    """Another run may end a program between the looks of two of these processes."""
    monkeypatch.setattr(program_cache.backend, "name", lambda: name)
    monkeypatch.setattr(program_cache, "_is_everywhere", lambda _: True)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    jax.config.update("jax_compilation_cache_dir", "/shared")
    if processes > 1:
        assert program_cache.keep_if_shared() == ""
        assert kept() == (None if name == "gpu" else "/shared")
    program_cache.keep_in(tmp_path)
    own = (name, processes) == ("gpu", 2)
    assert kept() == (str(tmp_path / "programs") if own else "/shared")


@pytest.mark.slow
def test_programs_are_kept_only_in_a_folder_that_all_processes_see(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for found in start([first, first]):
        assert found[0] == [str(first), "True"] and "warning" not in found[1]
    (one, warning), (other, silence) = start([first, second])
    assert one == other == ["None", "False"]
    assert f"not all processes see {first}" in warning
    assert "not all processes" not in silence
    assert not list(first.glob(".seen*"))
