"""The environments that share a batch, with their texts and how much of it each has."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ragen_jax.envs.base import Environment
from ragen_jax.errors import UserError
from ragen_jax.text.prompts import Dialogue, DialogueTokens, opening_tokens


@dataclasses.dataclass(frozen=True)
class Task:
    """One environment of a batch. Static: never a traced value."""

    label: str  # unique in a batch; names the environment's metrics
    env: Environment
    dialogue: Dialogue
    prompts: int  # of the batch's P


TaskTokens = tuple[DialogueTokens, ...]  # one for each task, in their order


def longest_row(tasks: Sequence[Task], tokens: TaskTokens, window: int = 0) -> int:
    """T that a row of any task can need at most, in tokens.

    Args:
      tasks, tokens: the environments and their texts.
      window: most turns of a row; 0: all turns of an episode.
    """

    def longest(task: Task, texts: DialogueTokens) -> int:
        limits = task.dialogue.limits
        turns = min(window or limits.turns, limits.turns)
        # A row of fewer turns may begin with a later message, which also has feedback.
        is_whole = turns == limits.turns
        first = texts.first_capacity if is_whole else texts.window_capacity
        return first + turns * limits.reply_tokens + (turns - 1) * texts.next_capacity

    return max(map(longest, tasks, tokens))


def common_opening(tokens: TaskTokens) -> tuple[int, ...]:
    """The tokens that every episode of every task begins with."""
    openings = [opening_tokens(texts) for texts in tokens]
    shortest = min(map(len, openings))
    table = np.array([opening[:shortest] for opening in openings])
    differs = (table != table[:1]).any(axis=0)
    return openings[0][: int(differs.argmax()) if differs.any() else shortest]


def refuse_cut_messages(labels: Sequence[str], too_long: Sequence[int]) -> None:
    """Refuses a record in which messages were cut.

    Args:
      labels: of the environments.
      too_long: messages of each that were longer than the room for them.

    Raises:
      UserError: if there was one.
    """
    for label, count in zip(labels, too_long, strict=True):
        if count:
            raise UserError(
                f"{label} shows more tokens than its longest_observation allows, so"
                f" that the ends of messages are lost, {count} of them in this batch:"
                " correct it; python -m ragen_jax.testing.check_env finds an example"
            )
