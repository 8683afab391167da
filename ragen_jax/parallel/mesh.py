"""The device mesh, and the PartitionSpecs of parameters on it."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ragen_jax.errors import UserError
from ragen_jax.parallel import backend

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
AXES = (DATA, FSDP, TENSOR)
ROWS = PartitionSpec((DATA, FSDP))  # rows and episodes: over data, then fsdp

# Logical name of a parameter's dimension -> mesh axis, in training.
_TRAINING = {"embed": FSDP, "heads": TENSOR, "mlp": TENSOR, "vocabulary": TENSOR}
# In a tensor-parallel rollout: no fsdp, and whole logits on every device.
_ROLLOUT = {"heads": TENSOR, "mlp": TENSOR}


def make_mesh(
    data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh over `devices`; None: all devices of all processes.

    Raises:
      UserError: if the axes do not multiply to the number of devices.
    """
    devices = backend.devices() if devices is None else devices
    count = len(devices)
    if data * fsdp * tensor != count:
        raise UserError(
            f"mesh.data * mesh.fsdp * mesh.tensor = {data} * {fsdp} * {tensor} ="
            f" {data * fsdp * tensor}, but there are {count} devices; set one of them"
            " to -1 to take every device that the others leave"
        )
    types = (AxisType.Auto,) * 3
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=types, devices=devices)


def training_specs(declared, mesh: Mesh):
    """PartitionSpecs of a declared parameter tree while it is trained."""
    return _specs(declared, mesh.shape, _TRAINING)


def rollout_specs(declared, mesh: Mesh, layout: str):
    """PartitionSpecs of the sampler's weights: replicated, or tensor-parallel."""
    return _specs(declared, mesh.shape, _ROLLOUT if layout == "tensor" else {})


def shards_heads(heads: int, kv_heads: int, mesh: Mesh) -> bool:
    """Whether the tensor axis shards the heads: only if it divides both kinds."""
    size = mesh.shape[TENSOR]
    return size > 1 and heads % size == 0 and kv_heads % size == 0


def shards_parameters(declared, sizes: Mapping[str, int], axis: str) -> bool:
    """Whether an axis shards any parameter in training, on a mesh of these sizes."""
    specs = _specs(declared, sizes, _TRAINING)
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return any(axis in spec for spec in leaves)


def is_leaf(x) -> bool:
    """Whether x is a declared parameter, a `parameters.Leaf`: it names its axes."""
    return hasattr(x, "axes")


def _specs(declared, sizes: Mapping[str, int], rules: dict[str, str]):
    """Specs by `rules` (logical name -> mesh axis), where the axis divides the size."""
    heads = {
        size
        for leaf in jax.tree.leaves(declared["layers"], is_leaf=is_leaf)
        for size, name in zip(leaf.shape, leaf.axes, strict=True)
        if name == "heads"
    }
    whole_heads = any(size % sizes[TENSOR] for size in heads)

    def spec(leaf) -> PartitionSpec:
        parts = []
        for size, name in zip(leaf.shape, leaf.axes, strict=True):
            axis = rules.get(name)
            # Query and key heads are sharded together or not at all.
            if axis is None or size % sizes[axis] or (name == "heads" and whole_heads):
                axis = None
            parts.append(axis)
        return PartitionSpec(*parts)

    return jax.tree.map(spec, declared, is_leaf=is_leaf)


def shardings(specs, mesh: Mesh):
    """The tree of PartitionSpecs as NamedShardings."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def row_shards(mesh: Mesh) -> int:
    """How many shards rows and episodes are divided into."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def describe(mesh: Mesh) -> str:
    """For the banner: `data 1 x fsdp 1 x tensor 1 (cpu)`."""
    sizes = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in AXES)
    kind = np.asarray(mesh.devices).flat[0].device_kind
    return f"{sizes} ({kind})"
