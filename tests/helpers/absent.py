"""Runs on GPUs and TPUs that are not there, for tests of what is compiled for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax import cli
from ragen_jax import settings as settings_lib
from ragen_jax.errors import UserError
from ragen_jax.models import attention
from ragen_jax.planning import compiling, devices, model, programs, target
from ragen_jax.planning.compiling import Program
from ragen_jax.planning.devices import Description
from ragen_jax.planning.programs import Block
from ragen_jax.planning.target import Target
from ragen_jax.settings import Settings
from ragen_jax.training import programs as programs_lib
from ragen_jax.training import run as run_lib
from ragen_jax.training.run import Run


def is_available(device: str) -> bool:
    """Whether XLA's compiler for this device is installed; no device is needed."""
    try:
        target.make_target(device)
    except UserError:
        return False
    return True


def _needs(device: str, extra: str):
    return pytest.mark.skipif(
        not is_available(device),
        reason=f"no compiler for {device} is installed: pip install '.[{extra}]'",
    )


needs_compiler, needs_tpu_compiler = (
    _needs("h100", "plan-gpu"),
    _needs("v5e", "plan-tpu"),
)


def settings(config: str, **changes) -> Settings:
    """Of "configs/FILE.py:VARIANT"; `__` in a key stands for its dot."""
    chosen = cli.load_config(config)
    chosen.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return settings_lib.from_dict(chosen.to_dict())


def prepare(chosen: Settings) -> Run:
    """Within `Target.tracing`. No model's files are needed."""
    return run_lib.prepare(chosen, source=model.find(chosen.model.path, None))


@functools.cache
def h100(count: int = 1, hosts: int = 1) -> Target:
    """H100s that are not there."""
    return target.make_target("h100", count, hosts)


@functools.cache
def v5e(count: int = 1) -> Target:
    """TPUs that are not there."""
    return target.make_target("v5e", count)


def names(kind: type[Description]) -> list[str]:
    """The values of --target that are of this kind, devices.Gpu or devices.Tpu."""
    return [n for n in devices.names() if isinstance(devices.read(n), kind)]


def compiled_attention(chosen: Target) -> str:
    """The HLO of a gradient through attention, two rows on each device."""
    mesh = jax.sharding.Mesh(np.array(chosen.backend.devices), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((2 * chosen.count, 64, 2, 64), jnp.bfloat16, sharding=rows)

    # On each device's rows, as a run has it: a TPU's kernel asks for it.
    attend = jax.shard_map(
        attention.causal_attention,
        mesh=mesh,
        in_specs=rows.spec,
        out_specs=rows.spec,
        check_vma=False,
    )

    @jax.jit
    @jax.grad
    def f(x):
        mixed = attend(x, x, x)
        return (mixed @ mixed.mT).astype(jnp.float32).sum()

    with chosen.tracing():
        lowered = f.lower(x)
    return chosen.compile(lowered).as_text()


class Compiled:
    """A run whose programs are compiled when they are asked for, once."""

    def __init__(self, config: str, devices: int = 1, make=h100, **changes):
        self.target = make(devices)
        self.settings = settings(config, **changes)
        with self.target.tracing():
            self.run = prepare(self.settings)

    @functools.cache  # noqa: B019 (lives as long as its module's fixture)
    def program(self, name: str) -> Program:
        """One of compiling.ROLLOUT, UPDATE and so on."""
        with self.target.tracing():
            (traced,) = compiling.lower(self.run, [name])
            if name == compiling.ROLLOUT:
                self.record = programs_lib.record_shapes(self.run, traced.lowered)
            return compiling.compile_program(self.target, traced)

    @functools.cache  # noqa: B019
    def tree(self, name: str) -> Block:
        """The program, read."""
        return programs.read(self.program(name).text)
