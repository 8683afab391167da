"""Tries cuDNN's attention in each form that the programs use, one by one.

The first stage of the GPU suite. Later stages avoid the forms that failed.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from ragen_jax.models.attention import fused_attention
from ragen_jax.parallel import backend_choices
from ragen_jax.rollout import cache_attention

_ROWS = 2  # R, in the forms of whole rows
_SLOTS = 8  # S, in the forms of the cache
_PREFIX = 170  # tokens of the common beginning of all rows, whose keys come ahead
_MESSAGE = 83  # tokens of an observation that is prefilled: odd, as some are
# Of the largest value, by which a form may differ from plain operations: bfloat16
# rounds by 0.4 % at each of several steps, a wrong mask or head differs by 100 %.
_TOLERANCE = 0.05
_WORKS = "works"
_BEGUN, _FATAL = "begun", "ended its process, or came to its time limit"
_NOT_TRIED = "not tried: no device is left"
_OF_ROWS = "rows of"  # how the names of the update's forms begin

Form = Callable[[], Any]  # computes the form and returns its arrays, a pytree
Heads = tuple[int, int, int]  # query heads, key heads, features of each


def tried(
    cases: Sequence[tuple[int, Heads]], earlier: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Tries each form; before and after each, yields the outcomes so far by form.

    An outcome is "works", where the values are those of plain operations, or says what
    is wrong. A kernel that accesses invalid memory makes the device unusable for the
    process: then no more forms are tried.

    Args:
      cases: (C, heads) of each model: positions of the cache, and its heads.
      earlier: outcomes of a process that did not come to the end: they stand, and a
        form at which it ended is not tried again.
    """
    outcomes: dict[str, str] = {}
    for context, heads in dict.fromkeys(cases):
        if not backend_choices.has_cudnn_attention(jnp.bfloat16, heads[2]):
            continue
        plain = forms(context, heads, "xla", jax.device_count())
        for name, form in forms(context, heads, "cudnn", jax.device_count()).items():
            if earlier.get(name, _NOT_TRIED) != _NOT_TRIED:
                has_ended = earlier[name] == _BEGUN
                outcomes[name] = _FATAL if has_ended else earlier[name]
                continue
            outcomes[name] = _NOT_TRIED
            if _answers():
                outcomes[name] = _BEGUN  # All that is known if it ends the process.
                yield dict(outcomes)
                by_slot = not name.startswith(_OF_ROWS)
                outcomes[name] = outcome(form, plain[name], by_slot)
            yield dict(outcomes)
    yield outcomes or {"state": "not asked for on this device"}


