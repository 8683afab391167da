"""What an update reports per token, added up over microbatches and minibatches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.learning.aggregation import Mean


@struct.dataclass
class TokenSums:
    """(sum, count) of everything reported per token, added up over microbatches."""

    policy_loss: Mean
    value_loss: Mean
    entropy: Mean
    kl: Mean
    approx_kl: Mean
    clip_fraction: Mean
    logprob_gap: Mean  # first update of an iteration only: the policy has not moved
    ratio: Mean  # of probabilities, to those that were sampled from
    logprob_gap_max: jax.Array  # float32[]
    ratio_max: jax.Array  # float32[]


MAXIMA = ("logprob_gap_max", "ratio_max")


def no_sums() -> TokenSums:
    """Of no tokens."""
    zeros: dict[str, Any] = {
        field.name: jnp.zeros(()) if field.name in MAXIMA else Mean.zero()
        for field in dataclasses.fields(TokenSums)
    }
    return TokenSums(**zeros)


def merge(one: TokenSums, other: TokenSums) -> TokenSums:
    """The sums over both."""
    total = jax.tree.map(jnp.add, one, other)
    highest = {
        name: jnp.maximum(getattr(one, name), getattr(other, name)) for name in MAXIMA
    }
    return total.replace(**highest)
