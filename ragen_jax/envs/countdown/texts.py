"""Countdown in words: the rules for the prompt, and the puzzle as phrases."""

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import base, phrase_tables
from ragen_jax.envs.countdown.types import ACTION_NAMES, Countdown, State

_LABELS = ("Numbers:", "Target:", *(f"Last answer: {n}\n" for n in ACTION_NAMES))
_NUMBERS, _TARGET, _VERDICT = 0, 1, 2


def observe(state: State, settings: Countdown) -> jax.Array:
    """int32[N + 4], the puzzle as indices into `phrases(settings)`."""
    listed = len(_LABELS) - 1  # The phrase of number n before a comma is listed + n.
    ending = listed + settings.highest_number
    place = jnp.arange(settings.max_numbers)
    is_last = place == (state.numbers > 0).sum() - 1
    numbers = jnp.where(is_last, ending, listed) + state.numbers
    numbers = jnp.where(state.numbers > 0, numbers, base.NO_PHRASE)
    has_verdict = state.verdict != base.NO_ACTION
    verdict = jnp.where(has_verdict, _VERDICT + state.verdict, base.NO_PHRASE)
    label = jnp.array([_NUMBERS])
    rest = jnp.stack([jnp.full((), _TARGET), ending + state.target, verdict])
    return phrase_tables.close_gaps(jnp.concatenate([label, numbers, rest]))


def phrases(settings: Countdown) -> tuple[str, ...]:
    """Labels, numbers before a comma, and numbers that end a line."""
    listed = (f" {n}," for n in range(1, settings.highest_number + 1))
    ending = (f" {n}\n" for n in range(1, settings.highest_target + 1))
    return (*_LABELS, *listed, *ending)


def instruction(settings: Countdown) -> str:
    """The rules for the system prompt; short, since small models read it too."""
    use = (
        "all the numbers, each once" if settings.use_all else "each number at most once"
    )
    return (
        "Make the target from the given numbers with one arithmetic expression. Use"
        f" {use}, with + - * / and parentheses; every division must come out even."
        " Action: the expression, such as (1 + 2) * 3. After a wrong one you are told"
        f" what the last answer was: {ACTION_NAMES[0]} (against the rules) or"
        f" {ACTION_NAMES[1]} (legal, but not the target)."
    )


def longest_observation(lengths: np.ndarray, settings: Countdown) -> int:
    """Most tokens in an observation; `lengths` is int[phrases], the tokens of each."""
    labels, listed, ending = np.split(
        lengths, [len(_LABELS), len(_LABELS) + settings.highest_number]
    )
    total = labels[_NUMBERS] + labels[_TARGET] + labels[_VERDICT:].max()
    total += (settings.max_numbers - 1) * listed.max()
    return int(total + ending[: settings.highest_number].max() + ending.max())
