"""The update's forward passes: over microbatches, sharded on the mesh, by row length.

`starpo.score` calls `old_scores`; the losses in gradients.py call `policy_scores` and
`critic_values` for each microbatch.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ragen_jax.learning import token_scores
from ragen_jax.learning.batch import KeptRows, OldScores
from ragen_jax.learning.sharded_forward import forward_options, score_on_shards
from ragen_jax.learning.train_state import TrainState
from ragen_jax.learning.update_plan import (
    UpdatePlan,
    by_length,
    shard_rows,
    split_into_microbatches,
)
from ragen_jax.models.parameters import Parameters
from ragen_jax.models.transformer import KeysAndValues, prefix_keys_and_values

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
        forward_options(plan, remat, is_prefix=True),
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
        forward_options(plan, remat),
        is_reply=is_reply,
        prefix=prefix,
        score=functools.partial(score_on_shards, plan),
        with_entropy=with_entropy,
    )


def critic_values(
    plan: UpdatePlan,
    parameters: Parameters,
    tokens: jax.Array,
    prefix: KeysAndValues,
    *,
    remat: bool = False,
) -> jax.Array:
    """float32[R, T], units of reward: the critic's value before each token.

    Args: as for `policy_scores`.
    """
    return token_scores.value_tokens(
        parameters,
        tokens,
        plan.config,
        forward_options(plan, remat),
        prefix=prefix,
    )


# Passes over all kept rows, before the first update -----------------------------------


def old_scores(
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
    sampler_logprobs = kept.rows.logprobs
    values = old_values(plan, frozen, state.critic, kept)
    ref_logprobs = reference_logprobs(plan, reference, kept)
    if not plan.settings.loss.sampler_correction:
        return OldScores(values, ref_logprobs, sampler_logprobs)
    logprobs = actor_logprobs(plan, frozen, state.actor, kept)
    return OldScores(values, ref_logprobs, logprobs, sampler_logprobs)


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


def _policy_logprobs(
    plan: UpdatePlan, parameters: Parameters, kept: KeptRows
) -> jax.Array:
    """float32[C, T], nats, of the reply tokens under a policy."""
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
    microbatches = split_into_microbatches(plan, (tokens, is_reply))

    def score_to_length(length: int, microbatch) -> jax.Array:
        scores = score(*jax.tree.map(lambda x: x[:, :length], microbatch))
        return jnp.pad(scores, ((0, 0), (0, width - length)))

    def score_microbatch(index, scores):
        microbatch = jax.tree.map(lambda x: x[index], microbatches)
        return scores.at[index].set(
            by_length(plan, score_to_length, microbatch[1], microbatch)
        )

    blank = split_into_microbatches(plan, jnp.zeros(tokens.shape, jnp.float32))
    scores = jax.lax.fori_loop(0, count, score_microbatch, blank)
    return shard_rows(plan, scores.reshape(tokens.shape))
