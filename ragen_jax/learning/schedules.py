"""Learning rates by update, and coefficients by iteration."""

import jax
import jax.numpy as jnp
import optax

from ragen_jax.settings import Settings
from ragen_jax.settings.update_counts import actor_share, updates_expected

_MOST_UPDATES = 2**31 - 1  # optax counts in int32; a longer schedule is cut to this


def over_the_run(
    settings: Settings, first: float, end: float, iteration: jax.Array
) -> float | jax.Array:
    """A coefficient that moves linearly from the first iteration to the last.

    Args:
      settings: of the run.
      first: its value in the first iteration.
      end: in the last; -1 leaves it at `first`, a constant of the compiled program.
      iteration: int32[], iterations finished.

    Returns:
      `first` itself, or float32[].
    """
    if end == -1:
        return first
    progress = iteration.astype(jnp.float32) / max(1, settings.iterations - 1)
    # Exactly `end` at the last iteration, which the sum may miss by a rounding.
    return jnp.where(progress >= 1, end, first + (end - first) * progress)


def learning_rate(
    settings: Settings, peak: float | jax.Array, *, of_critic: bool = False
) -> optax.Schedule:
    """Learning rate by real updates made: warm-up, then constant, linear or cosine.

    Args:
      settings: of the run.
      peak: the rate after the warm-up.
      of_critic: False: the actor's, which does not count updates while the critic
        warms up.
    """
    optimizer = settings.optimizer
    total = optimizer.schedule_updates or updates_expected(settings)
    if not of_critic:
        total = actor_share(settings, total)
    has_own = of_critic and optimizer.critic_schedule != "same"
    kind = optimizer.critic_schedule if has_own else optimizer.schedule
    rest = max(1, min(total, _MOST_UPDATES) - optimizer.warmup)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[kind]
    if not optimizer.warmup:
        return after
    rise = optax.linear_schedule(
        peak / optimizer.warmup, peak, max(1, optimizer.warmup - 1)
    )
    return optax.join_schedules([rise, after], [optimizer.warmup])
