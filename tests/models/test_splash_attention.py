"""A TPU's attention, interpreted, is the plain operations', forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.models import splash_attention
from ragen_jax.models.attention import blocked_attention

pytestmark = pytest.mark.slow  # The kernel is interpreted.


def _interpreted(query, key, value):
    return splash_attention.splash_attention(query, key, value, interpret=True)


def _random(length, keys, dim, dtype):
    """Two rows, four query heads, two key heads."""
    rng = np.random.default_rng(length)
    shapes = [(2, length, 4, dim), (2, keys, 2, dim), (2, keys, 2, dim)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def _with_gradients(attend, query, key, value):
    weight = jnp.asarray(np.random.default_rng(0).normal(size=query.shape))

    def total(*x):
        return (weight * attend(*x).astype(jnp.float32)).sum()

    def both(*x):
        return attend(*x), *jax.grad(total, argnums=(0, 1, 2))(*x)

    return jax.jit(both)(query, key, value)


@pytest.mark.parametrize(
    ("length", "keys", "dim"),
    [
        pytest.param(1, 1, 64, id="one token"),
        pytest.param(150, 150, 16, id="padded"),
        pytest.param(70, 230, 128, id="behind a prefix"),
        pytest.param(600, 700, 8, id="several blocks, of different widths"),
    ],
)
def test_the_kernel_and_its_gradients_equal_plain_operations(length, keys, dim):
    arrays = _random(length, keys, dim, jnp.float32)
    found = _with_gradients(_interpreted, *arrays)
    wanted = _with_gradients(blocked_attention, *arrays)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_in_bfloat16_the_kernel_takes_its_softmax_in_float32():
    # 300 equal scores: each weight is 1/300, and a bfloat16 sum would stop at 256.
    ones = jnp.ones((1, 300, 2, 64), jnp.bfloat16)
    mixed = jax.jit(_interpreted)(ones, ones, ones)
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(mixed, np.float32), 1, atol=0.01)


@pytest.mark.parametrize(
    ("length", "block", "padded"),
    [(1, 128, 128), (129, 256, 256), (512, 512, 512), (600, 384, 768)],
)
def test_blocks_are_whole_tiles_of_at_most_512_tokens(length, block, padded):
    found = splash_attention._block(length)
    assert found == block
    x = splash_attention._heads_first(jnp.ones((1, length, 2, 8)), found)
    assert x.shape == (1, 2, padded, 8)
    assert x.sum() == length * 16  # Zeros behind.
