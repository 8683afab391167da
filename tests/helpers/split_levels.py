"""Levels of each split, drawn once for all tests of a file, and their split by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import base


@functools.cache
def drawn(reset, settings, *, count, seed):
    """States of `count` levels of each split, leaves [3 * count, ...], as numpy."""
    keys = jax.random.split(jax.random.key(seed), 3 * count)
    splits = jnp.repeat(jnp.arange(3, dtype=jnp.int32), count)
    reset = jax.jit(jax.vmap(functools.partial(reset, settings=settings)))
    return jax.tree.map(np.asarray, reset(keys, splits))


def split_of(words):
    """The split of a level's numbers, in Python's integers: see `base.content_hash`."""
    value = 2166136261
    for word in words:
        value = ((value ^ word) * 16777619) % 2**32
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) % 2**32
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) % 2**32
    value ^= value >> 16
    return {0: base.TEST, 1: base.VALIDATION}.get(value % 8, base.TRAIN)
