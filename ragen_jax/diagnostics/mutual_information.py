"""Mutual information of prompts and thoughts: whether thoughts depend on their input.

X is all that the policy has read when it begins to think, the opening tag included; Z
is the thought, without its tags. Thoughts may be diverse for one input and yet ignore
it ("template collapse", RAGEN-2, arXiv:2604.06268): I(X; Z) falls while H(Z | X) stays.

Every sampled thought z_i is scored under every prompt x_j,
  S_ij = sum_t log p(z_it | x_j, z_i,<t),
and with c(i) its own prompt's column, M columns,
  matched_i  = S_i,c(i)
  marginal_i = logsumexp_j S_ij - log M
  I(X; Z) = mean(matched - marginal), H(Z | X) = -mean matched, H(Z) = -mean marginal.
Three normalizations, each under its own name:
  sequence: as above, nats a thought.
  token: divided by |z_i| after the mixture (the paper's Eq. 1), nats a token.
  ragen: S_ij / |z_i| before the mixture, as RAGEN's code has it: the marginal is then
    no log-probability, and I is at most log M whatever the length.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.models import transformer
from ragen_jax.models.attention import blocked_attention
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters

STD_EPSILON = 1e-3  # nats, added to the std of the marginals in the z-score
EMA_DECAY = 0.9  # of that std from one measurement to the next
RETRIEVAL = (1, 2, 4, 8)  # k of the retrieval accuracies
# Most float32 numbers that exist at a time: logits, and scores of attention.
_MOST_LOGITS = _MOST_SCORES = 2**24


@struct.dataclass
class Pairs:
    """N thoughts and M prompts; each thought's own prompt is one of them."""

    prompts: jax.Array  # int32[M, Tp], right-padded
    prompt_lengths: jax.Array  # int32[M], at least 1
    thoughts: jax.Array  # int32[N, Tz], right-padded
    thought_lengths: jax.Array  # int32[N], at least 1
    own: jax.Array  # int32[N], column of each thought's own prompt
    is_same: jax.Array  # bool[N, M], equal to the own prompt token for token


@struct.dataclass
class Information:
    """Estimates under one normalization, in nats per thought or nats per token."""

    mutual: jax.Array  # float32[], I(X; Z)
    conditional_entropy: jax.Array  # float32[], H(Z | X)
    entropy: jax.Array  # float32[], H(Z)
    bound: jax.Array  # float32[], the largest estimate that M prompts allow
    marginal_std: jax.Array  # float32[], population std of the marginals
    zscore: jax.Array  # float32[], mean((matched - marginal) / (std + 1e-3))


@struct.dataclass
class Retrieval:
    """How often a thought's own prompt is among the k that explain it best."""

    accuracy: jax.Array  # float32[len(RETRIEVAL)]
    chance: jax.Array  # likewise, of a random guess; exact if all prompts differ


# Scores ------------------------------------------------------------------------------


