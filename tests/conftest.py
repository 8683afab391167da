"""Eight simulated CPU devices and a strict JAX, for every test."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import jax  # noqa: E402  (the flags above must be set before JAX starts)

jax.config.update("jax_numpy_rank_promotion", "raise")
