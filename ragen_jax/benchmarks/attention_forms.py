"""Tries cuDNN's attention in each form that the programs use, one by one.

The first stage of the GPU suite. Later stages avoid the forms that failed.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ragen_jax.models.attention import fused_attention
from ragen_jax.parallel import backend_choices
from ragen_jax.rollout import cache_attention

_ROWS = 2  # R, in the forms of whole rows
_SLOTS = 8  # S, in the forms of the cache
_PREFIX = 170  # tokens of the common beginning of all rows, whose keys come ahead
_MESSAGE = 66  # tokens of an observation that is prefilled
_WORKS = "works"
_OF_ROWS = "rows of"  # how the names of the update's forms begin

Form = Callable[[], Any]  # computes the form and returns its arrays, a pytree


def tried(context: int, heads: tuple[int, int, int]) -> Iterator[dict[str, str]]:
    """Tries each form; after each, yields the outcomes so far by form.

    An outcome is "works" or says what is wrong. A kernel that accesses invalid memory
    makes the device unusable for the process: then no more forms are tried.

    Args:
      context: C, positions of the cache.
      heads: (query heads, key heads, features of each).
    """
    if not backend_choices.has_cudnn_attention(jnp.bfloat16, heads[2]):
        yield {"state": "not asked for on this device"}
        return
    outcomes: dict[str, str] = {}
    for name, form in forms(context, heads, "cudnn").items():
        outcomes[name] = outcome(form) if _answers() else "not tried: no device is left"
        yield dict(outcomes)


def forms(
    context: int, heads: tuple[int, int, int], implementation: Literal["cudnn", "xla"]
) -> dict[str, Form]:
    """The forms by name: those of the update, then those of the rollout.

    Args:
      context: C, positions of the cache.
      heads: (query heads, key heads, features of each).
      implementation: "cudnn", or "xla", which computes the same on any device.
    """
    # Row lengths are multiples of 64, padded to the kernels' multiples of 128.
    lengths = {
        f"{_OF_ROWS} 128 tokens": (128, 0),
        f"{_OF_ROWS} 448 tokens": (448, 0),
        f"{_OF_ROWS} 448 tokens behind {_PREFIX}": (448, _PREFIX),
    }
    of_rows: dict[str, Form] = {
        f"{name}, with gradients": functools.partial(
            _gradients, length, prefix, heads, implementation
        )
        for name, (length, prefix) in lengths.items()
    }
    return of_rows | {
        "decoding": functools.partial(_decoded, context, heads, implementation),
        "messages": functools.partial(_messages, context, heads, implementation),
    }


def settings_without_failing(
    outcomes: Mapping[str, str], context: int, heads: tuple[int, int, int]
) -> dict[str, str]:
    """The settings, by dotted key, that avoid every form which does not work.

    Args:
      outcomes: the last that `tried` yielded. A form that is missing does not work: it
        may have crashed the process.
      context, heads: as for `tried`.
    """
    failing = [
        name for name in forms(context, heads, "cudnn") if outcomes.get(name) != _WORKS
    ]
    of_rows = [name for name in failing if name.startswith(_OF_ROWS)]
    changes = {}
    if of_rows:
        changes["model.attention"] = "xla"
    if len(of_rows) < len(failing):
        changes["rollout.decode_attention"] = "xla"
    return changes


def outcome(form: Form) -> str:
    """Runs a form: "works", or one line on what is wrong."""
    try:
        found = jax.tree.leaves(form())
        # Errors of the device are raised only when its results are read: here.
        is_finite = all(bool(jnp.isfinite(x).all()) for x in found)
    except Exception as error:  # Any error is an outcome.
        return f"fails: {next(iter(str(error).splitlines()), type(error).__name__)}"
    return _WORKS if is_finite else "not finite"


def _answers() -> bool:
    """Whether the device still computes anything."""
    return outcome(lambda: jnp.ones(8) + 1) == _WORKS


def _gradients(length, prefix, heads, implementation):
    queries, groups, features = heads

    def loss(query, key, value):
        mixed = fused_attention(query, key, value, implementation)
        return mixed.astype(jnp.float32).sum()

    query = _random(0, _ROWS, length, queries, features)
    key, value = (
        _random(seed, _ROWS, prefix + length, groups, features) for seed in (1, 2)
    )
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query, key, value)


def _decoded(context, heads, implementation):
    kernel, entries = _cache(context, heads, implementation)
    query = _random(0, _SLOTS, 1, heads[0], heads[2])
    lengths = jnp.linspace(1, context, _SLOTS).astype(jnp.int32)
    attend = lambda *given: kernel.attend_token(*given, context)
    return jax.jit(attend)(query, *entries, lengths)


def _messages(context, heads, implementation):
    kernel, entries = _cache(context, heads, implementation)
    query = _random(0, _SLOTS, _MESSAGE, heads[0], heads[2])
    starts = jnp.linspace(0, context - _MESSAGE, _SLOTS).astype(jnp.int32)
    positions = starts[:, None] + jnp.arange(_MESSAGE)[None]
    attend = lambda *given: kernel.attend_message(*given, context)
    return jax.jit(attend)(query, *entries, positions)


def _cache(context, heads, implementation):
    """(the kernel, [keys, values] of full slots in its layout)."""
    kernel = cache_attention.fused(implementation)
    made = (_random(seed, _SLOTS, context, heads[1], heads[2]) for seed in (1, 2))
    return kernel, [kernel.to_entry(x) for x in made]


def _random(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
