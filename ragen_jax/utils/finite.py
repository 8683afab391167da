"""Numbers that JSON cannot hold: what is not finite is written as null, not known."""

import math
from typing import Any


def finite(tree: Any) -> Any:
    """The same dicts, lists and leaves, with None for a float that is not finite."""
    if isinstance(tree, dict):
        return {key: finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [finite(value) for value in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return None
    return tree
