"""The whole loss of the policy on a small model, against finite differences."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models, updates

from ragen_jax.learning import forward, optimize
from ragen_jax.learning.batch import Batch

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
    plan = forward.UpdatePlan(
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
        return optimize.actor_loss(
            plan, {}, moved, (), piece, jnp.asarray(True), jnp.int32(0)
        )[0]

    gradient = jax.jit(
        jax.grad(
            lambda x: optimize.actor_loss(
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
    chosen = updates.settings(loss__sampler_correction=2.0)
    lengths = (updates.LENGTH,)
    plan = forward.UpdatePlan(chosen, updates.CONFIG, None, jnp.float32, None, lengths)
    actor, piece = updates.parameters()[0], _batch(FIRST)
    scores = forward.policy_scores(plan, actor, piece.tokens, piece.is_reply, ())
    moved = np.asarray(scores.logprobs - piece.sampler_logprobs)[piece.is_reply]
    piece = piece.replace(old_logprobs=scores.logprobs)  # as before each use
    _, (_, sums) = optimize.actor_loss(
        plan, {}, actor, (), piece, jnp.asarray(True), jnp.int32(0)
    )
    ratio = np.exp(moved)
    np.testing.assert_allclose(sums.ratio.value(), ratio.mean(), rtol=1e-5)
    np.testing.assert_allclose(sums.ratio_max, ratio.max(), rtol=1e-5)
    k3 = (ratio - 1 - moved).mean()
    np.testing.assert_allclose(sums.approx_kl.value(), k3, rtol=1e-4)
    assert sums.clip_fraction.value() == 0


def test_what_all_rows_begin_with_is_computed_once_for_all_microbatches():
    """Forward and back: no product of the loop over microbatches is as long as it."""
    common = 7  # tokens; no other size of this model
    chosen, lengths = updates.settings(optimizer__microbatch=2), (updates.LENGTH,)
    plan = forward.UpdatePlan(
        chosen,
        updates.CONFIG,
        None,
        jnp.float32,
        None,
        lengths,
        tuple(range(common)),
    )
    pieces = forward.microbatches(plan, _batch(FIRST))
    state = updates.new_state(chosen)
    traced = jax.make_jaxpr(functools.partial(optimize._add_up, plan, {}))(
        state, pieces, jnp.int32(8), jnp.asarray(True)
    )
    looped, once = _products(traced.jaxpr)
    assert not [shapes for shapes in looped if common in shapes]
    assert len(looped) > 30
    # Seven weights a layer, each used forward, and back to the input and the weight.
    assert len([shapes for shapes in once if common in shapes]) > 7 * 3


def test_only_one_models_gradient_is_held_beside_the_sums():
    """What a branch of a length gives exists beside what it is added to."""
    chosen, lengths = updates.settings(optimizer__microbatch=2), (14, updates.LENGTH)
    plan = forward.UpdatePlan(
        chosen, updates.CONFIG, None, jnp.float32, None, lengths, updates.OPENING
    )
    pieces = forward.microbatches(plan, _batch(FIRST))
    state = updates.new_state(chosen)
    traced = jax.make_jaxpr(functools.partial(optimize._add_up, plan, {}))(
        state, pieces, jnp.int32(8), jnp.asarray(True)
    )
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
