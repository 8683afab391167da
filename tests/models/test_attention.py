"""Every way of computing attention is the plain formula, forward and backward."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.models import attention
from ragen_jax.models.row_attention import row_attention
from ragen_jax.parallel import backend_choices

PATHS = {
    "on CPU": attention.causal_attention,
    "elsewhere": attention.blocked_attention,
    "fused": functools.partial(attention.fused_attention, implementation="xla"),
}


def _plain_attention(query, key, value):
    """softmax(q k / sqrt(d)) v over all T x T pairs, a key head for each query head."""
    rows, length, heads, dim = query.shape
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("rthd,rshd->rhts", query, key) / np.sqrt(dim)
    seen = np.tril(np.ones((length, length), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("rhts,rshd->rthd", weights, value)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "length",  # Blocks of 64 and 128.
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(5, marks=pytest.mark.slow),
        pytest.param(64, marks=pytest.mark.slow),
        150,
    ],
)
def test_attention_equals_a_plain_softmax_and_so_do_its_gradients(path, length):
    assert backend_choices.choices().query_block == 64
    rng = np.random.default_rng(length)
    query, key, value, weight = (
        jnp.asarray(rng.normal(size=(3, length, heads, 8)), jnp.float32)
        for heads in (4, 2, 2, 4)
    )

    def weighted(attend):
        return lambda q, k, v: (weight * attend(q, k, v)).sum()

    def both(attend):
        gradient = jax.grad(weighted(attend), argnums=(0, 1, 2))
        return attend(query, key, value), *gradient(query, key, value)

    found = jax.jit(lambda: both(PATHS[path]))()
    with jax.enable_x64(True):  # The formula has no rounding of its own.
        query, key, value, weight = (
            jnp.asarray(np.float64(x)) for x in (query, key, value, weight)
        )
        wanted = both(_plain_attention)
    for one, other in zip(found, wanted, strict=True):
        assert other.dtype == np.float64
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_wider_blocks_of_queries_attend_to_the_same(monkeypatch):
    rng = np.random.default_rng(3)
    qkv = [
        jnp.asarray(rng.normal(size=(1, 300, heads, 8)), jnp.float32)
        for heads in (4, 2, 2)
    ]
    found = {}
    for width in (64, 256):
        chosen = dataclasses.replace(backend_choices.choices(), query_block=width)
        monkeypatch.setattr(backend_choices, "choices", lambda chosen=chosen: chosen)
        found[width] = jax.jit(lambda *x: attention.blocked_attention(*x))(*qkv)
    np.testing.assert_allclose(found[64], found[256], atol=1e-6)
    np.testing.assert_allclose(found[256], _plain_attention(*qkv), atol=2e-6)


@pytest.mark.parametrize("path", PATHS)
def test_tokens_behind_a_prefix_see_all_of_it(path):
    rng = np.random.default_rng(7)
    query, key, value = (
        jnp.asarray(rng.normal(size=(2, 80, heads, 8)), jnp.float32)
        for heads in (4, 2, 2)
    )
    wanted = _plain_attention(query, key, value)[:, 9:]
    found = jax.jit(PATHS[path])(query[:, 9:], key, value)
    np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize(("ahead", "length"), [(0, 448), (171, 640), (0, 128)])
def test_cudnn_is_given_full_tiles_only(monkeypatch, ahead, length):
    given = []

    def attend(query, key, value, **options):
        given.extend(x.shape[1] for x in (query, key, value))
        return jnp.zeros_like(query)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    query = jnp.zeros((1, length, 4, 8), jnp.bfloat16)
    key = jnp.zeros((1, ahead + length, 2, 8), jnp.bfloat16)
    found = attention.fused_attention(query, key, key, "cudnn")
    assert found.shape == query.shape
    assert given == [-(-(ahead + length) // 128) * 128] * 3


def test_cudnn_is_asked_for_where_it_has_a_kernel(monkeypatch):
    """By its own rules: half precision, heads of 8n up to 128, Ampere or later."""

    def device(platform="gpu", version="cuda 13000", capability="9.0"):
        client = types.SimpleNamespace(platform_version=version)
        made = dict(platform=platform, client=client, compute_capability=capability)
        return types.SimpleNamespace(**made)

    def fused(dtype=jnp.bfloat16, head_dim=64, **given) -> bool:
        monkeypatch.setattr(jax, "local_devices", lambda: [device(**given)])
        return backend_choices.has_cudnn_attention(jnp.dtype(dtype), head_dim)

    assert fused() and fused(jnp.float16) and fused(head_dim=128)
    assert fused(capability="12.0") and fused(capability="8.0")
    assert not fused(jnp.float32)
    assert not fused(head_dim=12) and not fused(head_dim=136)
    assert not fused(capability="7.5")
    assert not fused(version="rocm 6", capability="gfx90a")
    assert not fused(platform="tpu")


@pytest.mark.parametrize("path", PATHS)
def test_attention_in_bfloat16_takes_its_softmax_in_float32(path):
    # 300 equal scores: each weight is 1/300, and a bfloat16 sum would stop at 256.
    ones = jnp.ones((1, 300, 2, 8), jnp.bfloat16)
    mixed = jax.jit(PATHS[path])(ones, ones, ones)
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(mixed, np.float32), 1, atol=0.01)


def test_a_gradient_in_bfloat16_cancels_in_float32():
    """All values are alike, so that no query matters: 257 - 257, which is no bfloat16.

    A sum of 256 would leave 1.
    """
    ones = jnp.ones((1, 3, 2, 8), jnp.bfloat16)
    upstream = jnp.zeros_like(ones).at[..., 0].set(256).at[..., 1].set(1)
    _, back = jax.vjp(lambda query: row_attention(query, ones, ones), ones)
    np.testing.assert_array_equal(back(upstream)[0].astype(jnp.float32), 0)
