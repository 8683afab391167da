"""The update's forward passes: over microbatches, sharded on the mesh, by row length.

`starpo.score` calls `score_before`; the losses in optimize.py call `policy_scores` and
`critic_values` for each microbatch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.learning import token_scores
from ragen_jax.learning.batch import KeptRows, OldScores, reply_lengths
from ragen_jax.learning.train_state import TrainState
from ragen_jax.learning.vocabulary_scores import score_vocabulary
from ragen_jax.models.attention import causal_attention
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters, declare
from ragen_jax.models.transformer import KeysAndValues, embed, prefix_keys_and_values
from ragen_jax.parallel import mesh as meshes
from ragen_jax.settings import Settings
from ragen_jax.trajectory import Episodes, Rows


@dataclasses.dataclass(frozen=True)
class UpdatePlan:
    """What the update is compiled for. Static."""

    settings: Settings
    config: ModelConfig
    mesh: Mesh | None  # None: arrays are one device's own, inside `shard_map`
    dtype: Any  # of the transformers' computation
    shardings: TrainState  # of the state, before and after
    lengths: tuple[int, ...]  # row lengths compiled for, rising; the last is T
    prefix: tuple[int, ...] = ()  # tokens that every row begins with; shorter than all
    # Trainable and frozen tree -> parameters; full training: the trainable one.
    assemble: Callable[[Any, Any], Parameters] = lambda trainable, frozen: trainable


def check_record(plan: UpdatePlan, rows: Rows, episodes: Episodes) -> None:
    """Refuses a record of other sizes than the plan's, part of which would be ignored.

    Checks shapes alone, so it is free after tracing.

    Raises:
      ValueError: naming the sizes.
    """
    length, rollout = rows.tokens.shape[1], plan.settings.rollout
    if length != plan.lengths[-1]:
        raise ValueError(
            f"rows have T = {length} tokens and the plan {plan.lengths[-1]} (its last"
            " length): fill rows up with padding, or make a plan for longer ones"
        )
    count = rollout.prompts * rollout.group_size
    if episodes.turns.shape[0] != count:
        raise ValueError(
            f"there are B = {episodes.turns.shape[0]} episodes, and rollout.prompts *"
            f" rollout.group_size = {rollout.prompts} * {rollout.group_size}: make a"
            " plan of settings for as many"
        )


# Axes of the mesh that share arrays of `microbatches`.
MICROBATCHES = PartitionSpec(None, *meshes.ROWS)

# Passes over one microbatch -----------------------------------------------------------


def prefix_states(
    plan: UpdatePlan, parameters: Parameters, *, remat: bool = False
) -> KeysAndValues:
    """Keys and values of `plan.prefix`, float[L, 1, S, G, d] each; () without a prefix.

    Rows all begin with the prefix: it is computed once for all microbatches.
    """
    if not plan.prefix:
        return ()
    return prefix_keys_and_values(
        parameters,
        jnp.array(plan.prefix, jnp.int32),
        plan.config,
        dtype=plan.dtype,
        remat=remat,
        attention=_attention_on_shards(plan),
        look_up=functools.partial(_look_up_on_shards, plan),
    )


def policy_scores(
    plan: UpdatePlan,
    parameters: Parameters,
    tokens: jax.Array,
    is_reply: jax.Array,
    prefix: KeysAndValues,
    *,
    remat: bool = False,
    with_entropy: bool = True,
) -> token_scores.TokenScores:
    """Scores of the reply tokens under a policy at the temperature of sampling.

    Args: `parameters` as `plan.assemble` gives them, `prefix` by `prefix_states`; the
      others as for `token_scores.score_tokens`.
    """
    return token_scores.score_tokens(
        parameters,
        tokens,
        plan.config,
        plan.settings.rollout.temperature,
        is_reply=is_reply,
        prefix=prefix,
        remat=remat,
        with_entropy=with_entropy,
        score=functools.partial(_score_on_shards, plan),
        **_shared_options(plan),
    )


def critic_values(
    plan: UpdatePlan,
    parameters: Parameters,
    tokens: jax.Array,
    prefix: KeysAndValues,
    *,
    remat: bool = False,
) -> jax.Array:
    """float32[R, T], units of reward: the critic's value before each token."""
    return token_scores.value_tokens(
        parameters,
        tokens,
        plan.config,
        prefix=prefix,
        remat=remat,
        **_shared_options(plan),
    )


def _shared_options(plan: UpdatePlan) -> dict[str, Any]:
    """What every pass over rows is given besides parameters and tokens."""
    return dict(
        dtype=plan.dtype,
        constrain=functools.partial(share_rows, plan),
        attention=_attention_on_shards(plan),
        look_up=functools.partial(_look_up_on_shards, plan),
    )


# Passes over all kept rows, before the first update -----------------------------------


