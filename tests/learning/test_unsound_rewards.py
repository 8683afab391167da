"""Rewards that are not finite: what a group with one is kept from teaching the rest."""

import functools

import jax
import numpy as np
import pytest
from helpers import models, updates

from ragen_jax import starpo
from ragen_jax.diagnostics.scored_batch import Trained
from ragen_jax.learning.update_plan import UpdatePlan

BONUS = 0.25  # for each turn played, in each of them
HOOK = """
import jax.numpy as jnp

def turn_rewards(episodes):
    earned = {bonus} * jnp.broadcast_to(episodes.turns[:, None], episodes.reward.shape)
    return earned.at[jnp.array({spoilt}, int)].set(jnp.nan)
"""


def score(folder, spoilt: list[int], **changes) -> starpo.ScoredRecord:
    """The record by GRPO with whitening, with a hook that is NaN for some episodes."""
    hook = folder / "my_rewards.py"
    hook.write_text(HOOK.format(bonus=BONUS, spoilt=spoilt))
    usual = dict(
        estimator="grpo",
        algorithm="starpo",
        loss__kl=0.0,
        advantage__whiten=True,
        reward__hook=str(hook),
        optimizer__minibatch=16,
    )
    chosen, mesh = updates.settings(**usual | changes), models.one_device()
    plan = UpdatePlan(
        chosen,
        updates.CONFIG,
        mesh,
        np.float32,
        updates.shardings(chosen, mesh),
        (updates.LENGTH,),
        prefix=updates.OPENING,
    )
    compute = jax.jit(functools.partial(starpo.score, plan))
    # GRPO without a KL term reads no model to score a batch.
    state = Trained({}, {}, np.int32(0))
    return jax.device_get(compute(state, {}, {}, *updates.record()))


def advantages_of(groups: list[int]) -> np.ndarray:
    """float[B], GRPO's in these groups, whitened over their reply tokens; else 0."""
    rows, episodes = jax.device_get(updates.record())
    earned = (
        episodes.reward - 0.1 * ~episodes.is_valid + BONUS * episodes.turns[:, None]
    )
    played = np.arange(updates.TURNS) < episodes.turns[:, None]
    returns = np.where(played, earned, 0).sum(axis=1)
    gains = np.zeros(len(returns))
    for group in groups:
        own = episodes.group == group
        gains[own] = (returns[own] - returns[own].mean()) / returns[own].std(ddof=1)
    by_token = gains[:, None] * np.ones(rows.is_reply.shape)
    counted = by_token[rows.is_reply & np.isin(episodes.group, groups)[:, None]]
    whitened = (gains - counted.mean()) / counted.std()
    return np.where(np.isin(episodes.group, groups), whitened, 0)


@pytest.mark.parametrize("metric", ["return_std", "length", "entropy_std"])
@pytest.mark.parametrize(("spoilt", "kept"), [([], [0, 1, 2, 3]), ([5], [0, 2, 3])])
def test_a_hook_that_is_not_finite_for_an_episode_leaves_out_its_group_alone(
    tmp_path, spoilt, kept, metric
):
    found = score(tmp_path, spoilt, filter__metric=metric)
    assert np.flatnonzero(found.selection.kept_groups).tolist() == kept
    assert found.selection.kept_fraction == len(kept) / 4
    rows, batch = found.kept.rows, found.batch
    assert (batch.weight > 0).sum() == 4 * len(kept)
    expected = advantages_of(kept)[np.maximum(rows.episode.max(axis=1), 0)]
    expected = np.where(rows.is_reply, expected[:, None], 0)
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-4, atol=1e-5)
    assert np.isnan(found.selection.std.mean()) == bool(spoilt)


def test_a_hook_that_is_never_finite_spoils_the_update_instead_of_emptying_it(tmp_path):
    found = score(tmp_path, [0, 5, 10, 15], filter__metric="length")
    assert found.selection.keep.all()
    assert np.isnan(found.batch.advantages[found.kept.rows.is_reply]).all()
