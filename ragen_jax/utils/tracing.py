"""A check of a user's function by tracing it, before anything is compiled."""

from collections.abc import Callable
from typing import Any

import jax


def keeps_traced_values(function: Callable, *arguments: Any) -> bool:
    """Whether a function leaks tracers: reads values that an earlier trace left behind.

    Such a tracer is in a variable outside the function, for example a global list. JAX
    compiles it as a constant and fails only when the program is called.

    Args:
      function: one that was traced before, itself or within another one.
      arguments: pytrees of jax.ShapeDtypeStruct.

    Raises:
      Exception: whatever the function, or JAX while tracing it, raises.
    """
    # A new lambda, so that JAX does not reuse an earlier trace.
    traced = jax.make_jaxpr(lambda *given: function(*given))(*arguments)
    return any(isinstance(value, jax.core.Tracer) for value in traced.consts)
