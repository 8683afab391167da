"""The sampling engine's data: plan, prompts, slots, row buffers, feedback.

All of it is one shard's: arrays here are that shard's own.
"""

import dataclasses
from typing import Any

import jax
from flax import struct

from ragen_jax.models.parameters import Parameters
from ragen_jax.rollout import windows
from ragen_jax.rollout.kv_cache import Cache
from ragen_jax.text import reply_parser
from ragen_jax.trajectory import Episodes

IDLE, DECODING, WAITING = range(3)  # What a slot is doing.


@dataclasses.dataclass(frozen=True)
class EnvShard:
    """One environment's part of a shard, as ranges of the shard's."""

    first_episode: int
    episodes: int
    first_group: int
    groups: int  # prompts
    first_slot: int
    slots: int  # at most `episodes`; they play no other environment
    first_feedback: int  # within the W entries of an `EnvFeedback`
    extend_width: int  # of those
    prompts: int  # P of this environment in the whole batch

    @property
    def slot_range(self) -> slice:
        """Its slots among the S of the shard."""
        return slice(self.first_slot, self.first_slot + self.slots)

    @property
    def feedback_range(self) -> slice:
        """Its entries among the W of an `EnvFeedback`."""
        return slice(self.first_feedback, self.first_feedback + self.extend_width)


@dataclasses.dataclass(frozen=True)
class RolloutOptions:
    """How episodes are sampled, whatever the batch. Static. 0: what suits."""

    # T; 0: `tasks.longest_row`, rounded up to the backend's multiple. With windows a
    # shorter one drops the oldest turns, and a longer one is cut to `longest_row`.
    context: int = 0
    window: int = 0  # most turns of a row; 0: a row holds a whole episode
    # Decode steps between two evaluations of the loop's condition.
    decode_chunk: int = 0
    buckets: int = 0  # how many cache lengths to compile for
    greedy: bool = False  # take the likeliest token
    stop_at_answer: bool = False  # end a reply at `</answer>`


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
    """Sizes and switches of one shard's rollout. Static."""

    # One for each environment; the next three are their sums.
    env_shards: tuple[EnvShard, ...]
    episodes: int  # B on this shard
    slots: int  # S
    extend_width: int  # W, waiting slots that get their feedback in one step
    group_size: int  # N in the whole batch
    context: int  # T, tokens of a row
    turns: int  # K
    actions_per_turn: int  # A
    reply_tokens: int  # most tokens sampled in one turn
    decode_chunk: int  # decode steps between two evaluations of the loop's condition
    buckets: tuple[int, ...]  # lengths of the cache that decoding chooses from
    # An environment steps once 1 / extend_share of its slots that are not idle wait, at
    # the latest when they fill its part of W; 0: only then. See `engine.env_step_due`.
    extend_share: int = 0
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


Scalar = Any  # a NumPy scalar outside a compiled program, a traced array inside


@struct.dataclass
class RolloutArgs:
    """What differs from one rollout of a compiled program to the next."""

    seed: Scalar  # uint32[]
    split: Scalar  # int32[], TRAIN, VALIDATION or TEST
    iteration: Scalar  # int32[]; an evaluation's is 0, so that its levels are fixed
    first_prompt: Scalar  # int32[], for batches too large for one call; else 0
    temperature: Scalar  # float32[], above 0; not read when greedy
    policy_version: Scalar  # int32[], real updates made so far


@struct.dataclass
class Prompts:
    """What the episodes of one shard start from."""

    tokens: jax.Array  # int32[groups, Tp], right-padded
    lengths: jax.Array  # int32[groups]
    group: jax.Array  # int32[B], index of each episode's prompt among those here
    group_in_batch: jax.Array  # int32[B], its group in the whole batch
    # int32[B], each episode's number in the whole batch, which keys its noise: the same
    # on every mesh.
    episode_in_batch: jax.Array
    first_index: jax.Array  # int32[], index of the shard's first episode in the record
    cuts: windows.Cuts | None = None  # None unless `RolloutPlan.window`


@struct.dataclass
class Slots:
    """S slots."""

    status: jax.Array  # int32[S], IDLE, DECODING or WAITING
    episode: jax.Array  # int32[S], on this shard; `RolloutPlan.episodes` when idle
    turn: jax.Array  # int32[S], 0-based turn being played
    length: jax.Array  # int32[S], tokens in the cache
    pending: jax.Array  # int32[S], the token after those
    sampled: jax.Array  # int32[S], tokens of the current reply
    reply: reply_parser.ReplyState  # of S slots: what the reply says so far
    reply_end: jax.Array  # int32[S], why the last reply ended


@struct.dataclass
class RowBuffers:
    """Rows being written.

    With windows, `is_reply` is False on earlier turns' replies: each is trained on in
    the row of its own turn.
    """

    tokens: jax.Array  # int32[R, T]
    logprobs: jax.Array  # float32[R, T], nats
    entropy: jax.Array  # float32[R, T], nats
    turn: jax.Array  # int32[R, T], 0-based; PADDING where nothing is written yet
    is_reply: jax.Array  # bool[R, T]


@struct.dataclass
class RolloutState:
    """Everything that changes during a rollout."""

    slots: Slots
    cache: Cache
    rows: RowBuffers
    episodes: Episodes
    next_episode: jax.Array  # int32[environments], heads of their queues
    decode_passes: jax.Array  # int32[], forward passes of one token for all slots
    extend_passes: jax.Array  # int32[], forward passes of messages for W slots
    too_long: jax.Array  # int32[environments], messages longer than the room for them


@struct.dataclass
class EngineInputs:
    """What a rollout reads and never changes."""

    weights: Parameters  # from `kv_cache.to_decode_layout`
    prompts: Prompts
    prompt_cache: Cache  # of one entry a group
    tables: tuple[reply_parser.ReplyTables, ...]  # of each environment's replies
    stops: jax.Array  # int32[V], as in `DialogueTokens`
    key: jax.Array  # key[], from `prng.iteration_key`
    temperature: jax.Array  # float32[]


@struct.dataclass
class EnvFeedback:
    """Messages and outcomes from the environments for W waiting slots."""

    slot: jax.Array  # int32[W]
    is_used: jax.Array  # bool[W], False where fewer than W slots waited
    tokens: jax.Array  # int32[W, M], the next message, right-padded
    length: jax.Array  # int32[W], tokens of it, 1..M
    reward: jax.Array  # float32[W], the environment's reward of the turn
    is_valid: jax.Array  # bool[W], of the turn's reply
    grounded: jax.Array  # float32[W], share of the landmarks that its thought names
    actions: jax.Array  # int32[W], actions that reached the environment
    success: jax.Array  # bool[W], of the episode so far
    end: jax.Array  # int32[W], UNFINISHED, or why the episode ended


def row_of(plan: RolloutPlan, slots: Slots) -> jax.Array:
    """int32[S], the row on this shard that a slot writes to."""
    if not plan.window:
        return slots.episode
    return slots.episode * plan.rows_each + slots.turn
