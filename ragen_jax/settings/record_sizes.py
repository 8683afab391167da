"""The keys that limit episodes, and whether int32 can index the record that they make.

Of several environments each may have limits of its own, so that a message about a
number has to look up which key sets it.
"""

import math
from collections.abc import Mapping

from ragen_jax.errors import SettingsError
from ragen_jax.settings.schema import Settings


def limit_key(settings: Settings, name: str, label: str, *, is_training: bool) -> str:
    """The dotted key that sets a limit of an environment's episodes.

    Args:
      settings: of the run.
      name: one of environment.LIMITS.
      label: of the environment.
      is_training: whether it is one that training plays, of `env.mix`; else of
        `env.evaluate`.
    """
    own = settings.env.mix if is_training else settings.env.evaluate
    for task in own:
        if task.label == label and getattr(task, name):
            return f"env.{'mix' if is_training else 'evaluate'}.{label}.{name}"
    return f"rollout.{name}"


def longest_turns(settings: Settings, *, is_training: bool = True) -> dict[str, int]:
    """The most turns of an episode of any environment, by the key that sets them.

    Args:
      settings: of the run.
      is_training: of those that training plays; else of those that are evaluated.
    """
    tasks = settings.tasks() if is_training else settings.evaluated_tasks()
    longest = max(tasks, key=lambda task: task.turns)
    of_training = is_training or not settings.env.evaluate
    key = limit_key(settings, "turns", longest.label, is_training=of_training)
    return {key: longest.turns}


def turn_sizes(settings: Settings, *, is_training: bool = True) -> dict[str, int]:
    """Sizes of an episode's record by key: turns, and tokens or actions of each.

    Args:
      settings, is_training: as in `longest_turns`.
    """
    rollout = settings.rollout
    names = ("reply_tokens", "actions_per_turn")
    name = max(names, key=lambda name: getattr(rollout, name))
    turns = longest_turns(settings, is_training=is_training)
    return turns | {f"rollout.{name}": getattr(rollout, name)}


def evaluations(settings: Settings) -> tuple[str, ...]:
    """Prefixes of the keys of the evaluations that a run makes: validation and test."""
    return ("", "test_") if settings.every.evaluate > 0 else ("test_",)


def check_record(sizes: Mapping[str, int]) -> None:
    """Raises SettingsError for a record with too many elements to index with int32.

    Args:
      sizes: of the axes of its largest array, by the key or flag that sets each.
    """
    if (numbers := math.prod(sizes.values())) >= 2**31:
        raise SettingsError(
            f"{' * '.join(sizes)} = {' * '.join(map(str, sizes.values()))} ="
            f" {numbers} numbers of its record are 2**31 or more, too many for int32"
            f" indices: lower {max(sizes, key=sizes.__getitem__)}, the largest of them"
        )


def check_sizes(settings: Settings) -> None:
    """Refuses rollouts whose record has too many elements to index with int32."""
    rollout, evaluation = settings.rollout, settings.evaluation
    sizes = {
        "rollout.prompts": rollout.prompts,
        "rollout.group_size": rollout.group_size,
    }
    check_record(sizes | turn_sizes(settings))
    for test in evaluations(settings):
        names = [f"{test}prompts", f"{test}rollouts"]
        sizes = {f"evaluation.{name}": getattr(evaluation, name) for name in names}
        # With fewer slots than episodes, levels are evaluated in several batches.
        if 0 < evaluation.slots < math.prod(sizes.values()):
            del sizes[f"evaluation.{names[0]}"]
        check_record(sizes | turn_sizes(settings, is_training=False))
