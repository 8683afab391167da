"""Whether a checkpoint's JSON files hold what is read of them, of the right types."""

import math
from collections.abc import Callable, Mapping
from typing import Any


def problem(record: Mapping[str, Any]) -> str:
    """What is wrong with a step's record, as "has no usable score"; "" if nothing.

    Parts that a record lacks are no problem: older ones have fewer, and who reads a
    part asks whether it is there.

    Args:
      record: of info.json, as it was read; any JSON in it.
    """
    score, info = record.get("score"), record.get("info")
    if not _is_number_or_none(score) or not isinstance(info, dict):
        return "has no usable score or info"
    wrong = [name for name, fits in _PARTS.items() if not fits(info.get(name, {}))]
    wrong = [name for name in wrong if name in info]
    return f"has no usable {' or '.join(wrong)}" if wrong else ""


def digests(written: Any) -> dict[str, tuple[int, str]] | None:
    """(bytes, checksum) by file, of what digests.json holds; None if it is no such."""
    table = written.get("crc32") if isinstance(written, dict) else None
    if not isinstance(table, dict) or not all(map(_is_digest, table.values())):
        return None
    return {name: (size, checksum) for name, (size, checksum) in table.items()}


def _is_digest(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], int)
        and isinstance(value[1], str)
    )


def _is_number_or_none(value: Any) -> bool:
    if value is None:
        return True
    try:
        is_finite = math.isfinite(value)
    except (TypeError, OverflowError):  # Or a number of hundreds of digits.
        return False
    return is_finite and not isinstance(value, bool)


def _is_settings(value: Any) -> bool:
    read = ("evaluation", "optimizer", "filter")  # By training/resumed.py.
    return isinstance(value, dict) and all(
        isinstance(value.get(section, {}), dict) for section in read
    )


def _is_table_of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(x, str) for x in value.values())


def _is_health(value: Any) -> bool:
    counts = ("rollbacks", "healthy_until")
    return (
        isinstance(value, dict)
        and all(type(value.get(name, 0)) is int for name in counts)
        and _holds_numbers(value)
    )


def _holds_numbers(tree: Any) -> bool:
    """Whether nested dicts and lists hold nothing but numbers, booleans and None."""
    if isinstance(tree, dict | list):
        inner = tree.values() if isinstance(tree, dict) else tree
        return all(map(_holds_numbers, inner))
    return isinstance(tree, bool) or _is_number_or_none(tree)


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        x is not None and _is_number_or_none(x) for x in value
    )


_PARTS: dict[str, Callable[[Any], bool]] = {
    "settings": _is_settings,
    "validation": _is_number_or_none,
    "logprob_gaps": _is_list_of_numbers,
    "health": _is_health,
    "model": _is_table_of_texts,
    "code": _is_table_of_texts,
    "dtype": lambda value: isinstance(value, str),
}
