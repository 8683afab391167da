"""Environments that never draw a level of some split."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from ragen_jax.envs.base import Environment


@contextlib.contextmanager
def without_levels(env: Environment, split: int) -> Iterator[Environment]:
    """The environment, whose search for a level of the split ends with the block.

    It is no loop, which nothing would end: other tests of the process go on after it.
    """
    is_over = threading.Event()

    def wait(wanted):
        assert wanted != split or is_over.wait(60)
        return wanted

    def reset(key, wanted):
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        return env.reset(key, jax.pure_callback(wait, shape, wanted))

    try:
        yield dataclasses.replace(env, reset=reset)
    finally:
        is_over.set()
