"""The record: what the sampler writes and everything after it reads.

Letters used throughout: P prompts, N rollouts of each (a group), B = P * N episodes,
K turns, A actions in a turn, R rows (training samples), T tokens in a row,
V vocabulary, D width, L layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

# Why a reply ended (`Episodes.reply_end`).
NO_REPLY = 0  # the turn was never played
END_OF_TURN = 1  # the policy sampled the token that the chat template closes it with
REPLY_BUDGET = 2  # the reply reached rollout.reply_tokens
ANSWER_CLOSED = 3  # </answer> was complete and rollout.stop_at_answer was set
OTHER_STOP = 4  # the policy sampled another of the model's stop tokens
SAMPLED_STOPS = (END_OF_TURN, OTHER_STOP)  # the last token is a control token

# Why an episode ended (`Episodes.end`).
UNFINISHED = 0
ENV_DONE = 1  # the environment reached an end of its own: goal, hole
OUT_OF_TURNS = 2
OUT_OF_ACTIONS = 3

PADDING = -1  # in `Rows.episode` and `Rows.turn`


@struct.dataclass
class Episodes:
    """B episodes of at most K turns.

    Ordered by group; with several environments by device, then environment, then group.
    To compare the episodes of a group, read `group` and never the position.
    """

    group: jax.Array  # int32[B], which prompt (initial state) the episode started from
    environment: jax.Array  # int32[B], index into the list of environments
    success: jax.Array  # bool[B], whether the environment counts the episode as solved
    end: jax.Array  # int32[B], why it ended: ENV_DONE, OUT_OF_TURNS, OUT_OF_ACTIONS
    turns: jax.Array  # int32[B], turns played, 1..K
    reward: jax.Array  # float32[B, K], the environment's in each turn, no penalty
    is_valid: jax.Array  # bool[B, K], reply well formed, all actions known
    actions: jax.Array  # int32[B, K], actions that reached the environment in each turn
    reply_tokens: jax.Array  # int32[B, K], tokens sampled in each turn
    reply_end: jax.Array  # int32[B, K], NO_REPLY, END_OF_TURN, REPLY_BUDGET, ...
    thought_tokens: jax.Array  # int32[B, K], before the one that ends <answer>
    grounded: jax.Array  # float32[B, K], share of the landmarks that the thought names


def blank_episodes(count: int, turns: int) -> Episodes:
    """B episodes of K turns in which nothing was played: every field is 0 or False."""
    by_episode, flag = jnp.zeros(count, jnp.int32), jnp.zeros(count, bool)
    by_turn = jnp.zeros((count, turns), jnp.int32)
    float_by_turn = jnp.zeros((count, turns), jnp.float32)
    return Episodes(
        group=by_episode,
        environment=by_episode,
        success=flag,
        end=by_episode,
        turns=by_episode,
        reward=float_by_turn,
        is_valid=jnp.zeros((count, turns), bool),
        actions=by_turn,
        reply_tokens=by_turn,
        reply_end=by_turn,
        thought_tokens=by_turn,
        grounded=float_by_turn,
    )


@struct.dataclass
class Rows:
    """R training rows of T tokens, exactly as sampled and as fed.

    A row is one context window: with full history a whole episode. `is_reply` alone
    says what is trained on. Position t of a row holds what is known of token t: its
    log-probability is read from the logits of position t - 1.

    Padding is no reply and ends no turn: `record.finish_rows` and `gather.gather_rows`
    see to it.
    """

    tokens: jax.Array  # int32[R, T], prompt, then replies and observations in turn
    is_reply: jax.Array  # bool[R, T], True on tokens that the policy sampled
    logprobs: jax.Array  # float32[R, T], nats, under the sampling policy; else 0
    entropy: jax.Array  # float32[R, T], nats, of the distribution sampled from; else 0
    episode: jax.Array  # int32[R, T], index of a token's in `Episodes`; -1: padding
    turn: jax.Array  # int32[R, T], 0-based turn of that episode; -1: padding
    turn_end: jax.Array  # bool[R, T], True on the last reply token of each turn
    policy_version: jax.Array  # int32[R], updates made before the row was sampled

    @property
    def is_real(self) -> jax.Array:
        """bool[R, T], False on padding."""
        return self.episode >= 0

    @property
    def real_replies(self) -> jax.Array:
        """bool[R, T], the reply tokens, for what indexes by `episode`.

        Whoever made the rows: an index of -1 would read the last episode.
        """
        return self.is_reply & self.is_real


def check_rows(rows: Rows) -> None:
    """Raises ValueError if the fields' shapes disagree. Host side; reads no values."""
    for name in ("is_reply", "logprobs", "entropy", "episode", "turn", "turn_end"):
        if (shape := getattr(rows, name).shape) != rows.tokens.shape:
            raise ValueError(f"{name} has shape {shape}, tokens {rows.tokens.shape}")


def is_played(episodes: Episodes) -> jax.Array:
    """bool[B, K], True for the turns that were played; on the host, of host arrays."""
    turn = np.arange(episodes.reward.shape[1], dtype=np.int32)
    return episodes.turns[:, None] > turn[None, :]


def look_up_turns(by_turn: jax.Array, rows: Rows) -> jax.Array:
    """[R, T] from [B, K]: for each token the number of its turn.

    Padding (-1, which would index from the end) reads turn 0 of episode 0: mask it.
    """
    return by_turn[jnp.maximum(rows.episode, 0), jnp.maximum(rows.turn, 0)]


def reply_places(rows: Rows) -> jax.Array:
    """int32[R, T], 0-based place of each reply token within its turn's reply; else -1.

    A reply begins where the one before it ended, as `turn_end` records.
    """
    is_reply = rows.real_replies
    # Reply tokens of the row so far, less those of the replies that ended before.
    count = jnp.cumsum(is_reply, axis=1, dtype=jnp.int32)
    ended = jax.lax.cummax(jnp.where(rows.turn_end, count, 0), axis=1)
    place = count - 1 - jnp.pad(ended[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(is_reply, place, -1)


def thought_mask(rows: Rows, episodes: Episodes) -> jax.Array:
    """bool[R, T], the reply tokens before the one that ends `<answer>`.

    These are the first `thought_tokens` of each reply: the thought and the tags behind
    it, which are the same in every well-formed reply, but for the last token of them.
    """
    place = reply_places(rows)
    return (place >= 0) & (place < look_up_turns(episodes.thought_tokens, rows))


def row_lengths(rows: Rows) -> jax.Array:
    """int32[R], tokens in each row without its padding (rows are filled from 0)."""
    return rows.is_real.sum(axis=1)


def first_to_hold(lengths: tuple[int, ...], needed: jax.Array) -> jax.Array | int:
    """int32[], the index of the first of rising lengths that holds `needed` tokens.

    Args:
      lengths: of rows, to choose from. The last is not asked: no row outgrows it.
      needed: int32[].
    """
    # That index is how many lengths are too short.
    return sum((needed > length).astype(jnp.int32) for length in lengths[:-1])
