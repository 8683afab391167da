"""Groups whose episodes earned the same, by way of other turns: no advantage at all."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import updates
from helpers.records import episodes_of, rows_of

from ragen_jax.learning import advantages, shaping
from ragen_jax.learning.estimators import ESTIMATORS, Evidence
from ragen_jax.learning.groups import Grouping, group_statistics

GROUPS, MEMBERS, TURNS = 4, 8, 4


def same_returns_in_each_group():
    """Episodes of 10.2, 10.3, 10.4 and 10.2 in all, each cut into turns at random."""
    rng, rewards = np.random.default_rng(0), []
    for total in (10.2, 10.3, 10.4, 10.2):
        early = -rng.integers(1, 6, (MEMBERS, TURNS - 1)) / 10
        last = total - early.sum(axis=1, keepdims=True)
        rewards += np.round(np.concatenate([early, last], axis=1), 1).tolist()
    return episodes_of(rewards, group=np.repeat(np.arange(GROUPS), MEMBERS).tolist())


def evidence(**changes):
    """(settings, Evidence) of those episodes, a reply of two tokens a turn."""
    chosen = updates.settings(
        rollout__prompts=GROUPS,
        rollout__group_size=MEMBERS,
        rollout__turns=TURNS,
        rollout__reply_tokens=2,
        filter__strategy="none",
        **changes,
    )
    episodes = same_returns_in_each_group()
    count = GROUPS * MEMBERS
    rows = rows_of(*["orR" * TURNS] * count, episode=list(range(count)))
    paid = shaping.turn_rewards(chosen.reward, episodes, GROUPS)
    zeros = jnp.zeros(rows.tokens.shape)
    return chosen, Evidence(rows, episodes, jnp.ones(count, bool), paid, zeros, zeros)


NORMALIZED = [
    dict(reward__normalize=method, reward__normalize_by=by)
    for method in ("mean", "mean_std", "asym_clip")
    for by in ("state", "batch", "environment")
]


@pytest.mark.parametrize(
    "changes", [{}, *NORMALIZED], ids=lambda x: "-".join(x.values())
)
@pytest.mark.parametrize("name", ["grpo", "rloo", "turn_grpo"])
def test_what_normalizing_rounds_is_no_advantage(name, changes):
    """Rewards of 11 over a std of 0.08 are 130, and add up to 1.4 but for 1e-5."""
    chosen, given = evidence(estimator=name, **changes)
    found = np.asarray(ESTIMATORS[name](chosen, given).advantages)
    # Of later turns the returns-to-go differ.
    first_turn = np.asarray(given.rows.turn == 0)
    np.testing.assert_array_equal(found[first_turn], 0)
    assert name != "turn_grpo" or found.any()


@pytest.mark.parametrize("reward", [0.0, 40.0])
def test_whitening_finds_nothing_in_what_equal_returns_differ_by_in_rounding(reward):
    chosen, given = evidence(estimator="reinforce_pp_baseline")
    assert chosen.advantage.whiten
    given = given.replace(turn_rewards=given.turn_rewards.at[:, 1].add(reward))
    gains = ESTIMATORS["reinforce_pp_baseline"](chosen, given).advantages
    rows = given.rows
    found = advantages.whiten(gains, rows.is_reply, jnp.ones(len(rows.tokens)))
    np.testing.assert_array_equal(found, 0)


def test_rounding_is_judged_by_the_terms_of_a_sum_that_cancel():
    values, terms = jnp.array([0.0, 3e-5, 1e-5]), jnp.array([0.0, 200.0, 100.0])
    grouping = Grouping(jnp.zeros(3, jnp.int32), 1)
    assert group_statistics(values, grouping).std[0] > 0
    assert group_statistics(values, grouping, terms).std[0] == 0
    assert group_statistics(values, grouping, terms / 100).std[0] > 0
    # The second is no member: its terms say nothing of the others' rounding.
    grouping = grouping.replace(members=jnp.array([True, False, True]))
    terms = jnp.array([1.0, 200.0, 1.0])
    assert group_statistics(values, grouping, terms).std[0] > 0
