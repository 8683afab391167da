"""Rows of the last turns alone: their tokens, log-probabilities and episodes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models
from helpers.replay import Host, HostGame

from ragen_jax.envs.frozen_lake.env import FrozenLake
from ragen_jax.evaluation import transcripts
from ragen_jax.learning.token_scores import score_tokens
from ragen_jax.parallel import mesh as meshes
from ragen_jax.rollout import prng, windows
from ragen_jax.rollout import rollout as rollout_lib
from ragen_jax.rollout import tasks as tasks_lib
from ragen_jax.text.prompts import TurnLimits
from ragen_jax.trajectory import (
    ANSWER_CLOSED,
    END_OF_TURN,
    OTHER_STOP,
    PADDING,
    REPLY_BUDGET,
    check_rows,
)

EPISODES, TURNS, REPLY_TOKENS = 16, 4, 5


CASES = {
    # Of two environments, each with its own system prompt and number of turns.
    "two turns": dict(environments=2, window=2),
    # The first two turns take up exactly this; two later ones, with a reward, more.
    "what fits, greedy": dict(
        environments=1, window=TURNS, context=262, slots=5, greedy=True
    ),
}
EACH = ["two turns", pytest.param("what fits, greedy", marks=pytest.mark.slow)]
# By case: (turn, turns of its row).
HELD = {
    "two turns": {(0, 1), (1, 2), (2, 2), (3, 2)},
    "what fits, greedy": {(0, 1), (1, 2), (2, 1), (3, 1)},
}


@pytest.fixture(scope="module")
def environments():
    """The usual lake with more turns, and a wider one with fewer."""
    wide = FrozenLake(4, 0.8, observation="both")
    return (
        models.make_task(TurnLimits(TURNS, 2, 8, REPLY_TOKENS)),
        models.make_task(TurnLimits(TURNS - 1, 2, 8, REPLY_TOKENS), settings=wide),
    )


@pytest.fixture(scope="module")
def sampled(environments):
    """By name of a case: its plan and its record, sampled once."""
    made = {}

    def get(name: str):
        if name not in made:
            sizes = dict(CASES[name])
            own = environments[: sizes.pop("environments")]
            shares = tuple(task.share(4 // len(own)) for task in own)
            tokens = tuple(task.tokens for task in own)
            usual = dict(group_size=4, slots=0, context=0, shards=1)
            usual |= dict(decode_chunk=2, buckets=1)
            plan = models.make_plan(shares, tokens, **(usual | sizes))
            context = own[0].rollout_context(models.one_device())
            rollout = rollout_lib.make_rollout(
                dataclasses.replace(context, tasks=shares), plan
            )
            record = rollout(own[0].parameters, tokens, models.call())
            made[name] = plan, jax.device_get(record)
        return made[name]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("case", EACH)
def test_rows_equal_windows_put_together_in_plain_python(environments, sampled, case):
    plan, record = sampled(case)
    check_rows(record.rows)
    rows, hosts = record.rows, [Host(task) for task in environments]
    assert not (rows.is_reply | rows.turn_end)[~rows.is_real].any()
    assert rows.tokens.shape == (EPISODES * TURNS, plan.context)
    key = prng.iteration_key(np.uint32(0), models.call().split, 2)
    row_of = transcripts.rows_of_turns(rows)
    assert len(row_of) == record.episodes.turns.sum()
    held = set()
    for index, env in enumerate(record.episodes.environment):
        host = hosts[env]
        game = HostGame(host, key, models.call().split, index // 4, index)
        message, messages, replies = game.first_message(), [], []
        while not game.end:
            turn = game.turn
            row = jax.tree.map(lambda x: x[row_of[index, turn]], rows)  # noqa: B023
            replies.append(row.tokens[row.is_reply].tolist())
            messages.append(message)
            oldest = _check_row(host, plan, row, index, messages, replies)
            held.add((turn, turn - oldest + 1))
            reward, _, _ = game.play(replies[-1])
            assert reward == record.episodes.reward[index, turn]
            message = game.next_message(replies[-1], reward)
        assert (game.turn, game.end) == (
            record.episodes.turns[index],
            record.episodes.end[index],
        )
    assert held == HELD[case]
    # Turns that were never played have rows that hold nothing.
    unplayed = (rows.episode == PADDING).all(axis=1)
    assert unplayed.sum() == len(unplayed) - len(row_of) > 0
    for name in ("tokens", "logprobs", "entropy", "is_reply", "turn_end"):
        assert not getattr(rows, name)[unplayed].any()


def _check_row(host, plan, row, index, messages, replies) -> int:
    """Compares a row with the newest turns that fit; returns the oldest of them."""
    turn = len(messages) - 1
    opening = messages[0][0]
    for oldest in range(max(0, turn - plan.window + 1), turn + 1):
        # Whatever opens or closes before the oldest message, the opening stands there.
        pieces = [[opening, *messages[oldest][1:]], *messages[oldest + 1 :]]
        fed = [host.tokens(piece) for piece in pieces]
        said = replies[oldest:]
        length = sum(map(len, fed)) + sum(map(len, said[:-1]))
        if length + plan.reply_tokens <= plan.context:
            break
    parts = zip(range(oldest, turn + 1), fed, said, strict=True)
    tokens, marks = [], []
    for number, message, reply in parts:
        tokens += message + reply
        marks += [(number, False)] * len(message)
        marks += [(number, number == turn)] * len(reply)
    room = len(row.tokens) - len(tokens)
    assert row.tokens.tolist() == tokens + [0] * room
    marks += [(PADDING, False)] * room
    assert list(zip(row.turn.tolist(), row.is_reply.tolist(), strict=True)) == marks
    assert np.flatnonzero(row.turn_end).tolist() == [len(tokens) - 1]
    expected = np.where(row.turn == PADDING, PADDING, index)
    np.testing.assert_array_equal(row.episode, expected)
    return oldest


@pytest.mark.slow
@pytest.mark.parametrize("case", EACH)
def test_recorded_log_probabilities_are_those_of_the_rows(environments, sampled, case):
    plan, record = sampled(case)
    rows = record.rows
    score = jax.jit(score_tokens, static_argnums=2)
    scores = score(environments[0].parameters, rows.tokens, environments[0].config, 1.0)
    for name in ("logprobs", "entropy"):
        expected = np.where(rows.is_reply, getattr(scores, name), 0)
        np.testing.assert_allclose(getattr(rows, name), expected, rtol=0, atol=1e-4)
    assert rows.entropy[rows.is_reply].min() > 0.1  # No token was forced.
    ends = set(record.episodes.reply_end.ravel().tolist())
    # Messages that close the reply before them and, but for greedy ones, some that
    # need not.
    assert ends >= ({REPLY_BUDGET} if plan.greedy else {END_OF_TURN, REPLY_BUDGET})


@pytest.mark.slow
def test_a_window_of_all_turns_gives_the_episodes_of_the_full_history():
    """Also on eight devices, each with a slot for two episodes."""
    task = models.usual_task()
    plan = task.plan(window=9, slots=8, shards=8)
    assert (plan.episodes, plan.slots, plan.rows) == (2, 1, 6)
    assert plan.context == task.plan().context
    program = models.compile_rollout(task, plan, meshes.make_mesh(8, 1, 1))
    found = jax.device_get(program(task.parameters, (task.tokens,), models.call()))
    full = jax.device_get(models.sample_usual())
    jax.tree.map(np.testing.assert_array_equal, found.episodes, full.episodes)
    for (episode, turn), row in transcripts.rows_of_turns(found.rows).items():
        one, whole = (
            jax.tree.map(lambda x, i=i: x[i], record.rows)
            for record, i in ((found, row), (full, episode))
        )
        length = (one.turn >= 0).sum()
        assert whole.turn[length - 1] == turn
        np.testing.assert_array_equal(one.tokens[:length], whole.tokens[:length])
        is_own = whole.is_reply & (whole.turn == turn)
        np.testing.assert_array_equal(one.is_reply, is_own)
        np.testing.assert_allclose(
            one.logprobs, np.where(is_own, whole.logprobs, 0), rtol=0, atol=1e-4
        )
    reader = transcripts.make_reader(task.tokenizer, task.env, task.dialogue)
    one, other = (
        transcripts.read(reader, record.rows, record.episodes, first_episode=0)
        for record in (found, full)
    )
    assert one == other


@pytest.mark.slow
def test_transcripts_of_windows_hold_every_message_and_reply(environments, sampled):
    task, (_, record) = environments[0], sampled("what fits, greedy")
    reader = transcripts.make_reader(task.tokenizer, task.env, task.dialogue)
    found = transcripts.read(reader, record.rows, record.episodes, first_episode=0)
    assert [len(one.turns) for one in found] == record.episodes.turns.tolist()
    for one in found:
        for number, turn in enumerate(one.turns):
            opening = "State:\n" if number == 0 else "Reward: "
            assert turn.message.startswith(opening)
            assert f"Turn {number + 1} of {TURNS}. Actions left: " in turn.message
            assert turn.reply.startswith("<think>")


def test_a_turn_that_falls_out_takes_the_token_that_closes_its_reply_along():
    """Opening 1 2; replies 5 6 and 7 8; messages close with 9, once with none."""
    # Rows of two turns at most, replies of two tokens.
    next_row = jax.jit(functools.partial(windows.next_row, 2, 2))
    opening, closing = jnp.int32(2), jnp.array([0, 1, 0])

    def follow(tokens, turns, turn, message, room=16):
        pad = room - len(tokens)
        row = windows.Row(
            jnp.array(tokens + [0] * pad),
            jnp.array(turns + [PADDING] * pad),
            jnp.int32(len(tokens)),
        )
        padded = jnp.array(message + [0] * (3 - len(message)))
        said = windows.Message(padded, jnp.int32(len(message)))
        made, kept = next_row(row, jnp.int32(turn), opening, closing, said)
        length = int(made.length)
        assert not made.tokens[length:].any() and (made.turn[length:] == -1).all()
        return made.tokens[:length].tolist(), made.turn[:length].tolist(), int(kept)

    first = [1, 2, 3, 4, 5, 6], [0] * 6
    tokens, turns, kept = follow(*first, 0, [9, 11, 12])
    assert tokens == [1, 2, 3, 4, 5, 6, 9, 11, 12] and kept == 6
    assert turns == [0] * 6 + [1] * 3
    # Without room for another reply the first turn goes already.
    tokens, turns, kept = follow(*first, 0, [9, 11, 12], room=10)
    assert tokens == [1, 2, 11, 12] and turns == [1] * 4 and kept == 2
    second = [1, 2, 3, 4, 5, 6, 9, 11, 12, 7, 8], [0] * 6 + [1] * 5
    tokens, turns, kept = follow(*second, 1, [13, 14])
    assert tokens == [1, 2, 11, 12, 7, 8, 13, 14] and kept == 2
    assert turns == [1] * 6 + [2] * 2


def test_a_message_closes_the_reply_of_the_turn_before_it():
    cuts = windows.Cuts(None, jnp.array([5, 2]))
    ends = jnp.array([[END_OF_TURN, REPLY_BUDGET, OTHER_STOP, ANSWER_CLOSED]])
    assert windows.closing_before(cuts, ends)[0, 1:].tolist() == [2, 5, 5]


def test_shorter_windows_need_shorter_rows(environments):
    task = environments[0]
    lengths = [
        tasks_lib.longest_row((task.share(),), (task.tokens,), window)
        for window in (1, 2, 3, TURNS, TURNS + 1, 0)
    ]
    turn = task.tokens.next_capacity + REPLY_TOKENS
    assert np.diff(lengths[:3]).tolist() == [turn, turn]
    assert 0 < lengths[3] - lengths[2] <= turn
    assert lengths[3] == lengths[4] == lengths[5]
    assert task.plan(window=2, context=9999).context == lengths[1]
