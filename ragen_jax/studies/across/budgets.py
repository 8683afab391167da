"""Comparisons at equal numbers of updates or episodes, or equal amounts of learning."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ragen_jax.studies.across import numbers
from ragen_jax.studies.across.numbers import Mean, points
from ragen_jax.studies.across.pool import Pool, Trained
from ragen_jax.utils.words import counted

_Arm = Mapping[int, Trained]  # seed -> run


@dataclasses.dataclass(frozen=True)
class Contrast:
    """An arm against another of the same environment, by seed, in shares."""

    title: str
    environment: str
    spent: int  # updates or episodes of `arm`, as much as `end` compares
    by_iteration: Mapping[int, float]  # both after as many iterations as `arm` makes
    end: Mapping[int, float]  # both after as much was spent, the last that is known
    course: Mapping[int, float]  # the mean of all validations at equal expense


def validation_at(run: Trained, iteration: float) -> float:
    """Validation success at an iteration; NaN if none was made there."""
    iterations, values = run.record.series("validation/success")
    found = values[iterations == iteration]
    return float(found[0]) if len(found) else math.nan


def contrast(
    title: str, arm: _Arm, other: _Arm, expense: Callable[[Trained], float]
) -> Contrast | None:
    """`arm` minus `other`, of the seeds that both have.

    Args:
      title: of the contrast.
      arm: which gives the iterations at which both are compared.
      other: of which the iteration is taken at which it has spent as much.
      expense: what one iteration of a run costs.

    Returns:
      The contrast; None where the arms have no seed in common.
    """
    seeds = sorted(set(arm) & set(other))
    if not seeds:
        return None
    by_iteration, end, course = {}, {}, {}
    for seed in seeds:
        left, right = arm[seed], other[seed]
        iterations, values = left.record.series("validation/success")
        ratio = expense(left) / expense(right)
        # Rounded, because 0.1 * 30 is no whole number.
        there = [validation_at(right, round(ratio * i, 6)) for i in iterations]
        difference = values - np.array(there)
        by_iteration[seed] = values[-1] - validation_at(right, iterations[-1])
        known = difference[~np.isnan(difference)]
        end[seed] = float(known[-1]) if len(known) else math.nan
        course[seed] = float(known.mean()) if len(known) else math.nan
    first = arm[seeds[0]]
    spent = round(expense(first) * first.settings["iterations"])
    return Contrast(title, first.environment, spent, by_iteration, end, course)


def averaged(contrasts: Sequence[Mapping[int, float]]) -> Mean:
    """The mean over contrasts of each seed that has all of them, then over seeds."""
    seeds = sorted(set.intersection(*(set(c) for c in contrasts)))
    return numbers.student([float(np.mean([c[s] for c in contrasts])) for s in seeds])


# Of kept_share ------------------------------------------------------------------------


def _share(run: Trained) -> float:
    """The share of the prompts that a run of kept_share learns from."""
    return float(run.planned.changes.get("filter.fraction", 1))


def _updates(run: Trained) -> float:
    """Updates of an iteration: minibatches of the episodes that are kept."""
    settings = run.settings
    episodes = settings["rollout.prompts"] * settings["rollout.group_size"]
    passes = settings["optimizer.epochs"] * settings["optimizer.reuse"]
    return _share(run) * episodes / settings["optimizer.minibatch"] * passes


def kept_share(pool: Pool) -> list[Contrast]:
    """Each share of the prompts against all of them, where they share seeds."""
    groups: dict[tuple[str, str], dict[float, _Arm]] = {}
    for arm in pool.arms("kept_share").values():
        run = next(iter(arm.values()))
        group = run.environment, run.settings["estimator"].upper()
        groups.setdefault(group, {})[_share(run)] = arm
    contrasts = (
        contrast(f"{name}, {estimator}, {100 * share:.0f} %", arm, arms[1.0], _updates)
        for (name, estimator), arms in groups.items()
        for share, arm in sorted(arms.items())
        if share < 1 and 1.0 in arms
    )
    return [found for found in contrasts if found is not None]


def equal_updates(pool: Pool) -> list[str]:
    """The section's lines."""
    lines = [
        "## Equal updates",
        "",
        "Do prompts that vary most teach more, or do runs that keep fewer prompts"
        " merely make fewer updates?",
        "",
    ]
    contrasts = kept_share(pool)
    if not contrasts:
        return [*lines, "No run of `kept_share` has finished.", ""]
    lines += [
        "The arms of `kept_share` make equally many iterations at a constant rate, so"
        " one that keeps a quarter of the prompts makes a quarter of the updates (at"
        " most: a prompt whose episodes all return the same is dropped besides). Here"
        " validation success of an arm at its end, minus that of all prompts: after as"
        " many iterations, and where all prompts had made as many updates. The last"
        " column is the mean over all validations with equal updates, not the last"
        " alone. Points, Student's t over paired seeds.",
        "",
    ]
    rows = [
        [c.title, str(c.spent), str(len(c.end)), *(points(m) for m in _means(c))]
        for c in contrasts
    ]
    head = ["arm minus all prompts", "updates", "seeds", "equal iterations"]
    lines += numbers.table(head + ["equal updates", "the whole course"], rows)
    lines += [_finding(contrasts)]
    for name in dict.fromkeys(c.environment for c in contrasts):
        chosen = [c for c in contrasts if c.environment == name]
        by_iteration = averaged([c.by_iteration for c in chosen])
        by_update = averaged([c.end for c in chosen])
        lines += [
            f"On {name} the {counted(len(chosen), 'contrast')}, averaged seed by seed,"
            f" come to {points(by_iteration)} at equal iterations and"
            f" {points(by_update)} at equal updates; what all prompts lose by their"
            f" further updates is {points(averaged([_further(c) for c in chosen]))}"
            f" ({counted(by_update.count, 'seed')})."
        ]
    return [*lines, ""]


