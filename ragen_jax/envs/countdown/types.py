"""The settings and the state of Countdown."""

import dataclasses

import jax
from flax import struct

# An action is the verdict on an answer, which `read_action` finds.
ACTION_NAMES = ("refused", "other value", "target")
MOST_NUMBERS = 6  # upper limit of the setting `max_numbers`


@dataclasses.dataclass(frozen=True)
class Countdown:
    """Settings of one kind of puzzle."""

    min_numbers: int = 3  # fewest numbers of a puzzle
    max_numbers: int = 4  # N, most numbers of a puzzle
    highest_number: int = 99  # Numbers are drawn uniformly from 1 to this.
    highest_target: int = 999  # A puzzle with a higher target is not drawn.
    use_all: bool = False  # An answer must use every number.
    # Paid for the first legal answer with a wrong value; the target pays 1 in all.
    # RAGEN calls it the format score.
    partial_reward: float = 0.1


@struct.dataclass
class State:
    """One puzzle and the verdict on the last answer."""

    numbers: jax.Array  # int32[N], padded with 0
    target: jax.Array  # int32[]
    verdict: jax.Array  # int32[], the last action, or base.NO_ACTION before the first
    is_paid: jax.Array  # bool[], whether the partial reward has been paid
    done: jax.Array  # bool[], True once the target was made


def check(settings: Countdown) -> None:
    """Raises ValueError, in one sentence, for settings that cannot be used."""
    fewest, most = settings.min_numbers, settings.max_numbers
    if fewest not in range(2, MOST_NUMBERS + 1):
        raise ValueError(
            f"countdown.min_numbers = {fewest} is not possible: choose a whole number"
            f" from 2 to {MOST_NUMBERS}"
        )
    if most not in range(fewest, MOST_NUMBERS + 1):
        raise ValueError(
            f"countdown.max_numbers = {most} is not possible: choose a whole number"
            f" from countdown.min_numbers = {fewest} to {MOST_NUMBERS}"
        )
    if settings.highest_number not in range(10, 1000):
        raise ValueError(
            f"countdown.highest_number = {settings.highest_number} is not possible:"
            " choose a whole number from 10 to 999"
        )
    # With lower targets, too few random expressions would have a value in range.
    if settings.highest_target not in range(settings.highest_number, 10_000):
        raise ValueError(
            f"countdown.highest_target = {settings.highest_target} is not possible:"
            " choose a whole number from countdown.highest_number ="
            f" {settings.highest_number} to 9999"
        )
    if not 0 <= settings.partial_reward < 1:
        raise ValueError(
            f"countdown.partial_reward = {settings.partial_reward} is not a part of the"
            " reward 1: choose at least 0 and less than 1"
        )
