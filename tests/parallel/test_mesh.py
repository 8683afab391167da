"""The mesh, and which parameters which axis shards."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import models
from jax.sharding import PartitionSpec as P  # noqa: N817

from ragen_jax.errors import UserError
from ragen_jax.models import parameters
from ragen_jax.parallel import mesh as meshes

CONFIG = models.small_config(40)


def _specs(mesh, **changes):
    declared = parameters.declare(dataclasses.replace(CONFIG, **changes))
    return meshes.training_specs(declared, mesh)


def test_a_mesh_takes_every_device_in_order():
    mesh = meshes.make_mesh(2, 2, 2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert set(mesh.devices.flat) == set(jax.devices())
    assert meshes.row_shards(mesh) == 4
    assert meshes.describe(mesh) == "data 2 x fsdp 2 x tensor 2 (cpu)"


def test_a_mesh_of_another_size_is_refused_with_the_numbers():
    with pytest.raises(UserError, match=r"4 \* 1 \* 1 = 4, but there are 8 devices"):
        meshes.make_mesh(4, 1, 1)


def test_in_training_width_goes_to_fsdp_and_heads_and_mlp_to_tensor():
    specs = _specs(meshes.make_mesh(2, 2, 2))
    layers = specs["layers"]
    assert specs["embedding"] == P("tensor", "fsdp")
    assert specs["head"] == P("fsdp", "tensor")
    assert specs["final_norm"] == P("fsdp")
    assert layers["query"] == layers["key"] == P(None, "fsdp", "tensor", None)
    assert layers["output"] == P(None, "tensor", None, "fsdp")
    assert layers["value_bias"] == P(None, "tensor", None)
    assert layers["gate"] == P(None, "fsdp", "tensor")
    assert layers["down"] == P(None, "tensor", "fsdp")


def test_heads_that_the_tensor_axis_does_not_divide_stay_whole_together():
    mesh = meshes.make_mesh(2, 1, 4)  # 4 query heads would fit, 2 key heads do not.
    assert not meshes.shards_heads(4, 2, mesh)
    layers = _specs(mesh)["layers"]
    for name in ("query", "key", "value", "output", "query_bias"):
        assert "tensor" not in layers[name]
    assert layers["gate"] == P(None, "fsdp", "tensor")
    assert meshes.shards_heads(8, 4, mesh)
    assert not meshes.shards_heads(4, 2, meshes.make_mesh(8, 1, 1))


def test_an_axis_shards_parameters_if_it_shares_any_of_them():
    declared = parameters.declare(CONFIG)
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    shared = [meshes.shards_parameters(declared, sizes, axis) for axis in meshes.AXES]
    assert shared == [False, True, True]
    assert not meshes.shards_parameters(declared, sizes | {"tensor": 7}, "tensor")


def test_a_dimension_that_an_axis_does_not_divide_stays_whole():
    specs = _specs(meshes.make_mesh(1, 2, 4), vocabulary=41, mlp_width=50)
    assert specs["embedding"] == P(None, "fsdp")
    assert specs["layers"]["up"] == P(None, "fsdp", None)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)])
@pytest.mark.parametrize("value_head", [False, True])
def test_specs_fit_every_parameter_and_use_an_axis_once(sizes, value_head):
    mesh = meshes.make_mesh(*sizes)
    declared = parameters.declare(CONFIG, value_head=value_head)
    for specs in (
        meshes.training_specs(declared, mesh),
        meshes.rollout_specs(declared, mesh, "tensor"),
        meshes.rollout_specs(declared, mesh, "replicated"),
    ):
        placed = meshes.shardings(specs, mesh)
        for leaf, sharding in zip(
            jax.tree.leaves(declared, is_leaf=parameters.is_leaf),
            jax.tree.leaves(placed),
            strict=True,
        ):
            sharding.shard_shape(leaf.shape)  # Raises where it does not divide.
            used = [axis for axis in sharding.spec if axis]
            assert len(used) == len(set(used))


def test_a_rollouts_copy_is_whole_or_shares_only_heads_and_mlp():
    mesh = meshes.make_mesh(2, 2, 2)
    declared = parameters.declare(CONFIG)
    whole = meshes.rollout_specs(declared, mesh, "replicated")
    axes = {axis for spec in jax.tree.leaves(whole) for axis in spec}
    assert axes == {None}
    shared = meshes.rollout_specs(declared, mesh, "tensor")
    assert shared["layers"]["query"] == P(None, None, "tensor", None)
    assert shared["layers"]["down"] == P(None, "tensor", None)
    assert shared["embedding"] == shared["head"] == P(None, None)


def test_rows_are_shared_over_data_then_fsdp():
    mesh = meshes.make_mesh(2, 2, 2)
    rows = jax.device_put(np.arange(8), jax.NamedSharding(mesh, meshes.ROWS))
    held = {shard.device: shard.data.tolist() for shard in rows.addressable_shards}
    for data in range(2):
        for fsdp in range(2):
            for device in mesh.devices[data, fsdp]:
                first = 4 * data + 2 * fsdp
                assert held[device] == [first, first + 1]