def _means(c: Contrast) -> list[Mean]:
    by_seed = (c.by_iteration, c.end, c.course)
    return [numbers.student(list(values.values())) for values in by_seed]


def _further(c: Contrast) -> dict[int, float]:
    """What the other arm loses from equal updates to equal iterations, by seed."""
    return {seed: c.by_iteration[seed] - c.end[seed] for seed in c.end}


def _finding(
    contrasts: Sequence[Contrast],
    equal: str = "equal updates",
    less: str = "fewer updates",
) -> str:
    """How many contrasts have an interval without 0, and whether they keep it.

    Args:
      contrasts: to count.
      equal: what was spent equally.
      less: what may explain a difference at equal iterations.
    """
    sides = [[mean.side for mean in _means(c)] for c in contrasts]
    decided = [side for side in sides if side[0]]
    kept, along = (sum(s[0] == s[i] for s in decided) for i in (1, 2))
    new, newly_along = (sum(bool(s[i]) for s in sides if not s[0]) for i in (1, 2))
    cause = less.capitalize()
    if not decided:
        follows = f"Nothing is decided that {less} could explain."
    elif kept == along == len(decided):
        follows = f"{cause} cannot explain them."
    elif kept == along == 0:
        follows = f"{cause} may be all that distinguishes them."
    else:
        follows = f"{cause} may explain a part of them."
    return (
        f"**Finding.** Of {counted(len(contrasts), 'contrast')} {len(decided)} are"
        f" decided at equal iterations; of these {kept} remain at {equal} and {along}"
        f" over the whole course. Of the others {new} are decided at {equal} and"
        f" {newly_along} over the whole course. {follows}"
    )


# Of collapse --------------------------------------------------------------------------


def _rate(run: Trained) -> float:
    """The actor's learning rate, which is constant."""
    return float(run.settings["optimizer.actor_lr"])


