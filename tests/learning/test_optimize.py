"""The whole loss of the policy on a small model, against finite differences."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import models, records, updates

from ragen_jax.learning import batch as batches
from ragen_jax.learning import forward, gradients, optimize, train_state
from ragen_jax.learning.advantages import Estimate
from ragen_jax.learning.batch import (
    Batch,
    KeptRows,
    OldScores,
    gather_kept_rows,
    make_batch,
    reply_lengths,
)
from ragen_jax.learning.objectives import token_losses
from ragen_jax.learning.token_sums import no_sums
from ragen_jax.learning.update_plan import UpdatePlan, split_into_microbatches
from ragen_jax.learning.vocabulary_scores import TokenScores

# Together every term of the loss whose gradient is that of its value.
CASES = {
    "token means, thoughts' entropy": dict(loss__entropy_on="thought"),
    "row sums, KL, two bounds": dict(
        estimator="grpo",
        loss__kl=0.3,
        loss__kl_kind="k3",
        loss__dual_clip=1.5,
        loss__aggregation="sequence_mean_token_sum_norm",
    ),
    "ratios of rows, corrected for the sampler": dict(
        estimator="grpo",
        loss__ratio="sequence",
        loss__sampler_correction=1.1,
        loss__aggregation="sequence_mean_token_mean",
    ),
}


FIRST = next(iter(CASES))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_the_whole_loss_is_its_slope(case):
    chosen = updates.settings(**CASES[case])
    mesh = models.one_device()
    plan = UpdatePlan(
        chosen,
        updates.CONFIG,
        mesh,
        jnp.float32,
        updates.shardings(chosen, mesh),
        (updates.LENGTH,),
    )
    actor, _ = updates.parameters()
    piece = _batch(case)

    @jax.jit
    def loss(step, direction):
        moved = jax.tree.map(lambda x, d: x + step * d, actor, direction)
        return gradients.actor_loss(
            plan, {}, moved, (), piece, jnp.asarray(True), jnp.int32(0)
        )[0]

    gradient = jax.jit(
        jax.grad(
            lambda x: gradients.actor_loss(
                plan, {}, x, (), piece, jnp.asarray(True), jnp.int32(0)
            )[0]
        )
    )(actor)
    size = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradient)))
    direction = jax.tree.map(lambda g: g / size, gradient)
    step = 2e-3
    slope = (loss(step, direction) - loss(-step, direction)) / (2 * step)
    np.testing.assert_allclose(slope, size, rtol=0.03)


def test_how_far_the_policy_has_moved_is_counted_from_the_one_that_sampled():
    """With a correction the loss counts from scores of the update's own instead."""
    chosen = updates.settings(estimator="grpo", loss__sampler_correction=2.0)
    lengths = (updates.LENGTH,)
    plan = UpdatePlan(chosen, updates.CONFIG, None, jnp.float32, None, lengths)
    state, piece = updates.new_state(chosen), _batch(FIRST)
    rows = updates.record()[0].replace(logprobs=piece.sampler_logprobs)
    kept = KeptRows(rows, piece.weight)

    @functools.partial(jax.jit, compiler_options=updates.QUICK_TO_COMPILE)
    def compute(state, kept):
        own = forward.policy_scores(plan, state.actor, rows.tokens, rows.is_reply, ())
        before = forward.old_scores(plan, state, {}, {}, kept)
        return own.logprobs, before

    own, before = compute(state, kept)
    np.testing.assert_allclose(before.old_logprobs, own, atol=1e-5)
    np.testing.assert_array_equal(before.sampler_logprobs, rows.logprobs)
    moved = np.asarray(own - piece.sampler_logprobs)[piece.is_reply]
    piece = piece.replace(
        old_logprobs=before.old_logprobs, sampler_logprobs=before.sampler_logprobs
    )
    _, (_, sums) = jax.jit(
        functools.partial(gradients.actor_loss, plan, {}),
        compiler_options=updates.QUICK_TO_COMPILE,
    )(state.actor, (), piece, jnp.asarray(True), jnp.int32(0))
    ratio = np.exp(moved)
    np.testing.assert_allclose(sums.ratio.value(), ratio.mean(), rtol=1e-5)
    np.testing.assert_allclose(sums.ratio_max, ratio.max(), rtol=1e-5)
    k3 = (ratio - 1 - moved).mean()
    np.testing.assert_allclose(sums.approx_kl.value(), k3, rtol=1e-4)
    assert sums.clip_fraction.value() == 0


