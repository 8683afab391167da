"""Absent GPUs and TPUs as a target for compilation. Nothing is ever run on them.

XLA needs only a description of a GPU to compile for it, on any machine with the plugin
(`pip install -e .[plan-gpu]`). It cannot autotune, so tile sizes and the choice between
Triton and cuBLAS may differ from those on the device. Structure, copies, loops, memory
and collectives do not. Its compiler for TPUs, in libtpu (`.[plan-tpu]`), knows them by
name and needs no device to choose.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from ragen_jax.errors import UserError
from ragen_jax.parallel import backend
from ragen_jax.parallel.backend import Backend
from ragen_jax.planning import devices
from ragen_jax.planning.devices import Description, Gpu, Tpu

# The share of a GPU's memory that JAX allocates by default.
_MEMORY_FRACTION = 0.75
_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# libtpu would ask Google Cloud, and warn, which TPU this machine has, and let one
# process at a time use it.
_NO_TPU_HERE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def fraction_variable() -> str:
    """The environment variable that sets that share: JAX refuses both of them."""
    given = [name for name in _FRACTION_VARIABLES if name in os.environ]
    return (given or _FRACTION_VARIABLES)[0]


@dataclasses.dataclass(frozen=True)
class Target:
    """A number of hosts, each with the same number of equal devices."""

    device: Description
    hosts: int
    backend: Backend  # as which tracing sees the devices
    # Compiler options, and those to try where XLA fails with the ones before.
    attempts: tuple[dict[str, int | bool], ...]

    @property
    def count(self) -> int:
        """Devices of all hosts."""
        return len(self.backend.devices)

    @property
    def available(self) -> int:
        """Bytes of one device's memory that JAX would allocate."""
        if isinstance(self.device, Gpu):
            return int(self.device.memory * memory_fraction())
        return self.device.memory

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """A context in which the project traces and lowers for these devices."""
        with backend.targeting(self.backend):
            yield

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles a program for these devices, which allocates nothing on them.

        Raises:
          UserError: if the compiler finds that a device has too little memory. Only
            that for TPUs looks.
        """
        *firsts, last = self.attempts
        with _without_cache():
            for options in firsts:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    return lowered.compile(compiler_options=options)
            try:
                return lowered.compile(compiler_options=last)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                raise UserError(
                    f"a {self.device.title} has too little memory"
                    f" ({' '.join(str(error).split())[:200]}): for an update set"
                    " model.remat = True or lower optimizer.microbatch, for a rollout"
                    " lower rollout.slots or set rollout.layout = 'tensor'; or divide"
                    " the state over more devices with mesh.fsdp"
                ) from error


def make_target(
    name: str,
    count: int = 1,
    hosts: int | None = None,
    *,
    deterministic: bool = False,
) -> Target:
    """Makes a target of absent devices.

    Args:
      name: of a file in device_data, such as "h100".
      count: devices of all hosts together.
      hosts: over which they are divided evenly, with one process each; None: as few
        as typical hosts can be (8 GPUs fit in one).
      deterministic: as settings.deterministic; programs for TPUs always are.

    Raises:
      UserError: if `hosts` does not divide `count`, the device has no description,
        TPUs come in no such number, or XLA's compiler for them is not installed.
    """
    device = devices.read(name)
    if isinstance(device, Tpu):
        return _tpus(device, count, hosts)
    assert isinstance(device, Gpu)
    if hosts is None:
        hosts = max(1, math.ceil(count / device.per_host))
    return _gpus(device, count, hosts, deterministic)


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Turns JAX's compilation cache on disk off.

    It would never be hit: for absent devices the key differs in each process (tried).
    """
    was_enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX remembers whether the cache is in use.
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()


def memory_fraction() -> float:
    """The share of a GPU's memory that JAX allocates; environment variables set it."""
    for variable in _FRACTION_VARIABLES:
        with contextlib.suppress(KeyError, ValueError):
            return float(os.environ[variable])
    return _MEMORY_FRACTION


def _gpus(device: Gpu, count: int, hosts: int, deterministic: bool) -> Target:
    """Absent GPUs. Raises UserError as `make_target` does."""
    if count < 1 or hosts < 1 or count % hosts:
        raise UserError(
            f"--target-devices={count}, of all hosts together, cannot be divided evenly"
            f" over {hosts} host{'s'[: hosts != 1]} of usually {device.per_host}:"
            " choose another number, or --target-hosts"
        )
    absent = _absent_devices(
        device,
        "cuda",
        target_config=device.target_config,
        topology=f"1x{hosts}x{count // hosts}",  # slices x hosts x devices of a host
    )
    seen = Backend("gpu", absent, absent[: count // hosts], device.capability)
    return Target(device, hosts, seen, gpu_attempts(deterministic))


def gpu_attempts(deterministic: bool) -> tuple[dict[str, int | bool], ...]:
    """`Target.attempts` for GPUs."""
    options: dict[str, int | bool] = {"xla_gpu_autotune_level": 0}
    # Triton has no kernel for some fusions, such as those of attention by plain
    # operations. On a device the autotuner would choose cuBLAS.
    without_triton = options | {"xla_gpu_enable_triton_gemm": False}
    if not deterministic:
        return options, without_triton
    # A Triton product here falls back on cuBLASLt, whose algorithms can only be listed
    # on a device.
    return (without_triton | {"xla_gpu_exclude_nondeterministic_ops": True},)


def _tpus(device: Tpu, count: int, hosts: int | None) -> Target:
    """A slice of absent TPUs. Raises UserError as `make_target` does."""
    if count not in device.slices:
        raise UserError(
            f"--target-devices={count}: choose a slice of {device.title} of"
            f" {', '.join(map(str, device.slices))} devices"
        )
    in_host = min(count, device.per_host)
    if hosts not in (None, count // in_host):
        raise UserError(
            f"--target-hosts={hosts}: {count} x {device.title} have {in_host} in each"
            f" host: leave it out, or set it to {count // in_host}"
        )
    for variable, value in _NO_TPU_HERE.items():
        os.environ.setdefault(variable, value)
    shape = device.slices[count]
    one = {"chips_per_host_bounds": [1, 1, 1]} if count == 1 else {}
    absent = _absent_devices(device, "tpu", f"{device.name}:{shape}", **one)
    seen = Backend("tpu", absent, absent[:in_host], cuda_capability=None)
    return Target(device, count // in_host, seen, ({},))


def _absent_devices(
    device: Description, platform: str, name: str = "", **described: Any
) -> tuple[Any, ...]:
    """JAX's descriptions of absent devices.

    Args:
      device: which they are.
      platform: "cuda" or "tpu".
      name: of the topology, for TPUs.
      **described: what XLA's compiler for them wants to know.

    Raises:
      UserError: if that compiler is not installed.
    """
    try:
        topology = topologies.get_topology_desc(name, platform, **described)
    except (NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        kind, extra = (
            ("NVIDIA GPUs", "plan-gpu") if platform == "cuda" else ("TPUs", "plan-tpu")
        )
        raise UserError(
            f"--target={device.name} needs XLA's compiler for {kind}, which does not"
            f" start here ({reason}): pip install -e '.[{extra}]' brings it, for Linux;"
            " no such device is needed"
        ) from None
    return tuple(topology.devices)