def score_before(
    plan: UpdatePlan, state: TrainState, frozen, reference, kept: KeptRows
) -> OldScores:
    """Old values, and log-probs of reference and actor, of the kept rows.

    The actor's are the sampler's own, unless loss.sampler_correction asks for the
    update's forward pass.

    Args:
      plan: what is static.
      state: before the first step.
      frozen: the parameters that are not trained; {} in full training.
      reference: the policy of the KL term, {} without one.
      kept: C rows.
    """
    recorded = kept.rows.logprobs
    values = old_values(plan, frozen, state.critic, kept)
    ref_logprobs = reference_logprobs(plan, reference, kept)
    if not plan.settings.loss.sampler_correction:
        return OldScores(values, ref_logprobs, recorded)
    own = actor_logprobs(plan, frozen, state.actor, kept)
    return OldScores(values, ref_logprobs, own, recorded)


def old_values(plan: UpdatePlan, frozen, critic, kept: KeptRows) -> jax.Array:
    """float32[C, T], units of reward, of the critic before its steps; 0 without one.

    Args:
      plan: what is static.
      frozen: the tree that is not trained; {} in full training.
      critic: the critic's trainable tree, {} without one.
      kept: C rows.
    """
    if not plan.settings.has_critic:
        return jnp.zeros(kept.rows.tokens.shape, jnp.float32)
    parameters = plan.assemble(critic, frozen)
    prefix = prefix_states(plan, parameters)
    return map_rows(
        plan, lambda tokens, _: critic_values(plan, parameters, tokens, prefix), kept
    )


def actor_logprobs(plan: UpdatePlan, frozen, actor, kept: KeptRows) -> jax.Array:
    """float32[C, T], nats, of the reply tokens under the actor as the update runs it.

    Equal but for rounding to what the sampler recorded; `loss.sampler_correction`
    weighs tokens by the ratio of the two. Args: as for `old_values`.
    """
    return _policy_logprobs(plan, plan.assemble(actor, frozen), kept)


def reference_logprobs(
    plan: UpdatePlan, reference: Parameters, kept: KeptRows
) -> jax.Array:
    """float32[C, T], nats, of the reply tokens under the frozen reference; 0 without.

    Args:
      plan: what is static.
      reference: the policy of the KL term, {} without one.
      kept: C rows.
    """
    if not plan.settings.has_reference:
        return jnp.zeros(kept.rows.tokens.shape, jnp.float32)
    return _policy_logprobs(plan, reference, kept)


def _policy_logprobs(plan: UpdatePlan, parameters: Parameters, kept: KeptRows):
    prefix = prefix_states(plan, parameters)

    def score(tokens, is_reply):
        return policy_scores(
            plan, parameters, tokens, is_reply, prefix, with_entropy=False
        ).logprobs

    return map_rows(plan, score, kept)


def map_rows(plan: UpdatePlan, score: Callable, kept: KeptRows) -> jax.Array:
    """float32[C, T], `score` of every row of weight 1, a microbatch at a time.

    Args:
      plan: what is static.
      score: (int32[R, T] tokens, bool[R, T] is_reply) -> float32[R, T].
      kept: C rows; those of weight 1 stand in front.
    """
    tokens, is_reply = kept.rows.tokens, kept.rows.is_reply
    micro, width = plan.settings.optimizer.microbatch, tokens.shape[1]
    count = -(-(kept.weight > 0).sum() // micro)
    pieces = microbatches(plan, (tokens, is_reply))

    def scored(length: int, piece) -> jax.Array:
        scores = score(*jax.tree.map(lambda x: x[:, :length], piece))
        return jnp.pad(scores, ((0, 0), (0, width - length)))

    def one(index, out):
        piece = jax.tree.map(lambda x: x[index], pieces)
        return out.at[index].set(by_length(plan, scored, piece[1], piece))

    blank = microbatches(plan, jnp.zeros(tokens.shape, jnp.float32))
    scores = jax.lax.fori_loop(0, count, one, blank)
    return share_rows(plan, scores.reshape(tokens.shape))


# Rows on the mesh, and their lengths --------------------------------------------------


def by_length(plan: UpdatePlan, compute: Callable, is_reply: jax.Array, piece):
    """`compute(length, piece)` at the shortest compiled length that fits."""
    longest = reply_lengths(is_reply).max()
    which = sum((longest > n).astype(jnp.int32) for n in plan.lengths[:-1])
    branches = [lambda piece, n=n: compute(n, piece) for n in plan.lengths]
    return jax.lax.switch(which, branches, piece)


def share_rows(plan: UpdatePlan, tree):
    """Shards every array's leading axis over data and fsdp."""
    return _constrain(plan, tree, meshes.ROWS)


def microbatches(plan: UpdatePlan, tree):
    """[rows, ...] -> [microbatches, rows of each, ...], the second axis sharded."""
    micro = plan.settings.optimizer.microbatch
    cut_up = jax.tree.map(lambda x: x.reshape(-1, micro, *x.shape[1:]), tree)
    return _constrain(plan, cut_up, MICROBATCHES)


def _constrain(plan: UpdatePlan, tree, spec: PartitionSpec):
    if plan.mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(plan.mesh, spec))


