"""The settings of environments: of the one that is played, or of each of several.

A part of the tree in schema.py, whose conventions hold here.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ragen_jax.settings import limits
from ragen_jax.utils.words import shortened

MIX = "mix"  # The `env.name` of several environments in one batch.
# The leaves of `rollout` that each of several environments can override.
LIMITS = ("turns", "actions_per_turn", "actions")
# The leaves that change an environment's rules in the system prompt (envs/wording.py).
TEXTS = ("instruction", "note")


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """One of several environments: an entry of `env.mix` or `env.evaluate`.

    0 turns, actions_per_turn (up to its actions) or actions: the value in `rollout`.
    """

    label: str  # its key in the config, used in metrics and messages
    name: str = limits.name()  # a built-in environment or the path of a Python file
    # Its share of rollout.prompts; 0 if it is only evaluated.
    prompts: int = limits.at_least(0, default=0)
    turns: int = limits.between(0, limits.MOST_TURNS, default=0)
    actions_per_turn: int = limits.between(0, limits.MOST_EACH, default=0)
    actions: int = limits.between(0, limits.MOST_ACTIONS, default=0)
    options: tuple[tuple[str, Any], ...] = ()  # the environment's own, sorted by key
    instruction: str = ""  # in place of the environment's own rules; "": those
    note: str = ""  # behind the rules; "": nothing

    @property
    def options_and_texts(self) -> tuple[tuple[str, Any], ...]:
        """All that `envs.make` reads: `options`, and those of TEXTS that are set."""
        return (*self.options, *_texts(self))


@dataclasses.dataclass(frozen=True)
class EnvironmentSettings:
    """The environment to play, whose own settings dataclass checks `options`."""

    name: str = limits.name()  # a built-in environment, a Python file, or MIX
    thinking: bool  # replies begin with <think>, else with <answer>
    options: tuple[tuple[str, Any], ...]  # the environment's own, sorted by key
    mix: tuple[TaskSettings, ...] = ()  # the environments of a batch, if `name` is MIX
    evaluate: tuple[TaskSettings, ...] = ()  # to evaluate on; (): those trained on
    instruction: str = ""  # these two as in TaskSettings
    note: str = ""


def described(env: TaskSettings | EnvironmentSettings) -> str:
    """What is set of an environment, for people: "size 6, note 'Plan ahead.'"."""
    values = [f"{key} {value}" for key, value in env.options]
    values += [f"{key} {shortened(text)!r}" for key, text in _texts(env)]
    return ", ".join(values) or "as it comes"


def _texts(env: TaskSettings | EnvironmentSettings) -> Iterator[tuple[str, str]]:
    """Those of TEXTS that are set, by key."""
    return ((key, getattr(env, key)) for key in TEXTS if getattr(env, key))
