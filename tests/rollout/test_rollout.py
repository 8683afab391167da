"""The record of a rollout: what was sampled and fed, however the loop was cut up."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compiled_text, models, updates, xla
from helpers.replay import Host, HostGame

from ragen_jax.envs.base import TEST, TRAIN
from ragen_jax.errors import UserError
from ragen_jax.learning.token_scores import score_tokens
from ragen_jax.models import transformer
from ragen_jax.rollout import plan as plan_lib
from ragen_jax.rollout import prng, token_sampling
from ragen_jax.rollout import rollout as rollout_lib
from ragen_jax.rollout.rollout import training_rollout_args
from ragen_jax.rollout.tasks import refuse_cut_messages
from ragen_jax.text.prompts import TurnLimits
from ragen_jax.trajectory import (
    ANSWER_CLOSED,
    END_OF_TURN,
    ENV_DONE,
    NO_REPLY,
    OTHER_STOP,
    OUT_OF_ACTIONS,
    OUT_OF_TURNS,
    PADDING,
    REPLY_BUDGET,
    check_rows,
)


@pytest.fixture(scope="module")
def task():
    return models.usual_task()


@pytest.fixture(scope="module")
def record():
    return jax.device_get(models.sample_usual())


@pytest.fixture(scope="module")
def stopping():
    """Replies that follow `<answer>` at once and end where the answer does.

    Token 0, <|endoftext|>, ends them too, as some models' configurations have it.
    """
    task = models.make_task(TurnLimits(2, 3, 3, 6), thinking=False, more_stops=(0,))
    plan = task.plan(group_size=2, slots=5, stop_at_answer=True)
    program = models.compile_rollout(task, plan)
    return task, program(task.parameters, (task.tokens,), models.call(4))


@pytest.fixture(scope="module")
def bucketed(task):
    plan = task.plan(slots=7, buckets=4, decode_chunk=3)
    return plan, models.compile_rollout(task, plan, **xla.AS_SHIPPED)


def test_the_record_under_test_holds_every_kind_of_turn_and_end(record):
    episodes = record.episodes
    check_rows(record.rows)
    assert set(episodes.end) == {ENV_DONE, OUT_OF_TURNS, OUT_OF_ACTIONS}
    assert set(episodes.reply_end.ravel()) == {NO_REPLY, END_OF_TURN, REPLY_BUDGET}
    assert set(episodes.turns) == {1, 2, 3}
    assert set(episodes.actions.ravel()) == {0, 1, 2}
    assert 2 <= episodes.success.sum() <= 8
    assert 16 < episodes.is_valid.sum() < 32


@pytest.mark.parametrize("changes", [{}, {"seed": 3, "split": np.int32(TEST)}])
def test_rows_and_episodes_equal_a_plain_replay(task, changes):
    call = models.call(**changes)
    record = jax.device_get(models.sample_usual(**changes))
    assert record.rows.policy_version.tolist() == [7] * 16
    _check_replay(task, call, record, group_size=4, stop_at_answer=False)


@pytest.mark.slow
def test_replies_that_stop_at_the_answer_equal_a_plain_replay(stopping):
    task, record = stopping
    ends = np.asarray(record.episodes.reply_end)
    assert (ends == ANSWER_CLOSED).sum() >= 4
    assert (ends == END_OF_TURN).any()
    # Of an episode that goes on: the template's closer is fed behind it.
    assert (ends[:, 0] == OTHER_STOP)[ends[:, 1] != NO_REPLY].sum() >= 2
    _check_replay(task, models.call(4), record, group_size=2, stop_at_answer=True)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recorded_log_probabilities_equal_those_of_the_whole_rows(task, temperature):
    rows = models.sample_usual(temperature=np.float32(temperature)).rows
    score = jax.jit(score_tokens, static_argnums=2)
    scores = score(task.parameters, rows.tokens, task.config, temperature)
    for name in ("logprobs", "entropy"):
        expected = np.where(rows.is_reply, getattr(scores, name), 0)
        np.testing.assert_allclose(getattr(rows, name), expected, rtol=0, atol=1e-4)
    assert np.asarray(rows.entropy)[rows.is_reply].min() > 0.1  # No token was forced.


def test_padding_is_no_reply_and_ends_no_turn(record):
    rows = record.rows
    assert (~rows.is_real).any()
    assert not (rows.is_reply | rows.turn_end)[~rows.is_real].any()


def test_every_reply_token_is_the_one_that_its_own_key_draws(task, record):
    row, at = np.nonzero(record.rows.is_reply)
    turn = record.rows.turn[row, at]
    # Reply tokens of one turn stand together: count from where the last turn ended.
    is_first = np.diff(at, prepend=-1) != 1
    nth = np.arange(len(row)) - np.maximum.accumulate(
        np.where(is_first, np.arange(len(row)), 0)
    )

    @jax.jit
    def draw(parameters, tokens):
        hidden = transformer.hidden_states(parameters, tokens, task.config)
        logits = transformer.vocabulary_logits(parameters, hidden[row, at - 1])
        key = prng.iteration_key(jnp.uint32(0), TRAIN, 2)
        noise = jax.vmap(prng.token_key, (None, 0, 0, 0))(key, row, turn, nth)
        return token_sampling.sample(noise, logits, 1.0, greedy=False).token

    expected = draw(task.parameters, record.rows.tokens)
    np.testing.assert_array_equal(record.rows.tokens[row, at], expected)


@pytest.mark.slow
def test_fewer_slots_than_episodes_give_the_same_record(task, record):
    program = models.compile_rollout(task, task.plan(slots=5))
    other = program(task.parameters, (task.tokens,), models.call())
    models.check_same_record(record, other)
    assert other.passes.decode_passes > record.passes.decode_passes


@pytest.mark.slow
def test_observations_longer_than_declared_are_counted_and_refused(task, record):
    """A lake of 3 x 3 has the same number of tokens whatever it shows."""
    assert record.too_long.tolist() == [[0]]
    context = task.rollout_context(models.one_device())
    program = rollout_lib.make_rollout(context, task.plan())

    def sample(**capacity):
        tokens = (task.tokens.replace(**capacity),)
        return program(task.parameters, tokens, models.call())

    first = sample(first_capacity=task.tokens.first_capacity - 20)
    assert first.too_long.tolist() == [[4]]  # One of each level.
    later = sample(next_capacity=1)
    # One behind each reply, but for those that end an episode.
    assert later.too_long.tolist() == [[int(later.episodes.turns.sum()) - 16]]
    with pytest.raises(UserError, match="^lake shows more tokens .* lost, 4 of them"):
        refuse_cut_messages(["sokoban", "lake"], [0, 4])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 6, 7])
def test_buckets_and_chunks_of_decoding_change_nothing_in_the_record(
    task, bucketed, seed
):
    """With seeds 6 and 7 a slot waits that is longer than the others' bucket."""
    plan, program = bucketed
    assert plan.buckets == (264, 352)
    other = program(task.parameters, (task.tokens,), models.call(seed))
    models.check_same_record(models.sample_usual(seed=seed), other)


