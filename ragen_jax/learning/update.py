"""The update: a record in, a better policy out, as one compiled program.

rewards -> filter -> gather -> old values -> advantages -> minibatches of gradient
accumulation. How many rows are kept is traced: the loops over minibatches and
microbatches run as far as there are rows, so that dropped groups cost nothing.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import struct

from ragen_jax.learning import losses, reduce, state
from ragen_jax.learning.batch import Batch, choose_groups, explained_variance, prepare
from ragen_jax.learning.forward import Forward, UpdatePlan, cut, reply_lengths
from ragen_jax.learning.reduce import Mean
from ragen_jax.learning.state import TrainState
from ragen_jax.trajectory import Episodes, Rows


@struct.dataclass
class Sums:
    """(sum, count) of everything reported per token, added up over microbatches."""

    policy_loss: Mean
    value_loss: Mean
    entropy: Mean
    kl: Mean
    approx_kl: Mean
    clip_fraction: Mean
    logprob_gap: Mean  # first update of an iteration only: the policy has not moved
    logprob_gap_max: jax.Array  # float32[]


@struct.dataclass
class Learned:
    """Means over an iteration's updates, as the sinks want them."""

    sums: Sums
    actor_grad_norm: jax.Array  # float32[], mean over updates, before clipping
    critic_grad_norm: jax.Array  # float32[]
    reward_std: jax.Array  # float32[], mean in-group std of the task return
    kept_fraction: jax.Array  # float32[], of groups
    explained_variance: jax.Array  # float32[], of the returns by the old values
    made: jax.Array  # int32[], real updates in this iteration


def make_update(plan: UpdatePlan, shardings: TrainState) -> Callable:
    """Compiles (state, frozen, reference, rows, episodes, seed) ->
    (state, Learned).

    `shardings` are the state's, before and after.

    `frozen` is {} in full training, `reference` {} without a KL term. The old state's
    memory is reused for the new one. `seed`, uint32[], shuffles the rows: no constant,
    so that runs which differ in it alone share a compiled program.
    """

    def update(
        old: TrainState, frozen, reference, rows: Rows, episodes: Episodes, seed
    ) -> tuple[TrainState, Learned]:
        forward = Forward(plan, frozen)
        learner = _Learner(plan, shardings, forward)
        keep, reward_std = choose_groups(plan.settings, episodes)
        batch = prepare(forward, old.critic, reference, rows, episodes, keep)
        new, sums, norms, made = learner.train(old, batch, seed)
        attempted = made.attempted
        is_bad, is_empty = made.bad > 0, attempted == 0
        new = new.replace(
            iteration=old.iteration + 1,
            updates=old.updates + made.real,
            bad_in_row=jnp.where(is_bad, old.bad_in_row + 1, 0),
            empty_in_row=jnp.where(is_empty, old.empty_in_row + 1, 0),
            skipped_bad=old.skipped_bad + made.bad,
            skipped_empty=old.skipped_empty + is_empty,
        )
        divisor = jnp.maximum(attempted, 1)
        return new, Learned(
            sums=sums,
            actor_grad_norm=norms[0] / divisor,
            critic_grad_norm=norms[1] / divisor,
            reward_std=reward_std.mean(),
            kept_fraction=keep.mean(dtype=jnp.float32),
            explained_variance=explained_variance(batch),
            made=made.real,
        )

    return jax.jit(update, donate_argnums=(0,), out_shardings=(shardings, None))


@struct.dataclass
class _Made:
    attempted: jax.Array  # int32[], minibatches with at least one row
    real: jax.Array  # int32[], of them applied
    bad: jax.Array  # int32[], of them skipped: gradient not finite


