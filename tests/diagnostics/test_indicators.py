"""Indicators of collapse against hand-worked numbers and plain Python."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models, records

from ragen_jax import trajectory
from ragen_jax.diagnostics import indicators
from ragen_jax.text import reply_parser
from ragen_jax.trajectory import Episodes, Rows


def record(thoughts: list[list[list[int]]], group: list[int]) -> tuple[Rows, Episodes]:
    """Episodes whose turns' replies are a thought and one token 99 of answer."""
    turns = max(map(len, thoughts))
    lines, tokens = [], []
    for episode in thoughts:
        line, numbers = "", []
        for thought in episode:
            line += "o" + "r" * len(thought) + "R"
            numbers += [7, *thought, 99]
        lines.append(line)
        tokens.append(numbers)
    width = max(map(len, lines))
    rows = records.rows_of(
        *(line.ljust(width, ".") for line in lines), episode=[*range(len(lines))]
    )
    padded = [numbers + [0] * (width - len(numbers)) for numbers in tokens]
    episodes = records.episodes_of(
        [[0.0] * turns] * len(thoughts), turns=[*map(len, thoughts)], group=group
    )
    lengths = [[*map(len, e)] + [0] * (turns - len(e)) for e in thoughts]
    return (
        rows.replace(tokens=jnp.array(padded, jnp.int32)),
        episodes.replace(thought_tokens=jnp.array(lengths, jnp.int32)),
    )


THOUGHTS = [
    [[1, 2, 3], [4, 5]],
    [[1, 2, 3], [5, 4]],  # the other order is another thought
    [[1, 2, 3, 1], []],  # a longer one, and one that is not there
    [[4, 5]],
]


def test_a_thought_is_a_reply_up_to_the_answer():
    rows, episodes = record(THOUGHTS, [0, 0, 1, 1])
    mask = np.asarray(trajectory.thought_mask(rows, episodes))
    found = [np.asarray(rows.tokens)[row][mask[row]].tolist() for row in range(4)]
    assert found == [[1, 2, 3, 4, 5], [1, 2, 3, 5, 4], [1, 2, 3, 1], [4, 5]]


def test_repeated_thoughts_are_counted_by_hand():
    rows, episodes = record(THOUGHTS, [0, 0, 1, 1])
    mask = trajectory.thought_mask(rows, episodes)
    hashes, is_there = indicators.thought_hashes(rows, episodes, mask)
    assert is_there.tolist() == [True, True, True, True, True, False, True, False]
    found = indicators.repetition_of(hashes, is_there)
    # 123 twice, 45 twice, 54, 1231: four of six, the most frequent twice of six.
    assert float(found.distinct) == pytest.approx(4 / 6)
    assert float(found.top_share) == pytest.approx(2 / 6)


def test_overlap_is_counted_by_hand():
    rows, episodes = record(THOUGHTS, [0, 0, 1, 1])
    mask = trajectory.thought_mask(rows, episodes)
    found = indicators.gram_overlap(rows, episodes, mask, 2)
    # 12 23 45 | 12 23 54 | 12 23 31 | 45. In the same group again: 12 and 23 of the
    # first two episodes, nothing in the second group. In the other group: 12, 23 of
    # three episodes, 45 of two.
    assert float(found.distinct) == pytest.approx(5 / 10)
    assert float(found.within) == pytest.approx(4 / 10)
    assert float(found.across) == pytest.approx(8 / 10)


def test_nothing_said_is_no_division_by_zero():
    rows, episodes = record([[[]], [[]]], [0, 1])
    mask = trajectory.thought_mask(rows, episodes)
    hashes = indicators.thought_hashes(rows, episodes, mask)
    assert float(indicators.repetition_of(*hashes).distinct) == 0
    assert float(indicators.repetition_of(*hashes).top_share) == 0
    overlap = indicators.gram_overlap(rows, episodes, mask, 2)
    assert jax.tree.map(float, overlap) == indicators.GramOverlap(0, 0, 0)


def test_places_count_from_zero_in_each_reply():
    rows = records.rows_of("oorrRorR", "orRooooo", "rRrrR...", episode=[0, 1, 2])
    places = trajectory.reply_places(rows).tolist()
    assert places[0] == [-1, -1, 0, 1, 2, -1, 0, 1]
    assert places[1] == [-1, 0, 1, -1, -1, -1, -1, -1]
    assert places[2] == [0, 1, 0, 1, 2, -1, -1, -1]  # By where each ended.


