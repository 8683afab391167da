"""Mixed precision: products in the computation's dtype, their gradients in float32.

Master weights are float32. Cast to bfloat16 first, a weight's gradient would come out
of its product in bfloat16, and would be rounded so for each microbatch and added up so
across devices. Here it leaves the product as float32, the precision in which the matrix
units add up anyway.
"""

import functools

import jax
import jax.numpy as jnp


def project(spec: str, x: jax.Array, weight: jax.Array, *, out_dtype=None) -> jax.Array:
    """`einsum(spec, x, weight)` in x's dtype, with a gradient in the weight's own.

    Args:
      spec: of two operands without an ellipsis; each letter of an operand stands in
        the other or in the result.
      x: float[...], in the computation's dtype.
      weight: float[...], in that dtype or a wider one; cast for the product.
      out_dtype: of the result; None: x's.

    Returns:
      float[...]. Its gradient by `x` is in x's dtype, that by `weight` in the weight's,
      taken from the product without a rounding to x's dtype.
    """
    out_dtype = x.dtype if out_dtype is None else jnp.dtype(out_dtype)
    return _project(spec, out_dtype, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _project(spec: str, out_dtype, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, weight.astype(x.dtype), preferred_element_type=out_dtype)


def _project_forward(spec: str, out_dtype, x, weight):
    return _project(spec, out_dtype, x, weight), (x, weight)


def _project_backward(spec: str, out_dtype, kept, gradient):
    x, weight = kept
    operands, result = spec.split("->")
    of_x, of_weight = operands.split(",")
    gradient = gradient.astype(x.dtype)  # A product of two dtypes would be a slow one.
    by_x = jnp.einsum(f"{result},{of_weight}->{of_x}", gradient, weight.astype(x.dtype))
    pair = [(of_x, x), (result, gradient)]
    if weight.dtype == x.dtype and gradient.size < x.size:
        # A CPU turns the first operand over: the narrower one takes a third of the
        # time in the MLP.
        pair.reverse()
    (first, left), (second, right) = pair
    by_weight = jnp.einsum(
        f"{first},{second}->{of_weight}",
        left,
        right,
        preferred_element_type=jnp.promote_types(weight.dtype, jnp.float32),
    )
    return by_x, by_weight.astype(weight.dtype)


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
    # One operation on two bfloat16 numbers, rounded once, is the bfloat16 operation.
    rounded = _round(x.dtype, weight)
    return operation(x.astype(weight.dtype), rounded).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _round(dtype, x: jax.Array) -> jax.Array:
    """x as `dtype` holds it, in its own dtype; the gradient passes unrounded."""
    return x.astype(dtype).astype(x.dtype)


@_round.defjvp
def _round_derivative(dtype, primals, tangents):
    return _round(dtype, *primals), tangents[0]
