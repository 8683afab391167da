"""Optimization: epochs over a batch, and an optimizer step for each minibatch.

A minibatch's gradient is accumulated over microbatches. The number of kept rows is
traced, and so is the trip count of both loops: dropped groups cost nothing.

  optimize > _update_on_minibatch > _accumulate > _accumulate_one_loss > actor_loss
                                                                       > critic_loss
                                  > _apply
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from ragen_jax.learning import aggregation, losses, train_state
from ragen_jax.learning.aggregation import Mean
from ragen_jax.learning.batch import Batch
from ragen_jax.learning.forward import (
    MICROBATCHES,
    UpdatePlan,
    by_length,
    critic_values,
    cut,
    microbatches,
    own_plan,
    policy_scores,
    prefix_states,
)
from ragen_jax.learning.minibatches import (
    even_share,
    longest_first,
    order_key,
    shuffled,
)
from ragen_jax.learning.objectives import (
    aggregate,
    sampler_logprobs,
    token_losses,
    value_loss,
)
from ragen_jax.learning.token_sums import MAXIMA, TokenSums, merge, no_sums
from ragen_jax.learning.train_state import TrainState, UpdateArgs, UpdateCounts
from ragen_jax.parallel import mesh as meshes


@struct.dataclass
class Steps:
    """What the minibatches of one iteration added up to."""

    sums: TokenSums
    # float32[] each: sums of the gradient norms, before clipping, of actor and critic.
    norms: tuple[jax.Array, jax.Array]
    made: UpdateCounts


def optimize(
    plan: UpdatePlan, frozen, old: TrainState, batch: Batch, given: UpdateArgs
) -> tuple[TrainState, Steps]:
    """All epochs over the batch, one real update a minibatch.

    Args:
      plan: what is static.
      frozen: the parameters that are not trained; {} in full training.
      old: the state before.
      batch: C rows, those of weight 1 in front, C a multiple of minibatches.
      given: the seed that shuffles the rows, and the learning rate.
    """
    settings = plan.settings
    size = settings.optimizer.minibatch
    real_rows = (batch.weight > 0).sum()
    count = -(-real_rows // size)

    def minibatch(index, carry):
        new, steps, order = carry
        if settings.rollout.window_turns:
            picked = even_share(batch, order, index, count, real_rows, size)
        else:
            rows = jax.lax.dynamic_slice_in_dim(order, index * size, size)
            picked = longest_first(batch, rows)
        new, steps = _update_on_minibatch(
            plan, frozen, new, picked, steps, given.actor_lr
        )
        return new, steps, order

    def epoch(index, carry):
        order = shuffled(order_key(settings, given.seed, old, index), batch.weight)
        new, steps = carry
        new, steps, _ = jax.lax.fori_loop(0, count, minibatch, (new, steps, order))
        return new, steps

    return jax.lax.fori_loop(0, settings.optimizer.epochs, epoch, (old, _no_steps()))


def _update_on_minibatch(
    plan: UpdatePlan, frozen, old: TrainState, picked: Batch, steps: Steps, actor_lr
):
    """Accumulates the gradients of one minibatch and applies them."""
    pieces = microbatches(plan, picked)
    count = -(-(picked.weight > 0).sum() // plan.settings.optimizer.microbatch)
    is_data_parallel = _devices_hold_all_parameters(plan.mesh)
    accumulate = _accumulate_on_devices if is_data_parallel else _accumulate
    gradients, counts, sums = accumulate(
        plan, frozen, old, pieces, count, steps.made.attempted == 0
    )
    optimizer = train_state.actor_optimizer(plan.settings, actor_lr)
    return _apply(plan.settings, optimizer, old, gradients, counts, sums, steps)


def _accumulate(
    plan: UpdatePlan, frozen, old: TrainState, pieces: Batch, count, is_first
):
    """((actor, critic) gradients, counts, TokenSums) of the first `count` microbatches.

    The actor's over all microbatches, then the critic's, so that the activations and
    the gradient of a microbatch exist for one of the two at a time.
    """

    def of_actor(actor, prefix, piece: Batch):
        return actor_loss(plan, frozen, actor, prefix, piece, is_first, old.iteration)

    def of_critic(critic, prefix, piece: Batch):
        loss, mean = critic_loss(plan, frozen, critic, prefix, piece)
        return loss, (mean.count, no_sums().replace(value_loss=mean))

    accumulate = functools.partial(
        _accumulate_one_loss, plan, frozen, old, pieces, count
    )
    actor_gradient, actor_count, sums = accumulate("actor", of_actor)
    # Without a critic its trees are {}: its gradient too.
    critic_gradient, critic_count = old.critic, jnp.zeros(())
    if plan.settings.has_critic:
        critic_gradient, critic_count, critic_sums = accumulate("critic", of_critic)
        sums = merge(sums, critic_sums)
    return (actor_gradient, critic_gradient), (actor_count, critic_count), sums


def _accumulate_one_loss(
    plan: UpdatePlan, frozen, old: TrainState, pieces: Batch, count, name: str, loss
):
    """(gradient, count, TokenSums) of one loss of the first `count` microbatches.

    All of them attend to one prefix. Its keys and values are an input of the loss of
    their own: their gradient is accumulated too, and pulled back to the parameters
    once, at the end.

    Args:
      plan, frozen, old: as for `optimize`.
      pieces: microbatches, [microbatches, rows, ...] each.
      count: int32[], how many of them hold rows; these are in front.
      name: "actor" or "critic", the trainable tree that the loss is differentiated by.
      loss: (tree, prefix, microbatch) -> (float32[], (float32[] count, TokenSums)).
    """
    learned = getattr(old, name)

    def prefix_of(learned):
        remat = plan.settings.model.remat
        return prefix_states(plan, plan.assemble(learned, frozen), remat=remat)

    def constrain(gradient):  # Sharded like the parameters, so never whole.
        if plan.mesh is None:
            return gradient
        return jax.lax.with_sharding_constraint(gradient, getattr(plan.shardings, name))

    prefix, pull_back = jax.vjp(prefix_of, learned)
    loss_and_gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)

    def gradients_of(length: int, piece: Batch):
        (_, (counted, sums)), (gradient, of_prefix) = loss_and_gradients(
            learned, prefix, cut(piece, length)
        )
        return (constrain(gradient), of_prefix), counted, sums

    def accumulate(index, carry):
        piece = jax.tree.map(lambda x: x[index], pieces)
        return _add(carry, by_length(plan, gradients_of, piece.is_reply, piece))

    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), learned)
    # float32, whatever the prefix's dtype.
    blank_prefix = jax.tree.map(lambda x: jnp.zeros(x.shape), prefix)
    start = (blank, blank_prefix), jnp.zeros(()), no_sums()
    (direct, of_prefix), counted, sums = jax.lax.fori_loop(0, count, accumulate, start)

    def add_prefix(direct):
        cast = jax.tree.map(lambda g, x: g.astype(x.dtype), of_prefix, prefix)
        (through_prefix,) = pull_back(cast)
        return constrain(jax.tree.map(jnp.add, direct, through_prefix))

    # In a branch, taken whenever there is a microbatch. Outside of one XLA would
    # allocate the prefix's gradient, as large as the parameters, before the loop.
    total = jax.lax.cond(count > 0, add_prefix, lambda direct: direct, direct)
    return total, counted, sums


def _devices_hold_all_parameters(mesh: Mesh | None) -> bool:
    """Whether the mesh is data-parallel alone, over several devices."""
    if mesh is None:
        return False
    return mesh.shape[meshes.DATA] == mesh.size > 1


def _accumulate_on_devices(
    plan: UpdatePlan, frozen, old: TrainState, pieces, count, is_first
):
    """`_accumulate` on each device's own rows, and one all-reduce at the end.

    Left to the compiler there would be an all-reduce after each microbatch. Each device
    also takes the compiled row length that its own rows need.
    """
    everywhere, own = PartitionSpec(), own_plan(plan)

    def one_device(frozen, old, pieces, count, is_first):
        added = _accumulate(own, frozen, old, pieces, count, is_first)
        gradients, counts, sums = jax.lax.psum(added, meshes.DATA)
        highest = {
            name: jax.lax.pmax(getattr(added[2], name), meshes.DATA) for name in MAXIMA
        }
        return gradients, counts, sums.replace(**highest)

    return jax.shard_map(
        one_device,
        mesh=plan.mesh,
        in_specs=(everywhere, everywhere, MICROBATCHES, everywhere, everywhere),
        out_specs=everywhere,
        check_vma=False,
    )(frozen, old, pieces, count, is_first)


def actor_loss(
    plan: UpdatePlan, frozen, actor, prefix, piece: Batch, is_first, iteration
):
    """The policy's loss as a sum: `_apply` divides by the minibatch's count.

    Args:
      plan: what is static.
      frozen: the parameters that are not trained; {} in full training.
      actor: the trainable tree, by which the loss is differentiated.
      prefix: by `prefix_states` from the same tree.
      piece: rows of one microbatch.
      is_first: bool[], whether the policy is still the one that sampled.
      iteration: int32[], on which coefficients may depend.

    Returns:
      (float32[], (float32[] count, TokenSums)).
    """
    settings, parameters = plan.settings, plan.assemble(actor, frozen)
    remat = settings.model.remat
    scores = policy_scores(
        plan, parameters, piece.tokens, piece.is_reply, prefix, remat=remat
    )
    by_token = token_losses(settings, scores, piece, iteration)
    objective = aggregate(settings, by_token.total, piece)

    def mean(x: jax.Array) -> Mean:
        return jax.lax.stop_gradient(
            aggregation.token_mean(x, piece.is_reply, piece.weight)
        )

    sampled = sampler_logprobs(piece)
    gap = jnp.abs(scores.logprobs - sampled)
    counted = piece.is_reply & (piece.weight > 0)[:, None]
    gap_mean = mean(gap)
    ratio = losses.probability_ratio(scores.logprobs, sampled)
    sums = TokenSums(
        policy_loss=mean(by_token.surrogate),
        value_loss=Mean.zero(),
        entropy=mean(scores.entropy),
        kl=mean(by_token.divergence),
        approx_kl=mean(losses.kl(sampled, scores.logprobs, "k3")),
        clip_fraction=mean(by_token.is_clipped),
        logprob_gap=jax.tree.map(lambda x: jnp.where(is_first, x, 0), gap_mean),
        ratio=mean(ratio),
        logprob_gap_max=jax.lax.stop_gradient(
            jnp.where(counted & is_first, gap, 0).max()
        ),
        ratio_max=jax.lax.stop_gradient(jnp.where(counted, ratio, 0).max()),
    )
    return objective.sum, (objective.count, sums)


def critic_loss(plan: UpdatePlan, frozen, critic, prefix, piece: Batch):
    """(float32[], Mean): the critic's loss, summed. Args: as for `actor_loss`."""
    settings, parameters = plan.settings, plan.assemble(critic, frozen)
    values = critic_values(
        plan, parameters, piece.tokens, prefix, remat=settings.model.remat
    )
    mean = value_loss(settings, values, piece)
    return mean.sum, mean


