"""Which steps of a run are kept, and which is the best: by recency and by score."""

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


def best(step_scores: Mapping[int, float | None]) -> int | None:
    """The step of the highest score, the later of equals; None without any score."""
    return next(iter(_by_score(step_scores)), None)


def _by_score(step_scores: Mapping[int, float | None]) -> list[int]:
    """Steps with a score, the best first, of equals the later first."""
    scored = {s: score for s, score in step_scores.items() if score is not None}
    return sorted(scored, key=lambda step: (scored[step], step), reverse=True)