def test_a_step_that_would_leave_a_parameter_infinite_is_not_made():
    """Of a gradient that is finite itself."""
    chosen, optimizer = updates.settings(estimator="grpo"), optax.sgd(1e30)
    actor = {"w": jnp.ones(2)}
    state = train_state.new_state(actor, {}, chosen)
    state = state.replace(actor_optimizer=optimizer.init(actor))

    def step(size: float):
        by_tree = ({"w": jnp.array([0.0, size])}, {})
        norms = (jnp.float32(size), jnp.float32(0.0))
        new, is_finite = optimize._apply(chosen, optimizer, state, by_tree, norms)
        no_steps = optimize._no_steps()
        counts = optimize._add_step(no_steps, no_sums(), norms, is_finite).counts
        return new, (counts.attempted, counts.real, counts.bad)

    new, counts = step(2.5e9)
    np.testing.assert_array_equal(new.actor["w"], [1, 1])
    assert counts == (1, 0, 1)
    new, counts = step(1e-30)
    np.testing.assert_allclose(new.actor["w"], [1, 0], atol=1e-6)
    assert counts == (1, 1, 0)


def test_all_rows_are_scored_at_lengths_that_hold_their_replies():
    """Five rows in twos, at three tokens or all; the last is padding."""
    lines = ("orrrR", "ooR..", "orR..", "ooR..", "oorR.", ".....")
    rows = records.rows_of(*lines, episode=[0, 1, 2, 3, 4, 0])
    chosen = updates.settings(optimizer__microbatch=2)
    plan = UpdatePlan(chosen, updates.CONFIG, None, jnp.float32, None, lengths=(3, 5))
    kept = KeptRows(rows, jnp.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]))
    found = forward.map_rows(plan, lambda tokens, _: tokens * 1.0, kept)
    np.testing.assert_array_equal(found[rows.is_reply], rows.tokens[rows.is_reply])
    assert not found[2:4, 3:].any()  # The short ones are cut.


def test_there_is_room_for_all_rows_of_the_episodes_that_can_be_kept():
    """In windows 36 of 12 episodes, a row a turn; minibatches of 8, longest first."""
    chosen = updates.settings(filter__fraction=0.75, rollout__history="window")
    rows, episodes = updates.record_of_turns()
    keep = episodes.group != 2
    gather = functools.partial(gather_kept_rows, chosen)
    gather = jax.jit(gather, compiler_options=updates.QUICK_TO_COMPILE)
    kept = gather(rows, episodes, keep)
    assert kept.weight.shape == (40,)
    assert kept.weight.sum() == episodes.turns[keep].sum()
    ends = reply_lengths(kept.rows.is_reply)
    assert ends.tolist() == sorted(ends.tolist(), reverse=True)


def test_a_batch_holds_each_thing_in_its_own_place(monkeypatch):
    rows = records.rows_of("orR", episode=[0])
    kept, episodes = KeptRows(rows, jnp.ones(1)), records.episodes_of([[0.0]])
    given = [jnp.full((1, 3), float(number)) for number in range(7)]
    scores, estimate = OldScores(*given[:4]), Estimate(given[4], given[5], given[6])
    given = kept, episodes, scores, estimate, given[0] + 7
    batch = make_batch(updates.settings(loss__entropy_on="reply"), *given)
    names = ("old_values", "ref_logprobs", "old_logprobs", "sampler_logprobs")
    names = dict(zip(names, range(4), strict=True))
    for name, number in (names | dict(returns=5, is_target=6, advantages=7)).items():
        assert (getattr(batch, name) == number).all(), name
    assert batch.has_bonus is None and batch.has_loss is None
    chosen = updates.settings(loss__entropy_on="thought")
    monkeypatch.setattr(batches, "bonus_tokens", lambda *given: given)
    assert make_batch(chosen, *given).has_bonus == (chosen, rows, episodes)
    chosen = updates.settings(loss__cut_replies="mask")
    monkeypatch.setattr(batches, "uncut_tokens", lambda *given: given)
    assert make_batch(chosen, *given).has_loss == (rows, episodes)


def test_what_was_learned_from_is_reported_but_the_samplers_gap_is_of_all_replies():
    """Of two tokens the second is masked; the third is none of a reply."""
    chosen = updates.settings(estimator="grpo", loss__entropy=0.0)
    new = jnp.log(jnp.array([[0.5, 0.25, 1.0]]))
    piece = Batch(*(jnp.zeros((1, 3)),) * 7, weight=jnp.ones(1)).replace(
        is_reply=jnp.array([[True, True, False]]),
        has_loss=jnp.array([[True, False, False]]),
        advantages=jnp.array([[1.0, 9.0, 9.0]]),
        old_logprobs=jnp.log(jnp.array([[0.5, 0.125, 0.1]])),
    )
    scores = TokenScores(new, jnp.array([[0.25, 7.0, 7.0]]))
    by_token = token_losses(chosen, scores, piece, jnp.int32(0))
    sums = gradients._policy_sums(scores, by_token, piece, jnp.asarray(True))
    own = dict(policy_loss=-1, entropy=0.25, clip_fraction=0, ratio=1)
    for name, value in own.items():
        mean = getattr(sums, name)
        assert (mean.sum, mean.count) == (value, 1), name
    np.testing.assert_allclose(sums.logprob_gap.sum, np.log(2), rtol=1e-6)
    np.testing.assert_allclose(sums.logprob_gap_max, np.log(2), rtol=1e-6)
    assert (sums.logprob_gap.count, sums.ratio_max) == (2, 1)


