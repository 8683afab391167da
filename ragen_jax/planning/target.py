"""Devices that are not there, and the compiler for them. Nothing is ever run on them.

XLA compiles for a GPU from a description of it alone, on any machine that has the
plugin. It cannot try which kernel is fastest: tile sizes, and Triton against cuBLAS,
may differ on the device. Structure, copies, loops, memory and collectives do not.
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

# What JAX allocates of a GPU's memory where no variable says otherwise.
_MEMORY_FRACTION = 0.75
_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@dataclasses.dataclass(frozen=True)
class Target:
    """Some hosts of equal devices."""

    device: Description
    hosts: int
    backend: Backend
    deterministic: bool = False  # compile only operations that always give the same

    @property
    def count(self) -> int:
        """Devices of all hosts."""
        return len(self.backend.devices)

    @property
    def available(self) -> int:
        """Bytes of one device's memory that JAX allocates for programs."""
        return int(self.device.memory * memory_fraction())

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Within it the project's functions trace and lower for these devices."""
        with backend.targeting(self.backend):
            yield

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """The program for these devices; allocates nothing there."""
        options: dict[str, int | bool] = {"xla_gpu_autotune_level": 0}
        if self.deterministic:
            options["xla_gpu_exclude_nondeterministic_ops"] = True
            # Without a device cuBLASLt's algorithms cannot be listed, which a Triton
            # product falls back on here.
            options["xla_gpu_enable_triton_gemm"] = False
        with _without_cache():
            try:
                return lowered.compile(compiler_options=options)
            except jax.errors.JaxRuntimeError:
                if self.deterministic:  # Without Triton already.
                    raise
                # Triton has no kernel for some fusions, of attention in plain
                # operations for one. A card's tuner passes to cuBLAS there.
                options["xla_gpu_enable_triton_gemm"] = False
                return lowered.compile(compiler_options=options)


def make_target(
    name: str, count: int = 1, hosts: int = 1, *, deterministic: bool = False
) -> Target:
    """Devices of one kind that need not be there.

    Args:
      name: of a file in device_data, such as "h100".
      count: devices of all hosts together.
      hosts: that share them equally, one process each.
      deterministic: as settings.deterministic.

    Raises:
      UserError: if the numbers do not fit, no such device is described, or XLA's
        compiler for it is not installed.
    """
    if count < 1 or hosts < 1 or count % hosts:
        raise UserError(
            f"--target-devices={count} cannot be shared by --target-hosts={hosts}:"
            " give a number of devices, of all hosts together, that the hosts divide"
        )
    device = devices.read(name)
    found = _absent_devices(device.target_config, hosts, count // hosts)
    return Target(
        device=device,
        hosts=hosts,
        backend=Backend(
            name="gpu",
            devices=found,
            local_devices=found[: count // hosts],
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
    """Nothing goes to the cache on the disk: there it would never be found again,
    for its key differs from one process to the next (tried)."""
    kept = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks once whether there is one.
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
        compilation_cache.reset_cache()


def memory_fraction() -> float:
    """The part of a GPU's memory that JAX allocates, as the environment has it."""
    for variable in _FRACTION_VARIABLES:
        with contextlib.suppress(KeyError, ValueError):
            return float(os.environ[variable])
    return _MEMORY_FRACTION


def _absent_devices(target_config: str, hosts: int, each: int) -> tuple:
    """JAX's stand-ins for devices. All that is experimental in JAX is used here."""
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
