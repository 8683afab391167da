"""Finds this machine's GPUs without opening them, and divides them among runs."""

import importlib.util
import itertools
import os
import re
import subprocess
from collections.abc import Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def found() -> list[str]:
    """The NVIDIA GPUs that a run started from here would see, as VARIABLE names them.

    [] if JAX has no plugin for them, or JAX_PLATFORMS leaves them out.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    if not any(importlib.util.find_spec(name) for name in _PLUGINS):
        return []
    visible = os.environ.get(VARIABLE)
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # As in CUDA, an invalid name hides itself and all behind it.
        is_valid = re.compile(r"\d|GPU-|MIG-").match
        return list(itertools.takewhile(is_valid, names))
    return re.findall(r"^GPU .*\(UUID: (GPU-[\w-]+)\)", _listed(), re.MULTILINE)


def split(names: Sequence[str], jobs: int) -> list[str]:
    """A value of VARIABLE for each of the runs side by side, of equally many GPUs.

    At most `jobs` values, at most one per GPU, and none without a GPU.
    """
    count = min(jobs, len(names))
    per_run = len(names) // max(count, 1)
    return [
        ",".join(names[index * per_run : (index + 1) * per_run])
        for index in range(count)
    ]


def _listed() -> str:
    """The list of GPUs that nvidia-smi prints; "" without a driver."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout
