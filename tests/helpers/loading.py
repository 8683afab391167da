"""Loads a model folder as a run does and prints what that took.

  python tests/helpers/loading.py FOLDER

Run by test_partial_reads. Prints a JSON object: bytes of the parameters, and how far
the memory of this process rose above what it held before. Linux only.
"""

import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax  # noqa: E402  (the flags above must be set before JAX starts)

from ragen_jax.models.io.sources import Source  # noqa: E402
from ragen_jax.parallel import mesh
from ragen_jax.training import placement  # noqa: E402


def status(key: str) -> int:
    """Bytes that the kernel reports of this process: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def main(folder: str) -> None:
    source = Source(Path(folder), is_gguf=False)
    config, on_mesh = source.read_config(), mesh.make_mesh(1, 4, 1)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here.
    before = status("VmRSS")
    loaded = placement.read_parameters(source, config, on_mesh)
    peak = status("VmHWM") - before
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))
    print(json.dumps({"parameters": size, "peak": peak}))


if __name__ == "__main__":
    main(sys.argv[1])