def half_rate(pool: Pool) -> list[Contrast]:
    """The lower of two rates against each arm with the higher, where they share seeds.

    Arms whose rate changes in training, by a schedule or a rollback, are left out.
    """
    arms: list[_Arm] = []
    for arm in pool.arms("collapse").values():
        run = next(iter(arm.values()))
        if run.settings["optimizer.schedule"] == "constant" and not run.rewinds:
            arms.append(arm)
    rates = [_rate(next(iter(arm.values()))) for arm in arms]
    lower = [arm for arm, rate in zip(arms, rates, strict=True) if rate == min(rates)]
    if len(lower) != 1:
        return []
    contrasts = (
        contrast(next(iter(arm.values())).planned.arm, lower[0], arm, _rate)
        for arm, rate in zip(arms, rates, strict=True)
        if rate > min(rates)
    )
    return [found for found in contrasts if found is not None]


def equal_learning(pool: Pool) -> list[str]:
    """The section's lines."""
    lines = [
        "## Equal rate times iterations",
        "",
        "Does half the learning rate keep more of what is learned, or has it merely"
        " learned half as much?",
        "",
    ]
    contrasts = half_rate(pool)
    if not contrasts:
        return [*lines, "No run of `collapse` with half the rate has finished.", ""]
    lines += [
        "Validation success of `collapse`'s half the rate minus that of arms with the"
        " whole rate: at the end, after equal iterations; at the last of its"
        " validations at which such an arm was validated in half as many iterations;"
        " and over all of these. Arms whose rate changes are left out. Points,"
        " Student's t over paired seeds.",
        "",
    ]
    rows = [
        [c.title, str(len(c.end)), *(points(mean) for mean in _means(c))]
        for c in contrasts
    ]
    head = ["half the rate minus", "seeds", "equal iterations"]
    head += ["equal rate times iterations", "the whole course"]
    lines += numbers.table(head, rows)
    return [
        *lines,
        _finding(contrasts, "equal rate times iterations", "less learning"),
        "",
    ]


# Of reuse -----------------------------------------------------------------------------


def _episodes(run: Trained) -> float:
    """Episodes of an iteration."""
    return run.settings["rollout.prompts"] * run.settings["rollout.group_size"]


def reuse(pool: Pool) -> list[Contrast]:
    """Each number of updates from a batch against one, where they share seeds."""
    groups: dict[str, dict[int, _Arm]] = {}
    for arm in pool.arms("reuse").values():
        run = next(iter(arm.values()))
        times = run.settings["optimizer.reuse"]
        groups.setdefault(run.environment, {})[times] = arm
    contrasts = (
        contrast(f"{name}, {times} from a batch", arm, arms[1], _episodes)
        for name, arms in groups.items()
        for times, arm in sorted(arms.items())
        if times > 1 and 1 in arms
    )
    return [found for found in contrasts if found is not None]


def equal_episodes(pool: Pool) -> list[str]:
    """The section's lines."""
    lines = [
        "## Equal episodes",
        "",
        "Does it pay to learn several times from a batch, if episodes are what costs?",
        "",
    ]
    contrasts = reuse(pool)
    if not contrasts:
        return [*lines, "No run of `reuse` has finished.", ""]
    lines += [
        "The arms of `reuse` make equally many updates, those that use a batch k times"
        " with a k-th of the episodes. Here validation success at their end, minus that"
        " of a fresh batch for each update, stopped after as many episodes (the rate is"
        " constant, so stopping early changes nothing before). The last column is the"
        " mean over all validations that both made after equal episodes. Points,"
        " Student's t over paired seeds.",
        "",
    ]
    rows = [
        [c.title, str(c.spent), str(len(c.end)), *(points(m) for m in _means(c)[1:])]
        for c in contrasts
    ]
    head = ["arm minus a fresh batch", "episodes", "seeds", "equal episodes"]
    lines += numbers.table([*head, "the whole course"], rows)
    better, worse = (
        [c.title for c in contrasts if _means(c)[1].side == side] for side in (1, -1)
    )
    said = [
        f"{word} for {'; '.join(titles)}"
        for word, titles in (("better", better), ("worse", worse))
        if titles
    ] or ["decided for none"]
    lines += [
        f"**Finding.** At equal episodes using a batch again is {' and '.join(said)}"
        f" ({counted(len(contrasts) - len(better) - len(worse), 'contrast')} of"
        f" {len(contrasts)} undecided)."
    ]
    return [*lines, ""]