@pytest.mark.slow
def test_no_loop_over_decode_passes_copies_the_cache(task, bucketed):
    """Nor does a round of the loop around them, which also steps the environments."""
    plan, program = bucketed
    shape = (plan.slots, task.config.kv_heads, task.config.head_dim, plan.context)
    loops = compiled_text.loops_that_carry(program.as_text(), shape)
    assert len(loops) >= 1 + len(plan.buckets)
    in_place = [line for loop in loops for line in loop if " scatter(" in line]
    assert len(in_place) >= 2 * task.config.layers * len(plan.buckets)
    copies = [
        line
        for loop in loops
        for line in loop
        if re.search(r" (copy|transpose)\(", line)
    ]
    assert copies == []


def test_a_later_first_prompt_continues_the_batch(record):
    """Groups 2 and 3 come first when the batch begins with them."""
    later = jax.device_get(models.sample_usual(first_prompt=np.int32(2)))
    assert later.episodes.group.tolist() == np.repeat([2, 3, 4, 5], 4).tolist()

    def common(record, first):
        trees = record.rows, record.episodes
        return jax.tree.map(lambda x: x[first : first + 8], trees)

    jax.tree.map(np.testing.assert_array_equal, common(record, 8), common(later, 0))


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"split": np.int32(TEST)}, {"iteration": np.int32(3)}]
)
def test_seed_split_and_iteration_each_change_levels_and_replies(record, changes):
    rows = jax.device_get(models.sample_usual(**changes).rows)
    in_prompt = (record.rows.turn == 0) & ~record.rows.is_reply
    prompts = [r.tokens[i][in_prompt[i]] for r in (rows, record.rows) for i in (0, 4)]
    assert not np.array_equal(prompts[0], prompts[2])
    assert not np.array_equal(prompts[1], prompts[3])
    assert np.mean(rows.tokens == record.rows.tokens) < 0.95


