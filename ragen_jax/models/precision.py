"""Mixed precision: products in the computation's dtype, their gradients in float32.

Master weights are float32. If a weight were cast to bfloat16 before its product, its
gradient would be bfloat16: rounded in each microbatch and in each sum over devices.
Here the gradient leaves the product as float32, in which matrix units accumulate
anyway.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct

# Weights of a sampler in 8 bits, and the largest number that each kind holds.
EIGHT_BITS = {"int8": (jnp.int8, 127.0), "float8": (jnp.float8_e4m3fn, 448.0)}


@struct.dataclass
class Quantized:
    """A weight in 8 bits with one factor an output feature. It has no gradient."""

    values: jax.Array  # int8 or float8_e4m3fn, of the weight's shape
    scale: jax.Array  # float32, of its last axes: those that a product keeps


def quantize(weight: jax.Array, kind: str, summed: int = 1) -> Quantized:
    """The weight in 8 bits, rounded to the nearest, its largest number kept exactly.

    Each output feature has a factor of its own (LLM.int8, arXiv:2208.07339, section
    2.1): a product is taken of the 8 bits, and then multiplied.

    Args:
      weight: float[...].
      kind: one of EIGHT_BITS.
      summed: how many leading axes a product contracts.
    """
    dtype, most = EIGHT_BITS[kind]
    wide = weight.astype(jnp.float32)
    axes = tuple(range(summed))
    scale = jnp.abs(wide).max(axis=axes, keepdims=True) / most
    values = wide / jnp.where(scale > 0, scale, 1)
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.round(values)
    return Quantized(values=values.astype(dtype), scale=scale.squeeze(axes))


def project(
    spec: str, x: jax.Array, weight: jax.Array | Quantized, *, out_dtype=None
) -> jax.Array:
    """`einsum(spec, x, weight)` in x's dtype, with a gradient in the weight's own.

    Args:
      spec: of two operands without an ellipsis; each letter of an operand stands in
        the other or in the result.
      x: float[...], in the computation's dtype.
      weight: float[...], in that dtype or a wider one; cast for the product. Or one
        in 8 bits, which has no gradient.
      out_dtype: of the result; None: x's.

    Returns:
      float[...]. Its gradient by `x` is in x's dtype, that by `weight` in the weight's,
      taken from the product without a rounding to x's dtype.
    """
    out_dtype = x.dtype if out_dtype is None else jnp.dtype(out_dtype)
    if isinstance(weight, Quantized):
        values = weight.values.astype(x.dtype)
        product = jnp.einsum(spec, x, values, preferred_element_type=out_dtype)
        scale = jnp.expand_dims(weight.scale, range(product.ndim - weight.scale.ndim))
        return (product * scale).astype(out_dtype)
    return _project(spec, out_dtype, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _project(spec: str, out_dtype, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, weight.astype(x.dtype), preferred_element_type=out_dtype)


def _project_forward(spec: str, out_dtype, x, weight):
    return _project(spec, out_dtype, x, weight), (x, weight)


def _project_backward(spec: str, out_dtype, residuals, d_out):
    x, weight = residuals
    operands, result = spec.split("->")
    of_x, of_weight = operands.split(",")
    d_out = d_out.astype(x.dtype)  # A product of mixed dtypes would be slow.
    d_x = jnp.einsum(f"{result},{of_weight}->{of_x}", d_out, weight.astype(x.dtype))
    pair = [(of_x, x), (result, d_out)]
    if weight.dtype == x.dtype and d_out.size < x.size:
        # A CPU transposes the first operand: with the narrower one there it takes a
        # third of the time in the MLP.
        pair.reverse()
    (first, left), (second, right) = pair
    d_weight = jnp.einsum(
        f"{first},{second}->{of_weight}",
        left,
        right,
        preferred_element_type=jnp.promote_types(weight.dtype, jnp.float32),
    )
    return d_x, d_weight.astype(weight.dtype)


_project.defvjp(_project_forward, _project_backward)


def scale(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x * weight along x's last axes, rounded as in x's dtype; see `add_bias`."""
    return _wide(x, weight, jnp.multiply)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x + bias along x's last axes, rounded as if the bias had x's dtype.

    The gradient by the bias is added up over the other axes in the bias's own dtype.
    """
    return _wide(x, bias, jnp.add)


def _wide(x: jax.Array, weight: jax.Array, operation) -> jax.Array:
    weight = jnp.expand_dims(weight, range(x.ndim - weight.ndim))
    if weight.dtype == x.dtype:
        return operation(x, weight)
    # A float32 operation on two bfloat16 numbers, rounded once, equals the bfloat16
    # one.
    rounded = _round(x.dtype, weight)
    return operation(x.astype(weight.dtype), rounded).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _round(dtype, x: jax.Array) -> jax.Array:
    """x as `dtype` holds it, in its own dtype; the gradient passes unrounded."""
    return x.astype(dtype).astype(x.dtype)


@_round.defjvp
def _round_derivative(dtype, primals, tangents):
    return _round(dtype, *primals), tangents[0]
