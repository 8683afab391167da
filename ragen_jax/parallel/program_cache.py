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

    JAX writes it from process 0 alone. If other hosts have folders of their own, a
    second run finds its programs on process 0's host only. On GPUs the others then
    compile, and wait (for up to a day) for autotuning results that a process with a
    cached program never sends. Called by all processes together.

    Returns:
      What to tell the user, or "".
    """
    config = jax.config
    folder = getattr(config, "jax_compilation_cache_dir")  # noqa: B009  (untyped)
    wanted = getattr(config, "jax_enable_compilation_cache")  # noqa: B009
    if _is_everywhere(folder if wanted and folder else ""):
        return ""
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX reads the setting once, and has read it.
    if not (wanted and folder):
        return ""
    return (
        f"warning: not all processes see {folder}: programs are compiled again at each"
        " start; set JAX_COMPILATION_CACHE_DIR to a folder that all of them see"
    )


def _is_everywhere(folder: str) -> bool:
    """Whether all processes see one and the same folder under this path."""
    # A bucket's address, which is the same from everywhere.
    if multihost_utils.process_allgather(np.bool_("://" in folder)).all():
        return True
    path = Path(folder) if folder and "://" not in folder else None
    if path is not None and jax.process_index() == 0:
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
    return bool(who_sees(path).all())
