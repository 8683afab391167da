"""The values that a setting may take, and how an error message names them.

Each function below returns a dataclass field for a leaf of schema.py, with its Limit in
the metadata; reader.py checks it. The fields have no default unless one is given.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

# Adam divides by 1 - beta. A number closer to 1 may be rounded to 1 in float32.
LARGEST_BELOW_ONE = 0.9999999
# Logits are divided by it; at far lower ones no gradient is finite in float32.
LEAST_TEMPERATURE = 1e-6
# Of turns and actions of an episode, and of actions of a turn or passes over a batch. A
# larger number is a typing error, and would make the run hang.
MOST_TURNS, MOST_ACTIONS, MOST_EACH = 10_000, 100_000, 1_000
BELOW_ONE_REMEDY = f"a number from 0 to below 1, at most {LARGEST_BELOW_ONE}"


@dataclasses.dataclass(frozen=True)
class Limit:
    """The values that a leaf may take."""

    allows: Callable[[Any], bool]
    remedy: str  # the rest of a sentence that begins with "choose"


def leaf(
    allows: Callable[[Any], bool], remedy: str, default: Any = dataclasses.MISSING
) -> Any:
    metadata = {"limit": Limit(allows, remedy)}
    return dataclasses.field(default=default, metadata=metadata)


def at_least(low: float, default: Any = dataclasses.MISSING) -> Any:
    return leaf(lambda value: value >= low, f"{low} or more", default)


def between(low: int, high: int, default: Any = dataclasses.MISSING) -> Any:
    """For sizes of loops or arrays that would exhaust time or memory if huge."""
    allows = lambda value: low <= value <= high
    return leaf(allows, f"{low} or more, and at most {high}", default)


def above(low: float, default: Any = dataclasses.MISSING) -> Any:
    return leaf(lambda value: value > low, f"a number above {low}", default)


def temperature_or_zero() -> Any:
    allows = lambda value: value == 0 or value >= LEAST_TEMPERATURE
    return leaf(allows, f"0, or {LEAST_TEMPERATURE:g} or more")


def or_constant(allows: Callable[[Any], bool], remedy: str) -> Any:
    """For a coefficient's value at the last iteration; -1: it stays constant."""
    return leaf(
        lambda value: value == -1 or allows(value),
        f"{remedy}, or -1 for the same throughout",
    )


def up_to_one() -> Any:
    return leaf(lambda value: 0 < value <= 1, "a number above 0 and at most 1")


def from_zero_to_one() -> Any:
    return leaf(lambda value: 0 <= value <= 1, "a number from 0 to 1")


def below_one() -> Any:
    return leaf(lambda value: 0 <= value <= LARGEST_BELOW_ONE, BELOW_ONE_REMEDY)


def one_of(*names: str, default: Any = dataclasses.MISSING) -> Any:
    return leaf(lambda value: value in names, f"one of {', '.join(names)}", default)


def name() -> Any:
    return leaf(lambda value: value.strip() != "", "a name that is not empty")


def axis() -> Any:
    return leaf(
        lambda value: value == -1 or value >= 1,
        "1 or more, or -1 for every device that the other axes leave",
    )
