"""Which of several environments stands for a run where one is to be looked at."""

from ragen_jax.settings.schema import LIMITS, Settings, TaskSettings


def main_task(settings: Settings) -> TaskSettings:
    """The evaluated environment that is most like one that training plays.

    That is the same game, with the fewest settings and limits that differ, with the
    same label; the first evaluated (by label, for a config keeps no order) if training
    plays none of them, or several.
    """
    trained = settings.tasks()
    return min(
        settings.evaluated_tasks(),
        key=lambda task: min(_difference(task, other) for other in trained),
    )


def _difference(task: TaskSettings, trained: TaskSettings) -> tuple[bool, int, bool]:
    """Smaller, the more alike; what only one of them names counts as equal."""
    if task.name != trained.name:
        return True, 0, True
    own, other = dict(task.options), dict(trained.options)
    differing = sum(own[key] != other[key] for key in own.keys() & other.keys())
    differing += sum(getattr(task, key) != getattr(trained, key) for key in LIMITS)
    return False, differing, task.label != trained.label
