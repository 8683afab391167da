"""What a batch of episodes was like: the numbers that are logged."""

import jax
import jax.numpy as jnp

from ragen_jax.learning import reduce, rewards
from ragen_jax.trajectory import Episodes, Rows, row_lengths


def summarize(
    rows: Rows, episodes: Episodes, format_penalty: float
) -> dict[str, jax.Array]:
    """Means over episodes, turns or reply tokens, each float32[].

    Args:
      rows: all rows of the episodes.
      episodes: the B episodes.
      format_penalty: reward units, <= 0.
    """
    played = jnp.arange(episodes.reward.shape[1])[None] < episodes.turns[:, None]
    turns = played.sum()

    def per_turn(values: jax.Array) -> jax.Array:
        return jnp.where(played, values, 0).sum() / turns

    by_turn = {
        "reply_tokens": per_turn(episodes.reply_tokens),
        "thought_tokens": per_turn(episodes.thought_tokens),
        "grounded": per_turn(episodes.grounded),
        "valid_reply_rate": per_turn(episodes.is_valid.astype(jnp.float32)),
    }
    return by_turn | {
        "success": episodes.success.mean(dtype=jnp.float32),
        "return": rewards.returns(episodes).mean(),
        "return_with_penalty": rewards.returns(episodes, format_penalty).mean(),
        "entropy": reduce.token_mean(rows.entropy, rows.is_reply).value(),
        "turns": episodes.turns.mean(dtype=jnp.float32),
        "actions": episodes.actions.sum(axis=1).mean(dtype=jnp.float32),
        # Of all rows of an episode: what windows share counts in each of them.
        "episode_tokens": row_lengths(rows).sum(dtype=jnp.float32)
        / episodes.turns.shape[0],
        "sampled_tokens": episodes.reply_tokens.sum().astype(jnp.float32),
    }


def summarize_worlds(episodes: Episodes, worlds: int) -> dict[str, jax.Array]:
    """Means over each world's episodes, float32[worlds] each; NaN of none."""

    def mean(values: jax.Array) -> jax.Array:
        total = jax.ops.segment_sum(
            values.astype(jnp.float32), episodes.environment, worlds
        )
        ones = jnp.ones_like(values, jnp.float32)
        return total / jax.ops.segment_sum(ones, episodes.environment, worlds)

    turns = jnp.maximum(episodes.turns, 1)
    return {
        "success": mean(episodes.success),
        "return": mean(rewards.returns(episodes)),
        "valid_reply_rate": mean(episodes.is_valid.sum(axis=1) / turns),
        "reply_tokens": mean(episodes.reply_tokens.sum(axis=1) / turns),
        "turns": mean(episodes.turns),
    }
