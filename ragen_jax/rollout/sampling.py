"""Sampling one token from the policy, softmax(logits / temperature)."""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Sampled:
    """One token for each of S slots."""

    token: jax.Array  # int32[S]
    logprob: jax.Array  # float32[S], nats, under the distribution sampled from
    entropy: jax.Array  # float32[S], nats, of that distribution


def sample(
    keys: jax.Array, logits: jax.Array, temperature: jax.Array, *, greedy: bool
) -> Sampled:
    """Draws a token for each slot by the Gumbel-max trick, which needs no sort.

    argmax_v (x_v - log E_v), with E_v independent Exp(1), is distributed as
    softmax(x) (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030).

    Args:
      keys: key[S], one for each slot, consumed.
      logits: float32[S, V].
      temperature: float32[], above 0; not read when greedy.
      greedy: take the likeliest token; log-probabilities are those at temperature 1.
    """
    if greedy:
        log_policy = jax.nn.log_softmax(logits, axis=-1)
        token = jnp.argmax(logits, axis=-1)
    else:
        log_policy = jax.nn.log_softmax(logits / temperature, axis=-1)
        waits = jax.vmap(lambda key: jax.random.exponential(key, logits.shape[1:]))(
            keys
        )
        token = jnp.argmax(log_policy - jnp.log(waits), axis=-1)
    policy = jnp.exp(log_policy)
    # A token whose probability underflows to 0 adds nothing, whatever its logarithm.
    terms = jnp.where(policy > 0, policy * log_policy, 0)
    return Sampled(
        token=token.astype(jnp.int32),
        logprob=jnp.take_along_axis(log_policy, token[:, None], axis=1)[:, 0],
        entropy=-terms.sum(axis=-1),
    )
