"""The speed of the device at best, timings of calls, and counts of compilations."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class DeviceLimits:
    """What all devices together do at best."""

    matmul: float  # floating-point operations a second of a large matrix product
    copy: float  # bytes a second read and written by adding to a long vector in place
    read: float  # bytes a second read by a large matrix times a vector
    dtype: str  # of the product

    def figures(self) -> dict[str, float]:
        """For a table."""
        return {
            f"matmul {self.dtype}, TFLOP/s": self.matmul / 1e12,
            "copy, GB/s read and written": self.copy / 1e9,
            "read, GB/s": self.read / 1e9,
        }


def device_limits() -> DeviceLimits:
    """Measured on the first device; a CPU's devices share its cores."""
    on_cpu = jax.default_backend() == "cpu"
    size, dtype = (2048, jnp.float32) if on_cpu else (8192, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    wide = jnp.ones((2**14 if on_cpu else 2**17, 2**12), dtype)
    product, by_vector = jax.jit(lambda x: x @ x), jax.jit(lambda x: x @ x[0])
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    # In place: on a CPU the first touch of new memory takes longer than the copy.
    held = [jnp.zeros(2**26 if on_cpu else 2**30, jnp.float32)]

    def copy() -> jax.Array:
        held[0] = add(held[0])
        return held[0]

    devices = 1 if on_cpu else jax.device_count()
    return DeviceLimits(
        matmul=devices * 2 * size**3 / min(seconds(lambda: product(x))),
        copy=devices * 2 * held[0].nbytes / min(seconds(copy)),
        read=devices * wide.nbytes / min(seconds(lambda: by_vector(wide))),
        dtype=dtype.__name__,
    )


def seconds(run: Callable[[], Any], repeats: int = 5) -> list[float]:
    """Of each of some calls, after one that may compile."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - started)
    return taken


@dataclasses.dataclass
class Compilations:
    """What was compiled while `counting`."""

    seconds: float = 0.0
    programs: int = 0
    from_cache: int = 0  # of those programs


@contextlib.contextmanager
def counting() -> Iterator[Compilations]:
    """Counts what XLA compiles, or takes from its cache on the disk, in the block."""
    seen = Compilations()

    def timed(event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.seconds += duration
            seen.programs += 1

    def happened(event: str, **_) -> None:
        seen.from_cache += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_duration_secs_listener(timed)
    jax.monitoring.register_event_listener(happened)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(timed)
        jax.monitoring.unregister_event_listener(happened)
