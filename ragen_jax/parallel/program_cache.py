"""The cache of compiled programs where several processes compile together.

On GPUs each process tunes its share of a program's parts, and waits (up to a day) for
the others' results. One that finds the program in the cache sends none. So all have to
find it, or none: in one folder, to which no other run may write meanwhile. JAX writes
it from process 0 alone.
"""

import contextlib
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache

from ragen_jax.parallel import backend
from ragen_jax.parallel.agreement import who_sees

FOLDER = "programs"  # inside a workdir


def keep_if_shared() -> str:
    """Switches the cache off unless it is one folder for all processes, which are CPUs.

    Elsewhere another run could finish a program between the looks of two processes:
    `keep_in` gives training a folder of its own. Called by all processes together.

    Returns:
      What to tell the user, or "".
    """
    config = jax.config
    folder = getattr(config, "jax_compilation_cache_dir")  # noqa: B009  (untyped)
    wanted = getattr(config, "jax_enable_compilation_cache")  # noqa: B009
    if backend.name() != "cpu":
        _use(None)
        return ""
    if _is_everywhere(folder if wanted and folder else ""):
        return ""
    _use(None)
    if not (wanted and folder):
        return ""
    return (
        f"warning: not all processes see {folder}: programs are compiled again at each"
        " start; set JAX_COMPILATION_CACHE_DIR to a folder that all of them see"
    )


def keep_in(workdir: Path) -> None:
    """Keeps the programs of several processes in a folder of their run's own.

    Does nothing for a single process, nor on CPUs, where nothing is tuned.

    Args:
      workdir: which all processes see, and in which no other run trains.
    """
    if jax.process_count() > 1 and backend.name() != "cpu":
        _use(workdir / FOLDER)


def _use(folder: Path | None) -> None:
    """Keeps programs there from now on, or nowhere."""
    jax.config.update("jax_compilation_cache_dir", folder and str(folder))
    compilation_cache.reset_cache()  # JAX reads the setting once, and may have.


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
