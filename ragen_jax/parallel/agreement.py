"""Broadcasts of process 0's value, for decisions that all processes must take alike.

What each sees may differ, as files on a network folder do; and a process that takes
another branch than the rest waits for them for ever in the next collective. Every
process calls these functions, in the same order.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils


def agreed_number(number: int) -> int:
    """Process 0's `number`, an int32."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def agreed_flag(value: bool) -> bool:
    """Process 0's `value`."""
    return bool(agreed_number(int(value)))


def agreed_step(step: int | None) -> int | None:
    """Process 0's `step`: 0 or more, or None."""
    number = agreed_number(-1 if step is None else step)
    return None if number < 0 else number
