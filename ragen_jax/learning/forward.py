"""The models as the update runs them: over microbatches, on the mesh, by length."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax import mesh as meshes
from ragen_jax.learning import policy
from ragen_jax.models.attention import causal_attention
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.settings import Settings


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


class Forward:
    """Actor and critic passes with the plan and the frozen parameters bound in."""

    def __init__(self, plan: UpdatePlan, frozen):
        self.plan, self.settings, self.frozen = plan, plan.settings, frozen
        prefix = jnp.array(plan.prefix, jnp.int32) if plan.prefix else None
        self._shared = dict(
            prefix=prefix,
            dtype=plan.dtype,
            place=self.share_rows,
            attention=_attention_on_shards(plan),
        )

    def scores(self, actor, tokens, is_reply, **options) -> policy.TokenScores:
        """Scores of the reply tokens by the trainable tree `actor`, at T of sampling.

        Args: as for `policy.score_tokens`; `options` are its `remat` and
          `with_entropy`.
        """
        return self._score(
            self.plan.assemble(actor, self.frozen), tokens, is_reply, **options
        )

    def reference_logprobs(self, reference: Parameters, tokens, is_reply) -> jax.Array:
        """float32[R, T], nats, of the reply tokens by the frozen reference."""
        return self._score(reference, tokens, is_reply, with_entropy=False).logprobs

    def values(self, critic, tokens, **options) -> jax.Array:
        """float32[R, T], the critic's value before each token."""
        parameters = self._gather_vocabulary(self.plan.assemble(critic, self.frozen))
        config = self.plan.config
        return policy.value_tokens(
            parameters, tokens, config, **self._shared, **options
        )

    def _score(self, parameters: Parameters, tokens, is_reply, **options):
        return policy.score_tokens(
            self._gather_vocabulary(parameters),
            tokens,
            self.plan.config,
            self.settings.rollout.temperature,
            is_reply=is_reply,
            **self._shared,
            **options,
        )

    def _gather_vocabulary(self, parameters: Parameters) -> Parameters:
        """The embedding whole on every device, for looking tokens up in it."""
        whole = NamedSharding(self.plan.mesh, PartitionSpec())
        embedding = jax.lax.with_sharding_constraint(parameters["embedding"], whole)
        return {**parameters, "embedding": embedding}

    def map_rows(
        self, score: Callable, tokens: jax.Array, is_reply: jax.Array, weight: jax.Array
    ) -> jax.Array:
        """float32[C, T], `score` of every row of weight 1, a microbatch at a time.

        Args:
          score: (int32[R, T] tokens, bool[R, T] is_reply) -> float32[R, T].
          tokens: int32[C, T]. is_reply: bool[C, T].
          weight: float32[C]; the rows of weight 1 stand in front.
        """
        micro, width = self.settings.optimizer.microbatch, tokens.shape[1]
        count = -(-(weight > 0).sum() // micro)
        pieces = self.microbatches((tokens, is_reply))

        def scored(length: int, piece) -> jax.Array:
            scores = score(*jax.tree.map(lambda x: x[:, :length], piece))
            return jnp.pad(scores, ((0, 0), (0, width - length)))

        def one(index, out):
            piece = jax.tree.map(lambda x: x[index], pieces)
            return out.at[index].set(self.by_length(scored, piece[1], piece))

        blank = self.microbatches(jnp.zeros(tokens.shape, jnp.float32))
        scores = jax.lax.fori_loop(0, count, one, blank)
        return self.share_rows(scores.reshape(tokens.shape))

    def by_length(self, compute: Callable, is_reply: jax.Array, piece):
        """`compute(length, piece)` at the shortest compiled length that fits."""
        lengths = self.plan.lengths
        longest = reply_lengths(is_reply).max()
        which = sum((longest > n).astype(jnp.int32) for n in lengths[:-1])
        branches = [lambda piece, n=n: compute(n, piece) for n in lengths]
        return jax.lax.switch(which, branches, piece)

    def share_rows(self, tree):
        """Every array's leading axis shared over data and fsdp."""
        return jax.lax.with_sharding_constraint(
            tree, NamedSharding(self.plan.mesh, meshes.ROWS)
        )

    def microbatches(self, tree):
        """[rows, ...] -> [microbatches, rows of one, ...], each shared like rows."""
        micro = self.settings.optimizer.microbatch
        placed = NamedSharding(self.plan.mesh, PartitionSpec(None, *meshes.ROWS))
        return jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(
                x.reshape(-1, micro, *x.shape[1:]), placed
            ),
            tree,
        )


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
            causal_attention,
            mesh=mesh,
            in_specs=(own, own, own) + (common,) * len(prefix),
            out_specs=own,
            check_vma=False,
        )(query, key, value, *prefix)

    return attention


def reply_lengths(is_reply: jax.Array) -> jax.Array:
    """int32[rows], up to the last reply token; what stands behind has no loss."""
    index = jnp.arange(1, is_reply.shape[1] + 1)[None]
    return jnp.where(is_reply, index, 0).max(axis=1)


def cut(piece, length: int):
    """The first `length` tokens of every row."""
    return jax.tree.map(lambda x: x[:, :length] if x.ndim == 2 else x, piece)
