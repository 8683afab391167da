"""What tracing tells of a user's function, before anything is compiled."""

from collections.abc import Callable
from typing import Any

import jax


def keeps_traced_values(function: Callable, *arguments: Any) -> bool:
    """Whether a function reads traced values that an earlier trace has left behind.

    Such a value stands in a variable outside the function, as in a global list. JAX
    takes it for a constant, compiles, and fails when the program is called.

    Args:
      function: traced at least once before, or called by what was.
      arguments: pytrees of jax.ShapeDtypeStruct.

    Raises:
      Exception: of the function's own, or of JAX about it.
    """
    # A function of its own, so that no earlier trace is taken for this one.
    traced = jax.make_jaxpr(lambda *given: function(*given))(*arguments)
    return any(isinstance(value, jax.core.Tracer) for value in traced.consts)
