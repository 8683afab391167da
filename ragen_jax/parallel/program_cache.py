"""The cache of compiled programs where several processes compile together."""

import contextlib
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache

from ragen_jax.parallel.agreement import who_sees


def keep_if_shared() -> str:
    """Switches the cache off unless it is one folder for all processes.

    Process 0 alone writes it. Where the others have a folder of their own, a second run
    finds its programs on process 0's host alone. On GPUs the other hosts then compile
    and wait, for a day, for what XLA's autotuner was to measure in each process: those
    that have the program measure nothing. Called by all processes together.

    Returns:
      What to tell the user, or "".
    """
    config = jax.config
    folder = getattr(config, "jax_compilation_cache_dir")  # noqa: B009  (untyped)
    wanted = getattr(config, "jax_enable_compilation_cache")  # noqa: B009
    if _is_everywhere(folder if wanted and folder else ""):
        return ""
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # It asks once, and has been asked.
    if not (wanted and folder):
        return ""
    return (
        f"warning: not all processes see {folder}: programs are compiled anew at each"
        " start; set JAX_COMPILATION_CACHE_DIR to a folder that all of them see"
    )


def _is_everywhere(folder: str) -> bool:
    """Whether every process has named the folder that process 0 sees under its name."""
    # Of a bucket, which is the same from everywhere.
    if multihost_utils.process_allgather(np.bool_("://" in folder)).all():
        return True
    path = Path(folder) if folder and "://" not in folder else None
    if path is not None and jax.process_index() == 0:
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
    return bool(who_sees(path).all())
