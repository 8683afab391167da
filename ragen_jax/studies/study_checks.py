"""Checks of a study file: what each field of a Study and of its Claims may hold.

Made when the file is loaded, so that no mistake waits for the page, which is written
after all training.
"""

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from ragen_jax.errors import UserError

MOST_SEED = 2**32 - 1  # As the settings' `seed`.
# A name gives NAME.md, NAME.png and NAME.json; these pages are others'.
RESERVED_NAMES = ("across", "readme")
# Flags of launch/diagnose.py but for --checkpoint and --out, which a study sets itself.
_DIAGNOSE_FLAG = re.compile(
    r"--(no)?(all|same_prompts|information|gradients|trust-code)"
    r"|--(prompts|group_size|samples)=[0-9]+"
    r"|--buckets=(quantile|fixed)"
    r"|--(model|code)=.+"
)


def is_diagnose_flag(argument: str) -> bool:
    """Whether launch/diagnose.py takes an argument, written as --FLAG or --FLAG=X."""
    return bool(_DIAGNOSE_FLAG.fullmatch(argument))


def _is_text(found: Any) -> bool:
    return isinstance(found, str)


def _is_text_or_none(found: Any) -> bool:
    return found is None or _is_text(found)


def _is_series(found: Any) -> bool:
    return isinstance(found, tuple | list)


def _is_texts(found: Any) -> bool:
    return _is_series(found) and all(map(_is_text, found))


def _is_diagnosis(found: Any) -> bool:
    return _is_texts(found) and all(map(is_diagnose_flag, found))


def _is_seeds(found: Any) -> bool:
    return _is_series(found) and all(
        type(seed) is int and 0 <= seed <= MOST_SEED for seed in found
    )


def _is_number(found: Any) -> bool:
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return is_number and abs(found) < math.inf  # False for NaN.


def _is_value(found: Any) -> bool:
    """Whether it is of a kind that a setting can have."""
    if _is_series(found):
        return all(map(_is_value, found))
    return found is None or isinstance(found, str | int | float)


def _is_mapping(found: Any) -> bool:
    return isinstance(found, Mapping) and all(map(_is_text, found))


Rules = Mapping[str, tuple[Callable[[Any], bool], str]]
_TEXT = (_is_text, "a text")
_TEXTS = (_is_texts, "a tuple of texts, as in ('test_success',)")
_CHANGES = (
    _is_mapping,
    "a dict of settings by dotted key, as in {'iterations': 100}",
)
_ARMS = (
    _is_mapping,
    "a dict of dicts of settings by label, as in {'GRPO': {'estimator': 'grpo'}}",
)
# Field -> whether a value will do, and what to give instead.
STUDY: Rules = {
    "name": _TEXT,
    "question": _TEXT,
    "source": _TEXT,
    "config": (_is_text, "FILE or FILE:VARIANT, as in 'configs/frozenlake.py'"),
    "changes": _CHANGES,
    "arms": _ARMS,
    "seeds": (_is_seeds, "a tuple of whole numbers from 0 to 2**32 - 1, as in (0, 1)"),
    "measures": _TEXTS,
    "curves": (_is_texts, "a tuple of texts, as in ('validation/success',)"),
    "claims": (_is_series, "a tuple of Claims"),
    "smoke": _CHANGES,
    "paper": _CHANGES,
    "paper_arms": _ARMS,
    "diagnose": (
        _is_diagnosis,
        "a tuple of flags of launch/diagnose.py, as in ('--all', '--samples=64')",
    ),
    "notes": _TEXT,
}
CLAIM: Rules = {
    "text": _TEXT,
    "left": (_is_text, "the label of an arm"),
    "right": (_is_text_or_none, "the label of an arm, or None"),
    "measure": (_is_text, "the name of a measure"),
    "relation": _TEXT,
    "margin": (_is_number, "a finite number"),
}


def check_fields(found: Any, rules: Rules, where: str) -> None:
    """Checks the type of each field of a study or a claim.

    Args:
      found: a Study or a Claim.
      rules: STUDY or CLAIM.
      where: the error message's first words.

    Raises:
      UserError: for the first field that does not hold what it should.
    """
    for name, (is_right, remedy) in rules.items():
        value = getattr(found, name)
        if not is_right(value):
            raise UserError(f"{where}: {name} is {reprlib.repr(value)}: give {remedy}")


def check_changes(changes: Any, where: str) -> None:
    """Checks changes of settings, of all runs or of an arm.

    Args:
      changes: dotted key -> value, or anything else.
      where: the error message's first words.

    Raises:
      UserError: for what settings cannot be changed by.
    """
    is_right, remedy = _CHANGES
    if not is_right(changes):
        raise UserError(f"{where} is {reprlib.repr(changes)}: give {remedy}")
    if "seed" in changes:
        raise UserError(f"{where} sets the seed, to no effect: name seeds in `seeds`")
    for key, value in changes.items():
        if not (_is_text if key == "config" else _is_value)(value):
            kinds = "a text" if key == "config" else "a text, number, bool or tuple"
            said = reprlib.repr(value)
            raise UserError(f"{where} sets {key} to {said}: give {kinds}")
