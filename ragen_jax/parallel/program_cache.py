"""The cache of compiled programs where several processes compile together."""

import contextlib
import secrets
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache


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
        f"warning: not all processes see {folder}: programs are compiled anew at each"
        " start; set JAX_COMPILATION_CACHE_DIR to a folder that all of them see"
    )


def _is_everywhere(folder: str) -> bool:
    """Whether all processes see one and the same folder under this path."""
    number, is_first = secrets.randbits(31), jax.process_index() == 0
    is_address = "://" in folder  # Of a bucket, which is the same from everywhere.
    if is_first and folder and not is_address:
        with contextlib.suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
            _mark(folder, number).touch()
    number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    seen = is_address or bool(folder) and _mark(folder, number).exists()
    everywhere = bool(multihost_utils.process_allgather(np.bool_(seen)).all())
    if is_first and folder and not is_address:
        with contextlib.suppress(OSError):
            _mark(folder, number).unlink(missing_ok=True)
    return everywhere


def _mark(folder: str, number: int) -> Path:
    return Path(folder) / f".seen.{number}"
