"""Absent GPUs as a target for compilation. Nothing is ever run on them.

XLA needs only a description of a GPU to compile for it, on any machine with the plugin
(`pip install -e .[plan-gpu]`). It cannot autotune, so tile sizes and the choice between
Triton and cuBLAS may differ from those on the device. Structure, copies, loops, memory
and collectives do not.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from ragen_jax.errors import UserError
from ragen_jax.parallel import backend
from ragen_jax.parallel.backend import Backend
from ragen_jax.planning import devices
from ragen_jax.planning.devices import Description

# The share of a GPU's memory that JAX allocates by default.
_MEMORY_FRACTION = 0.75
_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@dataclasses.dataclass(frozen=True)
class Target:
    """A number of hosts, each with the same number of equal devices."""

    device: Description
    hosts: int
    backend: Backend  # as which tracing sees the devices
    deterministic: bool = False  # refuse operations with varying results

    @property
    def count(self) -> int:
        """Devices of all hosts."""
        return len(self.backend.devices)

    @property
    def available(self) -> int:
        """Bytes of one device's memory that JAX would allocate."""
        return int(self.device.memory * memory_fraction())

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """A context in which the project traces and lowers for these devices."""
        with backend.targeting(self.backend):
            yield

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles a program for these devices, which allocates nothing on them."""
        options: dict[str, int | bool] = {"xla_gpu_autotune_level": 0}
        if self.deterministic:
            options["xla_gpu_exclude_nondeterministic_ops"] = True
            # A Triton product here falls back on cuBLASLt, whose algorithms can only be
            # listed on a device.
            options["xla_gpu_enable_triton_gemm"] = False
        with _without_cache():
            try:
                return lowered.compile(compiler_options=options)
            except jax.errors.JaxRuntimeError:
                if self.deterministic:  # Without Triton already.
                    raise
                # Triton has no kernel for some fusions, such as those of attention by
                # plain operations. On a device the autotuner would choose cuBLAS.
                options["xla_gpu_enable_triton_gemm"] = False
                return lowered.compile(compiler_options=options)


def make_target(
    name: str, count: int = 1, hosts: int = 1, *, deterministic: bool = False
) -> Target:
    """Makes a target of absent devices.

    Args:
      name: of a file in device_data, such as "h100".
      count: devices of all hosts together.
      hosts: over which they are divided evenly, with one process each.
      deterministic: as settings.deterministic.

    Raises:
      UserError: if `hosts` does not divide `count`, the device has no description, or
        XLA's compiler for it is not installed.
    """
    if count < 1 or hosts < 1 or count % hosts:
        raise UserError(
            f"--target-devices={count}, of all hosts together, is not a multiple of"
            f" --target-hosts={hosts}: give every host as many devices"
        )
    device = devices.read(name)
    topology = _absent_devices(device.target_config, hosts, count // hosts)
    return Target(
        device=device,
        hosts=hosts,
        backend=Backend(
            name="gpu",
            devices=topology,
            local_devices=topology[: count // hosts],
            cuda_capability=device.capability,
        ),
        deterministic=deterministic,
    )


def is_available() -> bool:
    """Whether XLA's compiler for NVIDIA GPUs is installed; no GPU is needed."""
    try:
        make_target("h100")
    except UserError:
        return False
    return True


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


def _absent_devices(target_config: str, hosts: int, each: int) -> tuple:
    """JAX's descriptions of absent devices.

    Raises:
      UserError: if XLA's compiler for NVIDIA GPUs is not installed.
    """
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=target_config,
            topology=f"1x{hosts}x{each}",  # slices x hosts x devices of a host
        )
    except (NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            "--target needs XLA's compiler for NVIDIA GPUs, which does not start here"
            f" ({reason}): pip install -e '.[plan-gpu]' brings it, for Linux; no GPU is"
            " needed"
        ) from None
    return tuple(topology.devices)
