"""Connects the groups of CPU devices that a mesh's collectives run among.

Gloo connects a group when a program first uses it, and waits 30 s for its processes
(jaxlib 0.10). That program may take minutes to compile, on one host longer than on
another: so a small one connects the groups, when all processes are together.
"""

import itertools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.parallel import backend, distributed
from ragen_jax.parallel import mesh as meshes


def connect_all() -> None:
    """Connects all processes, before their first exchange; as `connect`."""
    connect(meshes.make_mesh(backend.device_count(), 1, 1))


def connect(mesh: Mesh) -> None:
    """Connects the groups of every choice of axes. Called by all processes together.

    Does nothing for a single process, and on GPUs and TPUs, which do not use Gloo.
    """
    if jax.process_count() == 1 or backend.name() != "cpu":
        return
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    counts = range(1, len(axes) + 1)
    groups = [group for n in counts for group in itertools.combinations(axes, n)]
    replicated = PartitionSpec()

    def meet() -> jax.Array:
        total = jnp.float32(1)
        for group in groups:  # Each waits for the one before: one order everywhere.
            total = jax.lax.psum(total, group)
        return total

    program = jax.jit(
        jax.shard_map(
            meet, mesh=mesh, in_specs=(), out_specs=replicated, check_vma=False
        ),
        out_shardings=NamedSharding(mesh, replicated),
    )
    compiled = program.lower().compile()
    distributed.meet("their first exchange")  # All have compiled it.
    jax.block_until_ready(compiled())