def forms(
    context: int,
    heads: Heads,
    implementation: Literal["cudnn", "xla"],
    devices: int = 1,
) -> dict[str, Form]:
    """The forms by name: those of the update, then those of the rollout.

    Args:
      context: C, positions of the cache.
      heads: of the model.
      implementation: "cudnn", or "xla", which computes the same on any device.
      devices: all there are; if several, they share the rows in one more form.
    """
    # Row lengths are multiples of 64, padded to the kernels' multiples of 128.
    longest = -(-context // 64) * 64
    lengths = {
        f"{_OF_ROWS} 128 tokens": (128, 0),
        f"{_OF_ROWS} 448 tokens": (448, 0),
        f"{_OF_ROWS} 448 tokens behind {_PREFIX}": (448, _PREFIX),
        f"{_OF_ROWS} {longest} tokens": (longest, 0),
    }
    given = heads, implementation
    made: dict[str, Form] = {
        f"{name}, with gradients": functools.partial(_gradients, length, prefix, *given)
        for name, (length, prefix) in lengths.items()
    }
    # Another of cuDNN's graphs: prompts, and probabilities before the update.
    made[f"{_OF_ROWS} 448 tokens, without gradients"] = functools.partial(
        _attended, 448, *given
    )
    if devices > 1:
        # What works on one GPU may fail on several (jax issue 27599).
        made[f"{_OF_ROWS} 128 tokens on all devices, with gradients"] = (
            functools.partial(_gradients_on_all, devices, 128, *given)
        )
    made["decoding"] = functools.partial(_decoded, context, *given)
    made["messages"] = functools.partial(_messages, context, *given)
    return {f"{name}, {_described(heads)}": form for name, form in made.items()}


def _described(heads: Heads) -> str:
    return f"{heads[0]} heads of {heads[2]}"


def settings_without_failing(
    outcomes: Mapping[str, str], context: int, heads: Heads
) -> dict[str, str]:
    """The settings, by dotted key, that avoid every form which does not work.

    Args:
      outcomes: the last that `tried` yielded. A form that is missing does not work: it
        may have crashed the process.
      context, heads: of the model, one of the cases of `tried`.
    """
    # Those of all devices are known only where all were tried.
    names = dict.fromkeys(forms(context, heads, "cudnn"))
    names |= dict.fromkeys(n for n in outcomes if n.endswith(_described(heads)))
    failing = [name for name in names if outcomes.get(name) != _WORKS]
    of_rows = [name for name in failing if name.startswith(_OF_ROWS)]
    changes = {}
    if of_rows:
        changes["model.attention"] = "xla"
    if len(of_rows) < len(failing):
        changes["rollout.decode_attention"] = "xla"
    return changes


def outcome(form: Form, plain: Form | None = None, by_slot: bool = False) -> str:
    """Runs a form: "works", or one line on what is wrong.

    Args:
      form: to be tried.
      plain: the same in plain operations, to be compared with; None: values only need
        to be finite.
      by_slot: whether the first axis is of slots, each of which has its own scale.
    """
    try:
        found = jax.tree.leaves(form())
        # Errors of the device are raised only when its results are read: here.
        if not all(bool(jnp.isfinite(x).all()) for x in found):
            return "not finite"
        expected = found if plain is None else jax.tree.leaves(plain())
        # As an array, whose maximum is NaN if any is.
        shares = [_difference(*x, by_slot) for x in zip(found, expected, strict=True)]
        differs = float(jnp.array(shares).max())
    except Exception as error:  # Any error is an outcome.
        return f"fails: {next(iter(str(error).splitlines()), type(error).__name__)}"
    if not differs <= _TOLERANCE:
        return f"differs from plain operations by {differs:.0%} of the largest value"
    return _WORKS


def _difference(x: jax.Array, expected: jax.Array, by_slot: bool) -> float:
    """The largest difference, as a share of the largest magnitude expected.

    With `by_slot`, the largest share of a slot. A mean of many values is small: what a
    slot that attends to thousands computes would hardly count beside one with a few.
    """
    x, expected = (jnp.asarray(each, jnp.float32) for each in (x, expected))
    shape = (x.shape[0], -1) if by_slot else (1, -1)
    differs = abs(x - expected).reshape(shape).max(axis=1)
    largest = abs(expected).reshape(shape).max(axis=1)
    smallest = jnp.finfo(jnp.float32).tiny  # Where all that is expected is 0.
    return float((differs / jnp.maximum(largest, smallest)).max())


def _answers() -> bool:
    """Whether the device still computes anything."""
    return outcome(lambda: jnp.ones(8) + 1) == _WORKS


def _attended(length, heads, implementation):
    query, key, value, _ = _rows(_ROWS, length, 0, heads)
    attend = functools.partial(fused_attention, implementation=implementation)
    return jax.jit(attend)(query, key, value)


def _gradients(length, prefix, heads, implementation):
    given = _rows(_ROWS, length, prefix, heads)
    return jax.jit(_gradient_of(implementation))(*given)


def _gradients_on_all(devices, length, heads, implementation):
    given = _rows(_ROWS * devices, length, 0, heads)
    by_rows = PartitionSpec("rows")
    on_shards = jax.shard_map(
        _gradient_of(implementation),
        mesh=Mesh(jax.devices(), ("rows",)),
        in_specs=by_rows,
        out_specs=by_rows,
        check_vma=False,
    )
    return jax.jit(on_shards)(*given)


def _gradient_of(implementation):
    """(query, key, value, weights) -> gradients by the first three."""

    def loss(query, key, value, weights):
        mixed = fused_attention(query, key, value, implementation)
        return (mixed.astype(jnp.float32) * weights).sum()

    return jax.grad(loss, argnums=(0, 1, 2))


def _rows(rows, length, prefix, heads):
    """Queries, keys, values, and weights of a loss, which tell all values apart."""
    queries, groups, features = heads
    query, weights = (_random(seed, rows, length, queries, features) for seed in (0, 3))
    key, value = (
        _random(seed, rows, prefix + length, groups, features) for seed in (1, 2)
    )
    return query, key, value, weights


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
