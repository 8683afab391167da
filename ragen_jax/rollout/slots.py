"""What the sampling engine works on: its plan, its slots, what is written and answered.

All of it is one shard's: arrays here are that shard's own.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.models.parameters import Parameters
from ragen_jax.rollout import windows
from ragen_jax.rollout.cache import Cache
from ragen_jax.text import replies
from ragen_jax.trajectory import Episodes

IDLE, DECODING, WAITING = range(3)  # What a slot is doing.


@dataclasses.dataclass(frozen=True)
class Part:
    """One world's share of a shard: ranges of its episodes, slots and answers."""

    first_episode: int
    episodes: int
    groups: int  # distinct prompts
    first_slot: int
    slots: int  # at most `episodes`; they play no other world
    first_answer: int  # within the W answers of a feed pass
    feed_width: int  # of those
    prompts: int  # P of this world in the whole batch


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and switches of one shard's rollout. Static."""

    parts: tuple[Part, ...]  # one for each world; the next four are their sums
    episodes: int  # B on this shard
    groups: int  # distinct prompts on this shard
    slots: int  # S
    feed_width: int  # W, waiting slots answered in one pass
    group_size: int  # N in the whole batch
    context: int  # T, tokens of a row
    turns: int  # K
    actions_per_turn: int  # A
    reply_tokens: int  # most tokens sampled in one turn
    decode_chunk: int  # decode passes between looks at the loop's predicate
    buckets: tuple[int, ...]  # lengths of the cache that decoding chooses from
    greedy: bool = False
    stop_at_answer: bool = False
    window: int = 0  # most turns of a row; 0: a row holds a whole episode

    @property
    def rows_each(self) -> int:
        """Rows of an episode: its turns' one after the other, or one for all."""
        return self.turns if self.window else 1

    @property
    def rows(self) -> int:
        """R on this shard."""
        return self.episodes * self.rows_each


@struct.dataclass
class Prompts:
    """What the episodes of one shard start from."""

    tokens: jax.Array  # int32[groups, Tp], right-padded
    lengths: jax.Array  # int32[groups]
    group: jax.Array  # int32[B], index of each episode's prompt among those here
    group_name: jax.Array  # int32[B], its group in the whole batch
    # int32[B], each episode's number in the whole batch, whichever shard it is on: what
    # its noise is drawn by.
    number: jax.Array
    first_place: jax.Array  # int32[], of the shard's episodes in the batch's record
    cuts: windows.Cuts | None = None  # read in windows alone


@struct.dataclass
class Slots:
    """S slots."""

    status: jax.Array  # int32[S], IDLE, DECODING or WAITING
    episode: jax.Array  # int32[S], on this shard; `Plan.episodes` when idle
    turn: jax.Array  # int32[S], 0-based turn being played
    length: jax.Array  # int32[S], tokens in the cache
    pending: jax.Array  # int32[S], the token after those
    sampled: jax.Array  # int32[S], tokens of the current reply
    reply: replies.ReplyState  # of S slots: what the reply says so far
    reply_end: jax.Array  # int32[S], why the last reply ended


@struct.dataclass
class Written:
    """Rows being written; mark = 2 * turn + (1 on reply tokens), -1 on padding.

    In windows the reply tokens of earlier turns count as fed: they are another row's.
    """

    tokens: jax.Array  # int32[R, T]
    logprobs: jax.Array  # float32[R, T], nats
    entropy: jax.Array  # float32[R, T], nats
    mark: jax.Array  # int32[R, T]


@struct.dataclass
class RolloutState:
    """Everything that changes during a rollout."""

    slots: Slots
    cache: Cache
    rows: Written
    episodes: Episodes
    next_episode: jax.Array  # int32[parts], heads of the parts' queues
    decode_passes: jax.Array  # int32[]
    feed_passes: jax.Array  # int32[]


@struct.dataclass
class Inputs:
    """What a rollout reads and never changes."""

    weights: Parameters  # from `cache.lay_out`
    prompts: Prompts
    prompt_cache: Cache  # of `Plan.groups` entries
    tables: tuple[replies.ReplyTables, ...]  # of the parts
    is_stop: jax.Array  # bool[V]
    key: jax.Array  # key[], from `keys.iteration_key`
    temperature: jax.Array  # float32[]


@struct.dataclass
class Answer:
    """What the world answers to W waiting slots."""

    slot: jax.Array  # int32[W]
    is_used: jax.Array  # bool[W], False where fewer than W slots waited
    tokens: jax.Array  # int32[W, M], the next message, right-padded
    length: jax.Array  # int32[W], tokens of it, 1..M
    reward: jax.Array  # float32[W], the world's reward of the turn
    is_valid: jax.Array  # bool[W], of the turn's reply
    grounded: jax.Array  # float32[W], share of the landmarks that its thought names
    taken: jax.Array  # int32[W], actions that reached the world
    success: jax.Array  # bool[W], of the episode so far
    end: jax.Array  # int32[W], UNFINISHED, or why the episode ended


def row_of(plan: Plan, slots: Slots) -> jax.Array:
    """int32[S], the row on this shard that a slot writes to."""
    if not plan.window:
        return slots.episode
    return slots.episode * plan.rows_each + slots.turn


def last_token(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    return jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