class _Learner:
    """The training steps of one update, with the plan and the fixed trees bound in."""

    def __init__(self, plan: UpdatePlan, shardings: TrainState, forward: Forward):
        self.settings, self.shardings, self.forward = plan.settings, shardings, forward
        self.has_critic = plan.settings.estimator == "ppo"
        self.optimizers = (
            state.actor_optimizer(plan.settings),
            state.critic_optimizer(plan.settings),
        )

    def train(self, old: TrainState, batch: Batch, seed: jax.Array):
        """All epochs over the batch, one real update a minibatch."""
        chosen = self.settings.optimizer
        real_rows = (batch.weight > 0).sum()
        count = -(-real_rows // chosen.minibatch)

        def minibatch(index, carry):
            new, sums, norms, made, order = carry
            if self.settings.rollout.window_turns:
                picked = even_share(
                    batch, order, index, count, real_rows, chosen.minibatch
                )
            else:
                rows = jax.lax.dynamic_slice_in_dim(
                    order, index * chosen.minibatch, chosen.minibatch
                )
                picked = _longest_first(batch, rows)
            return *self._one_update(new, picked, sums, norms, made), order

        def epoch(index, carry):
            key = jax.random.fold_in(jax.random.key(seed), old.iteration)
            order = _shuffled(jax.random.fold_in(key, index), batch.weight)
            carry = (*carry, order)
            return jax.lax.fori_loop(0, count, minibatch, carry)[:-1]

        zero = jnp.zeros((), jnp.int32)
        norms = (jnp.zeros(()), jnp.zeros(()))
        carry = (old, _no_sums(), norms, _Made(zero, zero, zero))
        return jax.lax.fori_loop(0, chosen.epochs, epoch, carry)

    def _one_update(self, old: TrainState, picked: Batch, sums, norms, made):
        """Accumulates the gradients of one minibatch and applies them."""
        micro = self.settings.optimizer.microbatch
        pieces = self.forward.microbatches(picked)
        is_first = made.attempted == 0

        def gradients_of(length: int, piece: Batch):
            return self._gradients(old, cut(piece, length), is_first)

        def accumulate(index, carry):
            piece = jax.tree.map(lambda x: x[index], pieces)
            return _add(
                carry, self.forward.by_length(gradients_of, piece.is_reply, piece)
            )

        micro_count = -(-(picked.weight > 0).sum() // micro)
        none = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), (old.actor, old.critic)
        )
        blank = none, (jnp.zeros(()), jnp.zeros(())), _no_sums()
        gradients, counts, added = jax.lax.fori_loop(0, micro_count, accumulate, blank)
        return self._apply(old, gradients, counts, added, sums, norms, made)

    def _gradients(self, old: TrainState, piece: Batch, is_first):
        """((actor, critic) gradients of loss sums, their counts, `Sums`)."""
        actor_loss = jax.value_and_grad(self._actor_loss, has_aux=True)
        (_, (actor_count, sums)), actor = actor_loss(old.actor, piece, is_first)
        critic, critic_count, value_loss = old.critic, jnp.zeros(()), Mean.zero()
        if self.has_critic:
            critic_loss = jax.value_and_grad(self._critic_loss, has_aux=True)
            (_, value_loss), critic = critic_loss(old.critic, piece)
            critic_count = value_loss.count
        sums = sums.replace(value_loss=value_loss)
        # Shared like the parameters, so that no device adds up whole gradients.
        gradients = jax.lax.with_sharding_constraint(
            (actor, critic), (self.shardings.actor, self.shardings.critic)
        )
        return gradients, (actor_count, critic_count), sums

    def _actor_loss(self, actor, piece: Batch, is_first):
        """Sum over the piece; dividing by the minibatch's count comes later."""
        settings, chosen = self.settings, self.settings.loss
        scores = self.forward.scores(
            actor, piece.tokens, piece.is_reply, remat=settings.model.remat
        )
        clips = dict(clip_low=chosen.clip_low, clip_high=chosen.clip_high)
        ratio_inputs = (scores.logprobs, piece.old_logprobs, piece.advantages)
        surrogate = losses.clipped_policy_loss(*ratio_inputs, **clips)
        total = surrogate - chosen.entropy * scores.entropy
        divergence = jnp.zeros_like(surrogate)
        if chosen.kl > 0:
            divergence = losses.kl(scores.logprobs, piece.ref_logprobs, chosen.kl_kind)
            if chosen.kl_in == "loss":
                total += chosen.kl * divergence
        aggregate = reduce.AGGREGATIONS[chosen.aggregation]
        objective = aggregate(total, piece.is_reply, piece.weight)
        mean = lambda x: jax.lax.stop_gradient(  # noqa: E731
            reduce.token_mean(x, piece.is_reply, piece.weight)
        )
        gap = jnp.abs(scores.logprobs - piece.old_logprobs)
        counted = piece.is_reply & (piece.weight > 0)[:, None] & is_first
        gap_mean = mean(gap)
        sums = Sums(
            policy_loss=mean(surrogate),
            value_loss=Mean.zero(),
            entropy=mean(scores.entropy),
            kl=mean(divergence),
            approx_kl=mean(losses.kl(piece.old_logprobs, scores.logprobs, "k3")),
            clip_fraction=mean(losses.clip_fraction(*ratio_inputs, **clips)),
            logprob_gap=jax.tree.map(lambda x: jnp.where(is_first, x, 0), gap_mean),
            logprob_gap_max=jax.lax.stop_gradient(jnp.where(counted, gap, 0).max()),
        )
        return objective.sum, (objective.count, sums)

    def _critic_loss(self, critic, piece: Batch):
        remat = self.settings.model.remat
        values = self.forward.values(critic, piece.tokens, remat=remat)
        clip = self.settings.loss.value_clip
        loss = losses.clipped_value_loss(values, piece.old_values, piece.returns, clip)
        mean = reduce.token_mean(loss, piece.is_reply, piece.weight)
        return mean.sum, mean

    def _apply(self, old: TrainState, gradients, counts, added, sums, norms, made):
        """One step of both optimizers, or none if any gradient is not finite."""
        gradients = tuple(
            jax.tree.map(lambda g, c=c: g / jnp.maximum(c, 1), gradient)
            for gradient, c in zip(gradients, counts, strict=True)
        )
        sizes = tuple(optax.global_norm(g) for g in gradients)
        is_finite = jnp.isfinite(sizes[0]) & jnp.isfinite(sizes[1])
        acts = is_finite & (old.iteration >= self.settings.optimizer.critic_warmup)
        actor, actor_optimizer = _step(
            self.optimizers[0], gradients[0], old.actor_optimizer, old.actor, acts
        )
        critic, critic_optimizer = _step(
            self.optimizers[1],
            gradients[1],
            old.critic_optimizer,
            old.critic,
            is_finite,
        )
        new = old.replace(
            actor=actor,
            critic=critic,
            actor_optimizer=actor_optimizer,
            critic_optimizer=critic_optimizer,
        )
        made = _Made(
            attempted=made.attempted + 1,
            real=made.real + is_finite,
            bad=made.bad + ~is_finite,
        )
        norms = tuple(norm + size for norm, size in zip(norms, sizes, strict=True))
        return new, _merge(sums, added), norms, made


