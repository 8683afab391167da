"""The counts that a state carries, where episodes are used once and several times."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import updates

from ragen_jax.learning import train_state
from ragen_jax.learning.train_state import UpdateCounts
from ragen_jax.settings import limits


def counts_after(reuse: int, *iterations) -> dict[str, int]:
    """Counters after iterations of so many uses, each (attempted, real, bad)."""
    chosen = updates.settings(optimizer__reuse=reuse)
    state = train_state.new_state({}, {}, chosen)
    for uses in iterations:
        made = [UpdateCounts(*map(np.int32, one)) for one in uses]
        for use, one in enumerate(made):
            given = train_state.update_arguments(chosen, made[:use])
            state = train_state.update_counters(chosen, state, state, one, given)
    return updates.counters(state)


GOOD, BAD, EMPTY = (2, 2, 0), (2, 1, 1), (0, 0, 0)


def test_each_use_of_the_episodes_counts_its_updates_and_all_of_them_one_iteration():
    found = counts_after(3, [GOOD, BAD, GOOD], [GOOD, GOOD, GOOD])
    assert found == dict(
        iteration=2,
        updates=11,
        bad_in_row=0,
        empty_in_row=0,
        skipped_bad=1,
        skipped_empty=0,
    )


@pytest.mark.parametrize("first", [BAD, GOOD])
def test_one_bad_use_makes_a_bad_iteration_whichever_use_it_is(first):
    last = GOOD if first == BAD else BAD
    assert counts_after(2, [first, last])["bad_in_row"] == 1
    assert counts_after(2, [first, last], [last, first])["bad_in_row"] == 2
    assert counts_after(2, [BAD, BAD], [BAD, BAD])["bad_in_row"] == 2
    assert counts_after(2, [BAD, BAD], [GOOD, GOOD])["bad_in_row"] == 0


def test_an_iteration_without_a_kept_group_is_empty_once_however_often_it_is_used():
    found = counts_after(3, [EMPTY] * 3, [EMPTY] * 3)
    assert (found["empty_in_row"], found["skipped_empty"]) == (2, 2)
    assert found["iteration"] == 2
    assert counts_after(3, [EMPTY] * 3, [GOOD] * 3)["empty_in_row"] == 0


def test_used_once_every_update_is_an_iteration():
    found = counts_after(1, [BAD], [EMPTY], [EMPTY])
    assert (found["bad_in_row"], found["empty_in_row"], found["iteration"]) == (0, 2, 3)


def test_the_critic_has_a_rate_and_a_schedule_of_its_own():
    """Adam moves by the rate where gradients stay as they are."""
    chosen = updates.settings(
        optimizer__critic_lr=0.5,
        optimizer__critic_schedule="linear",
        optimizer__schedule_updates=2,
        optimizer__weight_decay=0.0,
    )
    tree, moved = {"w": jnp.ones(1)}, {}
    for name in ("actor", "critic"):
        optimizer = getattr(train_state, f"{name}_optimizer")(chosen)
        state, moved[name] = optimizer.init(tree), []
        for _ in range(3):
            change, state = optimizer.update(tree, state, tree)
            moved[name].append(float(change["w"][0]))
    np.testing.assert_allclose(moved["critic"], [-0.5, -0.25, 0], rtol=1e-4)
    np.testing.assert_allclose(moved["actor"], [-1e-3] * 3, rtol=1e-4)


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_a_step_is_finite_for_the_largest_moments_that_are_allowed(name):
    largest = {f"optimizer__{name}": limits.LARGEST_BELOW_ONE}
    optimizer = train_state.actor_optimizer(updates.settings(**largest))
    tree = {"w": jnp.array([1.0, -2.0, 0.0])}
    change, _ = optimizer.update(tree, optimizer.init(tree), tree)
    assert jnp.isfinite(change["w"]).all()
    assert (jnp.sign(change["w"][:2]) == -jnp.sign(tree["w"][:2])).all()
