"""Parameters: declared once, and what follows from the declaration."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models

from ragen_jax.models import parameters, presets
from ragen_jax.models.io import hugging_face
from ragen_jax.parallel import mesh as meshes

CONFIG = models.small_config(40)


def _initialize(declared, seed):
    return jax.jit(lambda key: parameters.initialize(key, declared))(
        jax.random.key(seed)
    )


def _leaves(declared):
    return jax.tree.leaves(declared, is_leaf=parameters.is_leaf)


def test_the_number_of_parameters_equals_the_sum_worked_out_by_hand():
    # Width 32, 4 heads and 2 key heads of 8, MLP 48, vocabulary 40, two layers.
    attention = 32 * 32 + 32 + 2 * (32 * 16 + 16) + 32 * 32
    layer = attention + 3 * 32 * 48 + 2 * 32
    whole = 40 * 32 + 2 * layer + 32 + 32 * 40
    assert parameters.count(parameters.declare(CONFIG)) == whole
    tied = dataclasses.replace(CONFIG, tied=True)
    assert parameters.count(parameters.declare(tied)) == whole - 32 * 40
    critic = parameters.declare(CONFIG, value_head=True)
    assert parameters.count(critic) == whole - 32 * 40 + 32


def test_counting_does_not_overflow():
    declared = {"one": parameters.Leaf((48, 5120, 13824), (None,) * 3, 0.02)}
    assert parameters.count(declared) == 48 * 5120 * 13824 > 2**31


def test_the_embedded_model_has_about_a_million_parameters():
    count = parameters.count(parameters.declare(presets.TINY))
    assert 0.9e6 < count < 1.3e6
    assert presets.TINY.heads % presets.TINY.kv_heads == 0


@pytest.mark.parametrize("value_head", [False, True])
def test_declaration_shapes_and_arrays_agree(value_head):
    declared = parameters.declare(CONFIG, value_head=value_head)
    drawn = jax.eval_shape(
        lambda key: parameters.initialize(key, declared, jnp.bfloat16),
        jax.random.key(0),
    )
    shapes = parameters.shapes(declared, jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), drawn) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    assert parameters.count(drawn) == parameters.count(shapes)
    for leaf in _leaves(declared):
        assert len(leaf.axes) == len(leaf.shape)


def test_initial_values_have_the_declared_scales_and_are_independent():
    declared = parameters.declare(CONFIG)
    drawn = jax.device_get(_initialize(declared, seed=0))
    for leaf, array in zip(_leaves(declared), jax.tree.leaves(drawn), strict=True):
        if leaf.scale == 0:
            np.testing.assert_array_equal(array, leaf.mean)
        else:
            error = leaf.scale / math.sqrt(2 * array.size)  # of a sample's std
            assert abs(array.std() - leaf.scale) < 5 * error
            assert leaf.mean == 0
    layers = drawn["layers"]
    same_shape = np.corrcoef(layers["gate"].ravel(), layers["up"].ravel())[0, 1]
    across_layers = np.corrcoef(layers["gate"][0].ravel(), layers["gate"][1].ravel())
    assert abs(same_shape) < 0.1 and abs(across_layers[0, 1]) < 0.1


def test_residual_outputs_start_smaller_the_deeper_the_model():
    deep = parameters.declare(dataclasses.replace(CONFIG, layers=8))["layers"]
    assert deep["output"].scale == deep["down"].scale == pytest.approx(0.02 / 4)


def test_the_same_key_gives_the_same_parameters():
    declared = {"one": parameters.Leaf((9, 50), (None, None), 0.02)}
    one, same, other = (_initialize(declared, seed)["one"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).mean() > 0.9


def test_a_critic_knows_nothing_at_first():
    declared = parameters.declare(CONFIG, value_head=True)
    assert "head" not in declared
    head = {"value_head": declared["value_head"]}
    np.testing.assert_array_equal(_initialize(head, seed=0)["value_head"], 0)


def test_every_leaf_has_one_place_in_a_file_and_known_logical_axes():
    declared = parameters.declare(CONFIG)
    names = hugging_face.tensor_names(declared, CONFIG)
    assert len(set(names.values())) == len(names)
    # Layers are stored one by one: L tensors a stacked leaf.
    assert len(names) == 3 + 2 * len(declared["layers"])
    known = set(meshes._TRAINING) | {"layers", None}
    assert {axis for leaf in _leaves(declared) for axis in leaf.axes} <= known
