"""Eight simulated CPU devices and a strict JAX, for every test."""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

from helpers import xla

os.environ["JAX_PLATFORMS"] = "cpu"
_FLAGS = f"--xla_force_host_platform_device_count=8 {xla.FLAGS}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

# One folder for all that this session starts: pytest's processes, which inherit its
# name, and the scripts that tests run. See runs.py.
if "RAGEN_JAX_TESTS" not in os.environ:
    os.environ["RAGEN_JAX_TESTS"] = tempfile.mkdtemp(prefix="ragen_jax_tests.")
    atexit.register(shutil.rmtree, os.environ["RAGEN_JAX_TESTS"], ignore_errors=True)

gc.disable()  # Until the tests are collected: what they import stays.

import jax  # noqa: E402  (the flags above must be set before JAX starts)
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# What takes long to compile is compiled once, whichever process comes first.
jax.config.update("jax_compilation_cache_dir", os.environ["RAGEN_JAX_TESTS"] + "/cache")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


# Long ones first, so that no process is left alone with one at the end.
LONG = (
    "processes",
    "trainer",
    "monitor",
    "levers",
    "resume",
    "update",
    "update_mesh",
    "windowed_run",
    "windows",
    "rollout",
)


def pytest_collection_modifyitems(items):
    def place(item) -> int:
        name = item.path.stem.removeprefix("test_")
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=place)  # Stable.


def pytest_collection_finish():
    """What is imported by now stays, so the collector need never look at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # By default it takes 7 s of each process.
    if "PYTEST_XDIST_WORKER" in os.environ:
        # All is reported by then. To free thousands of programs would take 7 s.
        atexit.register(os._exit, 0)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Frees compiled programs before there are too many of them.

    Each holds memory maps of the kernel, of which a process may have only so many
    (Linux: 65,530) before it crashes. A third is left for the next module.
    """
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        gc.collect()
