"""The gradients of a minibatch, accumulated over its microbatches, and the losses.

The number of microbatches with rows is traced, and so is the trip count of the loop
over them.

  accumulate > _accumulate_both > _accumulate_one > actor_loss
                                                  > critic_loss
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from ragen_jax.learning import aggregation, losses
from ragen_jax.learning.aggregation import Mean
from ragen_jax.learning.batch import Batch
from ragen_jax.learning.forward import critic_values, policy_scores, prefix_states
from ragen_jax.learning.objectives import (
    TokenLosses,
    aggregate,
    sampler_logprobs,
    token_losses,
    value_loss,
)
from ragen_jax.learning.token_sums import MAXIMA, TokenSums, merge, no_sums
from ragen_jax.learning.train_state import TrainState
from ragen_jax.learning.update_plan import (
    MICROBATCHES,
    UpdatePlan,
    by_length,
    plan_of_one_device,
    truncate,
)
from ragen_jax.learning.vocabulary_scores import TokenScores
from ragen_jax.parallel import mesh as meshes


def accumulate(
    plan: UpdatePlan,
    frozen,
    old: TrainState,
    microbatches: Batch,
    count: jax.Array,
    is_first: jax.Array,
) -> tuple[tuple, tuple, TokenSums]:
    """Gradients of the summed losses of the first `count` microbatches.

    Args:
      plan: what is static.
      frozen: the parameters that are not trained; {} in full training.
      old: the state before the minibatch.
      microbatches: [microbatches, rows, ...] each.
      count: int32[], how many of them hold rows; these are in front.
      is_first: bool[], whether the policy is still the one that sampled.

    Returns:
      The (actor's, critic's) gradients; float32[] each, the (actor's, critic's) counts
      by which to divide them; and TokenSums.
    """
    compute = _accumulate_both
    if _devices_hold_all_parameters(plan.mesh):
        compute = _accumulate_on_devices
    return compute(plan, frozen, old, microbatches, count, is_first)


def _accumulate_both(
    plan: UpdatePlan, frozen, old: TrainState, microbatches: Batch, count, is_first
):
    """`accumulate` on one device, or where the compiler shards it.

    The actor's over all microbatches, then the critic's, so that the activations and
    the gradient of a microbatch exist for one of the two at a time.
    """

    def of_actor(actor, prefix, microbatch: Batch):
        return actor_loss(
            plan, frozen, actor, prefix, microbatch, is_first, old.iteration
        )

    def of_critic(critic, prefix, microbatch: Batch):
        loss, mean = critic_loss(plan, frozen, critic, prefix, microbatch)
        return loss, (mean.count, no_sums().replace(value_loss=mean))

    accumulate_one = functools.partial(
        _accumulate_one, plan, frozen, old, microbatches, count
    )
    actor_gradient, actor_count, sums = accumulate_one("actor", of_actor)
    # Without a critic its trees are {}: its gradient too.
    critic_gradient, critic_count = old.critic, jnp.zeros(())
    if plan.settings.has_critic:
        critic_gradient, critic_count, critic_sums = accumulate_one("critic", of_critic)
        sums = merge(sums, critic_sums)
    return (actor_gradient, critic_gradient), (actor_count, critic_count), sums


def _accumulate_one(
    plan: UpdatePlan,
    frozen,
    old: TrainState,
    microbatches: Batch,
    count,
    name: str,
    loss: Callable,
):
    """Gradient, count and TokenSums of one loss of the first `count` microbatches.

    All of them attend to one prefix. Its keys and values are an input of the loss of
    their own: their gradient is accumulated too, and pulled back to the parameters
    once, at the end.

    Args:
      plan, frozen, old, microbatches, count: as for `accumulate`.
      name: "actor" or "critic", the trainable tree that the loss is differentiated by.
      loss: (tree, prefix, microbatch) -> (float32[], (float32[] count, TokenSums)).
    """
    trainable = getattr(old, name)

    def prefix_of(trainable):
        remat = plan.settings.model.remat
        return prefix_states(plan, plan.assemble(trainable, frozen), remat=remat)

    def constrain(gradient):  # Sharded like the parameters, so never replicated.
        if plan.mesh is None:
            return gradient
        return jax.lax.with_sharding_constraint(gradient, getattr(plan.shardings, name))

    prefix, pull_back = jax.vjp(prefix_of, trainable)
    loss_and_gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)

    def gradients_of(length: int, microbatch: Batch):
        (_, (weight, sums)), (gradient, of_prefix) = loss_and_gradients(
            trainable, prefix, truncate(microbatch, length)
        )
        return (constrain(gradient), of_prefix), weight, sums

    def accumulate(index, carry):
        microbatch = jax.tree.map(lambda x: x[index], microbatches)
        return _add(
            carry, by_length(plan, gradients_of, microbatch.is_reply, microbatch)
        )

    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), trainable)
    # float32, whatever the prefix's dtype.
    blank_prefix = jax.tree.map(lambda x: jnp.zeros(x.shape), prefix)
    start = (blank, blank_prefix), jnp.zeros(()), no_sums()
    (direct, of_prefix), weight, sums = jax.lax.fori_loop(0, count, accumulate, start)

    def add_prefix(direct):
        cast = jax.tree.map(lambda g, x: g.astype(x.dtype), of_prefix, prefix)
        (through_prefix,) = pull_back(cast)
        return constrain(jax.tree.map(jnp.add, direct, through_prefix))

    # In a branch, taken whenever there is a microbatch. Outside of one XLA would
    # allocate the prefix's gradient, as large as the parameters, before the loop.
    total = jax.lax.cond(count > 0, add_prefix, lambda direct: direct, direct)
    return total, weight, sums


def _devices_hold_all_parameters(mesh: Mesh | None) -> bool:
    """Whether the mesh is data-parallel alone, over several devices."""
    if mesh is None:
        return False
    return mesh.shape[meshes.DATA] == mesh.size > 1


def _accumulate_on_devices(
    plan: UpdatePlan, frozen, old: TrainState, microbatches, count, is_first
):
    """`_accumulate_both` on each device's rows, and one all-reduce at the end.

    Left to the compiler there would be an all-reduce after each microbatch. Each device
    also takes the compiled row length that its rows need.
    """
    replicated, device_plan = PartitionSpec(), plan_of_one_device(plan)

    def one_device(frozen, old, microbatches, count, is_first):
        local = _accumulate_both(
            device_plan, frozen, old, microbatches, count, is_first
        )
        _, _, local_sums = local
        gradients, weights, sums = jax.lax.psum(local, meshes.DATA)
        highest = {
            name: jax.lax.pmax(getattr(local_sums, name), meshes.DATA)
            for name in MAXIMA
        }
        return gradients, weights, sums.replace(**highest)

    return jax.shard_map(
        one_device,
        mesh=plan.mesh,
        in_specs=(replicated, replicated, MICROBATCHES, replicated, replicated),
        out_specs=replicated,
        check_vma=False,
    )(frozen, old, microbatches, count, is_first)


def actor_loss(
    plan: UpdatePlan, frozen, actor, prefix, microbatch: Batch, is_first, iteration
):
    """The policy's loss as a sum: `optimize` divides by the minibatch's count.

    Args:
      plan: what is static.
      frozen: the parameters that are not trained; {} in full training.
      actor: the trainable tree, by which the loss is differentiated.
      prefix: by `prefix_states` from the same tree.
      microbatch: rows of one microbatch.
      is_first: bool[], whether the policy is still the one that sampled.
      iteration: int32[], on which coefficients may depend.

    Returns:
      (float32[], (float32[] count, TokenSums)).
    """
    settings, parameters = plan.settings, plan.assemble(actor, frozen)
    remat = settings.model.remat
    scores = policy_scores(
        plan, parameters, microbatch.tokens, microbatch.is_reply, prefix, remat=remat
    )
    by_token = token_losses(settings, scores, microbatch, iteration)
    objective = aggregate(settings, by_token.total, microbatch)
    sums = _policy_sums(scores, by_token, microbatch, is_first)
    return objective.sum, (objective.count, sums)


def _policy_sums(
    scores: TokenScores, by_token: TokenLosses, microbatch: Batch, is_first: jax.Array
) -> TokenSums:
    """What a microbatch adds to the metrics of the policy; without a gradient.

    Args:
      scores: of the microbatch, under the policy that is being trained.
      by_token: the losses from these scores.
      microbatch: R rows.
      is_first: as for `actor_loss`.
    """

    def mean(x: jax.Array, tokens: jax.Array = microbatch.policy_tokens) -> Mean:
        return jax.lax.stop_gradient(
            aggregation.token_mean(x, tokens, microbatch.weight)
        )

    sampled = sampler_logprobs(microbatch)
    gap = jnp.abs(scores.logprobs - sampled)
    # Of all replies: whether sampler and update agree does not depend on the loss.
    is_counted = microbatch.is_reply & (microbatch.weight > 0)[:, None]
    gap_mean = mean(gap, microbatch.is_reply)
    ratio = losses.probability_ratio(scores.logprobs, sampled)
    is_learned = is_counted
    if microbatch.has_loss is not None:
        is_learned &= microbatch.has_loss
    return TokenSums(
        policy_loss=mean(by_token.surrogate),
        value_loss=Mean.zero(),
        entropy=mean(scores.entropy),
        kl=mean(by_token.divergence),
        approx_kl=mean(losses.kl(sampled, scores.logprobs, "k3")),
        clip_fraction=mean(by_token.is_clipped),
        logprob_gap=jax.tree.map(lambda x: jnp.where(is_first, x, 0), gap_mean),
        ratio=mean(ratio),
        logprob_gap_max=jax.lax.stop_gradient(
            jnp.where(is_counted & is_first, gap, 0).max()
        ),
        ratio_max=jax.lax.stop_gradient(jnp.where(is_learned, ratio, 0).max()),
    )


def critic_loss(plan: UpdatePlan, frozen, critic, prefix, microbatch: Batch):
    """(float32[], Mean): the critic's loss, summed. Args: as for `actor_loss`."""
    settings, parameters = plan.settings, plan.assemble(critic, frozen)
    values = critic_values(
        plan, parameters, microbatch.tokens, prefix, remat=settings.model.remat
    )
    mean = value_loss(settings, values, microbatch)
    return mean.sum, mean


def _add(carry, new):
    """(gradients, counts, TokenSums) of a loop and of one more microbatch."""
    gradients, counts, _ = jax.tree.map(jnp.add, carry, new)
    return gradients, counts, merge(carry[2], new[2])  # Some of them are maxima.
