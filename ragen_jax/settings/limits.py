"""Which values a setting may take, and how a message says so.

Each function below gives the dataclass field of a leaf, with its Limit as metadata.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

# A number nearer to 1 may be 1 in float32, and Adam divides by the distance from it.
LARGEST_BELOW_ONE = 0.9999999
BELOW_ONE_REMEDY = f"a number from 0 to below 1, at most {LARGEST_BELOW_ONE}"


@dataclasses.dataclass(frozen=True)
class Limit:
    """Which values a leaf may take, and how to say so."""

    allows: Callable[[Any], bool]
    remedy: str  # completes "choose ..."


def leaf(
    allows: Callable[[Any], bool], remedy: str, default: Any = dataclasses.MISSING
) -> Any:
    metadata = {"limit": Limit(allows, remedy)}
    return dataclasses.field(default=default, metadata=metadata)


def at_least(low: float, default: Any = dataclasses.MISSING) -> Any:
    return leaf(lambda value: value >= low, f"{low} or more", default)


def between(low: int, high: int, default: Any = dataclasses.MISSING) -> Any:
    """For sizes by which loops are unrolled or arrays grow, whatever has room."""
    allows = lambda value: low <= value <= high
    return leaf(allows, f"{low} or more, and at most {high}", default)


def above(low: float, default: Any = dataclasses.MISSING) -> Any:
    return leaf(lambda value: value > low, f"a number above {low}", default)


def or_constant(allows: Callable[[Any], bool], remedy: str) -> Any:
    """A value at the last iteration, or -1 for one that stays as it is."""
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