def score_pairs(
    parameters: Parameters,
    pairs: Pairs,
    config: ModelConfig,
    temperature: float,
    dtype=jnp.float32,
) -> jax.Array:
    """float32[N, M], nats, S_ij: each thought's log-probability after each prompt.

    The keys and values of a prompt are computed once for all N thoughts: M * Tp +
    N * M * Tz tokens pass through the layers instead of N * M * (Tp + Tz).

    Args:
      parameters: of the policy, adapters merged.
      pairs: what to score.
      config: the model's shape.
      temperature: above 0; the one that the thoughts were sampled at.
      dtype: of the transformer's computation.
    """

    def column(prompt_and_length):
        prompt, length = prompt_and_length
        prefix, last = _read_prompt(parameters, prompt, length, config, dtype)
        count, width = pairs.thoughts.shape
        scores_of_row = config.heads * width * (prompt.shape[0] + width)
        rows = max(1, min(count, _MOST_SCORES // scores_of_row))

        def row(tokens):
            hidden = _after_prompt(
                parameters, tokens[None], prefix, length, config, dtype
            )
            return jnp.concatenate([last, hidden[0, :-1]])

        before = jax.lax.map(row, pairs.thoughts, batch_size=rows)
        return _logprobs(parameters, before, pairs.thoughts, temperature)

    logprobs = jax.lax.map(column, (pairs.prompts, pairs.prompt_lengths))  # [M, N, Tz]
    place = jnp.arange(pairs.thoughts.shape[1])
    is_real = place[None] < pairs.thought_lengths[:, None]
    return jnp.where(is_real[None], logprobs, 0).sum(axis=2).T


def _read_prompt(parameters, prompt, length, config: ModelConfig, dtype):
    """((keys, values) of each layer, [L, 1, Tp, G, d] each; last hidden [1, D])."""
    positions = jnp.arange(prompt.shape[0])[None]

    def layer(x, weights):
        return transformer.block(
            weights,
            x,
            positions,
            config,
            lambda q, k, v: (blocked_attention(q, k, v), (k, v)),
        )

    x = transformer.embed(parameters, prompt[None], dtype)
    x, prefix = jax.lax.scan(layer, x, parameters["layers"])
    last = jax.lax.dynamic_slice_in_dim(x[0], length - 1, 1)
    return prefix, _final_norm(parameters, last, config)


def _after_prompt(parameters, tokens, prefix, length, config: ModelConfig, dtype):
    """float[1, Tz, D], hidden states of a thought's tokens given the prompt's cache."""
    positions = length + jnp.arange(tokens.shape[1])[None]

    def layer(x, weights_and_prefix):
        weights, before = weights_and_prefix
        attend = lambda *own: (_attend(*own, *before, length), None)
        return transformer.block(weights, x, positions, config, attend)

    x = transformer.embed(parameters, tokens, dtype)
    x, _ = jax.lax.scan(layer, x, (parameters["layers"], prefix))
    return _final_norm(parameters, x, config)


def _final_norm(parameters, x, config: ModelConfig):
    return transformer.rms_norm(x, parameters["final_norm"], config.norm_epsilon)


def _attend(query, key, value, prefix_key, prefix_value, length) -> jax.Array:
    """float[1, T, H, d]: each token sees the prompt and its thought so far.

    Args:
      query, key, value: float[1, T, H or G, d], of the thought.
      prefix_key, prefix_value: float[1, Tp, G, d], of the prompt, right-padded.
      length: int32[], of the prompt.
    """
    rows, count, heads, dim = query.shape
    width = prefix_key.shape[1]
    key = jnp.concatenate([prefix_key, key], axis=1)
    value = jnp.concatenate([prefix_value, value], axis=1)
    grouped = query.reshape(rows, count, key.shape[2], -1, dim)
    scores = jnp.einsum(
        "rtgnd,rsgd->rgnts", grouped, key, preferred_element_type=jnp.float32
    )
    place = jnp.arange(width + count)
    own = place[None] - width  # Index within the thought; negative: in the prompt.
    is_seen = (place[None] < length) | (own >= 0) & (own <= jnp.arange(count)[:, None])
    scores = jnp.where(is_seen[None, None, None], scores * dim**-0.5, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    mixed = jnp.einsum("rgnts,rsgd->rtgnd", weights, value)
    return mixed.reshape(rows, count, heads, dim)


def _logprobs(parameters, before, tokens, temperature: float) -> jax.Array:
    """float32[N, Tz], nats: log-probabilities of tokens.

    Args:
      parameters: of the policy.
      before: float[N, Tz, D], the hidden state before each token.
      tokens: int32[N, Tz].
      temperature: of sampling.
    """

    def one(hidden_and_token):
        hidden, token = hidden_and_token
        logits = transformer.vocabulary_logits(parameters, hidden) / temperature
        return logits[token] - jax.nn.logsumexp(logits)

    vocabulary = parameters["embedding"].shape[0]
    flat = before.reshape(-1, before.shape[-1]), tokens.reshape(-1)
    size = max(1, min(flat[1].shape[0], _MOST_LOGITS // vocabulary))
    return jax.lax.map(one, flat, batch_size=size).reshape(tokens.shape)


# Estimates ---------------------------------------------------------------------------


def estimate(scores: jax.Array | np.ndarray, pairs: Pairs) -> dict[str, Information]:
    """Information by normalization: "sequence", "token" and "ragen".

    Args:
      scores: float32[N, M], nats, from `score_pairs`.
      pairs: of the same N and M.
    """
    chex.assert_shape(scores, pairs.is_same.shape)
    length = pairs.thought_lengths.astype(jnp.float32)
    matched, marginal = _matched(scores, pairs.own), _marginal(scores)
    each = scores / length[:, None]
    bound = jnp.log(jnp.float32(scores.shape[1]))
    return {
        "sequence": _information(matched, marginal, bound),
        "token": _information(
            matched / length, marginal / length, (bound / length).mean()
        ),
        "ragen": _information(_matched(each, pairs.own), _marginal(each), bound),
    }


def _matched(scores: jax.Array, own: jax.Array) -> jax.Array:
    return jnp.take_along_axis(scores, own[:, None], axis=1)[:, 0]


def _marginal(scores: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(scores, axis=1) - jnp.log(jnp.float32(scores.shape[1]))


def _information(matched, marginal, bound) -> Information:
    std = marginal.std()
    gap = matched - marginal
    return Information(
        mutual=gap.mean(),
        conditional_entropy=-matched.mean(),
        entropy=-marginal.mean(),
        bound=bound,
        marginal_std=std,
        zscore=(gap / (std + STD_EPSILON)).mean(),
    )


def retrieval(scores: jax.Array | np.ndarray, pairs: Pairs) -> Retrieval:
    """How often the k highest-scored prompts of a thought include its own.

    A prompt equal to its own counts too. k is at most M. Dividing a row by the length
    of its thought changes no ranking, so one matrix serves all normalizations.

    Args: as for `estimate`.
    """
    columns = scores.shape[1]
    share = pairs.is_same.sum(axis=1).mean(dtype=jnp.float32) / columns
    accuracy, chance = [], []
    for k in (min(k, columns) for k in RETRIEVAL):
        _, best = jax.lax.top_k(scores, k)
        found = jnp.take_along_axis(pairs.is_same, best, axis=1).any(axis=1)
        accuracy.append(found.mean(dtype=jnp.float32))
        chance.append(jnp.minimum(1.0, share * k))
    return Retrieval(jnp.stack(accuracy), jnp.stack(chance))


@dataclasses.dataclass(frozen=True)
class SmoothedStd:
    """Moving averages of the stds of marginals, by sample and normalization.

    The divisor of a z-score that one odd batch hardly moves. Frozen.
    """

    values: tuple[tuple[str, float], ...] = ()  # nats, sorted by name

    def update(self, name: str, std: float) -> tuple["SmoothedStd", float]:
        """The next state and the smoothed std, 0.9 old + 0.1 new."""
        known = dict(self.values)
        old = known.get(name, std)
        known[name] = EMA_DECAY * old + (1 - EMA_DECAY) * std
        return SmoothedStd(tuple(sorted(known.items()))), known[name]


def report(
    scores: jax.Array | np.ndarray, pairs: Pairs, sample: str, smoothed: SmoothedStd
) -> tuple[dict[str, float], SmoothedStd]:
    """Every number of one measurement, by name, and the next state of the z-scores.

    Args:
      scores, pairs: as for `estimate`.
      sample: "first_turn" or "trajectory", the first part of the names.
      smoothed: from the measurement before.
    """
    values: dict[str, float] = {}
    for kind, found in jax.device_get(estimate(scores, pairs)).items():
        name = f"{sample}/{kind}"
        for field in dataclasses.fields(Information):
            values[f"{name}/{field.name}"] = float(getattr(found, field.name))
        smoothed, std = smoothed.update(name, float(found.marginal_std))
        values[f"{name}/marginal_std_ema"] = std
        values[f"{name}/zscore_ema"] = float(found.mutual) / (std + STD_EPSILON)
    found = jax.device_get(retrieval(scores, pairs))
    for index, k in enumerate(RETRIEVAL):
        values[f"{sample}/retrieval_at_{k}"] = float(found.accuracy[index])
        values[f"{sample}/retrieval_at_{k}_chance"] = float(found.chance[index])
    return values, smoothed


def cost(pairs: Pairs) -> dict[str, int]:
    """Tokens that pass through the layers: here, and if every pair were a row."""
    prompts, prompt_width = pairs.prompts.shape
    thoughts, thought_width = pairs.thoughts.shape
    return {
        "tokens": prompts * prompt_width + thoughts * prompts * thought_width,
        "tokens_by_pair": thoughts * prompts * (prompt_width + thought_width),
    }


def as_arrays(pairs: Pairs) -> Pairs:
    """The same pairs with device arrays."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), pairs)
