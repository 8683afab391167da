"""Weights: read from a model's files or a checkpoint, joined with adapters, or new.

Without adapters all weights of actor and critic are trained. With adapters
(`lora.rank`) the state, and so a checkpoint, holds those alone; the base model is read
from `model.path`, once, and serves actor, critic and reference.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from ragen_jax.errors import UserError
from ragen_jax.learning import train_state as states
from ragen_jax.learning.train_state import TrainState
from ragen_jax.models import lora, parameters
from ragen_jax.models.io import fingerprint
from ragen_jax.models.parameters import Parameters
from ragen_jax.training import checkpoint_files, checkpoints, placement
from ragen_jax.training.model import Model
from ragen_jax.training.run import Run

# Reading and joining -----------------------------------------------------------------


def check_weights(model: Model) -> None:
    """Raises the UserErrors of `load_parameters`, without reading any weight."""
    model.source.open_parameters(model.config, model.declared)


def load_parameters(model: Model, *, value_head: bool = False) -> Parameters:
    """The model's parameters on its mesh. See `placement.read_parameters`."""
    return placement.read_parameters(
        model.source, model.config, model.mesh, value_head=value_head
    )


def abstract_parameters(model: Model) -> Parameters:
    """Shapes and shardings of `load_parameters`' result."""
    return placement.abstract(parameters.shapes(model.declared), model.shardings)


def load_frozen(model: Model) -> Parameters:
    """The base model under adapters; {} where all weights are trained."""
    return {} if model.adapters is None else load_parameters(model)


def assembler(adapters: lora.Adapters | None) -> Callable[[Any, Any], Parameters]:
    """(trainable, frozen) -> the parameters that the forward pass takes."""
    if adapters is None:
        return lambda trained, frozen: trained
    return lambda trained, frozen: lora.assemble(trained, frozen, adapters)


def make_merge(model: Model) -> Callable[[Any, Any], Parameters]:
    """(actor's trainable tree, frozen) -> plain parameters, for the sampler."""
    if model.adapters is None:
        return lambda trained, frozen: trained
    assemble = assembler(model.adapters)
    return jax.jit(
        lambda trained, frozen: lora.merge(assemble(trained, frozen)),
        out_shardings=model.shardings,
    )


# From checkpoints --------------------------------------------------------------------


def model_fingerprint(model: Model) -> dict[str, str]:
    """Fingerprints of tokens, constants and weights, saved in each checkpoint."""
    read = model.source.open_parameters(model.config, model.declared)
    return _fingerprint_without_weights(model) | {
        "weights": fingerprint.of_weights(read, model.declared)
    }


def played_fingerprint(
    model: Model, directory: Path | None, step: int | None
) -> dict[str, str]:
    """Fingerprints of what an evaluation plays, for `check_same_everywhere`.

    Args:
      model: made with the settings that it is played by.
      directory: a folder of steps; None: the model itself plays.
      step: of the checkpoint that plays; None likewise.
    """
    if directory is None or step is None:
        return model_fingerprint(model)
    whole = model.adapters is None
    found = _fingerprint_without_weights(model) if whole else model_fingerprint(model)
    mark = checkpoint_files.fingerprint(directory / str(step))
    return found | {"checkpointed weights": mark}


def _fingerprint_without_weights(model: Model) -> dict[str, str]:
    return {
        "tokens": fingerprint.of_tokenizer(model.tokenizer),
        "stop tokens": fingerprint.of_stops(model.pieces.stop_tokens),
        "rotations or norms": fingerprint.of_constants(model.config),
    }


def check_same_model(
    model: Model, directory: Path, step: int, current: Mapping[str, str]
) -> None:
    """Refuses a checkpoint of another model than `model.path` leads to now.

    Args:
      model: that is to use the checkpoint.
      directory: a folder of steps.
      step: which of them.
      current: `model_fingerprint`, or those parts of it that matter.

    Raises:
      UserError: naming the checkpoint and what differs.
    """
    saved = checkpoints.read_info(directory, step).get("model", {})
    for what, now in current.items():
        if saved.get(what, now) != now:  # Older checkpoints have no fingerprints.
            raise UserError(
                f"{directory / str(step)} began with a model of other {what} than"
                f" {model.settings.model.path} has now: give the original model (from"
                " the hub, OWNER/NAME@COMMIT), in training as --config.model.path, in"
                " evaluation, export and diagnosis as --model"
            )


def check_origin(
    model: Model, directory: Path, step: int, *, with_weights: bool
) -> None:
    """`check_same_model` of the model as it is now.

    Args:
      model, directory, step: as there.
      with_weights: whether the model's own weights are used besides the checkpoint's.
    """
    parts = model_fingerprint if with_weights else _fingerprint_without_weights
    check_same_model(model, directory, step, parts(model))


def restore_actor(model: Model, directory: Path, step: int) -> Parameters:
    """The actor of a checkpoint as plain parameters, adapters merged into their base.

    Args:
      model: made with the settings that the checkpoint was saved with.
      directory: a folder of steps.
      step: which of them.

    Raises:
      UserError: if the checkpoint or the base model cannot be read, or the model is
        not the one that the run began with.
    """
    saved = restore_trained(model, directory, step)
    return make_merge(model)(saved, load_frozen(model))


def restore_trained(model: Model, directory: Path, step: int) -> Parameters:
    """What was trained of a checkpoint's actor: all of it, or its adapters.

    Raises:
      UserError: as `restore_actor`.
    """
    # Without adapters the weights are its own; the rest must still agree.
    check_origin(model, directory, step, with_weights=model.adapters is not None)
    shapes = parameters.shapes(model.trained)
    shardings = placement.training_shardings(model.trained, model.mesh)
    wanted = {"actor": placement.abstract(shapes, shardings)}
    return checkpoints.restore(directory, step, wanted, partial=True)["actor"]


# The state of a run ------------------------------------------------------------------


def new_state(run: Run) -> TrainState:
    """The state before the first iteration."""
    shardings = run.state_shardings
    if run.model.adapters is None:
        actor = load_parameters(run.model)
        critic = (
            load_parameters(run.model, value_head=True)
            if run.settings.has_critic
            else {}
        )
    else:
        actor, critic = jax.jit(
            lambda: _new_adapters(run),
            out_shardings=(shardings.actor, shardings.critic),
        )()
    return jax.jit(
        lambda actor, critic: states.new_state(actor, critic, run.settings),
        out_shardings=shardings,
    )(actor, critic)


def _new_adapters(run: Run) -> tuple[Parameters, Parameters]:
    """(actor's, critic's), drawn from the run's seed."""
    actor_key, critic_key = jax.random.split(jax.random.key(run.settings.seed))
    actor = parameters.initialize(actor_key, run.model.trained)
    if not run.settings.has_critic:
        return actor, {}
    return actor, parameters.initialize(critic_key, run.trained_critic)


def abstract_state(run: Run) -> TrainState:
    """Shapes and shardings of the state, for restoring it onto the run's mesh."""
    shapes = jax.eval_shape(
        lambda actor, critic: states.new_state(actor, critic, run.settings),
        parameters.shapes(run.model.trained),
        parameters.shapes(run.trained_critic),
    )
    return placement.abstract(shapes, run.state_shardings)
