"""cuDNN's attention as the programs ask for it, each form tried by itself."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ragen_jax.models.attention import fused_attention
from ragen_jax.parallel import backend_choices
from ragen_jax.rollout import cache_attention

_ROWS = 2  # of whole rows
_SLOTS = 8  # of a cache
_PREFIX = 170  # tokens that all rows begin with: a prompt's opening
_MESSAGE = 66  # tokens
_WORKS = "works"
_OF_ROWS = "rows of"  # how the names of the update's forms begin

Form = Callable[[], Any]  # a pytree of what the form computes


def tried(context: int, heads: tuple[int, int, int]) -> Iterator[dict[str, str]]:
    """By form "works" or how it does not, all so far; anew after each.

    A kernel that reads where it must not leaves a process without its device: then no
    more forms are tried.

    Args:
      context: C, positions of the cache.
      heads: query heads, key heads, features of each.
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
    """The forms by name: of the update, then of the rollout.

    Args:
      context: C, positions of the cache.
      heads: query heads, key heads, features of each.
      implementation: "cudnn", or "xla", which computes the same on any device.
    """
    # Rows are a multiple of 64 tokens long, and filled up to the kernels' 128.
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
        "messages": functools.partial(_heard, context, heads, implementation),
    }


def settings_without_failing(
    outcomes: Mapping[str, str], context: int, heads: tuple[int, int, int]
) -> dict[str, str]:
    """The settings, by dotted key, with which no form is used that does not work.

    Args:
      outcomes: the last of `tried`. A form may have ended its process: what is not
        among them does not work.
      context, heads: as there.
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
    """Whether a form runs to its end here, in a word or a line."""
    try:
        found = jax.tree.leaves(form())
        # Waited for in here: a device's error comes when its result is wanted.
        is_finite = all(bool(jnp.isfinite(x).all()) for x in found)
    except Exception as error:  # Whatever it is, it is what this asks for.
        return f"fails: {next(iter(str(error).splitlines()), type(error).__name__)}"
    return _WORKS if is_finite else "not finite"


def _answers() -> bool:
    """Whether the device computes at all."""
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


def _heard(context, heads, implementation):
    kernel, entries = _cache(context, heads, implementation)
    query = _random(0, _SLOTS, _MESSAGE, heads[0], heads[2])
    starts = jnp.linspace(0, context - _MESSAGE, _SLOTS).astype(jnp.int32)
    positions = starts[:, None] + jnp.arange(_MESSAGE)[None]
    attend = lambda *given: kernel.attend_message(*given, context)
    return jax.jit(attend)(query, *entries, positions)


def _cache(context, heads, implementation):
    """(the layout, keys and values of full slots)"""
    kernel = cache_attention.fused(implementation)
    made = (_random(seed, _SLOTS, context, heads[1], heads[2]) for seed in (1, 2))
    return kernel, [kernel.to_entry(x) for x in made]


def _random(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
