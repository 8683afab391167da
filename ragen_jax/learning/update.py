"""The update: a record in, a better policy out, as one compiled program.

rewards -> filter -> gather -> old values -> advantages -> minibatches of gradient
accumulation. How many rows are kept is traced: the loops over minibatches and
microbatches run as far as there are rows, so that dropped groups cost nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax import mesh as meshes
from ragen_jax.learning import (
    advantages,
    filters,
    losses,
    policy,
    reduce,
    rewards,
    state,
)
from ragen_jax.learning.reduce import Mean
from ragen_jax.learning.state import TrainState
from ragen_jax.models import transformer
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.settings import Settings
from ragen_jax.trajectory import Episodes, Rows


@dataclasses.dataclass(frozen=True)
class UpdatePlan:
    """What the update is compiled for. Static."""

    settings: Settings
    config: ModelConfig
    mesh: Mesh
    dtype: Any  # of the transformers' computation
    lengths: tuple[int, ...]  # row lengths compiled for, rising; the last is T
    prefix: tuple[int, ...] = ()  # tokens that every row begins with; shorter than all
    # Trainable and frozen tree -> parameters; full training: the trainable one.
    assemble: Callable[[Any, Any], Parameters] = lambda trainable, frozen: trainable


@struct.dataclass
class Batch:
    """Kept rows with everything that the losses read. Rows of weight 0 are padding."""

    tokens: jax.Array  # int32[C, T]
    is_reply: jax.Array  # bool[C, T]
    old_logprobs: jax.Array  # float32[C, T], nats, under the sampling policy
    ref_logprobs: jax.Array  # float32[C, T], nats, 0 without a reference
    old_values: jax.Array  # float32[C, T], units of reward
    advantages: jax.Array  # float32[C, T]
    returns: jax.Array  # float32[C, T], units of reward
    weight: jax.Array  # float32[C]


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
    """Compiles (state, frozen, reference, rows, episodes) -> (state, Learned).

    `shardings` are the state's, before and after.

    `frozen` is {} in full training, `reference` {} without a KL term. The old state's
    memory is reused for the new one.
    """

    def update(
        old: TrainState, frozen, reference, rows: Rows, episodes: Episodes
    ) -> tuple[TrainState, Learned]:
        learner = _Learner(plan, shardings, frozen, reference)
        keep, reward_std = _choose_groups(plan.settings, episodes)
        batch = learner.prepare(old, rows, episodes, keep)
        new, sums, norms, made = learner.train(old, batch)
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
            explained_variance=_explained_variance(batch),
            made=made.real,
        )

    return jax.jit(update, donate_argnums=(0,), out_shardings=(shardings, None))


def _choose_groups(settings: Settings, episodes: Episodes):
    """bool[P] groups to train on, and float32[P] in-group std of the task return."""
    chosen, penalty = settings.filter, settings.reward.format_penalty
    groups = settings.rollout.prompts
    plain = rewards.returns(episodes)
    std = filters.group_statistics(plain, episodes.group, groups).std
    score = std
    if chosen.with_penalty:
        score = filters.group_statistics(
            rewards.returns(episodes, penalty), episodes.group, groups
        ).std
    keep = filters.keep_groups(
        score,
        strategy=chosen.strategy,
        fraction=chosen.fraction,
        keep_zero=chosen.keep_zero,
    )
    return keep, std


@struct.dataclass
class _Made:
    attempted: jax.Array  # int32[], minibatches with at least one row
    real: jax.Array  # int32[], of them applied
    bad: jax.Array  # int32[], of them skipped: gradient not finite


class _Learner:
    """The steps of one update, with the plan and the fixed trees bound in."""

    def __init__(self, plan: UpdatePlan, shardings: TrainState, frozen, reference):
        self.plan, self.settings, self.shardings = plan, plan.settings, shardings
        self.frozen, self.reference = frozen, reference
        self.attention = _attention_on_shards(plan)
        self.prefix = jnp.array(plan.prefix, jnp.int32) if plan.prefix else None
        self.has_critic = plan.settings.estimator == "ppo"
        self.optimizers = (
            state.actor_optimizer(plan.settings),
            state.critic_optimizer(plan.settings),
        )

    # Preparation ---------------------------------------------------------------------

    def prepare(self, old: TrainState, rows: Rows, episodes: Episodes, keep) -> Batch:
        """Gathers the kept rows and computes what their losses need."""
        settings = self.settings
        most = filters.most_kept(
            settings.rollout.prompts,
            strategy=settings.filter.strategy,
            fraction=settings.filter.fraction,
        )
        minibatch = settings.optimizer.minibatch
        capacity = -(-most * settings.rollout.group_size // minibatch) * minibatch
        is_kept = filters.kept_rows(rows, episodes, keep)
        rows, weight = filters.gather_rows(rows, is_kept, capacity)
        # Longest first, padding rows last: microbatches of like length.
        order = jnp.argsort(-_reply_lengths(rows.is_reply), stable=True)
        rows, weight = jax.tree.map(lambda x: x[order], (rows, weight))
        rows = self._share_rows(rows)
        is_reply = rows.is_reply
        zeros = jnp.zeros(rows.tokens.shape, jnp.float32)
        old_values = ref_logprobs = zeros
        if self.has_critic:
            old_values = self._map_rows(self._values(old.critic), rows, weight)
        if settings.loss.kl > 0:
            ref_logprobs = self._map_rows(self._reference, rows, weight)
        earned = rewards.token_rewards(rows, episodes, settings.reward.format_penalty)
        if settings.loss.kl > 0 and settings.loss.kl_in == "reward":
            earned = rewards.penalize_kl(
                earned,
                rows.logprobs,
                ref_logprobs,
                is_reply,
                settings.loss.kl,
                settings.loss.kl_kind,
            )
        gains, returns = self._advantages(earned, old_values, rows, episodes)
        if settings.advantage.whiten:
            gains = advantages.whiten(gains, is_reply, weight)
        return Batch(
            tokens=rows.tokens,
            is_reply=is_reply,
            old_logprobs=rows.logprobs,
            ref_logprobs=ref_logprobs,
            old_values=old_values,
            advantages=gains,
            returns=returns,
            weight=weight,
        )

    def _advantages(self, earned, old_values, rows: Rows, episodes: Episodes):
        chosen = self.settings.advantage
        if self.has_critic:
            result = advantages.gae(
                earned, old_values, rows.is_reply, gamma=chosen.gamma, lam=chosen.lam
            )
            return result.advantages, result.returns
        totals = rewards.returns(episodes, self.settings.reward.format_penalty)
        gain = advantages.group_advantages(
            totals,
            episodes.group,
            self.settings.rollout.prompts,
            divide_by_std=chosen.divide_by_std,
        )
        tokens = advantages.broadcast_to_tokens(gain, rows)
        return tokens, jnp.zeros_like(tokens)

    def _parameters(self, trainable) -> Parameters:
        return self._gather_vocabulary(self.plan.assemble(trainable, self.frozen))

    def _gather_vocabulary(self, parameters: Parameters) -> Parameters:
        """The embedding whole on every device, for looking tokens up in it."""
        whole = NamedSharding(self.plan.mesh, PartitionSpec())
        embedding = jax.lax.with_sharding_constraint(parameters["embedding"], whole)
        return {**parameters, "embedding": embedding}

    def _values(self, critic):
        parameters = self._parameters(critic)
        return lambda tokens, _: policy.value_tokens(
            parameters,
            tokens,
            self.plan.config,
            prefix=self.prefix,
            dtype=self.plan.dtype,
            place=self._share_rows,
            attention=self.attention,
        )

    def _reference(self, tokens, is_reply):
        return policy.score_tokens(
            self._gather_vocabulary(self.reference),
            tokens,
            self.plan.config,
            self.settings.rollout.temperature,
            is_reply=is_reply,
            prefix=self.prefix,
            dtype=self.plan.dtype,
            place=self._share_rows,
            attention=self.attention,
            with_entropy=False,
        ).logprobs

    def _map_rows(self, score: Callable, rows: Rows, weight: jax.Array) -> jax.Array:
        """float32[C, T], `score` of every row of weight 1, a microbatch at a time."""
        micro, width = self.settings.optimizer.microbatch, rows.tokens.shape[1]
        count = -(-(weight > 0).sum() // micro)  # real rows stand in front
        pieces = self._microbatches((rows.tokens, rows.is_reply))

        def scored(length: int, piece) -> jax.Array:
            scores = score(*jax.tree.map(lambda x: x[:, :length], piece))
            return jnp.pad(scores, ((0, 0), (0, width - length)))

        def one(index, out):
            piece = jax.tree.map(lambda x: x[index], pieces)
            return out.at[index].set(self._by_length(scored, piece[1], piece))

        blank = self._microbatches(jnp.zeros(rows.tokens.shape, jnp.float32))
        scores = jax.lax.fori_loop(0, count, one, blank)
        return self._share_rows(scores.reshape(rows.tokens.shape))

    def _by_length(self, compute: Callable, is_reply: jax.Array, piece):
        """`compute(length, piece)` at the shortest compiled length that fits."""
        lengths = self.plan.lengths
        longest = _reply_lengths(is_reply).max()
        which = sum((longest > n).astype(jnp.int32) for n in lengths[:-1])
        branches = [lambda piece, n=n: compute(n, piece) for n in lengths]
        return jax.lax.switch(which, branches, piece)

    def _share_rows(self, tree):
        """Every array's leading axis shared over data and fsdp."""
        return jax.lax.with_sharding_constraint(
            tree, NamedSharding(self.plan.mesh, meshes.ROWS)
        )

    def _microbatches(self, tree):
        """[rows, ...] -> [microbatches, rows of one, ...], each shared like rows."""
        micro = self.settings.optimizer.microbatch
        placed = NamedSharding(self.plan.mesh, PartitionSpec(None, *meshes.ROWS))
        return jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(
                x.reshape(-1, micro, *x.shape[1:]), placed
            ),
            tree,
        )

    # Training ------------------------------------------------------------------------

    def train(self, old: TrainState, batch: Batch):
        """All epochs over the batch, one real update a minibatch."""
        chosen = self.settings.optimizer
        real_rows = (batch.weight > 0).sum()
        count = -(-real_rows // chosen.minibatch)

        def minibatch(index, carry):
            new, sums, norms, made, order = carry
            rows = jax.lax.dynamic_slice_in_dim(
                order, index * chosen.minibatch, chosen.minibatch
            )
            return *self._one_update(new, batch, rows, sums, norms, made), order

        def epoch(index, carry):
            key = jax.random.fold_in(jax.random.key(self.settings.seed), old.iteration)
            order = _shuffled(jax.random.fold_in(key, index), batch.weight)
            carry = (*carry, order)
            return jax.lax.fori_loop(0, count, minibatch, carry)[:-1]

        zero = jnp.zeros((), jnp.int32)
        norms = (jnp.zeros(()), jnp.zeros(()))
        carry = (old, _no_sums(), norms, _Made(zero, zero, zero))
        return jax.lax.fori_loop(0, chosen.epochs, epoch, carry)

    def _one_update(self, old: TrainState, batch: Batch, rows, sums, norms, made):
        """Accumulates the gradients of one minibatch and applies them."""
        micro = self.settings.optimizer.microbatch
        # Longest first: microbatches of like length, padding rows last.
        lengths = _reply_lengths(batch.is_reply)[rows]
        rows = rows[jnp.argsort(-lengths, stable=True)]
        picked = jax.tree.map(lambda x: x[rows], batch)
        pieces = self._microbatches(picked)
        is_first = made.attempted == 0

        def gradients_of(length: int, piece: Batch):
            return self._gradients(old, _cut(piece, length), is_first)

        def accumulate(index, carry):
            piece = jax.tree.map(lambda x: x[index], pieces)
            return _add(carry, self._by_length(gradients_of, piece.is_reply, piece))

        micro_count = -(-(picked.weight > 0).sum() // micro)
        blank = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(
                lambda: self._gradients(
                    old, jax.tree.map(lambda x: x[0], pieces), is_first
                )
            ),
        )
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
        scores = policy.score_tokens(
            self._parameters(actor),
            piece.tokens,
            self.plan.config,
            settings.rollout.temperature,
            is_reply=piece.is_reply,
            prefix=self.prefix,
            dtype=self.plan.dtype,
            place=self._share_rows,
            attention=self.attention,
            remat=settings.model.remat,
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
        values = policy.value_tokens(
            self._parameters(critic),
            piece.tokens,
            self.plan.config,
            prefix=self.prefix,
            dtype=self.plan.dtype,
            place=self._share_rows,
            attention=self.attention,
            remat=self.settings.model.remat,
        )
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


def _attention_on_shards(plan: UpdatePlan) -> Callable[..., jax.Array]:
    """Attention of each device's own rows and heads, with no word to the others.

    Left to the compiler, the loop over rows would visit them one by one on all devices.
    """
    config, mesh = plan.config, plan.mesh
    shared = meshes.shares_heads(config.heads, config.kv_heads, mesh)
    heads = (None, meshes.TENSOR if shared else None, None)
    own, common = PartitionSpec(*meshes.ROWS, *heads), PartitionSpec(None, *heads)

    def attention(query, key, value, *prefix):
        return jax.shard_map(
            transformer.causal_attention,
            mesh=mesh,
            in_specs=(own, own, own) + (common,) * len(prefix),
            out_specs=own,
            check_vma=False,
        )(query, key, value, *prefix)

    return attention


def _step(optimizer, gradient, old_state, parameters, should_apply):
    changes, new_state = optimizer.update(gradient, old_state, parameters)
    new = optax.apply_updates(parameters, changes)
    choose = lambda new, old: jnp.where(should_apply, new, old)  # noqa: E731
    return (
        jax.tree.map(choose, new, parameters),
        jax.tree.map(choose, new_state, old_state),
    )


def _shuffled(key: jax.Array, weight: jax.Array) -> jax.Array:
    """int32[C], the rows of weight 1 in random order, then the others."""
    chance = jax.random.uniform(key, weight.shape)
    return jnp.argsort(jnp.where(weight > 0, chance, 2.0), stable=True)


def _reply_lengths(is_reply: jax.Array) -> jax.Array:
    """int32[rows], up to the last reply token; what stands behind has no loss."""
    index = jnp.arange(1, is_reply.shape[1] + 1)[None]
    return jnp.where(is_reply, index, 0).max(axis=1)


def _cut(piece: Batch, length: int) -> Batch:
    """The first `length` tokens of every row."""
    return jax.tree.map(lambda x: x[:, :length] if x.ndim == 2 else x, piece)


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


def _explained_variance(batch: Batch) -> jax.Array:
    """1 - Var(returns - old values) / Var(returns), over the kept reply tokens."""
    mask = batch.is_reply & (batch.weight > 0)[:, None]

    def variance(x: jax.Array) -> jax.Array:
        mean = reduce.token_mean(x, mask).value()
        return reduce.token_mean((x - mean) ** 2, mask).value()

    total = variance(batch.returns)
    rest = variance(batch.returns - batch.old_values)
    return jnp.where(total > 1e-12, 1 - rest / jnp.maximum(total, 1e-12), 0.0)
