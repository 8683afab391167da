"""Shardings of parameters and optimizer states, and reading weights onto the mesh."""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.learning import train_state as states
from ragen_jax.learning.train_state import TrainState
from ragen_jax.models import parameters
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.io import partial_reads
from ragen_jax.models.io.sources import Source
from ragen_jax.models.parameters import Parameters
from ragen_jax.parallel import mesh as meshes
from ragen_jax.settings import Settings


def training_shardings(declared: Parameters, mesh: Mesh):
    """NamedShardings of a declared tree during training."""
    return meshes.shardings(meshes.training_specs(declared, mesh), mesh)


def state_shardings(
    settings: Settings, mesh: Mesh, actor: Parameters, critic: Parameters
) -> TrainState:
    """NamedShardings of the whole TrainState.

    Args:
      settings: for the optimizers.
      mesh: of all devices.
      actor, critic: the declared trees of what is trained of both; {} for no critic.
    """
    replicated = NamedSharding(mesh, PartitionSpec())

    def of(declared: Parameters, optimizer: optax.GradientTransformation):
        if not declared:
            empty = jax.eval_shape(optimizer.init, {})
            return {}, jax.tree.map(lambda _: replicated, empty)
        placed = training_shardings(declared, mesh)
        optimizer_state = optax.tree_map_params(
            optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(optimizer.init, parameters.shapes(declared)),
            placed,
            transform_non_params=lambda _: replicated,
        )
        return placed, optimizer_state

    actor_parameters, actor_optimizer = of(actor, states.actor_optimizer(settings))
    critic_parameters, critic_optimizer = of(critic, states.critic_optimizer(settings))
    counts = {
        field.name: replicated
        for field in dataclasses.fields(TrainState)
        if field.type is jax.Array
    }
    return TrainState(
        actor=actor_parameters,
        critic=critic_parameters,
        actor_optimizer=actor_optimizer,
        critic_optimizer=critic_optimizer,
        **counts,
    )


def read_parameters(
    source: Source, config: ModelConfig, mesh: Mesh, *, value_head: bool = False
) -> Parameters:
    """A model's parameters on the mesh, float32, as training shards them.

    Each process reads what its own devices hold, one device's part of one leaf at a
    time.

    Args:
      source: where the weights are.
      config: the model's shape.
      mesh: of all devices.
      value_head: reads a critic: with zeros for its head, in place of the vocabulary's.

    Raises:
      UserError: if the files are damaged, or hold other tensors or numbers that are
        not finite.
    """
    read = partial_reads.finite_reader(
        source.open_parameters(config, parameters.declare(config)), source.name
    )
    declared = parameters.declare(config, value_head=value_head)

    def load(keys, leaf: parameters.Leaf, sharding: NamedSharding) -> jax.Array:
        path = tuple(key.key for key in keys)
        if path == ("value_head",):  # In no file.
            return _read_parts(
                lambda index: np.zeros(leaf.shape, np.float32)[index], leaf, sharding
            )
        return _read_parts(lambda index: read(path, index), leaf, sharding)

    return jax.tree.map_with_path(
        load, declared, training_shardings(declared, mesh), is_leaf=parameters.is_leaf
    )


def _read_parts(
    read: Callable[[tuple[slice, ...]], np.ndarray],
    leaf: parameters.Leaf,
    sharding: NamedSharding,
) -> jax.Array:
    """An array read part by part; a part that several devices hold is read once."""

    def begins(device_and_index) -> tuple:
        return tuple(
            part.indices(n)
            for part, n in zip(device_and_index[1], leaf.shape, strict=True)
        )

    parts = sharding.addressable_devices_indices_map(leaf.shape).items()
    arrays = []
    for _, equal in itertools.groupby(sorted(parts, key=begins), begins):
        devices, indices = zip(*equal, strict=True)
        part = read(indices[0])
        # Waits, so that the host holds one part at a time.
        arrays += [jax.device_put(part, d).block_until_ready() for d in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def abstract(shapes, shardings):
    """The tree of ShapeDtypeStructs with these shardings."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(
            shape.shape, shape.dtype, sharding=sharding
        ),
        shapes,
        shardings,
    )
