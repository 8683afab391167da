"""Loads a model folder as a run does and tells what that took; run by test_slices.

  python tests/loading.py FOLDER

Prints a JSON object: bytes of the parameters, and how far the memory of this process
rose above what it held before. Linux only.
"""

import json
import os
import sys
import types
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax  # noqa: E402  (the flags above must be set before JAX starts)

from ragen_jax import mesh, weights  # noqa: E402
from ragen_jax.models.sources import Source  # noqa: E402


def status(key: str) -> int:
    """Bytes that the kernel tells of this process: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def main(folder: str) -> None:
    source = Source(Path(folder), is_gguf=False)
    run = types.SimpleNamespace(
        mesh=mesh.make_mesh(1, 4, 1), source=source, config=source.read_config()
    )
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here.
    before = status("VmRSS")
    loaded = weights.load_parameters(run, value_head=False)
    peak = status("VmHWM") - before
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))
    print(json.dumps({"parameters": size, "peak": peak}))


if __name__ == "__main__":
    main(sys.argv[1])
