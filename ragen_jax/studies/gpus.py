"""The GPUs of this machine, shared out to runs side by side; none is opened here."""

import importlib.util
import os
import re
import subprocess
from collections.abc import Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def found() -> list[str]:
    """The NVIDIA GPUs that a run started from here would see, as VARIABLE names them.

    None where JAX has no plugin for them or is told to leave them alone.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    if not any(importlib.util.find_spec(name) for name in _PLUGINS):
        return []
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        # What stands behind a name of no device is not seen either.
        valid = [bool(re.match(r"\d|GPU-|MIG-", name)) for name in names] + [False]
        return names[: valid.index(False)]
    return re.findall(r"^GPU .*\(UUID: (GPU-[\w-]+)\)", _listed(), re.MULTILINE)


def shares(names: Sequence[str], jobs: int) -> list[str]:
    """A value of VARIABLE for each of some runs, equally many GPUs of its own.

    At most `jobs`, and no more than there are GPUs; none where there is no GPU.
    """
    count = min(jobs, len(names))
    each = len(names) // max(count, 1)
    return [",".join(names[n * each : (n + 1) * each]) for n in range(count)]


def _listed() -> str:
    """What the driver says is there; "" without a driver."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout
