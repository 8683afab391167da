"""How many devices each of several processes has."""

import os
import socket
import subprocess
import sys

import pytest
from helpers.paths import ROOT

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
cli.use_every_core(reader.from_dict(config.to_dict()))
cli.start_jax(False)
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
