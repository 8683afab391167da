"""Indicators of collapse, computed on device from the record of a batch.

The five of RAGEN (arXiv:2504.20073, section 3) are in `learning/summary.py`. Here are
those for what these miss: groups without spread, thoughts that repeat one another, and
first actions that no longer differ. Texts are compared as tokens, by 64-bit hashes:
equal texts always match, unequal ones by mistake in one of about 10^19 pairs. Called by
monitor.py for every batch, before the filter.
"""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.learning import rewards
from ragen_jax.learning.groups import SMALLEST_STD, Grouping, group_statistics
from ragen_jax.text import reply_parser
from ragen_jax.text.reply_parser import NO_ACTION, ReplyTables
from ragen_jax.trajectory import Episodes, Rows, reply_places, thought_mask

DISTINCT_GRAM = 2  # Li et al. 2016, arXiv:1510.03055: distinct-2
OVERLAP_GRAM = 4  # as the longest n-gram of BLEU
_SEEDS = (0x9E3779B9, 0x85EBCA6B)  # of the two 32-bit halves of a hash


@struct.dataclass
class Repetition:
    """How often texts repeat among N texts."""

    distinct: jax.Array  # float32[], distinct texts / texts; 0 without any
    top_share: jax.Array  # float32[], share of the most frequent one; 0 without any


@struct.dataclass
class GramOverlap:
    """How far n-grams repeat, as shares of all n-grams; 0 if there is none."""

    distinct: jax.Array  # float32[], distinct n-grams
    within: jax.Array  # float32[], those that another episode of the group has too
    across: jax.Array  # float32[], those that an episode of another group has too


def indicators(
    rows: Rows,
    episodes: Episodes,
    tables: Sequence[ReplyTables],
    *,
    actions: Sequence[int],
    groups: int,
    reply_tokens: int,
    format_penalty: float = 0.0,
) -> dict[str, jax.Array]:
    """All indicators of a batch, each float32[], by the names of `health/` metrics.

    Args:
      rows: all rows of the episodes, before any filter.
      episodes: the B episodes.
      tables: of the reply parser, one per environment.
      actions: number of named actions of each environment, 0 if its answers are free
        text, whose first actions are not counted; static.
      groups: P; static.
      reply_tokens: most tokens of a reply; static.
      format_penalty: of the returns whose spread is counted, `zero_spread`'s; static.
    """
    is_thought = thought_mask(rows, episodes)
    repetition = repetition_of(*thought_hashes(rows, episodes, is_thought))
    grams = gram_overlap(rows, episodes, is_thought, DISTINCT_GRAM)
    overlap = gram_overlap(rows, episodes, is_thought, OVERLAP_GRAM)
    found = {
        "zero_spread_groups": zero_spread(episodes, groups, format_penalty),
        "distinct_thoughts": repetition.distinct,
        "top_thought_share": repetition.top_share,
        "distinct_bigrams": grams.distinct,
        "overlap_within": overlap.within,
        "overlap_across": overlap.across,
    }
    if any(actions):
        action = first_actions(rows, episodes, tables, actions, reply_tokens)
        is_counted = (jnp.array(actions) > 0)[episodes.environment]
        batch, group = first_action_entropy(
            episodes, action, is_counted, actions, groups
        )
        found["first_action_entropy"] = batch
        found["first_action_entropy_in_group"] = group
    return found


# Spread ------------------------------------------------------------------------------


def zero_spread(
    episodes: Episodes, groups: int, format_penalty: float = 0.0
) -> jax.Array:
    """float32[], share of the groups whose episodes all earned the same return.

    Without penalties and bonuses such a group has no advantage to learn from (RAGEN-2,
    arXiv:2604.06268, counts them as zero-variance groups, of returns with penalty).

    Args:
      episodes: the B episodes.
      groups: P; static.
      format_penalty: units of reward, <= 0, of an invalid reply; 0: the task's return.
    """
    returns = rewards.returns(episodes, format_penalty)
    std = group_statistics(returns, Grouping(episodes.group, groups)).std
    return (std < SMALLEST_STD).mean(dtype=jnp.float32)


# Thoughts ----------------------------------------------------------------------------


