"""Eight simulated CPU devices and a strict JAX, for every test."""

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile far more than they compute: unoptimized machine code saves a third.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
).strip()

# One folder for all that this session starts: pytest's processes, which inherit its
# name, and the scripts that tests run. See runs.py.
if "RAGEN_JAX_TESTS" not in os.environ:
    os.environ["RAGEN_JAX_TESTS"] = tempfile.mkdtemp(prefix="ragen_jax_tests.")
    atexit.register(shutil.rmtree, os.environ["RAGEN_JAX_TESTS"], ignore_errors=True)

import jax  # noqa: E402  (the flags above must be set before JAX starts)
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


# Long ones first, so that no process is left alone with one at the end.
LONG = ("processes", "training", "resume", "update", "update_mesh", "windows_loop")


def pytest_collection_modifyitems(items):
    def place(item) -> int:
        name = item.path.stem.removeprefix("test_")
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=place)  # Stable.


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Frees a module's compiled programs: each holds memory maps of the kernel, of
    which a process may have only so many (Linux: 65,530) before it crashes."""
    yield
    jax.clear_caches()
