"""Writes that leave some places out."""

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.utils.scatter import put_where


def test_what_is_not_used_is_written_nowhere_and_never_twice():
    index, is_used = jnp.array([2, 2, 0, 4]), jnp.array([True, False, True, False])
    new = jnp.arange(1, 9.0).reshape(4, 2)
    found = put_where(jnp.zeros((5, 2)), index, new, is_used)
    assert found.tolist() == [[5, 6], [0, 0], [1, 2], [0, 0], [0, 0]]
    jaxpr = str(jax.make_jaxpr(put_where)(jnp.zeros((5, 2)), index, new, is_used))
    assert jaxpr.count("scatter[") == jaxpr.count("unique_indices=True") == 1


def test_places_of_two_axes_are_written_in_a_batch_too():
    rng = np.random.default_rng(0)
    row, column = (
        rng.permuted(np.tile(np.arange(6), (3, 1)), axis=1).reshape(3, 2, 3),
        1,
    )
    new, is_used = rng.normal(size=(3, 2, 3)), rng.random((3, 2, 3)) < 0.5
    column = np.full((3, 2, 3), column)
    found = jax.vmap(put_where)(jnp.zeros((3, 6, 2)), (row, column), new, is_used)
    wanted = np.zeros((3, 6, 2))
    for index in np.argwhere(is_used):
        at = tuple(index)
        wanted[at[0], row[at], column[at]] = new[at]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
