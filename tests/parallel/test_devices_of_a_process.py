"""How many devices each of several processes has."""

import os
import socket
import subprocess
import sys

import jax
import pytest
from helpers import runs
from helpers.paths import ROOT

from ragen_jax.parallel import distributed

_FORCED = "force_host_platform_device_count"
# As launch/train.py starts on a host of two cores; says how many devices it has.
STARTED = """
import os
import runpy
import sys
from absl import flags

flags.FLAGS(sys.argv[:1])
os.sched_getaffinity = lambda _: {0, 1}
from ragen_jax import cli
from ragen_jax.parallel import distributed
from ragen_jax.settings import reader

config = runpy.run_path("configs/frozenlake.py")["get_config"]()
settings = reader.from_dict(config.to_dict())
cli.use_every_core(settings)
cli.start_jax(settings)
import jax

print("devices", jax.local_device_count(), jax.device_count())
distributed.finish()
"""


def devices(processes: int, **more: str) -> list[list[str]]:
    """Of this process and of all, as each process under SLURM counts them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = server.getsockname()[1]  # from which JAX makes up a port
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    kept |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    kept |= {"SLURM_JOB_ID": str(job), "SLURM_NTASKS": str(processes)}
    kept |= {"SLURM_STEP_NODELIST": "localhost", **more}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", STARTED],
            cwd=ROOT,
            env=kept | {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]
    said = [process.communicate(timeout=240)[0] for process in started]
    # Gloo, too, prints to standard output.
    return [text.split("devices")[1].split() for text in said]


@pytest.mark.slow
def test_one_process_takes_every_core_and_each_of_several_one():
    # Two of a process's devices wait for each other where it has one thread.
    assert devices(1) == [["2", "2"]]
    assert devices(2) == [["1", "2"], ["1", "2"]]
    assert devices(2, JAX_NUM_CPU_DEVICES="2") == [["2", "4"], ["2", "4"]]


def test_devices_of_a_process_have_threads_to_wait_in_and_a_users_number_wins(
    monkeypatch,
):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("NPROC", "3")
    distributed.give_collectives_threads()
    assert os.environ["NPROC"] == "3"
    eight, two = (f"--xla_{_FORCED}={count}" for count in (8, 2))
    for flags, threads in ((eight, "34"), (two, "10"), ("", "6")):
        monkeypatch.delenv("NPROC")
        monkeypatch.setenv("XLA_FLAGS", flags)
        distributed.give_collectives_threads()
        assert os.environ["NPROC"] == threads


def test_a_plugin_for_gpus_that_are_not_there_leaves_cpus_their_threads(
    monkeypatch, tmp_path
):
    """As after `pip install ragen_jax[plan-gpu]`: JAX falls back to the CPUs."""
    package = tmp_path / "jax_cuda13_plugin-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: jax-cuda13-plugin\nVersion: 0\n")
    (package / "entry_points.txt").write_text(
        "[jax_plugins]\nxla_cuda13 = jax_plugins.xla_cuda13\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "nvidiactl"
    kinds = {"cuda": (str(file),), "tpu": (str(tmp_path / "accel*"),)}
    monkeypatch.setattr(distributed, "_DEVICE_FILES", kinds)
    monkeypatch.setenv("NPROC", "3")  # So that it is put back.
    monkeypatch.delenv("NPROC")
    chosen = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", None)
        file.touch()
        distributed.give_collectives_threads()
        assert "NPROC" not in os.environ
        for none in ("", "-1"):
            with monkeypatch.context() as hidden:
                hidden.setenv("CUDA_VISIBLE_DEVICES", none)
                assert distributed._is_on_cpus(None)
        file.unlink()
        distributed.give_collectives_threads()
        assert "NPROC" in os.environ
    finally:
        jax.config.update("jax_platforms", chosen)


@pytest.mark.slow
def test_two_devices_of_a_process_that_share_a_model_do_not_wait_for_ever(tmp_path):
    """With two threads they did, now and then: one device waits within a loop,
    the other in a sum that stands behind it."""
    shared = dict(iterations=3, mesh__data=1, mesh__fsdp=2, every__evaluate=0)
    process = runs.start(
        runs.arguments(tmp_path / "run", **shared),
        more={"JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""},
    )
    code, _, errors = runs.finish(process, seconds=240)
    assert code == 0, errors
    done = [record["iteration"] for record in runs.records(tmp_path / "run")]
    assert set(done) == {1, 2, 3}