def test_training_plays_the_levels_of_its_iteration_at_the_runs_temperature():
    chosen = updates.settings(seed=5, rollout__temperature=0.75)
    found = training_rollout_args(chosen, np.int32(3), np.int32(9))
    assert (found.seed, found.split, found.iteration) == (5, TRAIN, 3)
    assert (found.temperature, found.policy_version) == (0.75, 9)
    assert found.first_prompt == 0


def _check_replay(task, call, record, group_size, stop_at_answer):
    """Replays every episode on the host from its replies alone and compares all."""
    record = jax.device_get(record)
    host = Host(task)
    key = prng.iteration_key(call.seed, call.split, call.iteration)
    for index in range(len(record.episodes.group)):
        game = HostGame(host, key, call.split, index // group_size, index)
        row, episode = jax.tree.map(
            lambda x, i=index: x[i], (record.rows, record.episodes)
        )
        _check_episode(game, row, episode, stop_at_answer)


def _check_episode(game, row, episode, stop_at_answer):
    host, limits = game.host, game.host.limits
    assert episode.group == game.group and episode.environment == 0
    message = game.first_message()
    tokens, marks, text = [], [], b""
    turns = {name: [0] * limits.turns for name in _PER_TURN}
    while True:
        at, turn = len(tokens), game.turn
        fed = host.tokens(message)
        reply = _reply(row, turn)
        tokens += fed + reply
        marks += [(turn, False, False)] * len(fed)
        marks += [(turn, True, False)] * (len(reply) - 1) + [(turn, True, True)]
        text += "".join(message).encode() + host.raw(reply)
        assert row.tokens[at : len(tokens)].tolist() == fed + reply

        ends = [
            host.reply_end(reply[: n + 1], stop_at_answer) for n in range(len(reply))
        ]
        assert set(ends[:-1]) <= {NO_REPLY}
        reward, is_valid, taken = game.play(reply)
        thought = host.thought_tokens(reply)
        reported = (reward, is_valid, taken, len(reply), ends[-1], thought)
        for name, value in zip(_PER_TURN, reported, strict=True):
            turns[name][turn] = value
        if game.end:
            break
        message = game.next_message(reply, reward)

    assert row.tokens.tolist() == tokens + [0] * (len(row.tokens) - len(tokens))
    marks += [(PADDING, False, False)] * (len(row.tokens) - len(marks))
    written = zip(row.turn.tolist(), row.is_reply.tolist(), row.turn_end.tolist())  # noqa: B905
    assert list(written) == marks
    in_row = row.turn != PADDING
    assert row.episode.tolist() == np.where(in_row, game.episode, PADDING).tolist()
    decoded = host.task.tokenizer.decode(row.tokens[in_row])
    assert decoded == text.decode(errors="replace")
    for name, values in turns.items():
        assert getattr(episode, name).tolist() == values, name
    assert (episode.turns, episode.end) == (game.turn, game.end)
    assert bool(episode.success) == game.success


_PER_TURN = (
    *("reward", "is_valid", "actions", "reply_tokens", "reply_end", "thought_tokens"),
)


def _reply(row, turn):
    """The tokens sampled in a turn of a row."""
    return row.tokens[row.is_reply & (row.turn == turn)].tolist()


def test_the_passes_of_all_shards_and_of_both_kinds_are_counted():
    counts = rollout_lib.PassCounts(jnp.array([3, 5]), jnp.array([1, 2]))
    assert int(counts.total()) == 11


def test_environments_of_a_mix_share_the_slots_by_their_prompts():
    tasks = [types.SimpleNamespace(prompts=prompts) for prompts in (4, 4, 8)]
    shards = plan_lib._divide(tasks, 4, slots=16, shards=2, extend_share=2)
    assert [each.slots for each in shards] == [2, 2, 4]
    assert [each.first_slot for each in shards] == [0, 2, 4]
    assert [each.episodes for each in shards] == [8, 8, 16]
