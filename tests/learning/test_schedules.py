"""Schedules of runs of any length."""

import jax
import jax.numpy as jnp
import pytest
from helpers import updates

from ragen_jax.learning import schedules
from ragen_jax.settings import update_counts


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_rate_that_would_fall_over_more_updates_than_int32_counts_stays(kind):
    chosen = updates.settings(
        iterations=2**31 - 1,
        optimizer__schedule=kind,
        optimizer__minibatch=1,
        optimizer__microbatch=1,
        optimizer__warmup=2,
    )
    assert update_counts.updates_expected(chosen) > 2**31
    rate = jax.jit(schedules.learning_rate(chosen, 1.0))
    found = [float(rate(jnp.int32(update))) for update in (0, 1, 2, 100)]
    assert found == pytest.approx([0.5, 1.0, 1.0, 1.0])


def test_a_fraction_may_move_over_as_many_iterations_as_there_are_numbers_for():
    """One group of four in the first quarter, two in the middle half, then three."""
    chosen = updates.settings(
        iterations=2**31 - 1,
        optimizer__minibatch=updates.GROUP_SIZE,
        optimizer__microbatch=1,
        filter__strategy="top_fraction",
        filter__fraction=0.25,
        filter__fraction_end=0.75,
    )
    groups = update_counts.updates_expected(chosen) / chosen.iterations
    assert groups == pytest.approx(1 / 4 + 2 / 2 + 3 / 4, rel=1e-4)
