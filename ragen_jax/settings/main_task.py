"""Chooses which of several evaluated environments represents a run.

launch/evaluate.py plays it by default, and the last message of a run names it.
"""

from ragen_jax.settings.environment import LIMITS, TEXTS, TaskSettings
from ragen_jax.settings.schema import Settings


def main_task(settings: Settings) -> TaskSettings:
    """The evaluated environment that is most similar to one that training plays.

    It has the same name, then as few different options, limits and texts as possible,
    then the same label. Ties go to the first by label, since a config keeps no order.
    """
    trained = settings.tasks()
    return min(
        settings.evaluated_tasks(),
        key=lambda task: min(_difference(task, other) for other in trained),
    )


def _difference(task: TaskSettings, trained: TaskSettings) -> tuple[bool, int, bool]:
    """A sort key, smaller for more similar tasks.

    An option that only one of them sets counts as equal.
    """
    if task.name != trained.name:
        return True, 0, True
    own, other = dict(task.options), dict(trained.options)
    differing = sum(own[key] != other[key] for key in own.keys() & other.keys())
    compared = (*LIMITS, *TEXTS)
    differing += sum(getattr(task, key) != getattr(trained, key) for key in compared)
    return False, differing, task.label != trained.label
