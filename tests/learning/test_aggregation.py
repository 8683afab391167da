"""Means as (sum, count), against numbers worked out by hand and a slow reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.learning import aggregation

VALUES = jnp.array([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
MASK = jnp.array([[True, True, False], [True, False, False], [False, False, False]])
# A row holds at most 4 reply tokens, by which one of the means is divided.
NORM = "sequence_mean_token_sum_norm"
MEANS = aggregation.AGGREGATIONS | {
    NORM: functools.partial(aggregation.AGGREGATIONS[NORM], most_tokens=4)
}
NAMES = sorted(MEANS)
# token: (1 + 2 + 4) / 3; row means 1.5 and 4; row sums 3 and 4; row 2 has no token.
BY_HAND = {
    "token_mean": (7.0, 3.0),
    "sequence_mean_token_mean": (5.5, 2.0),
    "sequence_mean_token_sum": (7.0, 2.0),
    NORM: (7.0, 8.0),
}
# The same with weights 2 and 0.5 for the first two rows.
BY_HAND_WEIGHTED = {
    "token_mean": (8.0, 4.5),
    "sequence_mean_token_mean": (5.0, 2.5),
    "sequence_mean_token_sum": (8.0, 2.5),
    NORM: (8.0, 10.0),
}


def test_every_aggregation_is_in_the_table_once():
    assert set(aggregation.AGGREGATIONS) == set(BY_HAND)


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_numbers_worked_out_by_hand(name):
    aggregate = jax.jit(MEANS[name])
    _assert_mean(aggregate(VALUES, MASK), BY_HAND[name])
    weight = jnp.array([2.0, 0.5, 1.0])
    _assert_mean(aggregate(VALUES, MASK, weight), BY_HAND_WEIGHTED[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_weight_zero_might_as_well_not_be_there(name):
    aggregate = MEANS[name]
    whole = aggregate(VALUES, jnp.ones_like(MASK), jnp.array([1.0, 0.0, 1.0]))
    part = aggregate(VALUES[::2], jnp.ones_like(MASK[::2]))
    np.testing.assert_array_equal(whole.sum, part.sum)
    np.testing.assert_array_equal(whole.count, part.count)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_that_is_not_counted_reaches_neither_mean_nor_gradient(name):
    weight = jnp.array([1.0, 1.0, 0.0])
    mask = jnp.array([[True, True, False], [True, False, False], [True, True, True]])
    poisoned = jnp.where(mask & (weight > 0)[:, None], VALUES, jnp.nan)

    def mean(values):
        return MEANS[name](values, mask, weight).value()

    value, gradient = jax.value_and_grad(mean)(poisoned)
    total, count = BY_HAND[name]
    np.testing.assert_allclose(value, total / count, rtol=1e-6)
    assert np.isfinite(gradient).all()
    counted = np.asarray(mask & (weight > 0)[:, None])
    np.testing.assert_array_equal(np.asarray(gradient) != 0, counted)


@pytest.mark.parametrize("name", NAMES)
def test_parts_add_up_to_the_whole(name):
    values, mask, weight = _random(seed=1)
    aggregate = MEANS[name]
    whole = aggregate(values, mask, weight)
    parts = aggregate(values[:2], mask[:2], weight[:2]) + aggregate(
        values[2:], mask[2:], weight[2:]
    )
    np.testing.assert_allclose(parts.value(), whole.value(), rtol=1e-6)
    np.testing.assert_allclose(parts.count, whole.count, rtol=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_equals_a_loop_over_tokens(name, seed):
    values, mask, weight = _random(seed)
    total, count = 0.0, 0.0
    for row, is_counted, w in zip(
        np.asarray(values, np.float64), mask, weight, strict=True
    ):
        tokens = [x for x, counts in zip(row, is_counted, strict=True) if counts]
        if not tokens:
            continue
        if name == "token_mean":
            total, count = total + w * sum(tokens), count + w * len(tokens)
        elif name == "sequence_mean_token_mean":
            total, count = total + w * sum(tokens) / len(tokens), count + w
        else:
            total, count = (
                total + w * sum(tokens),
                count + w * (4 if name == NORM else 1),
            )
    _assert_mean(MEANS[name](values, mask, weight), (total, count))


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_of_nothing_is_zero_with_a_zero_gradient(name):
    def mean(values):
        return MEANS[name](values, jnp.zeros_like(MASK)).value()

    value, gradient = jax.value_and_grad(mean)(VALUES)
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros((3, 3)))


def test_low_precision_values_are_summed_in_float32():
    values = jnp.full((1, 1024), 1.0, jnp.bfloat16)
    mean = aggregation.token_mean(values, jnp.ones((1, 1024), bool))
    assert mean.sum.dtype == mean.count.dtype == jnp.float32
    assert mean.sum == 1024


def test_rejects_a_mask_that_is_not_boolean():
    with pytest.raises(AssertionError):
        aggregation.token_mean(VALUES, VALUES)


def _random(seed):
    random = np.random.default_rng(seed)
    values = random.normal(size=(5, 7)).astype(np.float32)
    mask = random.random((5, 7)) < 0.5
    mask[3] = False
    weight = np.array([1.0, 0.0, 0.5, 1.0, 2.0], np.float32)
    return jnp.asarray(values), jnp.asarray(mask), jnp.asarray(weight)


def _assert_mean(mean, expected):
    np.testing.assert_allclose(mean.sum, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mean.count, expected[1], rtol=1e-6)
