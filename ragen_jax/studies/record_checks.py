"""Checks of what a finished run left for a study, made where it is read.

A workdir's files, or a data file's entry, may have been edited or written by another
program: what no measure could be taken of is refused there, and not in a measure.
"""

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ragen_jax.diagnostics.rollbacks import is_rollback
from ragen_jax.errors import UserError

_BY_LEVEL = ("before_by_level", "after_by_level")


def read_json(path: Path, what: str, check: Callable[[Any], None]) -> Any:
    """What a JSON file of a run holds.

    Args:
      path: of the file.
      what: it has to be.
      check: raises ValueError, with what is missing, for anything else.

    Raises:
      UserError: if it is something else.
    """
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
        check(parsed)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not {what} ({why(error)}): restore it from a copy, or move the"
            " folder away to make the run again"
        ) from error
    return parsed


def why(error: Exception) -> str:
    """What is wrong with a text that is no JSON, or was refused by a check."""
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError):
        return "it is no JSON, or was cut off"
    return str(error)


def check_object(found: Any) -> None:
    """Raises ValueError unless it is an object."""
    _demand(isinstance(found, dict), "it is no object")


def check_words(found: Any) -> None:
    """Raises ValueError unless it is a list of texts."""
    is_words = isinstance(found, list) and all(isinstance(word, str) for word in found)
    _demand(is_words, "it is no list of texts")


def check_start(found: Any) -> None:
    """Raises ValueError unless it is the record of a run's start, or an older one."""
    if isinstance(found, list):
        check_words(found)
        return
    check_object(found)
    check_words(found.get("arguments"))
    check_code(found.get("code"))


def check_code(found: Any) -> None:
    """Raises ValueError unless it has a digest of each file that it names."""
    is_code = isinstance(found, dict) and all(
        isinstance(digest, str) for digest in found.values()
    )
    _demand(is_code, "it is no object of digests")


def check_test(test: Any) -> None:
    """Raises ValueError unless it holds what a measure of tests reads, or less."""
    check_object(test)
    _demand(test, "it has no result")
    by_label = {"": test} if "after" in test else test
    for label, one in by_label.items():
        place = f"{label}." if label else ""
        _demand(isinstance(one, dict), f"{label} is no object")
        for side in ("before", "after"):
            result = one.get(side, {} if side == "before" else None)
            _demand(isinstance(result, dict), f"{place}{side} is no object")
            success = result.get("success", "none" if side in one else None)
            _demand(_is_number(success), f"{place}{side}.success is no number")
        _demand(_is_number(one.get("gain")), f"{place}gain is no number")
        _check_levels(one, place)


def _check_levels(one: Mapping[str, Any], place: str) -> None:
    levels = {name: one[name] for name in _BY_LEVEL if one.get(name) is not None}
    for name, found in levels.items():
        is_of_numbers = isinstance(found, list) and all(map(_is_number, found))
        _demand(is_of_numbers, f"{place}{name} is no list of numbers")
    _demand(
        len({len(found) for found in levels.values()}) < 2,
        f"{place}{' and '.join(levels)} differ in length",
    )


def check_diagnoses(found: Any) -> None:
    """Raises ValueError unless it is a list of what is known of checkpoints."""
    _demand(isinstance(found, list), "it is no list")
    for one in found:
        check_object(one)
        for name, part in one.items():
            if name == "step":
                _demand(_is_whole(part), "a checkpoint's step is no whole number")
                continue
            is_known = isinstance(part, dict) and all(map(_is_number, part.values()))
            _demand(is_known, f"{name} of a checkpoint is no object of numbers")
        _demand("step" in one, "a checkpoint has no step")
        _demand("success" in one.get("text", {}), "a checkpoint has no success")


def check_rollbacks(found: Any) -> None:
    """Raises ValueError unless it is a list of rollbacks."""
    is_sound = isinstance(found, list | tuple) and all(map(is_rollback, found))
    _demand(is_sound, "it lists something else than rollbacks")


def check_series(series: Any) -> None:
    """Raises ValueError unless each metric has its iterations and as many values."""
    _demand(isinstance(series, dict), "it is no object")
    for name, columns in series.items():
        is_pair = isinstance(columns, list) and len(columns) == 2
        is_pair = is_pair and all(isinstance(column, list) for column in columns)
        _demand(is_pair, f"{name} is no pair of lists")
        iterations, values = columns
        _demand(len(iterations) == len(values), f"{name} has lists of two lengths")
        _demand(all(map(_is_whole, iterations)), f"{name} has no whole iterations")
        _demand(all(map(_is_number, values)), f"{name} is not of numbers")


def check_seed(seed: Any) -> None:
    """Raises ValueError unless it is a whole number from 0."""
    _demand(_is_whole(seed) and seed >= 0, "it is no whole number from 0")


def check_text(text: Any) -> None:
    """Raises ValueError unless it is a text."""
    _demand(isinstance(text, str), "it is no text")


def check_true(value: Any) -> None:
    """Raises ValueError unless it is true."""
    _demand(value is True, "it is not true")


def _is_number(value: Any) -> bool:
    """Whether it is a finite number, or None for one that is not known."""
    if value is None:
        return True
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    with contextlib.suppress(OverflowError):  # An int too large for a float.
        return math.isfinite(value)
    return False


def _is_whole(value: Any) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and abs(value) < 2**32


def _demand(is_so: Any, otherwise: str) -> None:
    if not is_so:
        raise ValueError(otherwise)