def own_plan(plan: UpdatePlan) -> UpdatePlan:
    """The plan for one device's rows of each microbatch, inside `shard_map`."""
    assert plan.mesh is not None
    optimizer = plan.settings.optimizer
    rows = optimizer.microbatch // meshes.row_shards(plan.mesh)
    optimizer = dataclasses.replace(optimizer, microbatch=rows)
    settings = dataclasses.replace(plan.settings, optimizer=optimizer)
    return dataclasses.replace(plan, settings=settings, mesh=None)


def _attention_on_shards(plan: UpdatePlan) -> Callable[..., jax.Array]:
    """Attention in a `shard_map`: each device's own rows and heads, no communication.

    Left to the compiler, all devices would step through the loop over rows together.
    And outside `shard_map` cuDNN's custom call holds an address of this process, so
    that the compilation cache never hits. A batch of one row is the prefix, which is
    replicated.
    """
    config, mesh = plan.config, plan.mesh
    attend = functools.partial(causal_attention, kernel=plan.settings.model.attention)
    if mesh is None:
        return attend
    shared = meshes.shares_heads(config.heads, config.kv_heads, mesh)
    heads = (None, meshes.TENSOR if shared else None, None)
    own, common = PartitionSpec(*meshes.ROWS, *heads), PartitionSpec(None, *heads)

    def attention(query, key, value, *prefix):
        is_prefix = query.shape[0] == 1
        rows = common if is_prefix else own
        return jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(rows, rows, rows) + (common,) * len(prefix),
            out_specs=rows,
            # Unchecked, the transpose would sum the equal gradients of all devices.
            check_vma=is_prefix,
        )(query, key, value, *prefix)

    return attention


def _look_up_on_shards(
    plan: UpdatePlan, parameters: Parameters, tokens: jax.Array, dtype
) -> jax.Array:
    """`transformer.embed` where the embedding's features are sharded (fsdp).

    Each device looks up the tokens of all rows in its own features; an all-to-all then
    trades features for rows. That sends activations instead of gathering the embedding
    and its gradient in float32. A batch of one row is the prefix, which is replicated.
    """
    if plan.mesh is None:
        return embed(parameters, tokens, dtype)
    features = _shared_over(plan, "embedding")[1]
    is_prefix = tokens.shape[0] == 1
    rows = None if is_prefix else meshes.DATA
    embedding = _constrain(plan, parameters["embedding"], PartitionSpec(None, features))
    tokens = _constrain(plan, tokens, PartitionSpec(rows))
    x = embed({"embedding": embedding}, tokens, dtype)
    x = _constrain(plan, x, PartitionSpec(rows, None, features))
    return _constrain(plan, x, PartitionSpec() if is_prefix else meshes.ROWS)


def _shared_over(plan: UpdatePlan, name: str) -> tuple[str | None, ...]:
    """For each dimension of "embedding" or "head": the mesh axis that shards it."""
    mesh = plan.mesh
    assert mesh is not None
    spec = meshes.training_specs(declare(plan.config), mesh)[name]
    return tuple(axis if axis and mesh.shape[axis] > 1 else None for axis in spec)


def _score_on_shards(
    plan: UpdatePlan, weight, hidden, token, wanted, *, temperature, **options
) -> token_scores.TokenScores:
    """`score_vocabulary` in a `shard_map`, of each device's own rows.

    Each device accumulates its gradient of the weight; one all-reduce sums them.
    """
    if plan.mesh is None:
        return score_vocabulary(
            weight, hidden, token, wanted, temperature=temperature, **options
        )
    own, everywhere = meshes.ROWS, PartitionSpec()
    shared_over = _shared_over(plan, "embedding" if options["is_tied"] else "head")
    options["shared_over"] = shared_over

    def score(weight, hidden, token, wanted, temperature):
        options_of_one = options | {"temperature": temperature}
        return score_vocabulary(weight, hidden, token, wanted, **options_of_one)

    return jax.shard_map(
        score,
        mesh=plan.mesh,
        in_specs=(PartitionSpec(*shared_over), own, own, own, everywhere),
        out_specs=own,
        check_vma=False,
    )(weight, hidden, token, wanted, jnp.float32(temperature))


def cut(piece, length: int):
    """The first `length` tokens of every row."""
    return jax.tree.map(lambda x: x[:, :length] if x.ndim == 2 else x, piece)
