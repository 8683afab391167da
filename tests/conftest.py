"""Eight simulated CPU devices and a strict JAX, for every test."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile far more than they compute: unoptimized machine code saves a third.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
).strip()

import jax  # noqa: E402  (the flags above must be set before JAX starts)
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Frees a module's compiled programs: each holds memory maps of the kernel, of
    which a process may have only so many (Linux: 65,530) before it crashes."""
    yield
    jax.clear_caches()
