"""Products in bfloat16 whose weights' gradients are float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.models import precision


def _bfloat16(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


def test_a_product_equals_that_of_cast_weights():
    rng = np.random.default_rng(0)
    x, weight = _bfloat16(rng, 3, 5, 8), jnp.asarray(rng.normal(size=(8, 6)), "float32")
    found = precision.project("rtd,df->rtf", x, weight)
    assert found.dtype == jnp.bfloat16
    wanted = jnp.einsum("rtd,df->rtf", x, weight.astype(jnp.bfloat16))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("int8", [[127, -127], [64, 51], [-1, 0]]),
        ("float8", [[448, -448], [224, 176], [-3.5, 0.875]]),
    ],
)
def test_a_weight_in_8_bits_keeps_its_largest_number_and_rounds_the_others(
    kind, expected
):
    weight = jnp.array([[2.54, -1.27], [1.27, 0.508], [-0.02, 0.0025]])
    quantized = precision.quantize(weight, kind)
    most = precision.EIGHT_BITS[kind][1]
    np.testing.assert_allclose(quantized.scale, [2.54 / most, 1.27 / most], rtol=1e-6)
    np.testing.assert_array_equal(quantized.values.astype(jnp.float32), expected)


@pytest.mark.parametrize("kind", precision.EIGHT_BITS)
def test_a_product_in_8_bits_is_that_of_the_rounded_weight(kind):
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((2, 3, 4, 5)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((4, 5, 6)), jnp.float32).at[..., 1].set(0)
    quantized = precision.quantize(weight, kind, summed=2)
    assert quantized.scale.shape == (6,)
    scale = quantized.scale[None, None]
    rounded = quantized.values.astype(jnp.float32) * scale
    # Half a step of int8; 1/16 of a number with three bits behind the first.
    step = scale / 2 if kind == "int8" else jnp.abs(weight) / 15
    assert (jnp.abs(rounded - weight) <= step + 1e-3 * scale).all()
    found = precision.project("rthk,hkd->rtd", x, quantized)
    expected = precision.project("rthk,hkd->rtd", x, rounded)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_weight_are_not_rounded_to_bfloat16():
    rng = np.random.default_rng(1)
    x, upstream = _bfloat16(rng, 40, 50, 8), _bfloat16(rng, 40, 50, 6)
    weight = jnp.asarray(rng.normal(size=(8, 6)), jnp.float32)

    def loss(x, weight):
        mixed = precision.project("rtd,df->rtf", x, weight)
        return (mixed * upstream).sum(dtype=jnp.float32)

    by_x, by_weight = jax.grad(loss, (0, 1))(x, weight)
    assert by_weight.dtype == jnp.float32 and by_x.dtype == jnp.bfloat16
    exact = np.einsum("rtd,rtf->df", np.float64(x), np.float64(upstream))
    np.testing.assert_allclose(by_weight, exact, rtol=1e-4, atol=1e-3)
    rounded = np.float64(by_weight.astype(jnp.bfloat16))
    assert np.abs(rounded - exact).max() > 10 * np.abs(by_weight - exact).max()
    exact = np.einsum("rtf,df->rtd", np.float64(upstream), np.float64(weight))
    np.testing.assert_allclose(np.float64(by_x), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("operation", ["scale", "add_bias"])
def test_a_scale_or_bias_acts_as_if_it_were_bfloat16_and_its_gradient_is_float32(
    operation,
):
    rng = np.random.default_rng(2)
    x, upstream = _bfloat16(rng, 3000, 8), _bfloat16(rng, 3000, 8)
    weight = jnp.asarray(rng.normal(size=8), jnp.float32)
    act = getattr(precision, operation)
    plain = jnp.multiply if operation == "scale" else jnp.add
    wanted = plain(x, weight.astype(jnp.bfloat16)[None])
    np.testing.assert_array_equal(act(x, weight), wanted)

    def loss(weight):
        return (act(x, weight) * upstream).sum(dtype=jnp.float32)

    found = jax.grad(loss)(weight)
    assert found.dtype == jnp.float32
    times = np.float64(x) if operation == "scale" else 1.0
    exact = (np.float64(upstream) * times).sum(0)
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("width", [2, 9])  # narrower and wider than the input
def test_operands_of_one_dtype_have_the_plain_products_gradients(width):
    rng = np.random.default_rng(width)
    x, weight, upstream = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in [(3, 4, 5), (5, width), (3, 4, width)]
    )

    def loss(multiply):
        return lambda x, weight: (upstream * multiply(x, weight)).sum()

    own = functools.partial(precision.project, "rtd,df->rtf")
    found = jax.grad(loss(own), argnums=(0, 1))(x, weight)
    wanted = jax.grad(loss(jnp.matmul), argnums=(0, 1))(x, weight)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
