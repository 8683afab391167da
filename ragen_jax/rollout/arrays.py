"""Operations on arrays, and pytrees of them, by their first axis; and a branch."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp


def take(tree: Any, index: jax.Array) -> Any:
    """A pytree whose arrays are those of `tree` at `index`, on their first axis."""
    return jax.tree.map(lambda x: x[index], tree)


def concatenate(trees: Iterable[Any]) -> Any:
    """Pytrees of like structure, joined along their arrays' first axis."""
    trees = list(trees)
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *trees)


def run_if(condition: jax.Array | bool, step: Callable[[Any], Any], state: Any) -> Any:
    """`step(state)` if the condition, bool[], holds; else the state as it is.

    A loop of one round or none. A branch of `lax.cond` or `lax.switch` would copy the
    whole cache on a GPU.
    """
    start: Any = (state, condition)
    step_once: Any = lambda carry: (step(carry[0]), False)
    return jax.lax.while_loop(lambda carry: carry[1], step_once, start)[0]


def where_first(condition: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`jnp.where` by a condition, bool[n], on the first axis of both arrays."""
    shape = condition.shape + (1,) * (new.ndim - condition.ndim)
    return jnp.where(condition.reshape(shape), new, old)


def last_token(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """int32[n], the last of the `lengths` (int32[n]) real tokens of int32[n, T]."""
    return jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
