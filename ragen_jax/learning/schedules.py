"""Learning rates by update, and coefficients by iteration."""

import jax
import jax.numpy as jnp
import optax

from ragen_jax.settings import Settings


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
    share = iteration.astype(jnp.float32) / max(1, settings.iterations - 1)
    return first + (end - first) * jnp.minimum(share, 1.0)


def updates_expected(settings: Settings) -> int:
    """Real updates of the whole run if every filter keeps all that it may.

    In windows, if every episode plays all its turns too: each turn is a row.
    """
    rollout, optimizer = settings.rollout, settings.optimizer
    rows = max(1, round(rollout.prompts * _kept_share(settings))) * rollout.group_size
    if rollout.window_turns:
        rows *= settings.most_turns()
    each = -(-rows // optimizer.minibatch) * optimizer.epochs * optimizer.reuse
    return settings.iterations * each


def _kept_share(settings: Settings) -> float:
    """Of the episodes, about: a guess where it is up to the scores."""
    chosen = settings.filter
    if chosen.strategy == "top_count":
        return min(1.0, chosen.count / settings.rollout.prompts)
    if chosen.strategy == "percentile_range":
        return chosen.high - chosen.low
    if chosen.strategy in ("none", "min_p"):
        return 1.0
    if chosen.fraction_end != -1:
        return (chosen.fraction + chosen.fraction_end) / 2
    return chosen.fraction


def learning_rate(
    settings: Settings, peak: float | jax.Array, kind: str = ""
) -> optax.Schedule:
    """Learning rate by real updates made: warm-up, then constant, linear or cosine.

    Args:
      settings: of the run.
      peak: the rate after the warm-up.
      kind: of schedule; "" or "same": the actor's.
    """
    chosen, total = settings.optimizer, updates_expected(settings)
    kind = chosen.schedule if kind in ("", "same") else kind
    rest = max(1, total - chosen.warmup)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[kind]
    if not chosen.warmup:
        return after
    rise = optax.linear_schedule(peak / chosen.warmup, peak, max(1, chosen.warmup - 1))
    return optax.join_schedules([rise, after], [chosen.warmup])
