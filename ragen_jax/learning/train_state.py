"""The training state: actor, critic, their optimizers, and the counts of updates."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from ragen_jax.learning.schedules import learning_rate
from ragen_jax.models.parameters import Parameters
from ragen_jax.settings import OptimizerSettings, Settings


@struct.dataclass
class TrainState:
    """Everything that an iteration hands to the next, and a checkpoint holds."""

    actor: Parameters
    critic: Parameters  # {} where the estimator has no critic
    actor_optimizer: Any  # optax state
    critic_optimizer: Any
    iteration: jax.Array  # int32[], iterations finished
    # int32[], real updates made; schedules count these, the actor's without those of
    # the critic's warm-up.
    updates: jax.Array
    bad_in_row: jax.Array  # int32[], iterations in a row with a step not finite
    empty_in_row: jax.Array  # int32[], consecutive iterations in which nothing was kept
    skipped_bad: jax.Array  # int32[], updates skipped so far: not finite
    skipped_empty: jax.Array  # int32[], iterations so far in which nothing was kept


def new_state(actor: Parameters, critic: Parameters, settings: Settings) -> TrainState:
    """The state before the first iteration.

    Args:
      actor: the policy's parameters.
      critic: the critic's, or {}.
      settings: of the run.
    """
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        actor=actor,
        critic=critic,
        actor_optimizer=actor_optimizer(settings).init(actor),
        critic_optimizer=critic_optimizer(settings).init(critic),
        iteration=zero,
        updates=zero,
        bad_in_row=zero,
        empty_in_row=zero,
        skipped_bad=zero,
        skipped_empty=zero,
    )


@struct.dataclass
class UpdateCounts:
    """Of the minibatches of one use of the episodes, or of several."""

    attempted: jax.Array  # int32[], with at least one row
    real: jax.Array  # int32[], of them applied
    bad: jax.Array  # int32[], of them skipped: gradient or step not finite


_ZERO: Any = np.int32(0)
NO_UPDATES = UpdateCounts(_ZERO, _ZERO, _ZERO)


@struct.dataclass
class UpdateArgs:
    """What differs from one call of the compiled update to the next: NumPy scalars.

    Arguments and not constants, so that runs which differ only in seed or learning rate
    share a compiled program, and a rollback that lowers the rate compiles nothing.
    """

    seed: jax.Array  # uint32[], of the run; shuffles the rows
    actor_lr: jax.Array  # float32[], peak of the actor's schedule
    use: jax.Array  # int32[], 0-based use of the episodes, below `optimizer.reuse`
    earlier: UpdateCounts  # of the earlier uses of the same episodes


def update_arguments(settings: Settings, earlier: Sequence[UpdateCounts]) -> UpdateArgs:
    """The arguments of the next update, computed on the host.

    Args:
      settings: of the run.
      earlier: the counts of each earlier use of the same episodes; empty before the
        first.
    """
    add: Any = functools.partial(jax.tree.map, np.add)
    numbers: Any = {
        "seed": np.uint32(settings.seed),
        "actor_lr": np.float32(settings.optimizer.actor_lr),
        "use": np.int32(len(earlier)),
    }
    total = functools.reduce(add, jax.device_get(earlier), NO_UPDATES)
    return UpdateArgs(**numbers, earlier=total)


def update_counters(
    settings: Settings,
    old: TrainState,
    new: TrainState,
    counts: UpdateCounts,
    update_args: UpdateArgs,
) -> TrainState:
    """`new` with its counters updated; the iteration is over after the last use.

    An iteration is bad if a gradient was not finite in any use of its episodes, and
    empty if no use had a row to learn from.

    Args:
      settings: of the run.
      old, new: before and after.
      counts: of this use of the episodes.
      update_args: which use it is, and the counts of the earlier ones.
    """
    total = jax.tree.map(jnp.add, update_args.earlier, counts)
    is_bad, is_empty = total.bad > 0, total.attempted == 0
    is_last = update_args.use == settings.optimizer.reuse - 1

    def in_row(before: jax.Array, happened: jax.Array) -> jax.Array:
        return jnp.where(is_last, jnp.where(happened, before + 1, 0), before)

    return new.replace(
        iteration=old.iteration + is_last,
        updates=old.updates + counts.real,
        bad_in_row=in_row(old.bad_in_row, is_bad),
        empty_in_row=in_row(old.empty_in_row, is_empty),
        skipped_bad=old.skipped_bad + counts.bad,
        skipped_empty=old.skipped_empty + (is_last & is_empty),
    )


def actor_optimizer(
    settings: Settings, peak: float | jax.Array | None = None
) -> optax.GradientTransformation:
    """AdamW behind a clip of the global gradient norm.

    Args:
      settings: of the run.
      peak: the highest learning rate; None: the settings'.
    """
    optimizer = settings.optimizer
    peak = optimizer.actor_lr if peak is None else peak
    return _adamw(optimizer, learning_rate(settings, peak))


def actor_steps(state: TrainState) -> jax.Array:
    """int32[], updates that moved the actor, as its schedule has counted them."""
    return optax.tree_utils.tree_get(
        state.actor_optimizer,
        "count",
        filtering=lambda path, _: (
            getattr(path[-1], "tuple_name", "") == optax.ScaleByScheduleState.__name__
        ),
    )


def critic_optimizer(settings: Settings) -> optax.GradientTransformation:
    """The critic's own AdamW."""
    optimizer = settings.optimizer
    rate = learning_rate(settings, optimizer.critic_lr, of_critic=True)
    return _adamw(optimizer, rate)


def _adamw(optimizer: OptimizerSettings, rate: optax.Schedule):
    return optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm),
        optax.adamw(
            rate,
            b1=optimizer.beta1,
            b2=optimizer.beta2,
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
        ),
    )
