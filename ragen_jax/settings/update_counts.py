"""How many groups a filter keeps, and how many updates a run makes, at most.

Arithmetic on the host, for checks of settings, shapes of arrays, and schedules.
"""

import dataclasses
import math

from ragen_jax.settings.schema import FilterSettings, Settings

# Error, either way, of a fraction that moves over the run and so is float32.
FRACTION_ROUNDING = 1e-6
_SLACK = 1e-6  # before ceil: 0.55 * 100 is 55.00000000000001 in Python, and means 55


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


def least_schedule(settings: Settings) -> int:
    """The shortest schedule whose share of the actor is longer than its warm-up."""
    optimizer = settings.optimizer
    of_actor = updates_expected(settings, since=optimizer.critic_warmup)
    return -(-(optimizer.warmup + 1) * updates_expected(settings) // of_actor)


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
        # Still a fraction that moves: `room_for_groups` allows for its rounding.
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
        return rollout.prompts * members_kept(rollout.group_size, options)
    sizes = scopes(settings)
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
    return room_for_groups(size, options)


def _rank(fraction: float, count: int) -> int:
    """round(fraction * count), in float32 like the compiled filter."""
    import numpy as np  # Here, for the sake of `--help` and of messages.

    return int(np.round(np.float32(fraction) * np.float32(count)))


def actor_share(settings: Settings, total: int) -> int:
    """Updates of a schedule of `total` that are the actor's; at least 1.

    The others pass while the critic warms up: `total` times the share of the run's
    updates that its iterations after `optimizer.critic_warmup` make, rounded down.
    """
    of_actor = updates_expected(settings, since=settings.optimizer.critic_warmup)
    return max(1, total * of_actor // updates_expected(settings))


# Of the filter ------------------------------------------------------------------------


def scopes(settings: Settings) -> list[int]:
    """Sizes of the sets of groups that are ranked apart: all P, or by environment."""
    if settings.filter.scope == "batch":
        return [settings.rollout.prompts]
    return [task.prompts for task in settings.tasks()]


def room_for_episodes(settings: Settings) -> int:
    """Episodes to make room for: as `room_for_groups`, of all sets of groups."""
    members = settings.rollout.group_size
    if settings.filter.strategy == "within_group":
        members = members_kept(members, settings.filter)
    groups = sum(room_for_groups(size, settings.filter) for size in scopes(settings))
    return members * groups


def room_for_groups(groups: int, options: FilterSettings) -> int:
    """Groups of P to make room for, at least as many as `keep_groups` can keep.

    All P where scores decide how many, although some such filters never keep them all
    (`_most_groups`).

    Args:
      groups: P.
      options: the filter.
    """
    if options.strategy == "top_count":
        return min(options.count, groups)
    if options.strategy == "top_fraction":
        most = max(options.fraction, options.fraction_end)
        if options.fraction_end != -1:  # Moving, it may be rounded up.
            most = min(1.0, most + 2 * FRACTION_ROUNDING)
        return rounded_count(groups, options, most)
    return groups


def members_kept(group_size: int, options: FilterSettings) -> int:
    """k, members that within_group keeps of N: at least 2, or they have no variance."""
    return min(
        group_size,
        max(2, rounded_count(group_size, options, options.fraction)),
    )


def rounded_count(size: int, options: FilterSettings, fraction: float) -> int:
    """fraction * size as a count, at least 1; filter.rounding: a half up, or down."""
    half = 0.5 if options.rounding == "nearest" else 0.0
    return max(1, math.floor(fraction * size + half))
