"""Which steps of a run are kept, and which is the best: by recency and by score."""

from collections.abc import Mapping


def kept(
    step_scores: Mapping[int, float | None], keep_last: int, keep_best: int
) -> set[int]:
    """The steps to keep: the last few, and the best few of those with a score."""
    by_score = _by_score(step_scores)
    return {*sorted(step_scores)[-keep_last:], *by_score[:keep_best]}


def best(step_scores: Mapping[int, float | None]) -> int | None:
    """The step of the highest score, the later of equals; None without any score."""
    return next(iter(_by_score(step_scores)), None)


def _by_score(step_scores: Mapping[int, float | None]) -> list[int]:
    """Steps with a score, the best first, of equals the later first."""
    scored = {s: score for s, score in step_scores.items() if score is not None}
    return sorted(scored, key=lambda step: (scored[step], step), reverse=True)