def plain_overlap(rows, episodes, mask, length):
    """The definitions, one n-gram after the other."""
    grams = []
    for row, column in np.ndindex(*mask.shape):
        first = column - length + 1
        if first >= 0 and mask[row, first : column + 1].all():
            episode = int(rows.episode[row, column])
            gram = tuple(rows.tokens[row, first : column + 1].tolist())
            grams.append((gram, int(episodes.group[episode]), episode))
    at = collections.defaultdict(set)
    for gram, group, episode in grams:
        at[gram].add((group, episode))
    within = across = 0
    for gram, group, episode in grams:
        within += any(g == group and e != episode for g, e in at[gram])
        across += any(g != group for g, e in at[gram])
    count = max(1, len(grams))
    return len(at) / count, within / count, across / count


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
@pytest.mark.parametrize("length", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
def test_overlap_equals_the_definition_on_random_records(seed, length):
    rng = np.random.default_rng(seed)
    thoughts = [
        [rng.integers(0, 3, rng.integers(0, 9)).tolist() for _ in range(3)]
        for _ in range(8)
    ]
    rows, episodes = record(thoughts, rng.integers(0, 3, 8).tolist())
    mask = trajectory.thought_mask(rows, episodes)
    found = indicators.gram_overlap(rows, episodes, mask, length)
    wanted = plain_overlap(*jax.device_get((rows, episodes, mask)), length)
    np.testing.assert_allclose(
        [found.distinct, found.within, found.across], wanted, rtol=1e-6
    )
    turns = [tuple(t) for e in thoughts for t in e if t]
    counts = collections.Counter(turns)
    repeats = indicators.repetition_of(*indicators.thought_hashes(rows, episodes, mask))
    assert float(repeats.distinct) == pytest.approx(len(counts) / len(turns))
    top = max(counts.values()) / len(turns)
    assert float(repeats.top_share) == pytest.approx(top)


def test_first_action_entropy_is_computed_by_hand():
    episodes = records.episodes_of([[0]] * 6, group=[0, 0, 1, 1, 2, 2])
    action = jnp.array([0, 0, 0, 1, -1, 1])
    everywhere = jnp.ones(6, bool)
    batch, group = indicators.first_action_entropy(
        episodes, action, everywhere, (2,), 3
    )
    shares = (3 / 6, 2 / 6, 1 / 6)
    assert float(batch) == pytest.approx(-sum(p * math.log(p) for p in shares))
    assert float(group) == pytest.approx((0 + math.log(2) + math.log(2)) / 3)
    first = jnp.arange(6) < 4
    batch, group = indicators.first_action_entropy(episodes, action, first, (2,), 3)
    assert float(batch) == pytest.approx(
        -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    )
    assert float(group) == pytest.approx(math.log(2) / 2)


def test_first_actions_of_two_environments_are_not_the_same_actions():
    episodes = records.episodes_of([[0]] * 6, group=[0, 0, 1, 1, 2, 2])
    episodes = episodes.replace(environment=jnp.array([0, 0, 1, 1, 1, 1]))
    action = jnp.array([0, 0, 1, 1, 0, 1])
    batch, group = indicators.first_action_entropy(
        episodes, action, jnp.ones(6, bool), (4, 2), 3
    )
    mixed = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert float(batch) == pytest.approx((2 * 0 + 4 * mixed) / 6)
    assert float(group) == pytest.approx(math.log(2) / 3)


@pytest.mark.slow
def test_the_first_actions_are_those_that_the_replies_name():
    task, rollout = models.usual_task(), models.sample_usual()
    rows, episodes = rollout.rows, rollout.episodes
    names = task.env.action_names
    found = indicators.first_actions(
        rows, episodes, (task.tokens.replies,), (len(names),), 5
    )
    rows, wanted = jax.device_get(rows), []
    read_token = jax.jit(reply_parser.read_token)
    for episode in range(episodes.group.shape[0]):
        is_mine = (rows.episode == episode) & (rows.turn == 0) & rows.is_reply
        reply = reply_parser.start_reply(task.tokens.replies, 1)
        for token in rows.tokens[is_mine]:
            reply = read_token(task.tokens.replies, reply, jnp.int32(token))
        wanted.append(int(reply_parser.final_actions(task.tokens.replies, reply)[0]))
    assert found.tolist() == wanted
    assert len(set(wanted)) > 2


def test_all_indicators_are_computed_by_hand():
    """Answers are Up, and then Down, Down, two free texts, and one that is open."""
    rows, episodes = record(
        [[[1, 2, 3, 4], []], [[1, 2, 3, 4]], [[9, 1, 2, 3, 4]], [[5, 5]], [[]]],
        [0, 0, 1, 1, 2],
    )
    answers = b"Up</answer>", b"Down</answer>", b"Up"
    said = [b"</answer>", *[b""] * 96, *(b"</think><answer>" + x for x in answers)]
    tables = reply_parser.reply_tables(said, ("Up", "Down"), b"<think>", True)
    ends = jnp.array([5, 7, 5, 1]), jnp.array([97, 98, 98, 99])
    rows = rows.replace(
        tokens=rows.tokens.at[jnp.array([0, 0, 1, 4]), ends[0]].set(ends[1])
    )
    episodes = episodes.replace(
        environment=jnp.array([0, 0, 1, 1, 0]),
        reply_tokens=jnp.array([[5, 1], [5, 0], [6, 0], [3, 0], [1, 0]]),
        reward=episodes.reward.at[0, 1].set(1),
    )
    compute = jax.jit(
        lambda rows, episodes: indicators.indicators(
            rows, episodes, (tables, None), actions=(2, 0), groups=3, reply_tokens=6
        )
    )
    # 12 23 34 twice, 91 12 23 34 and 55; of four tokens 1234 twice, 9123 and 1234.
    assert jax.tree.map(float, compute(rows, episodes)) == pytest.approx(
        {
            "zero_spread_groups": 2 / 3,
            "distinct_thoughts": 3 / 4,
            "top_thought_share": 2 / 4,
            "distinct_bigrams": 5 / 11,
            "overlap_within": 2 / 4,
            "overlap_across": 3 / 4,
            "first_action_entropy": math.log(3),
            "first_action_entropy_in_group": 2 / 3 * math.log(2),
        }
    )


def test_a_group_that_differs_by_the_penalty_alone_has_a_spread_where_it_counts():
    # Groups 0 and 1 earn the same throughout; one reply of group 1 is not valid.
    episodes = records.episodes_of([[1.0], [1.0], [0.5], [0.5]], group=[0, 0, 1, 1])
    episodes = episodes.replace(is_valid=jnp.ones((4, 1), bool).at[3, 0].set(False))
    assert float(indicators.zero_spread(episodes, 2)) == 1
    assert float(indicators.zero_spread(episodes, 2, -0.1)) == 0.5