def _apply(settings, optimizer, old: TrainState, gradients, counts, sums, steps: Steps):
    """One step of both optimizers, or none if a gradient or a parameter is not finite.

    A finite gradient can still lead there, with an absurd learning rate or decay. While
    the critic warms up the actor stays as it is.
    """
    gradients = tuple(
        jax.tree.map(lambda g, c=c: g / jnp.maximum(c, 1), gradient)
        for gradient, c in zip(gradients, counts, strict=True)
    )
    norms = tuple(optax.tree.norm(g) for g in gradients)
    optimizers = (optimizer, train_state.critic_optimizer(settings))
    before = (
        (old.actor, old.actor_optimizer),
        (old.critic, old.critic_optimizer),
    )
    after = tuple(map(_step, optimizers, gradients, before))
    is_finite = jnp.isfinite(norms[0]) & jnp.isfinite(norms[1])
    for parameters, _ in after:
        is_finite &= _all_finite(parameters)
    moves_actor = is_finite & (old.iteration >= settings.optimizer.critic_warmup)
    (actor, actor_optimizer), (critic, critic_optimizer) = (
        jax.tree.map(lambda n, o, keep=keep: jnp.where(keep, n, o), new, was)
        for keep, new, was in zip((moves_actor, is_finite), after, before, strict=True)
    )
    new = old.replace(
        actor=actor,
        critic=critic,
        actor_optimizer=actor_optimizer,
        critic_optimizer=critic_optimizer,
    )
    made = UpdateCounts(
        attempted=steps.made.attempted + 1,
        real=steps.made.real + is_finite,
        bad=steps.made.bad + ~is_finite,
    )
    norms = tuple(sum_ + norm for sum_, norm in zip(steps.norms, norms, strict=True))
    return new, Steps(sums=merge(steps.sums, sums), norms=norms, made=made)


def _step(optimizer, gradient, before):
    """(parameters, optimizer's state) after a step from those `before`."""
    parameters, state = before
    changes, state = optimizer.update(gradient, state, parameters)
    return optax.apply_updates(parameters, changes), state


def _all_finite(tree) -> jax.Array:
    """bool[], whether every number of every leaf is finite."""
    return jnp.stack(
        [jnp.bool_(True), *(jnp.isfinite(x).all() for x in jax.tree.leaves(tree))]
    ).all()


def _no_steps() -> Steps:
    zero = jnp.zeros((), jnp.int32)
    norms = (jnp.zeros(()), jnp.zeros(()))
    return Steps(sums=no_sums(), norms=norms, made=UpdateCounts(zero, zero, zero))


def _add(carry, new):
    """(gradients, counts, TokenSums) of a loop and of one more microbatch."""
    gradients, counts, sums = jax.tree.map(jnp.add, carry, new)
    return gradients, counts, merge(carry[2], new[2])
