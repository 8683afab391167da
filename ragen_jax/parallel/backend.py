"""The devices that programs are compiled for; all code asks here, not JAX.

They are the ones that JAX finds or, within `targeting`, absent ones that are planned
for. Choices that depend on them are in backend_choices.py.
"""

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Backend:
    """Absent devices, described as JAX would describe them."""

    name: str  # as jax.default_backend() has it: "cpu", "gpu" or "tpu"
    devices: tuple[Any, ...]  # of all processes
    local_devices: tuple[Any, ...]  # of one process
    cuda_capability: tuple[int, int] | None  # (9, 0) for Hopper; None: not NVIDIA's


_TARGET: contextvars.ContextVar[Backend | None] = contextvars.ContextVar(
    "target", default=None
)


@contextlib.contextmanager
def targeting(target: Backend) -> Iterator[None]:
    """Within it, and in this thread alone, programs are traced for these devices.

    JAX's caches are cleared before and after: their keys are functions and shapes, and
    do not include the target.
    """
    jax.clear_caches()
    token = _TARGET.set(target)
    try:
        yield
    finally:
        _TARGET.reset(token)
        jax.clear_caches()


def name() -> str:
    """The platform: "cpu", "gpu" or "tpu"."""
    target = _TARGET.get()
    return jax.default_backend() if target is None else target.name


def devices() -> list[Any]:
    """All devices of all processes."""
    target = _TARGET.get()
    return jax.devices() if target is None else list(target.devices)


def device_count() -> int:
    """How many devices all processes have together."""
    return len(devices())


def local_devices() -> list[Any]:
    """The devices of this process, or of one process of the target."""
    target = _TARGET.get()
    return jax.local_devices() if target is None else list(target.local_devices)


def cpu_cores() -> int:
    """Cores that this process may use."""
    available = getattr(os, "sched_getaffinity", None)  # Linux has it.
    return len(available(0)) if available else os.cpu_count() or 1


def cuda_capability() -> tuple[int, int] | None:
    """NVIDIA's compute capability, (9, 0) for Hopper; None on any other device."""
    target = _TARGET.get()
    if target is not None:
        return target.cuda_capability
    device = jax.local_devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        return None
    major, minor = str(device.compute_capability).split(".")
    return int(major), int(minor)