def _step(optimizer, gradient, old_state, parameters, should_apply):
    changes, new_state = optimizer.update(gradient, old_state, parameters)
    new = optax.apply_updates(parameters, changes)
    choose = lambda new, old: jnp.where(should_apply, new, old)  # noqa: E731
    return (
        jax.tree.map(choose, new, parameters),
        jax.tree.map(choose, new_state, old_state),
    )


def even_share(
    batch: Batch,
    order: jax.Array,
    index: jax.Array,
    count: jax.Array,
    real_rows: jax.Array,
    minibatch: int,
) -> Batch:
    """Minibatch `index` of `count` that differ by one row at most, longest rows first.

    How many turns are played is up to the episodes: cut into whole minibatches the last
    could hold a single row, and yet make as large a step as the others.

    Args:
      batch: C rows, enough for `count` whole minibatches.
      order: int32[C], the `real_rows` rows of weight 1 in front.
      index, count, real_rows: int32[].
      minibatch: rows of the result, of which the last are padding; static.
    """
    start, end = (real_rows * i // count for i in (index, index + 1))
    rows = jax.lax.dynamic_slice_in_dim(order, start, minibatch)
    is_own = jnp.arange(minibatch) < end - start
    picked = jax.tree.map(lambda x: x[rows], batch)
    picked = picked.replace(
        is_reply=picked.is_reply & is_own[:, None],
        weight=jnp.where(is_own, picked.weight, 0),
    )
    return _longest_first(picked, jnp.arange(minibatch))


def _longest_first(batch: Batch, rows: jax.Array) -> Batch:
    """The given rows: microbatches of like length, padding rows last."""
    lengths = reply_lengths(batch.is_reply)[rows]
    rows = rows[jnp.argsort(-lengths, stable=True)]
    return jax.tree.map(lambda x: x[rows], batch)


def _shuffled(key: jax.Array, weight: jax.Array) -> jax.Array:
    """int32[C], the rows of weight 1 in random order, then the others."""
    chance = jax.random.uniform(key, weight.shape)
    return jnp.argsort(jnp.where(weight > 0, chance, 2.0), stable=True)


def _no_sums() -> Sums:
    names = [field.name for field in dataclasses.fields(Sums)]
    means = {name: Mean.zero() for name in names[:-1]}
    return Sums(**means, logprob_gap_max=jnp.zeros(()))


def _merge(one: Sums, other: Sums) -> Sums:
    total = jax.tree.map(jnp.add, one, other)
    highest = jnp.maximum(one.logprob_gap_max, other.logprob_gap_max)
    return total.replace(logprob_gap_max=highest)


def _add(carry, new):
    gradients, counts, sums = jax.tree.map(jnp.add, carry, new)
    return gradients, counts, _merge(carry[2], new[2])
