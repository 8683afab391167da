"""Learning rates by update, and coefficients by iteration."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ragen_jax.learning import strategies
from ragen_jax.settings import FilterSettings, Settings

_MOST_UPDATES = 2**31 - 1  # that int32 counts; what falls for longer hardly falls
_SLACK = 1e-6  # 0.55 of 100 groups are 55, though 55.00000000000001 in Python


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
    # The sum may miss the end by a rounding.
    return jnp.where(share >= 1, end, first + (end - first) * share)


def updates_expected(settings: Settings, since: int = 0) -> int:
    """Real updates of the whole run if every filter keeps all that it may.

    In windows, if every episode plays all its turns too: each turn is a row. How many
    those are is up to its environment; of a mix all are taken to be kept alike.

    Args:
      settings: of the run.
      since: iterations whose updates are not counted, from the first on.
    """
    chosen = settings.filter
    if chosen.fraction_end == -1:
        return (settings.iterations - since) * _updates_of_one(settings, chosen)
    return _updates_while_moving(settings, since, settings.iterations)


def _updates_while_moving(settings: Settings, first: int, end: int) -> int:
    """Real updates of iterations `first` up to, not with, `end`.

    The fraction moves one way, and so do they: where the first and the last iteration
    make as many, all between them do. One by one a million would take minutes.
    """
    if first >= end:
        return 0
    chosen, last = settings.filter, max(1, settings.iterations - 1)

    def updates(iteration: int) -> int:
        share = iteration / last
        now = chosen.fraction + (chosen.fraction_end - chosen.fraction) * share
        # Still a fraction that moves: `most_kept` allows for its rounding.
        moved = dataclasses.replace(chosen, fraction=now, fraction_end=now)
        return _updates_of_one(settings, moved)

    if (each := updates(first)) == updates(end - 1):
        return (end - first) * each
    middle = (first + end) // 2
    halves = (first, middle), (middle, end)
    return sum(_updates_while_moving(settings, *half) for half in halves)


def _updates_of_one(settings: Settings, chosen: FilterSettings) -> int:
    """Real updates of an iteration with such a filter."""
    optimizer, rows = settings.optimizer, _kept_episodes(settings, chosen)
    if settings.rollout.window_turns:
        turns = sum(task.prompts * task.turns for task in settings.tasks())
        rows = -(-rows * turns // settings.rollout.prompts)
    return -(-rows // optimizer.minibatch) * optimizer.epochs * optimizer.reuse


def _kept_episodes(settings: Settings, chosen: FilterSettings) -> int:
    """The most of an iteration, as the filter rounds."""
    rollout = settings.rollout
    if chosen.strategy == "within_group":
        return rollout.prompts * strategies.members_kept(rollout.group_size, chosen)
    sizes = strategies.scopes(settings)
    return rollout.group_size * sum(_most_groups(size, chosen) for size in sizes)


def _most_groups(size: int, chosen: FilterSettings) -> int:
    """The most of `size` groups that scores, whatever they are, can make it keep."""
    # The k best of n have k / n of the sum or more: not so where the lowest are the
    # best, whose softmax is the largest all the same.
    is_largest = chosen.prefer == "largest" or chosen.strategy == "top_p_softmax"
    if chosen.strategy in ("top_p", "top_p_softmax") and is_largest:
        return max(1, math.ceil(chosen.fraction * size - _SLACK))
    if chosen.strategy == "percentile_range":
        counts = range(1, size + 1)  # of groups that are candidates
        return max(max(1, _rank(chosen.high, n) - _rank(chosen.low, n)) for n in counts)
    return strategies.most_kept(size, chosen)


def _rank(share: float, count: int) -> int:
    """As the compiled filter rounds it, in float32."""
    return int(np.round(np.float32(share) * np.float32(count)))


def learning_rate(
    settings: Settings, peak: float | jax.Array, kind: str = ""
) -> optax.Schedule:
    """Learning rate by real updates made: warm-up, then constant, linear or cosine.

    Args:
      settings: of the run.
      peak: the rate after the warm-up.
      kind: of the critic's schedule, "same" as the actor's; "": the actor's own, which
        counts no updates while the critic warms up.
    """
    chosen = settings.optimizer
    expected = updates_expected(settings)
    total = chosen.schedule_updates or expected
    if not kind:
        learned = updates_expected(settings, since=chosen.critic_warmup)
        total = max(1, total * learned // expected)
    kind = chosen.schedule if kind in ("", "same") else kind
    rest = max(1, min(total, _MOST_UPDATES) - chosen.warmup)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[kind]
    if not chosen.warmup:
        return after
    rise = optax.linear_schedule(peak / chosen.warmup, peak, max(1, chosen.warmup - 1))
    return optax.join_schedules([rise, after], [chosen.warmup])