def test_what_all_rows_begin_with_is_computed_once_for_all_microbatches():
    """Forward and back: no product of the loop over microbatches is as long as it."""
    common = 7  # tokens; no other size of this model
    chosen, lengths = updates.settings(optimizer__microbatch=2), (updates.LENGTH,)
    plan = UpdatePlan(
        chosen,
        updates.CONFIG,
        None,
        jnp.float32,
        None,
        lengths,
        tuple(range(common)),
    )
    pieces = split_into_microbatches(plan, _batch(FIRST))
    state = updates.new_state(chosen)
    traced = jax.make_jaxpr(functools.partial(gradients.accumulate, plan, {}))(
        state, pieces, jnp.int32(8), jnp.asarray(True)
    )
    looped, once = _products(traced.jaxpr)
    assert not [shapes for shapes in looped if common in shapes]
    assert len(looped) > 30
    # Seven weights a layer, each used forward, and back to the input and the weight.
    assert len([shapes for shapes in once if common in shapes]) > 7 * 3


def test_only_one_models_gradient_is_held_beside_the_sums(monkeypatch):
    """What a branch of a length gives exists beside what it is added to."""
    chosen, lengths = updates.settings(optimizer__microbatch=2), (14, updates.LENGTH)
    plan = UpdatePlan(
        chosen, updates.CONFIG, None, jnp.float32, None, lengths, updates.OPENING
    )
    pieces = split_into_microbatches(plan, _batch(FIRST))
    state, iterations = updates.new_state(chosen), []

    def token_losses(settings, scores, microbatch, iteration):
        iterations.append(iteration)
        return compute(settings, scores, microbatch, iteration)

    def accumulate(state, *given):
        found = gradients.accumulate(plan, {}, state, *given)
        # Of the run and not of its updates: by it coefficients move.
        assert iterations and all(one is state.iteration for one in iterations)
        return found

    compute = gradients.token_losses
    monkeypatch.setattr(gradients, "token_losses", token_losses)
    given = pieces, jnp.int32(8), jnp.asarray(True)
    traced = jax.make_jaxpr(accumulate)(state, *given)
    actor, critic = (
        sum(x.size for x in jax.tree.leaves(tree))
        for tree in (state.actor, state.critic)
    )
    given = sorted(_given_by_branches(traced.jaxpr))
    # Each model's own of its microbatches, and with the prefix's at the end.
    assert sum(size >= min(actor, critic) for size in given) == 4
    assert max(given) < 1.2 * max(actor, critic)


def _given_by_branches(jaxpr) -> list[int]:
    """The numbers that each `cond` or `switch` has as its result."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            found.append(sum(x.aval.size for x in equation.outvars))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found.extend(_given_by_branches(inner))
    return found


def _products(jaxpr, in_loop=False) -> tuple[list[set[int]], list[set[int]]]:
    """The sizes in each matrix product: of those in `while` loops, of the others."""
    found: tuple[list[set[int]], list[set[int]]] = ([], [])
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            operands = [*equation.invars, *equation.outvars]
            sizes = {size for x in operands for size in x.aval.shape}
            found[0 if in_loop else 1].append(sizes)
        loops = in_loop or equation.primitive.name == "while"
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            for mine, its in zip(found, _products(inner, loops), strict=True):
                mine.extend(its)
    return found


def _batch(case: str) -> Batch:
    """The rows of the record, with advantages of their own, off the clips' edges."""
    rows, episodes = updates.record(gap=0.05)
    rng = np.random.default_rng(4)
    gains = rng.normal(size=(len(rows.tokens), 1)).astype(np.float32)
    nth = np.cumsum(np.asarray(rows.is_reply), axis=1)
    noise = 0.05 * rng.normal(size=rows.tokens.shape)
    return Batch(
        tokens=rows.tokens,
        is_reply=rows.is_reply,
        old_logprobs=rows.logprobs,
        ref_logprobs=rows.logprobs + jnp.asarray(noise * 4, jnp.float32),
        old_values=jnp.zeros(rows.tokens.shape),
        advantages=jnp.broadcast_to(jnp.asarray(gains), rows.tokens.shape),
        returns=jnp.zeros(rows.tokens.shape),
        weight=jnp.ones(len(rows.tokens)),
        sampler_logprobs=rows.logprobs + jnp.asarray(noise, jnp.float32),
        has_bonus=jnp.asarray(nth % 2 == 1) if "thoughts" in case else None,
    )
