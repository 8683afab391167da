"""A hook of rewards that gives NaN in some iterations, and else nothing.

Which ones depends on the episodes alone, so that each run of the same seed has the same
iterations whose gradients are not finite: those whose replies' lengths, each times its
episode's number, leave 1 when their sum is divided by 8; one in eight, where lengths
differ.
"""

import jax.numpy as jnp


def turn_rewards(episodes):
    """float32[B, K]: 0, or NaN throughout."""
    number = 1 + jnp.arange(episodes.turns.size)[:, None]
    drawn = (episodes.reply_tokens * number).sum()
    return jnp.where(drawn % 8 == 1, jnp.nan, 0.0) * jnp.ones_like(episodes.reward)
