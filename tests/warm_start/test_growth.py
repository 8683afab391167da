"""More layers, and what the first ones learn to read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models

from ragen_jax.models import parameters, transformer
from ragen_jax.models.presets import SHAPES
from ragen_jax.warm_start import growth, reading
from ragen_jax.warm_start.batches import Batch
from ragen_jax.warm_start.recipe import LAST_LAYERS

SMALL = models.small_config(40, layers=2)
WEIGHTS = parameters.initialize(jax.random.key(1), parameters.declare(SMALL))


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_deepened_model_computes_what_it_did(last):
    deeper = dataclasses.replace(SMALL, layers=4)
    grown = growth.deepen(WEIGHTS, SMALL, deeper, last)
    shapes = jax.tree.map(lambda leaf: leaf.shape, grown)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, parameters.declare(deeper))
    tokens = jax.random.randint(jax.random.key(2), (3, 9), 0, 40)
    before = transformer.hidden_states(WEIGHTS, tokens, SMALL)
    after = transformer.hidden_states(grown, tokens, deeper)
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    ("change", "can"),
    [
        ({}, True),
        ({"layers": 4}, True),
        ({"layers": 5}, False),
        ({"layers": 1}, False),
        ({"layers": 4, "width": 2 * SMALL.width}, False),
    ],
)
def test_a_model_grows_by_layers_alone_and_to_twice_its_own(change, can):
    assert growth.can_grow(SMALL, dataclasses.replace(SMALL, **change)) is can


@pytest.mark.parametrize(
    ("layers", "last", "can"),
    [(2, 2, True), (3, 2, False), (4, 2, True), (6, 2, True), (7, 2, False)],
)
def test_layers_that_come_last_are_at_most_the_models_own(layers, last, can):
    deeper = dataclasses.replace(SMALL, layers=layers)
    assert growth.can_grow(SMALL, deeper, last) is can


def test_last_layers_look_where_the_models_own_last_layers_look():
    deeper = dataclasses.replace(SMALL, layers=5)
    up = growth.deepen(WEIGHTS, SMALL, deeper, last=2)["layers"]["up"]
    own = WEIGHTS["layers"]["up"]
    np.testing.assert_array_equal(up, own[np.array([0, 0, 1, 0, 1])])


def test_the_embedded_models_grow_from_the_first_one():
    assert growth.can_grow(SHAPES["tiny"], SHAPES["tiny_symbols"])
    assert not growth.can_grow(SHAPES["tiny_symbols"], SHAPES["tiny"])
    last = LAST_LAYERS["tiny_rooms"]
    assert growth.can_grow(SHAPES["tiny"], SHAPES["tiny_rooms"], last)


def test_drawn_embeddings_are_as_long_as_the_others_and_leave_these():
    drawn = growth.draw_embeddings(WEIGHTS, jnp.array([7, 9]), jax.random.key(3))
    old, new = np.asarray(WEIGHTS["embedding"]), np.asarray(drawn["embedding"])
    kept = np.setdiff1d(np.arange(40), [7, 9])
    np.testing.assert_array_equal(old[kept], new[kept])
    mean = np.linalg.norm(old, axis=1).mean()
    np.testing.assert_allclose(np.linalg.norm(new[[7, 9]], axis=1), mean, rtol=1e-5)


def test_splitting_off_first_layers_and_joining_them_changes_nothing():
    first, others = reading.split(WEIGHTS, 1)
    assert first["up"].shape[0] == others["layers"]["up"].shape[0] == 1
    again = reading.join(first, others)
    jax.tree.map(np.testing.assert_array_equal, again, WEIGHTS)


def _blank_first_layer():
    """Layers that change nothing, and an embedding of four tokens at right angles."""
    deeper = dataclasses.replace(SMALL, layers=4)
    grown = growth.deepen(WEIGHTS, SMALL, deeper)
    table = jnp.zeros((40, SMALL.width)).at[jnp.arange(4), jnp.arange(4)].set(1.0)
    first, others = reading.split({**grown, "embedding": table}, 2)
    return first, others, deeper


@pytest.mark.slow
def test_the_loss_of_layers_that_read_nothing_is_that_of_the_embeddings():
    # Rows of length 1 at right angles lie 2 apart, squared, in units of one's square.
    # Tokens that stay cost nothing.
    first, others, config = _blank_first_layer()
    tokens = jnp.array([[1, 2, 1, 2, 3, 0, 0]])
    meant = jnp.array([[3, 3, 1, 3, 2, 0, 0]])  # The opening's two stay as they are.
    blank = jnp.zeros((1, 7), bool)
    batch = Batch(tokens, blank, blank[0], None, meant, jnp.int32(2))
    loss, right = reading.loss(first, batch, others, config)
    assert float(right) == 0.0
    np.testing.assert_allclose(float(loss), 2.0, rtol=1e-6)


def test_a_rare_symbol_weighs_six_of_the_two_most_frequent_ones():
    # Cells mean 1, 1, 2, 2, 3. The last is its own embedding's opposite, 4 in the mean;
    # the others lie 2 away: (4 * 2 + 6 * 4) / (4 + 6).
    first, others, config = _blank_first_layer()
    table = others["embedding"].at[3].set(-others["embedding"][0])
    others = {**others, "embedding": table}
    tokens = jnp.array([[2, 2, 1, 1, 0]])
    meant = jnp.array([[1, 1, 2, 2, 3]])
    blank = jnp.zeros((1, 5), bool)
    batch = Batch(tokens, blank, blank[0], None, meant, jnp.int32(0))
    loss, _ = reading.loss(first, batch, others, config)
    np.testing.assert_allclose(float(loss), 3.2, rtol=1e-6)


def test_cells_that_are_read_rightly_are_counted():
    # Layers that do nothing read a token as itself. 3 is the same direction as 1, and 2
    # is nearer to 0 than to 1: of four cells the third alone is read wrongly.
    first, others, config = _blank_first_layer()
    table = others["embedding"]
    table = table.at[3].set(0.9 * table[1]).at[2].set(table[2] + 0.1 * table[0])
    others = {**others, "embedding": table}
    tokens, meant = jnp.array([[3, 3, 2, 2]]), jnp.array([[1, 1, 1, 0]])
    blank = jnp.zeros((1, 4), bool)
    batch = Batch(tokens, blank, blank[0], None, meant, jnp.int32(0))
    _, right = reading.loss(first, batch, others, config)
    assert float(right) == 0.75


def test_new_tokens_get_embeddings_and_the_others_keep_theirs_at_their_new_ids():
    old, new = {"a": 0, "b": 1, "name": 2}, {"a": 0, "b": 1, " W": 2, "name": 3}
    grown = growth.add_tokens(WEIGHTS, old, new, jax.random.key(4))["embedding"]
    before = WEIGHTS["embedding"]
    np.testing.assert_array_equal(grown[jnp.array([0, 1, 3])], before[:3])
    assert not (grown[2] == before[2]).any()
    np.testing.assert_array_equal(grown[4:], before[4:])