def thought_hashes(
    rows: Rows, episodes: Episodes, is_thought: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(uint32[B * K, 2] hashes of each turn's thought, bool[B * K] whether it has one).

    A hash is the sum over a thought's tokens of `_mix(token, place)`, modulo 2^32: it
    depends on the order of the tokens, but not on the order of summation.
    """
    turns = episodes.thought_tokens.shape[1]
    place = jnp.maximum(reply_places(rows), 0)
    owner = jnp.maximum(rows.episode, 0) * turns + jnp.maximum(rows.turn, 0)
    owner = owner.reshape(-1)
    count = episodes.thought_tokens.size
    halves = []
    for seed in _SEEDS:
        mixed = jnp.where(is_thought, _mix(rows.tokens, place, seed), 0)
        halves.append(jax.ops.segment_sum(mixed.reshape(-1), owner, count))
    is_any = is_thought.reshape(-1).astype(jnp.int32)
    tokens = jax.ops.segment_sum(is_any, owner, count)
    return jnp.stack(halves, axis=1), tokens > 0


def repetition_of(hashes: jax.Array, is_counted: jax.Array) -> Repetition:
    """Repetition among the counted texts.

    Args:
      hashes: uint32[N, 2], equal for equal texts.
      is_counted: bool[N].
    """
    keys = (~is_counted, hashes[:, 0], hashes[:, 1])
    unused, *halves = jax.lax.sort(keys, num_keys=3)
    is_real = ~unused
    begins = is_real & _differs(*halves)
    run = jnp.cumsum(begins) - 1
    sizes = jax.ops.segment_sum(is_real.astype(jnp.float32), run, run.shape[0])
    texts = jnp.maximum(is_real.sum(), 1)
    return Repetition(distinct=begins.sum() / texts, top_share=sizes.max() / texts)


def gram_overlap(
    rows: Rows, episodes: Episodes, is_counted: jax.Array, length: int
) -> GramOverlap:
    """Shares of n-grams that are distinct, and that other episodes have too.

    `distinct` is distinct-n of Li et al. 2016, arXiv:1510.03055, over the whole batch.
    `within` and `across` are n-gram precisions against all other episodes at once, as
    in Self-BLEU (Zhu et al. 2018, arXiv:1802.01886), but of one n, without clipping of
    counts or brevity penalty: one sort instead of a comparison of every pair.
    Sorted by hash, group and episode, equal n-grams stand together, and within them
    those of one group.

    Args:
      rows, episodes: the record.
      is_counted: bool[R, T], the tokens whose n-grams count; a gap ends an n-gram.
      length: n; static.
    """
    tokens, is_whole = rows.tokens, is_counted  # Ends a whole n-gram.
    for step in range(1, length):
        is_whole &= jnp.pad(is_counted[:, :-step], ((0, 0), (step, 0)))
    halves = []
    for seed in _SEEDS:
        total = jnp.zeros(tokens.shape, jnp.uint32)
        for step in range(length):
            earlier = jnp.pad(tokens[:, : tokens.shape[1] - step], ((0, 0), (step, 0)))
            total += _mix(earlier, jnp.full_like(earlier, step), seed)
        halves.append(total)
    episode = jnp.maximum(rows.episode, 0)
    group = episodes.group[episode]
    keys = [x.reshape(-1) for x in (~is_whole, *halves, group, episode)]
    unused, first, second, group, episode = jax.lax.sort(tuple(keys), num_keys=5)
    is_real = ~unused
    begins = _differs(unused, first, second)
    across = _varies(group, begins) & is_real
    within = _varies(episode, _differs(unused, first, second, group)) & is_real
    grams = jnp.maximum(is_real.sum(), 1)
    return GramOverlap(
        distinct=(begins & is_real).sum() / grams,
        within=within.sum() / grams,
        across=across.sum() / grams,
    )


def _mix(token: jax.Array, place: jax.Array, seed: int) -> jax.Array:
    """uint32, a well-spread function of token and place."""
    value = _avalanche(
        token.astype(jnp.uint32) * jnp.uint32(0xCC9E2D51) + jnp.uint32(seed)
    )
    return _avalanche(value ^ (place.astype(jnp.uint32) * jnp.uint32(0x27D4EB2F)))


def _avalanche(value: jax.Array) -> jax.Array:
    """uint32, one to one: the finalizer of Murmur3."""
    value = (value ^ (value >> 16)) * jnp.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)


def _differs(*sorted_keys: jax.Array) -> jax.Array:
    """bool[N], whether an entry differs from the one before it; True for the first."""
    differs = [key[1:] != key[:-1] for key in sorted_keys]
    found = jnp.zeros(differs[0].shape, bool)
    for one in differs:
        found |= one
    return jnp.pad(found, (1, 0), constant_values=True)


def _varies(values: jax.Array, begins: jax.Array) -> jax.Array:
    """bool[N], whether the run that an entry belongs to holds different values.

    Args:
      values: int32[N].
      begins: bool[N], True where a run begins; the first is.
    """
    run, count = jnp.cumsum(begins) - 1, begins.shape[0]
    low = jax.ops.segment_min(values, run, count)
    high = jax.ops.segment_max(values, run, count)
    return (low != high)[run]


# First actions -----------------------------------------------------------------------


def first_actions(
    rows: Rows,
    episodes: Episodes,
    tables: Sequence[ReplyTables],
    actions: Sequence[int],
    reply_tokens: int,
) -> jax.Array:
    """int32[B], the first action of each episode's first reply; NO_ACTION for none.

    The sampled tokens pass once more through the automaton that read them in sampling.

    Args: as for `indicators`.
    """
    place, count = reply_places(rows), episodes.group.shape[0]
    is_first = rows.is_reply & (rows.turn == 0)
    episode = jnp.where(is_first, rows.episode, count)
    replies = jnp.zeros((reply_tokens, count), jnp.int32)
    replies = replies.at[jnp.maximum(place, 0), episode].set(rows.tokens, mode="drop")
    lengths = episodes.reply_tokens[:, 0]
    found = jnp.full(count, NO_ACTION, jnp.int32)
    for index, table in enumerate(tables):
        if actions[index]:
            mine = _read_first(table, replies, lengths)
            found = jnp.where(episodes.environment == index, mine, found)
    return found


def _read_first(
    table: ReplyTables, replies: jax.Array, lengths: jax.Array
) -> jax.Array:
    """int32[B], the first action in each of int32[n, B] replies."""

    def read(states, place_and_tokens):
        place, tokens = place_and_tokens
        read_token = jax.vmap(reply_parser.read_token, in_axes=(None, 0, 0))
        after = read_token(table, states, tokens)

        def choose(new, old):
            is_real = (place < lengths).reshape(-1, *[1] * (new.ndim - 1))
            return jnp.where(is_real, new, old)

        return jax.tree.map(choose, after, states), None

    start = reply_parser.start_reply(table, 1)
    states = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (replies.shape[1], *x.shape)), start
    )
    states, _ = jax.lax.scan(read, states, (jnp.arange(replies.shape[0]), replies))
    actions = jax.vmap(reply_parser.final_actions, in_axes=(None, 0))(table, states)
    return actions[:, 0]


def first_action_entropy(
    episodes: Episodes,
    action: jax.Array,
    is_counted: jax.Array,
    actions: Sequence[int],
    groups: int,
) -> tuple[jax.Array, jax.Array]:
    """Entropy of the first actions, nats: (of the batch, mean within a group).

    A reply without an action is one more outcome, so each entropy is between 0 and
    log(actions + 1). That of the batch is taken over the first actions of all counted
    episodes; environments have different actions, so for several it is the mean of
    their entropies, weighted by episodes. That within a group is the mean over groups,
    weighted likewise.

    Args:
      episodes: the B episodes.
      action: int32[B], 0-based or NO_ACTION.
      is_counted: bool[B].
      actions: how many each environment has; static.
      groups: P; static.
    """
    chex.assert_rank([action, is_counted], 1)
    hot = jax.nn.one_hot(action + 1, max(actions) + 1) * is_counted[:, None]

    def mean_entropy(segments: jax.Array, count: int) -> jax.Array:
        counts = jax.ops.segment_sum(hot, segments, count)
        members = counts.sum(axis=1)
        return (members * _entropy(counts)).sum() / jnp.maximum(members.sum(), 1)

    return (
        mean_entropy(episodes.environment, len(actions)),
        mean_entropy(episodes.group, groups),
    )


def _entropy(counts: jax.Array) -> jax.Array:
    """float32[...], nats, of the distribution that counts float32[..., n] show."""
    share = counts / jnp.maximum(counts.sum(axis=-1, keepdims=True), 1)
    return -jnp.where(
        share > 0, share * jnp.log(jnp.where(share > 0, share, 1)), 0
    ).sum(axis=-1)
