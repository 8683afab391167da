"""Counts, lists and long texts in sentences."""

from collections.abc import Sequence


def counted(count: int, thing: str) -> str:
    """As "1 seed" or "3 seeds"."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def shortened(text: str) -> str:
    """The text, or its beginning and end if it has more than 60 characters."""
    return text if len(text) <= 60 else f"{text[:40]}...{text[-17:]}"


def listed(things: Sequence[str]) -> str:
    """As "a, b and c"."""
    *first, last = things
    return f"{', '.join(first)} and {last}" if first else last
