"""Replaces NaN and infinity, which JSON cannot hold, with null."""

import math
from typing import Any


def finite(tree: Any) -> Any:
    """A copy of nested dicts and lists with None for each float that is not finite."""
    if isinstance(tree, dict):
        return {key: finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [finite(value) for value in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return None
    return tree
