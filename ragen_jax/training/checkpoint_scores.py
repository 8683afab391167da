"""Which steps of a run are kept, and which is the best: by recency and by score."""

import math
from collections.abc import Mapping


def kept(
    step_scores: Mapping[int, float | None],
    keep_last: int,
    keep_best: int,
    every: int = 1,
) -> set[int]:
    """The steps to keep: the newest, the last few that were due, and the best few.

    One that a signal or a best validation saved in between must not take the place of
    one that was due: a rollback goes as far back in a run that was interrupted as in
    one that was not.

    Args:
      step_scores: of all steps; None without a score, which is never a best one.
      keep_last: how many of those that were due.
      keep_best: how many of the highest score, the later of equals.
      every: steps that are due are its multiples.
    """
    steps = sorted(step_scores)
    due = [step for step in steps if step % every == 0]
    return {*steps[-1:], *due[-keep_last:], *_by_score(step_scores)[:keep_best]}


def latest(
    step_scores: Mapping[int, float | None],
    until: int | None,
    keep_best: int,
    every: int = 1,
) -> int | None:
    """The last step, or, where `until` is given, the one to return to.

    That is the last until then which a run without signals would have saved, too, so
    that one that was interrupted returns as far; where there is none, any.

    Args:
      step_scores, keep_best, every: as for `kept`.
      until: the last step that may be returned to.
    """
    steps = [s for s in sorted(step_scores) if until is None or s <= until]
    saved, highest = [], -math.inf
    for step in steps:
        score = step_scores[step]
        is_best = keep_best > 0 and score is not None and score >= highest
        if step % every == 0 or is_best:
            saved.append(step)
        highest = max(highest, -math.inf if score is None else score)
    return max(steps if until is None else saved or steps, default=None)


def best(step_scores: Mapping[int, float | None]) -> int | None:
    """The step of the highest score, the later of equals; None without any score."""
    return next(iter(_by_score(step_scores)), None)


def _by_score(step_scores: Mapping[int, float | None]) -> list[int]:
    """Steps with a score, the best first, of equals the later first."""
    scored = {s: score for s, score in step_scores.items() if score is not None}
    return sorted(scored, key=lambda step: (scored[step], step), reverse=True)
