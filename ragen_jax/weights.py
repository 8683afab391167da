"""What a run trains, what it only reads, and where on the mesh both lie.

Without adapters all weights of actor and critic are trained. With adapters
(`lora.rank`) the state, and so a checkpoint, holds those alone; the base model is read
from `model.path`, once, and serves actor, critic and reference.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ragen_jax import checkpoints
from ragen_jax import mesh as meshes
from ragen_jax.learning import state as states
from ragen_jax.learning.state import TrainState
from ragen_jax.models import fingerprint, lora, parameters
from ragen_jax.models.parameters import Parameters
from ragen_jax.settings import Settings, UserError

if TYPE_CHECKING:
    from ragen_jax.loop import Run


def read_adapters(settings: Settings) -> lora.Adapters | None:
    """What `lora` asks for; None without adapters.

    Raises:
      UserError: if lora.targets matches no weight.
    """
    chosen = settings.lora
    targets = lora.read_targets(chosen.targets)
    if not chosen.rank:
        return None
    return lora.Adapters(chosen.rank, chosen.alpha, targets)


def check_weights(run: "Run") -> None:
    """Raises the UserErrors of `load_parameters`, which checkpoints do not need."""
    declared = parameters.declare(run.config)
    run.source.check_parameters(run.config, declared)


def model_marks(run: "Run") -> dict[str, str]:
    """Marks of the model that the run begins with, to know it by later."""
    declared = parameters.declare(run.config)
    read = run.source.open_parameters(run.config, declared)
    return {
        "tokens": fingerprint.of_tokenizer(run.tokenizer),
        "weights": fingerprint.of_weights(read, declared),
    }


def check_same_model(
    run: "Run", directory: Path, step: int, found: Mapping[str, str]
) -> None:
    """Refuses a checkpoint of another model than `model.path` leads to now.

    Args:
      run: that is to use the checkpoint.
      directory: a folder of steps.
      step: which of them.
      found: `model_marks`, or those of them that matter.

    Raises:
      UserError: naming the checkpoint and what differs.
    """
    saved = checkpoints.read_info(directory, step).get("model", {})
    for what, mark in found.items():
        if saved.get(what, mark) != mark:  # Older checkpoints have no marks.
            raise UserError(
                f"{directory / str(step)} began with a model of other {what} than"
                f" {run.settings.model.path} has now: give the model as it was (of the"
                " hub OWNER/NAME@COMMIT), in training as --config.model.path, in"
                " evaluation and export as --model"
            )


def trainable(run: "Run", *, value_head: bool) -> Parameters:
    """The declared tree of what is trained of the actor or, with a head, the critic."""
    if run.adapters is None:
        return parameters.declare(run.config, value_head=value_head)
    return lora.declare_adapters(run.config, run.adapters, value_head=value_head)


def assembler(run: "Run") -> Callable[[Any, Any], Parameters]:
    """(trainable, frozen) -> the parameters that the forward pass takes."""
    if run.adapters is None:
        return lambda trained, frozen: trained
    return lambda trained, frozen: lora.assemble(trained, frozen, run.adapters)


def load_frozen(run: "Run") -> Parameters:
    """The base model under adapters; {} where all weights are trained."""
    return {} if run.adapters is None else load_parameters(run, value_head=False)


def make_merge(run: "Run") -> Callable[[Any, Any], Parameters]:
    """(actor's trainable tree, frozen) -> plain parameters, for the sampler."""
    if run.adapters is None:
        return lambda trained, frozen: trained
    assemble = assembler(run)
    return jax.jit(
        lambda trained, frozen: lora.merge(assemble(trained, frozen)),
        out_shardings=_placed(run, parameters.declare(run.config)),
    )


def _placed(run: "Run", declared: Parameters):
    """NamedShardings of a declared tree, as training shares it."""
    return meshes.shardings(meshes.training_specs(declared, run.mesh), run.mesh)


def state_shardings(run: "Run") -> TrainState:
    """NamedShardings of the whole TrainState."""
    whole = NamedSharding(run.mesh, PartitionSpec())

    def of(value_head: bool, optimizer):
        declared = trainable(run, value_head=value_head)
        specs = _placed(run, declared)
        shapes = parameters.shapes(declared)
        opt_state = optax.tree_map_params(
            optimizer,
            lambda _, spec: spec,
            jax.eval_shape(optimizer.init, shapes),
            specs,
            transform_non_params=lambda _: whole,
        )
        return specs, opt_state

    actor, actor_state = of(False, states.actor_optimizer(run.settings))
    if run.settings.estimator == "ppo":
        critic, critic_state = of(True, states.critic_optimizer(run.settings))
    else:
        critic = {}
        optimizer = states.critic_optimizer(run.settings)
        critic_state = jax.tree.map(lambda _: whole, jax.eval_shape(optimizer.init, {}))
    counts = {
        field.name: whole
        for field in dataclasses.fields(TrainState)
        if field.type is jax.Array
    }
    return TrainState(
        actor=actor,
        critic=critic,
        actor_optimizer=actor_state,
        critic_optimizer=critic_state,
        **counts,
    )


def load_parameters(run: "Run", *, value_head: bool) -> Parameters:
    """The model's parameters on the mesh, as training shares them.

    Each process reads what its own devices hold, one device's part of one leaf at a
    time.
    """
    read = run.source.open_parameters(run.config, parameters.declare(run.config))
    declared = parameters.declare(run.config, value_head=value_head)

    def load(keys, leaf: parameters.Leaf, sharding: NamedSharding) -> jax.Array:
        path = tuple(key.key for key in keys)
        if path == ("value_head",):  # In no file.
            return _place(
                lambda index: np.zeros(leaf.shape, np.float32)[index], leaf, sharding
            )
        return _place(lambda index: read(path, index), leaf, sharding)

    return jax.tree.map_with_path(
        load, declared, _placed(run, declared), is_leaf=parameters.is_leaf
    )


def _place(
    read: Callable[[tuple[slice, ...]], np.ndarray],
    leaf: parameters.Leaf,
    sharding: NamedSharding,
) -> jax.Array:
    """An array whose parts are read one after the other; equal ones only once."""

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
        # Waited for, so that the host holds no second part meanwhile.
        arrays += [jax.device_put(part, d).block_until_ready() for d in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def abstract_parameters(run: "Run") -> Parameters:
    """Shapes and shardings of `load_parameters`' result."""
    declared = parameters.declare(run.config)
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(
            shape.shape, shape.dtype, sharding=sharding
        ),
        parameters.shapes(declared),
        _placed(run, declared),
    )


def new_state(run: "Run") -> TrainState:
    """The state before the first iteration."""
    has_critic = run.settings.estimator == "ppo"
    shardings = state_shardings(run)
    if run.adapters is None:
        actor = load_parameters(run, value_head=False)
        critic = load_parameters(run, value_head=True) if has_critic else {}
    else:
        actor, critic = jax.jit(
            lambda: _new_adapters(run, has_critic),
            out_shardings=(shardings.actor, shardings.critic),
        )()
    return jax.jit(
        lambda actor, critic: states.new_state(actor, critic, run.settings),
        out_shardings=shardings,
    )(actor, critic)


def restore_actor(run: "Run", directory: Path, step: int) -> Parameters:
    """The actor of a checkpoint as plain parameters, adapters merged into their base.

    Args:
      run: prepared with the settings that the checkpoint was saved with.
      directory: a folder of steps.
      step: which of them.

    Raises:
      UserError: if the checkpoint or the base model cannot be read, or the model is
        not the one that the run began with.
    """
    saved = restore_trained(run, directory, step)
    return make_merge(run)(saved, load_frozen(run))


def restore_trained(run: "Run", directory: Path, step: int) -> Parameters:
    """What was trained of a checkpoint's actor: all of it, or its adapters.

    Raises:
      UserError: as `restore_actor`.
    """
    if run.adapters is None:  # The weights are its own; the tokens must still agree.
        marks = {"tokens": fingerprint.of_tokenizer(run.tokenizer)}
    else:
        marks = model_marks(run)
    check_same_model(run, directory, step, marks)
    wanted = {"actor": abstract_state(run).actor}
    return checkpoints.restore(directory, step, wanted, partial=True)["actor"]


def _new_adapters(run: "Run", has_critic: bool) -> tuple[Parameters, Parameters]:
    keys = jax.random.split(jax.random.key(run.settings.seed))
    actor = parameters.initialize(keys[0], trainable(run, value_head=False))
    if not has_critic:
        return actor, {}
    return actor, parameters.initialize(keys[1], trainable(run, value_head=True))


def abstract_state(run: "Run") -> TrainState:
    """Shapes and shardings of the state, for restoring onto this run's mesh."""
    shapes = jax.eval_shape(
        lambda actor, critic: states.new_state(actor, critic, run.settings),
        parameters.shapes(trainable(run, value_head=False)),
        parameters.shapes(trainable(run, value_head=True))
        if run.settings.estimator == "ppo"
        else {},
    )
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(
            shape.shape, shape.dtype, sharding=sharding
        ),
        shapes,
        state_shardings(run),
    )
