"""Learning rates by update, and coefficients by iteration."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ragen_jax.learning import strategies
from ragen_jax.settings import FilterSettings, Settings

_MOST_UPDATES = 2**31 - 1  # optax counts in int32; a longer schedule is cut to this
_SLACK = 1e-6  # before ceil: 0.55 * 100 is 55.00000000000001 in Python, and means 55


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


def updates_expected(settings: Settings, since: int = 0) -> int:
    """Real updates of the whole run if the filter always keeps the most it can.

    With windows, where each turn is a row, also if every episode plays all its turns;
    of a mix, if all environments' groups are kept equally often.

    Args:
      settings: of the run.
      since: how many of the first iterations not to count.
    """
    options = settings.filter
    if options.fraction_end == -1:
        return (settings.iterations - since) * _updates_of_one(settings, options)
    return _updates_while_moving(settings, since, settings.iterations)


def _updates_while_moving(settings: Settings, first: int, end: int) -> int:
    """Real updates of iterations `first` up to, not with, `end`.

    The updates of an iteration are monotonic in the fraction, and so over the run: if
    the first and the last iteration make equally many, so do all between. Bisecting by
    that is fast; a sum over a million iterations would take minutes.
    """
    if first >= end:
        return 0
    options, last = settings.filter, max(1, settings.iterations - 1)

    def updates(iteration: int) -> int:
        progress = iteration / last
        fraction = options.fraction
        fraction += (options.fraction_end - options.fraction) * progress
        # Still a fraction that moves: `most_kept` allows for its rounding.
        options_then = dataclasses.replace(
            options, fraction=fraction, fraction_end=fraction
        )
        return _updates_of_one(settings, options_then)

    if (of_first := updates(first)) == updates(end - 1):
        return (end - first) * of_first
    middle = (first + end) // 2
    halves = (first, middle), (middle, end)
    return sum(_updates_while_moving(settings, *half) for half in halves)


def _updates_of_one(settings: Settings, options: FilterSettings) -> int:
    """Real updates of one iteration under a filter of these options."""
    optimizer, rows = settings.optimizer, _kept_episodes(settings, options)
    if settings.rollout.window_turns:
        turns = sum(task.prompts * task.turns for task in settings.tasks())
        rows = -(-rows * turns // settings.rollout.prompts)
    return -(-rows // optimizer.minibatch) * optimizer.epochs * optimizer.reuse


def _kept_episodes(settings: Settings, options: FilterSettings) -> int:
    """The most episodes of one iteration that the filter keeps, as it rounds."""
    rollout = settings.rollout
    if options.strategy == "within_group":
        return rollout.prompts * strategies.members_kept(rollout.group_size, options)
    sizes = strategies.scopes(settings)
    return rollout.group_size * sum(_most_groups(size, options) for size in sizes)


def _most_groups(size: int, options: FilterSettings) -> int:
    """The most of `size` groups that the filter can keep, whatever their scores."""
    # The k largest of n scores have at least k / n of the sum, which bounds top_p. Not
    # so the k smallest; but top_p_softmax negates those, and they are the largest
    # again.
    is_largest = options.prefer == "largest" or options.strategy == "top_p_softmax"
    if options.strategy in ("top_p", "top_p_softmax") and is_largest:
        return max(1, math.ceil(options.fraction * size - _SLACK))
    if options.strategy == "percentile_range":
        counts = range(1, size + 1)  # of groups that are candidates
        return max(
            max(1, _rank(options.high, n) - _rank(options.low, n)) for n in counts
        )
    return strategies.most_kept(size, options)


def _rank(fraction: float, count: int) -> int:
    """round(fraction * count), in float32 like the compiled filter."""
    return int(np.round(np.float32(fraction) * np.float32(count)))


def learning_rate(
    settings: Settings, peak: float | jax.Array, kind: str = ""
) -> optax.Schedule:
    """Learning rate by real updates made: warm-up, then constant, linear or cosine.

    Args:
      settings: of the run.
      peak: the rate after the warm-up.
      kind: optimizer.critic_schedule, for the critic ("same": as the actor's); "": the
        actor's, which does not count updates while the critic warms up.
    """
    optimizer = settings.optimizer
    expected = updates_expected(settings)
    total = optimizer.schedule_updates or expected
    if not kind:
        of_actor = updates_expected(settings, since=optimizer.critic_warmup)
        total = max(1, total * of_actor // expected)
    kind = optimizer.schedule if kind in ("", "same") else kind
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
