"""Optimization: epochs over a batch, and an optimizer step for each minibatch.

The number of kept rows is traced, and so is the trip count of the loop over
minibatches: dropped groups cost nothing.

  optimize > _update_on_minibatch > gradients.accumulate
                                  > _apply
"""

import jax
import jax.numpy as jnp
import optax
from flax import struct

from ragen_jax.learning import gradients as gradients_lib
from ragen_jax.learning import train_state
from ragen_jax.learning.batch import Batch
from ragen_jax.learning.minibatches import even_minibatch, order_key, shuffled
from ragen_jax.learning.token_sums import TokenSums, merge, no_sums
from ragen_jax.learning.train_state import TrainState, UpdateArgs, UpdateCounts
from ragen_jax.learning.update_plan import UpdatePlan, split_into_microbatches


@struct.dataclass
class Steps:
    """What the minibatches of one use of the episodes added up to."""

    sums: TokenSums
    # float32[] each: sums of the gradient norms, before clipping, of actor and critic.
    norms: tuple[jax.Array, jax.Array]
    counts: UpdateCounts


def optimize(
    plan: UpdatePlan, frozen, old: TrainState, batch: Batch, update_args: UpdateArgs
) -> tuple[TrainState, Steps]:
    """All epochs over the batch, one real update a minibatch.

    Args:
      plan: what is static.
      frozen: the parameters that are not trained; {} in full training.
      old: the state before.
      batch: C rows, those of weight 1 in front, C a multiple of minibatches.
      update_args: the seed that shuffles the rows, and the learning rate.
    """
    settings = plan.settings
    size = settings.optimizer.minibatch
    real_rows = (batch.weight > 0).sum()
    count = -(-real_rows // size)

    def one_minibatch(index, carry):
        state, steps, order = carry
        minibatch = even_minibatch(batch, order, index, count, real_rows, size)
        state, steps = _update_on_minibatch(
            plan, frozen, state, minibatch, steps, update_args.actor_lr
        )
        return state, steps, order

    def one_epoch(index, carry):
        key = order_key(settings, update_args.seed, old, index)
        order = shuffled(key, batch.weight)
        state, steps, _ = jax.lax.fori_loop(0, count, one_minibatch, (*carry, order))
        return state, steps

    epochs = settings.optimizer.epochs
    return jax.lax.fori_loop(0, epochs, one_epoch, (old, _no_steps()))


def _update_on_minibatch(
    plan: UpdatePlan, frozen, old: TrainState, minibatch: Batch, steps: Steps, actor_lr
) -> tuple[TrainState, Steps]:
    """Accumulates the gradients of one minibatch and applies them.

    Args:
      plan, frozen: as for `optimize`.
      old: the state before this minibatch.
      minibatch: rows, those of weight 1 in front.
      steps: of the minibatches before.
      actor_lr: float32[], the highest of the actor's schedule.
    """
    microbatches = split_into_microbatches(plan, minibatch)
    count = -(-(minibatch.weight > 0).sum() // plan.settings.optimizer.microbatch)
    is_first = steps.counts.attempted == 0
    gradients, weights, sums = gradients_lib.accumulate(
        plan, frozen, old, microbatches, count, is_first
    )
    optimizer = train_state.actor_optimizer(plan.settings, actor_lr)
    gradients = _means(gradients, weights)
    norms = tuple(optax.tree.norm(gradient) for gradient in gradients)
    new, is_finite = _apply(plan.settings, optimizer, old, gradients, norms)
    return new, _add_step(steps, sums, norms, is_finite)


def _means(gradients, weights):
    """Gradients of mean losses from those of summed ones.

    Args:
      gradients: the actor's and the critic's.
      weights: float32[] each, the counts of their losses' means.
    """
    return tuple(
        jax.tree.map(lambda g, w=weight: g / jnp.maximum(w, 1), gradient)
        for gradient, weight in zip(gradients, weights, strict=True)
    )


def _apply(settings, optimizer, old: TrainState, gradients, norms):
    """One step of both optimizers, or none if a gradient or a parameter is not finite.

    A finite gradient can still lead there, with an absurd learning rate or decay. While
    the critic warms up the actor stays as it is.

    Args:
      settings: of the run.
      optimizer: the actor's.
      old: the state before.
      gradients: the actor's and the critic's.
      norms: float32[] each, theirs.

    Returns:
      The state, and bool[], whether the step was finite.
    """
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

    def select(moves: jax.Array, new, old):
        return jax.tree.map(lambda n, o: jnp.where(moves, n, o), new, old)

    actor, actor_optimizer = select(moves_actor, after[0], before[0])
    critic, critic_optimizer = select(is_finite, after[1], before[1])
    new = old.replace(
        actor=actor,
        critic=critic,
        actor_optimizer=actor_optimizer,
        critic_optimizer=critic_optimizer,
    )
    return new, is_finite


def _add_step(steps: Steps, sums: TokenSums, norms, is_finite: jax.Array) -> Steps:
    """The steps with one more minibatch's.

    Args:
      steps: of the minibatches before.
      sums: of this one's microbatches.
      norms: float32[] each, of the actor's and the critic's gradient.
      is_finite: bool[], whether the minibatch was applied.
    """
    counts = UpdateCounts(
        attempted=steps.counts.attempted + 1,
        real=steps.counts.real + is_finite,
        bad=steps.counts.bad + ~is_finite,
    )
    norms = tuple(sum_ + norm for sum_, norm in zip(steps.norms, norms, strict=True))
    return Steps(sums=merge(steps.sums, sums), norms=norms, counts=counts)


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
    return Steps(sums=no_sums(), norms=norms, counts=UpdateCounts(zero, zero, zero))
