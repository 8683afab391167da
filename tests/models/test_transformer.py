"""The forward pass against plain formulas, and what a position may depend on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models

from ragen_jax.models import parameters as model_parameters
from ragen_jax.models import transformer
from ragen_jax.models.attention import causal_attention

CONFIG = models.small_config(40)


def test_rms_norm_equals_its_formula():
    x = jnp.array([[[3.0, 4.0], [0.0, 0.0]]])
    # The mean square of (3, 4) is 12.5; with epsilon 12.5 the root is 5.
    found = transformer.rms_norm(x, jnp.array([1.0, 10.0]), 12.5)
    np.testing.assert_allclose(found, [[[0.6, 8.0], [0.0, 0.0]]], rtol=1e-6)


def test_rms_norm_squares_in_float32():
    x = jnp.full((1, 1, 2), 1e4, jnp.float16)  # Its square is no float16.
    found = transformer.rms_norm(x, jnp.ones(2, jnp.float16), 0.0)
    assert found.dtype == jnp.float16
    np.testing.assert_array_equal(found, 1)


def test_rotation_pairs_the_halves_of_a_head():
    # Position 2, base 100, four features: angles 2 and 2 / 10.
    x = jnp.array([1.0, 10.0, 2.0, 20.0]).reshape(1, 1, 1, 4)
    found = transformer.rotate(x, jnp.array([[2]]), 100.0)[0, 0, 0]
    first = [np.cos(2) - 2 * np.sin(2), 2 * np.cos(2) + np.sin(2)]
    second = [10 * np.cos(0.2) - 20 * np.sin(0.2), 20 * np.cos(0.2) + 10 * np.sin(0.2)]
    wanted = [first[0], second[0], first[1], second[1]]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_products_of_rotated_vectors_depend_on_distance_alone():
    rng = np.random.default_rng(0)
    query, key = jnp.asarray(rng.normal(size=(2, 1, 1, 1, 8)), jnp.float32)

    def product(at, other):
        turned = transformer.rotate(query, jnp.array([[at]]), 1e4)
        return (turned * transformer.rotate(key, jnp.array([[other]]), 1e4)).sum()

    np.testing.assert_allclose(product(9, 4), product(25, 20), rtol=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-3


def test_rotation_separates_neighbours_in_bfloat16():
    x = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    found = transformer.rotate(x, jnp.array([[256, 257]]), 1e4)
    assert found.dtype == jnp.bfloat16
    assert (found[0, 0] != found[0, 1]).any()


def test_a_position_sees_itself_and_what_stands_before_it():
    weights = models.random_parameters(CONFIG)
    tokens = np.random.default_rng(1).integers(0, 40, (2, 90))
    changed = tokens.copy()
    changed[:, 70] = (tokens[:, 70] + 1) % 40
    states = jax.jit(lambda x: transformer.hidden_states(weights, x, CONFIG))
    one, other = states(tokens), states(changed)
    np.testing.assert_array_equal(one[:, :70], other[:, :70])
    assert (jnp.abs(one - other).max(axis=(0, 2))[70:] > 1e-3).all()


def test_rows_do_not_see_each_other():
    weights = models.random_parameters(CONFIG)
    tokens = np.random.default_rng(1).integers(0, 40, (3, 20))
    states = jax.jit(lambda x: transformer.hidden_states(weights, x, CONFIG))
    turned = states(tokens[[2, 0, 1]])
    np.testing.assert_allclose(states(tokens)[jnp.array([2, 0, 1])], turned, atol=1e-5)


def test_partial_results_are_combined_before_they_are_added():
    """As if the matrices that write the results were two and three times as large."""
    layer = jax.tree.map(lambda x: x[0], models.random_parameters(CONFIG)["layers"])
    larger = layer | dict(output=2 * layer["output"], down=3 * layer["down"])
    x = jnp.asarray(np.random.default_rng(3).normal(size=(1, 3, 32)), jnp.float32)

    @jax.jit
    def states(layer, heads, mlp):
        places, attend = jnp.arange(3)[None], lambda *qkv: (causal_attention(*qkv), 0)
        combine = lambda y: heads * y, lambda y: mlp * y
        return transformer.block(layer, x, places, CONFIG, attend, *combine)[0]

    one, other = states(layer, 2.0, 3.0), states(larger, 1.0, 1.0)
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_rows_behind_a_prefix_have_the_states_of_whole_rows():
    weights = models.random_parameters(CONFIG)
    tokens = np.random.default_rng(1).integers(0, 40, (2, 9))
    tokens[1, :4] = tokens[0, :4]

    @jax.jit
    def both(tokens):
        prefix = transformer.prefix_keys_and_values(weights, tokens[0, :4], CONFIG)
        behind = tokens[:, 4:]
        return (
            transformer.hidden_states(weights, behind, CONFIG, prefix=prefix),
            transformer.hidden_states(weights, tokens, CONFIG)[:, 4:],
        )

    np.testing.assert_allclose(*both(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_recomputing_layers_leaves_gradients_as_they_are():
    weights = models.random_parameters(CONFIG)
    tokens = np.random.default_rng(2).integers(0, 40, (2, 9))

    def loss(weights, remat):
        states = transformer.hidden_states(
            weights, tokens, CONFIG, transformer.ForwardOptions(remat=remat)
        )
        return jnp.sin(states).sum()

    run = jax.jit(jax.grad(loss), static_argnums=1)
    kept, recomputed = run(weights, False), run(weights, True)
    for one, other in zip(
        jax.tree.leaves(kept), jax.tree.leaves(recomputed), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_gradients_through_rows_of_padding_are_finite():
    weights = models.random_parameters(CONFIG)
    weights["embedding"] = weights["embedding"].at[0].set(0)  # as padding often is
    tokens = jnp.zeros((1, 7), jnp.int32)
    gradient = jax.jit(
        jax.grad(lambda w: transformer.hidden_states(w, tokens, CONFIG).sum())
    )(weights)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradient))


def test_parameters_of_float32_compute_in_the_dtype_asked_for():
    weights = models.random_parameters(CONFIG)
    tokens = np.arange(12).reshape(2, 6)
    options = transformer.ForwardOptions(dtype=jnp.bfloat16)
    states = transformer.hidden_states(weights, tokens, CONFIG, options)
    assert states.dtype == jnp.bfloat16
    logits = transformer.vocabulary_logits(weights, states)
    assert logits.dtype == jnp.float32 and logits.shape == (2, 6, 40)
    exact = transformer.hidden_states(weights, tokens, CONFIG)
    assert 0 < jnp.abs(states.astype(jnp.float32) - exact).mean() < 0.1


def test_the_gradient_of_a_frequent_tokens_embedding_adds_up_in_float32():
    def total(embedding):
        tokens = jnp.zeros((1, 300), jnp.int32)
        found = transformer.embed({"embedding": embedding}, tokens, jnp.bfloat16)
        return found.sum(dtype=jnp.float32)

    # A sum in bfloat16 would stop at 256.
    np.testing.assert_array_equal(jax.grad(total)(jnp.ones((1, 1))), 300)


def test_a_tied_model_reads_its_logits_from_the_embedding():
    config = dataclasses.replace(CONFIG, tied=True)
    weights = models.random_parameters(config)
    assert "head" not in weights
    states = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 32)), jnp.float32)
    np.testing.assert_allclose(
        transformer.vocabulary_logits(weights, states),
        states @ weights["embedding"].T,
        atol=1e-5,
    )


def test_the_value_of_a_token_is_read_from_the_position_before_it():
    states = jnp.arange(12.0).reshape(1, 6, 2)  # (0, 1), (2, 3), ...
    found = transformer.token_values({"value_head": jnp.array([1.0, 10.0])}, states)
    np.testing.assert_array_equal(found, [[0, 10, 32, 54, 76, 98]])
    assert found.dtype == jnp.float32


def test_each_layer_has_its_own_parameters():
    weights = models.random_parameters(CONFIG)
    tokens = np.arange(5)[None]
    swapped = dict(weights)
    swapped["layers"] = jax.tree.map(lambda x: x[::-1], weights["layers"])
    one = transformer.hidden_states(weights, tokens, CONFIG)
    assert jnp.abs(one - transformer.hidden_states(swapped, tokens, CONFIG)).max() > 0.1
    assert model_parameters.count(weights) == model_parameters.count(swapped)
