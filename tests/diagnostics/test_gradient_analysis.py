"""Gradient norms by bucket against gradients written out plainly."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import models, updates

from ragen_jax.diagnostics import gradient_analysis as analysis
from ragen_jax.diagnostics import scored_batch
from ragen_jax.learning import rewards
from ragen_jax.learning.batch import Batch, ScoredRecord, reply_lengths
from ragen_jax.learning.update_plan import UpdatePlan

CHANGES = dict(
    estimator="grpo",
    algorithm="starpo",
    loss__entropy=0.02,
    loss__kl=0.1,
    loss__kl_kind="k3",
    loss__kl_in="loss",
    advantage__whiten=False,
    optimizer__minibatch=8,
    optimizer__microbatch=4,
)

# GRPO without sampler correction reads no model to score a batch.
NOBODY = scored_batch.Trained({}, {}, np.int32(0))


@functools.cache
def plan(**changes) -> UpdatePlan:
    settings, mesh = updates.settings(**CHANGES | changes), models.one_device()
    return UpdatePlan(
        settings,
        updates.CONFIG,
        mesh,
        jnp.float32,
        updates.shardings(settings, mesh),
        (updates.LENGTH,),
        prefix=updates.OPENING,
    )


@functools.cache
def scored(keep_all: bool = True) -> ScoredRecord:
    rows, episodes = updates.record()
    score = scored_batch.make_scoring(plan(), keep_all=keep_all)
    reference = updates.reference(plan().settings)
    return score(NOBODY, {}, reference, rows, episodes)


def test_where_no_return_is_finite_no_spread_is_told():
    assert analysis._spread_of(np.array([np.nan, np.inf])) == {}
    told = analysis._spread_of(np.array([np.nan, 1.0, 3.0]))
    assert told == dict(reward_std_mean=2.0, reward_std_min=1.0, reward_std_max=3.0)


def test_quantile_buckets_are_of_equal_count_and_the_last_takes_the_rest():
    spread = np.array([5.0, 0, 3, 1, 4, 2, 6, 7, np.nan])
    buckets = analysis.quantile_buckets(spread, 3)
    assert [b.groups.tolist() for b in buckets] == [[1, 3], [5, 2], [4, 0, 6, 7]]
    assert len(analysis.quantile_buckets(spread[:2], 6)) == 2
    assert analysis.quantile_buckets(spread[-1:]) == []


def test_fixed_buckets_hold_their_lower_edge():
    spread = np.array([0.0, 0.99, 1.0, 4.5, 5.0, 80.0, np.nan])
    buckets = analysis.fixed_buckets(spread)
    assert [b.groups.tolist() for b in buckets] == [[0, 1], [2], [], [], [3], [4, 5]]
    assert buckets[-1].name == "spread_5_inf"


def test_a_minibatch_has_its_longest_rows_first_and_is_filled_with_none():
    is_reply = np.array([[0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]], bool)
    numbers = np.arange(12).reshape(3, 4)
    weight = np.array([3.0, 1.0, 2.0])
    batch = Batch(numbers, is_reply, *[numbers] * 5, weight)
    found = jax.device_get(analysis.minibatch_of(batch, np.array([0, 2]), 4))
    assert found.weight.tolist() == [2, 3, 0, 0]
    assert found.tokens[:2].tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert found.is_reply.sum(axis=1).tolist() == [2, 1, 0, 0]


def test_a_minibatch_is_picked_by_one_program():
    """Gathers of their own, array by array, can deadlock over several CPU devices."""
    numbers = np.zeros((3, 4), np.float32)
    batch = Batch(numbers, numbers > 0, *[numbers] * 5, numbers[:, 0])

    def pick(batch):
        return analysis.minibatch_of(batch, np.array([0, 2]), 4)

    assert [str(step.primitive) for step in jax.make_jaxpr(pick)(batch).eqns] == ["jit"]


@pytest.mark.slow
def test_the_scored_batch_holds_what_the_update_learned_from():
    rows, episodes = updates.record()
    found = jax.device_get(scored())
    returns = np.where(
        np.arange(updates.TURNS) < np.asarray(episodes.turns)[:, None],
        np.asarray(episodes.reward) + np.where(episodes.is_valid, 0, -0.1),
        0,
    ).sum(axis=1)
    groups = returns.reshape(updates.PROMPTS, updates.GROUP_SIZE)
    centred = groups - groups.mean(axis=1, keepdims=True)
    std = groups.std(axis=1, ddof=1, keepdims=True)
    wanted = (centred / (std + 1e-6)).reshape(-1)
    episode = found.kept.rows.episode.max(axis=1)
    for row in range(len(episode)):
        mine = found.batch.advantages[row][found.batch.is_reply[row]]
        np.testing.assert_allclose(mine, wanted[episode[row]], rtol=1e-3, atol=1e-4)
    assert sorted(episode.tolist()) == list(range(16))


@jax.jit
def plain_gradient(actor, batch, which):
    """The gradient of one component's mean; which: a one-hot choice of the three."""
    loss = plan().settings.loss

    def component(actor):
        policy = updates.log_policy(actor, batch.tokens, 0.8)
        chosen = jnp.take_along_axis(policy, batch.tokens[..., None], -1)[..., 0]
        ratio = jnp.exp(chosen - batch.old_logprobs)
        clipped = jnp.clip(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
        task = -jnp.minimum(ratio * batch.advantages, clipped * batch.advantages)
        entropy = 0.02 * (jnp.exp(policy) * policy).sum(axis=-1)
        gap = batch.ref_logprobs - chosen
        divergence = 0.1 * (jnp.exp(gap) - 1 - gap)
        values = which[0] * task + which[1] * entropy + which[2] * divergence
        return jnp.where(batch.is_reply, values, 0).sum() / batch.is_reply.sum()

    return optax.tree.norm(jax.grad(component)(actor))


def plain_norms(rows: np.ndarray) -> tuple[list[float], int]:
    """(norms of task, entropy and KL over these rows at once, reply tokens)."""
    batch = jax.tree.map(lambda x: x[rows], scored().batch)
    actor = updates.parameters()[0]
    norms = [float(plain_gradient(actor, batch, which)) for which in jnp.eye(3)]
    return norms, int(batch.is_reply.sum())


@pytest.mark.slow
def test_norms_equal_plain_gradients_and_a_small_bucket_is_not_made_quiet():
    _, episodes = updates.record()
    group = np.asarray(episodes.group)
    buckets = [
        analysis.Bucket("one", np.array([1])),
        analysis.Bucket("none", np.array([], int)),
    ]
    gradients = analysis.make_gradients(plan())
    actor = updates.parameters()[0]
    values = analysis.analyze(plan(), gradients, actor, {}, scored(), group, buckets)
    episode = np.asarray(scored().kept.rows.episode).max(axis=1)
    rows = np.flatnonzero(group[episode] == 1)
    assert len(rows) == 4 < plan().settings.optimizer.minibatch
    norms, tokens = plain_norms(rows)
    for name, norm in zip(analysis.COMPONENTS, norms, strict=True):
        assert norm > 0
        assert values[f"one/{name}"] == pytest.approx(norm, rel=1e-3)
        assert values[f"one/{name}/per_sample"] == pytest.approx(norm / 4, rel=1e-3)
        assert values[f"one/{name}/per_token"] == pytest.approx(norm / tokens, rel=1e-3)
    halves = [plain_norms(own)[0] for own in analysis.minibatches_of(np.arange(16), 8)]
    for index, name in enumerate(analysis.COMPONENTS):
        mean = (halves[0][index] + halves[1][index]) / 2
        assert values[f"all/{name}"] == pytest.approx(mean, rel=1e-3)
    assert values["none/rows"] == 0 and "none/task" not in values
    assert values["one/row_share"] == 0.25


def test_counts_shares_and_losses_of_a_bucket_are_worked_out_by_hand():
    """Rows of weight 0 count nowhere, and a loss is a mean over minibatches."""
    weight = jnp.where(jnp.arange(16) < 12, 1.0, 0.0)
    found = scored()
    found = found.replace(batch=found.batch.replace(weight=weight))
    losses = iter([0.25, 0.5, 1.0])  # Two minibatches of all, one of the bucket.

    def gradients(actor, frozen, batch):
        loss = jnp.full(3, next(losses))
        return analysis.ComponentGradients(jnp.full(3, 6.0), loss, jnp.float32(3.0))

    episode = np.asarray(found.kept.rows.episode).max(axis=1)
    group = np.zeros(len(episode), int)
    group[episode[8:12]] = 1
    buckets = [analysis.Bucket("one", np.array([1]))]
    values = analysis.analyze(plan(), gradients, None, {}, found, group, buckets)
    assert (values["all/rows"], values["all/row_share"]) == (12, 1.0)
    assert (values["one/rows"], values["one/row_share"]) == (4, 4 / 12)
    assert (values["one/groups"], values["one/task/loss"]) == (1, 1.0)
    assert values["all/task/loss"] == (0.25 + 0.5) / 2
    assert values["one/task/per_sample"] == 6.0 / 4
    assert values["one/task/per_token"] == 6.0 / 3


def test_a_bucket_is_cut_evenly_as_the_update_cuts_its_rows():
    cut = analysis.minibatches_of(np.arange(13), 5)
    assert sorted(map(len, cut)) == [4, 4, 5]
    assert sorted(np.concatenate(cut).tolist()) == list(range(13))


@pytest.mark.slow
def test_minibatches_of_a_bucket_are_mixed_as_the_updates_are():
    """Scored rows stand longest first: cut up as they stand, wins and losses part."""
    found = scored()
    is_short = np.arange(16) >= 8
    lengths = np.asarray(reply_lengths(found.batch.is_reply))
    assert lengths[is_short].max() <= lengths[~is_short].min()
    sign = jnp.where(is_short, 1.0, -1.0)  # Whoever is short has won.
    gains = jnp.broadcast_to(sign[:, None], found.batch.advantages.shape)
    found = found.replace(batch=found.batch.replace(advantages=gains))

    def net_gain(actor, frozen, batch):
        """As if each row's gradient were its sign: 1 where all have the same."""
        net = jnp.abs(batch.advantages[:, 0].mean())
        return analysis.ComponentGradients(jnp.full(3, net), jnp.zeros(3), jnp.ones(()))

    group = np.asarray(updates.record()[1].group)
    values = analysis.analyze(plan(), net_gain, None, {}, found, group, [])
    # Eight of sixteen at random: one in 6,435 draws has only one sign.
    assert values["all/task"] < 0.6


@pytest.mark.slow
def test_coefficients_are_those_of_the_checkpoints_iteration():
    """Of 10 iterations the entropy's goes from nothing to 0.02, the KL's to nothing."""
    moving = plan(
        iterations=10, loss__entropy=0.0, loss__entropy_end=0.02, loss__kl_end=0.0
    )
    actor = updates.parameters()[0]
    batch = analysis.minibatch_of(scored().batch, np.arange(8), 8)
    found = [
        analysis.make_gradients(*of)(actor, {}, batch).norm
        for of in ((plan(),), (moving, 0), (moving, 9))
    ]
    (task, entropy, divergence), first, last = np.asarray(found)
    assert entropy > 0 and divergence > 0
    np.testing.assert_allclose(first, [task, np.nan, divergence], rtol=1e-4)
    np.testing.assert_allclose(last, [task, entropy, np.nan], rtol=1e-4)


@pytest.mark.slow
def test_a_group_without_spread_has_no_task_gradient():
    _, episodes = updates.record()
    settings = dataclasses.replace(plan().settings.reward, format_penalty=0.0)
    settings = dataclasses.replace(plan().settings, reward=settings)
    quiet = dataclasses.replace(plan(), settings=settings)
    rows, episodes = updates.record()
    score = scored_batch.make_scoring(quiet, keep_all=True)
    found = score(NOBODY, {}, updates.reference(settings), rows, episodes)
    buckets = [analysis.Bucket("flat", np.array([2]))]
    values = analysis.analyze(
        quiet,
        analysis.make_gradients(quiet),
        updates.parameters()[0],
        {},
        found,
        np.asarray(episodes.group),
        buckets,
    )
    assert values["flat/reward_std_max"] == 0
    assert values["flat/task"] == 0 < values["flat/entropy"]


def plan_of_half() -> UpdatePlan:
    """Of a filter that keeps every other group."""
    half = dict(filter__strategy="top_fraction", filter__fraction=0.5)
    return dataclasses.replace(plan(), settings=updates.settings(**CHANGES | half))


def test_the_batch_of_kept_rows_is_the_updates_own():
    few = plan_of_half()
    rows, episodes = updates.record()
    reference = updates.reference(few.settings)
    found = scored_batch.make_scoring(few, keep_all=False)(
        NOBODY, {}, reference, rows, episodes
    )
    kept = np.asarray(found.kept.rows.episode).max(axis=1)[
        np.asarray(found.batch.weight) > 0
    ]
    assert np.asarray(found.selection.keep).sum() == 8
    assert set(kept) == set(np.flatnonzero(found.selection.keep))


def test_the_spread_that_sorts_buckets_has_the_penalty_where_the_filter_has_it():
    rows, episodes = updates.record()
    spread = {}
    for with_penalty in (False, True):
        changes = CHANGES | dict(filter__with_penalty=with_penalty)
        few = dataclasses.replace(plan(), settings=updates.settings(**changes))
        reference = updates.reference(few.settings)
        score = scored_batch.make_scoring(few, keep_all=True)
        found = score(NOBODY, {}, reference, rows, episodes)
        spread[with_penalty] = found.selection.std
    for with_penalty, penalty in ((False, 0.0), (True, -0.1)):
        by_group = np.asarray(rewards.returns(episodes, penalty)).reshape(4, 4)
        expected = by_group.std(axis=1, ddof=1)
        np.testing.assert_allclose(spread[with_penalty], expected, rtol=1e-5)
    assert np.abs(spread[True] - spread[False]).max() > 0.01
