"""Measures the device's peak rates; times calls and counts compilations."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class DeviceLimits:
    """Measured peak rates of all devices together."""

    matmul: float  # FLOP/s of a large matrix product
    copy: float  # bytes/s read and written by adding to a long vector in place
    read: float  # bytes/s read by a large matrix times a vector
    dtype: str  # of the matrix product

    def figures(self) -> dict[str, float]:
        """The rates for a table."""
        return {
            f"matmul {self.dtype}, TFLOP/s": self.matmul / 1e12,
            "copy, GB/s read and written": self.copy / 1e9,
            "read, GB/s": self.read / 1e9,
        }


def device_limits() -> DeviceLimits:
    """Measures the first device, times the number of devices; a CPU counts as one.

    A GPU reads 1 GiB in 0.3 ms, and launching a program and waiting for it takes at
    least a tenth of that. On a GPU each call is therefore a loop of dependent rounds,
    of a known number: else the host would read the loop's condition in each.
    """
    on_cpu = jax.default_backend() == "cpu"
    size, dtype = (2048, jnp.float32) if on_cpu else (8192, jnp.bfloat16)
    rounds = 1 if on_cpu else 30
    x = jax.random.normal(jax.random.key(0), (size, size), dtype) / size**0.5
    wide = jnp.ones((2**14 if on_cpu else 2**17, 2**12), dtype)
    held = jnp.zeros(2**26 if on_cpu else 2**30, jnp.float32)

    def least(step: Callable, state: Any, *given, in_place=False) -> float:
        """The fewest seconds of a round, `step(state, *given)` -> the next state."""
        if rounds > 1:
            step = functools.partial(repeated, step, rounds)
        once = jax.jit(step, donate_argnums=0 if in_place else ())
        states = [state]

        def call() -> Any:
            states[0] = once(states[0], *given)
            return states[0]

        return min(seconds(call)) / rounds

    # The maximum makes the next vector depend on the whole product.
    by_vector = lambda v, wide: v + (wide @ v).max() * 1e-6

    def multiply_twice(pair, x):
        """Two products, each into the other's place: one alone would be copied."""
        first = pair[0] @ x
        return first @ x, first

    devices = 1 if on_cpu else jax.device_count()
    return DeviceLimits(
        matmul=devices * 4 * size**3 / least(multiply_twice, (x, x), x),
        # In place: on a CPU the first touch of new memory takes longer than the copy.
        copy=devices * 2 * held.nbytes / least(lambda y: y + 1, held, in_place=True),
        read=devices * wide.nbytes / least(by_vector, wide[0], wide),
        dtype=dtype.__name__,
    )


def cuda_versions() -> dict[str, str]:
    """The versions of CUDA and cuDNN that are loaded, for a table; {} without them."""
    try:
        from jax._src.lib import cuda_versions as loaded
    except ImportError:
        return {}
    if loaded is None:
        return {}
    runtime, cudnn = loaded.cuda_runtime_get_version(), loaded.cudnn_get_version()
    return {
        "CUDA": f"{runtime // 1000}.{runtime % 1000 // 10}",
        "cuDNN": f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}",
    }


def repeated(step: Callable[..., Any], rounds: int, state, *given):
    """`step` applied `rounds` times, in a loop."""
    body = lambda state, _: (step(state, *given), None)
    return jax.lax.scan(body, state, length=rounds)[0]


def seconds(run: Callable[[], Any], repeats: int = 5) -> list[float]:
    """Seconds of each of `repeats` calls, after one that may compile."""
    jax.block_until_ready(run())
    durations = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        durations.append(time.perf_counter() - started)
    return durations


@dataclasses.dataclass
class Compilations:
    """What was compiled within `counting`."""

    seconds: float = 0.0
    programs: int = 0  # compiled, or read from the compilation cache
    from_cache: int = 0  # those read from the cache


@contextlib.contextmanager
def counting() -> Iterator[Compilations]:
    """A context that counts the programs which XLA compiles or reads from its cache."""
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
