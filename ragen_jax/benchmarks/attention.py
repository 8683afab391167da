"""Times the kernels of decode attention by themselves; a stage of the GPU suite."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.benchmarks import device
from ragen_jax.parallel import backend_choices
from ragen_jax.rollout import cache_attention
from ragen_jax.rollout.cache_attention import CacheAttention

# Caches that a call reads in turn, as a model's layers do. The filled part of one takes
# 34 MB at the suite's full size, which an H200's second-level cache (50 MB) would keep.
_CACHES = 6
_ROUNDS = 4  # over all caches in one timed call, so that launching it hardly counts
_FILLED = 0.2  # mean share of the cache that is filled


def compare(
    slots: int, context: int, heads: tuple[int, int, int]
) -> Iterator[tuple[str, dict]]:
    """Yields (kernel, figures) for one layer of a decode pass, cache write included.

    Args:
      slots: S.
      context: C, positions of the cache.
      heads: (query heads, key heads, features of each).
    """
    on_cpu = jax.default_backend() == "cpu"
    dtype = jnp.float32 if on_cpu else jnp.bfloat16
    rng = np.random.default_rng(0)
    lengths = rng.gamma(12, _FILLED * context / 12, slots).astype(np.int32)
    lengths = np.clip(lengths, 1, context - 1)
    kernels = {
        "plain operations": cache_attention.XLA,
        "with lengths, by JAX's own operations": cache_attention.fused("xla"),
    }
    # cuDNN comes last, so that the others are known if it fails.
    if backend_choices.has_cudnn_attention(dtype, heads[2]):
        kernels["with lengths, by cuDNN"] = cache_attention.fused("cudnn")
    expected = None
    for name, kernel in kernels.items():
        seconds, mixed = _time(kernel, jnp.asarray(lengths), context, heads, dtype)
        expected = mixed if expected is None else expected
        read = 2 * lengths.sum() * heads[1] * heads[2] * jnp.dtype(dtype).itemsize
        yield (
            name,
            {
                "a layer, us": 1e6 * seconds,
                "valid entries, GB/s": float(read) / seconds / 1e9,
                "largest difference to the first": float(abs(mixed - expected).max()),
            },
        )


def _time(
    kernel: CacheAttention,
    lengths: jax.Array,
    context: int,
    heads: tuple[int, int, int],
    dtype,
) -> tuple[float, np.ndarray]:
    """(seconds of a layer, its output as float32[S, 1, H, d])."""
    (queries, groups, features), slots = heads, lengths.shape[0]
    of_entries, of_queries = jax.random.split(jax.random.key(0))
    shape = (slots, context, groups, features)

    def entries(seed: int) -> list[jax.Array]:
        keys = jax.random.split(jax.random.fold_in(of_entries, seed), _CACHES)
        return [kernel.to_entry(jax.random.normal(key, shape, dtype)) for key in keys]

    query = jax.random.normal(of_queries, (slots, 1, queries, features), dtype)
    run = layers(kernel, lengths, context, groups)
    # Donated and replaced in each call: a copy of the caches would take too long.
    held = [entries(0), entries(1)]

    def call() -> jax.Array:
        held[0], held[1], mixed = run(*held, query)
        return mixed

    durations = device.seconds(call)
    layer = _layer(kernel, lengths, context, groups)
    mixed = jax.jit(layer)(held[0][0], held[1][0], query)[2]
    return min(durations) / (_ROUNDS * _CACHES), np.asarray(mixed, np.float32)


def layers(kernel: CacheAttention, lengths: jax.Array, context: int, groups: int):
    """A jitted (keys, values, query) -> the same after all layers, in place.

    Keys and values are lists of entries, of one cache each.
    """
    layer = _layer(kernel, lengths, context, groups)

    def turn(carry, _):
        keys, values, query = carry
        written = []
        for of_layer in zip(keys, values, strict=True):
            *entries, query = layer(*of_layer, query)
            written.append(entries)
        keys, values = map(list, zip(*written, strict=True))
        return (keys, values, query), None

    def run(keys, values, query):
        return jax.lax.scan(turn, (keys, values, query), length=_ROUNDS)[0]

    return jax.jit(run, donate_argnums=(0, 1))


def _layer(kernel: CacheAttention, lengths: jax.Array, context: int, groups: int):
    """A layer: (keys, values, query) -> the same, of one cache."""

    def layer(keys, values, query):
        new = query[:, 0, :groups]
        keys = kernel.write_token(keys, new, lengths)
        values = kernel.write_token(values, new, lengths)
        mixed = kernel.attend_token(query, keys, values, lengths + 1, context)
        # Each layer's query depends on the one before, as in a model.
        return keys, values, (query + mixed) / 2

    return layer
