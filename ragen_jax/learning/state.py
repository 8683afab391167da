"""What learning changes: actor, critic, their optimizers, and the counts of updates."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

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
    updates: jax.Array  # int32[], real updates made; schedules count these
    bad_in_row: jax.Array  # int32[], iterations running with a gradient not finite
    empty_in_row: jax.Array  # int32[], iterations running in which nothing was kept
    skipped_bad: jax.Array  # int32[], updates skipped so far: gradient not finite
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


def updates_expected(settings: Settings) -> int:
    """Real updates of the whole run if every filter keeps all that it may.

    In windows, if every episode plays all its turns too: each turn is a row.
    """
    rollout, optimizer = settings.rollout, settings.optimizer
    share = settings.filter.fraction if settings.filter.strategy != "none" else 1.0
    rows = max(1, round(rollout.prompts * share)) * rollout.group_size
    if rollout.window_turns:
        rows *= settings.most_turns()
    each = -(-rows // optimizer.minibatch) * optimizer.epochs
    return settings.iterations * each


def schedule(settings: Settings, peak: float) -> optax.Schedule:
    """Learning rate by real updates made: warm-up, then constant, linear or cosine."""
    chosen, total = settings.optimizer, updates_expected(settings)
    rest = max(1, total - chosen.warmup)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[chosen.schedule]
    if not chosen.warmup:
        return after
    rise = optax.linear_schedule(peak / chosen.warmup, peak, max(1, chosen.warmup - 1))
    return optax.join_schedules([rise, after], [chosen.warmup])


def actor_optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW behind a clip of the global gradient norm."""
    return _adamw(settings.optimizer, schedule(settings, settings.optimizer.actor_lr))


def critic_optimizer(settings: Settings) -> optax.GradientTransformation:
    """The critic's own AdamW."""
    return _adamw(settings.optimizer, schedule(settings, settings.optimizer.critic_lr))


def _adamw(chosen: OptimizerSettings, rate: optax.Schedule):
    return optax.chain(
        optax.clip_by_global_norm(chosen.clip_norm),
        optax.adamw(
            rate, b1=chosen.beta1, b2=chosen.beta2, weight_decay=chosen.weight_decay
        ),
    )
