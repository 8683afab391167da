"""Drawing with new keys until a draw is fit, against a loop in Python."""

import functools

import jax
import numpy as np
import pytest

from ragen_jax.envs import base


def _draw(*keys):
    """One number for each key, and whether their sum is of one value in five."""
    numbers = [jax.random.randint(key, (2,), 0, 100) for key in keys]
    return {"numbers": numbers}, sum(numbers).sum() % 5 == 0


def _in_python(key, keys):
    draw = jax.jit(_draw)
    for count in range(1, 1000):
        key, *draw_keys = jax.random.split(key, 1 + keys)
        candidate, is_fit = draw(*draw_keys)
        if is_fit:
            return candidate, count
    raise AssertionError("no draw was fit")


@pytest.mark.parametrize("keys", [1, 3])
def test_the_first_fit_candidate_is_returned_for_each_key_of_a_batch(keys):
    batch = jax.random.split(jax.random.key(keys), 16)
    draw = functools.partial(base.draw_until_fit, _draw, keys=keys)
    candidates = jax.jit(jax.vmap(draw))(batch)
    counts = []
    for place, key in enumerate(batch):
        wanted, count = _in_python(key, keys)
        found = jax.tree.map(lambda leaf, place=place: leaf[place], candidates)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        counts.append(count)
    assert min(counts) == 1 and max(counts) > 5  # Some at once, some after many draws.
