"""The engine driven from Python: `advance`, `choose_waiting`, `give_feedback`."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models
from helpers.replay import Host, HostGame

from ragen_jax.envs.base import TRAIN
from ragen_jax.rollout import (
    admission,
    cache_attention,
    decode_step,
    engine,
    prng,
    record,
)
from ragen_jax.rollout import kv_cache as kv
from ragen_jax.rollout.rollout import PassCounts, Rollout
from ragen_jax.rollout.types import (
    DECODING,
    IDLE,
    WAITING,
    EngineInputs,
    EnvFeedback,
    Prompts,
)
from ragen_jax.trajectory import (
    ANSWER_CLOSED,
    END_OF_TURN,
    NO_REPLY,
    OTHER_STOP,
    REPLY_BUDGET,
)


class Engine:
    """The compiled functions of one plan, and the usual task's prompts and games."""

    def __init__(self, attention=cache_attention.XLA):
        self.task = task = models.usual_task()
        self.plan = plan = task.plan(slots=5, buckets=4)
        self.model = kv.ShardedModel(task.config, jnp.float32, attention=attention)
        self.key = prng.iteration_key(jnp.uint32(0), TRAIN, 2)
        host = Host(task)
        self.host = host
        self.games = [
            HostGame(host, self.key, TRAIN, episode // 4, episode)
            for episode in range(plan.episodes)
        ]
        firsts = [host.tokens(game.first_message()) for game in self.games[::4]]
        prompts = Prompts(
            tokens=_padded(firsts, task.tokens.first_capacity),
            lengths=jnp.array([len(tokens) for tokens in firsts]),
            group=jnp.arange(plan.episodes) // 4,
            group_in_batch=jnp.arange(plan.episodes) // 4,
            episode_in_batch=jnp.arange(plan.episodes),
            first_index=jnp.int32(0),
        )
        weights = kv.to_decode_layout(task.parameters, jnp.float32)
        prefill = jax.jit(kv.prefill_prompts, static_argnums=1)
        self.inputs = EngineInputs(
            weights=weights,
            prompts=prompts,
            prompt_cache=prefill(weights, self.model, prompts.tokens),
            tables=(task.tokens.replies,),
            stops=task.tokens.stops,
            key=self.key,
            temperature=jnp.float32(1),
        )
        bind = lambda f: functools.partial(f, plan, self.model)
        self.start = jax.jit(bind(engine.start))
        self.advance = jax.jit(bind(engine.advance))
        self.give_feedback = jax.jit(bind(engine.give_feedback))
        self.finish_rows = jax.jit(functools.partial(record.finish_rows, plan))


@pytest.fixture(scope="module")
def driver():
    return Engine()


@pytest.mark.slow
def test_frozen_lake_stepped_from_python_gives_the_identical_record(driver):
    record, admitted = _sample(driver)
    models.check_same_record(record, models.sample_usual())
    assert admitted == list(range(driver.plan.episodes))  # In the queue's order.


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention", [cache_attention.fused("xla"), cache_attention.merged(2)]
)
def test_attention_of_other_devices_gives_the_same_record(attention):
    """All of a GPU's path but cuDNN itself, which needs one, and all of a TPU's."""
    record, _ = _sample(Engine(attention))
    models.check_same_record(record, models.sample_usual())


def test_environments_step_for_a_share_of_the_slots_that_are_not_idle(driver):
    state = driver.start(driver.inputs)
    idle, decoding, waiting = IDLE, DECODING, WAITING

    def due(extend_share, *status):
        plan = dataclasses.replace(driver.plan, extend_share=extend_share)
        slots = state.slots.replace(status=jnp.array(status))
        return bool(engine.env_step_due(plan, state.replace(slots=slots)))

    one_of_five = (waiting, *[decoding] * 4)
    two_of_five = (waiting, waiting, *[decoding] * 3)
    one_of_three = (waiting, idle, decoding, idle, decoding)
    assert driver.plan.extend_width == 2
    assert [due(0, *s) for s in (one_of_five, two_of_five)] == [False, True]
    assert [due(4, *s) for s in (one_of_five, two_of_five)] == [False, True]
    assert [due(0, *one_of_three), due(4, *one_of_three)] == [False, True]
    # Never for more than have room, nor for nobody while others decode.
    assert due(1, *two_of_five) and not due(1, *one_of_five)
    assert not due(4, *[decoding] * 5)


def _sample(driver):
    """The record of a rollout stepped from here, and the episodes as they came."""
    plan, inputs = driver.plan, driver.inputs
    state = driver.start(inputs)
    admitted = list(range(plan.slots))
    while True:
        state = driver.advance(inputs, state)
        slot, is_used = jax.device_get(engine.choose_waiting(plan, state))
        if not is_used.any():
            break
        state, new = driver.give_feedback(
            inputs, state, _feedback(driver, state, slot, is_used)
        )
        admitted += [episode for episode in new.tolist() if episode >= 0]
    rows = driver.finish_rows(inputs.prompts, state.rows, jnp.int32(7))
    passes = PassCounts(state.decode_passes, state.extend_passes)
    return Rollout(rows, state.episodes, passes, state.too_long), admitted


def test_a_slot_that_waits_is_not_touched_while_others_decode(driver):
    """It may be longer than the bucket that the others decode in."""
    plan, inputs = driver.plan, driver.inputs
    assert plan.buckets == (264, 352)
    state = driver.start(inputs)
    noise = lambda x: x.at[0].set(jax.random.normal(jax.random.key(1), x.shape[1:]))
    slots = state.slots
    state = state.replace(
        cache=jax.tree.map(noise, state.cache),
        slots=slots.replace(
            status=slots.status.at[0].set(WAITING),
            length=slots.length.at[0].set(300),
        ),
    )
    after = driver.advance(inputs, state)
    assert after.decode_passes > 0
    for name in ("slots", "cache"):
        kept = [jax.tree.map(lambda x: x[0], getattr(s, name)) for s in (after, state)]
        jax.tree.map(np.testing.assert_array_equal, *kept)
    np.testing.assert_array_equal(after.rows.tokens[0], state.rows.tokens[0])


def test_lower_slots_are_answered_first_and_unused_places_are_marked(driver):
    state = driver.start(driver.inputs)

    def chosen(*status):
        slots = state.slots.replace(status=jnp.array(status))
        both = engine.choose_waiting(driver.plan, state.replace(slots=slots))
        return [values.tolist() for values in both]

    idle, decoding, waiting = IDLE, DECODING, WAITING
    assert chosen(decoding, waiting, idle, waiting, waiting) == [[1, 3], [True, True]]
    slot, is_used = chosen(idle, decoding, decoding, waiting, idle)
    assert slot[0] == 3 and is_used == [True, False]


def test_free_slots_take_the_next_episodes_as_long_as_there_are_any(driver):
    def admit(head, *is_free):
        taken = admission.take_from_queues(
            driver.plan, jnp.array([head]), jnp.array(is_free)
        )
        return [x.tolist() for x in taken]

    assert admit(5, True, True) == [[5, 6], [True, True], [7]]
    admitted, is_new, head = admit(5, False, True)
    assert (admitted[1], is_new, head) == (5, [False, True], [6])
    last = driver.plan.episodes - 1
    assert admit(last, True, True)[1] == [True, False]


def test_a_reply_ends_by_a_stop_token_else_by_its_answer_else_by_its_budget():
    ends = [END_OF_TURN, OTHER_STOP, ANSWER_CLOSED, REPLY_BUDGET, NO_REPLY]
    stop = jnp.array([END_OF_TURN, OTHER_STOP, NO_REPLY, NO_REPLY, NO_REPLY])
    is_closed = jnp.array([True, True, True, False, False])
    sampled = jnp.array([5, 5, 5, 5, 4])
    for stop_at_answer in (True, False):
        plan = SimpleNamespace(stop_at_answer=stop_at_answer, reply_tokens=5)
        found = decode_step._reply_end(plan, stop, is_closed, sampled)
        wanted = ends if stop_at_answer else [*ends[:2], *[REPLY_BUDGET] * 2, NO_REPLY]
        assert found.tolist() == wanted


def test_the_tokens_of_a_reply_are_those_that_were_sampled_last(driver):
    state, shape = driver.start(driver.inputs), (driver.plan.rows, driver.plan.context)
    tokens = jnp.arange(shape[0] * shape[1]).reshape(shape)
    # A slot's row holds one token more than its cache, the last that was sampled.
    slots = state.slots.replace(
        length=state.slots.length.at[2].set(50),
        sampled=state.slots.sampled.at[2].set(3),
    )
    state = state.replace(slots=slots, rows=state.rows.replace(tokens=tokens))
    found, count = engine.reply_tokens(driver.plan, state, jnp.array([2]))
    assert count.tolist() == [3]
    assert found[0, :3].tolist() == tokens[slots.episode[2], 48:51].tolist()


def test_in_windows_the_tokens_of_a_reply_are_in_the_row_of_its_turn(driver):
    plan = dataclasses.replace(driver.plan, window=2)
    state = driver.start(driver.inputs)
    tokens = jnp.arange(plan.rows * plan.context).reshape(plan.rows, plan.context)
    slots = state.slots.replace(
        turn=state.slots.turn.at[2].set(1),
        length=state.slots.length.at[2].set(50),
        sampled=state.slots.sampled.at[2].set(3),
    )
    state = state.replace(slots=slots, rows=state.rows.replace(tokens=tokens))
    found, _ = engine.reply_tokens(plan, state, jnp.array([2]))
    row = slots.episode[2] * plan.turns + 1
    assert found[0, :3].tolist() == tokens[row, 48:51].tolist()


def test_a_turn_is_written_down_where_its_episode_and_number_say(driver):
    state, width = driver.start(driver.inputs), 2
    slots = jax.tree.map(lambda x: x[jnp.array([3, 0])], state.slots)
    slots = slots.replace(
        turn=jnp.array([1, 0]), sampled=jnp.array([4, 9]), reply_end=jnp.array([2, 1])
    )
    slots = slots.replace(reply=slots.reply.replace(thought=jnp.array([3, 8])))
    by_slot = dict(
        reward=jnp.array([0.5, 9.0]),
        is_valid=jnp.array([True, True]),
        grounded=jnp.array([0.25, 9.0]),
        actions=jnp.array([6, 9]),
        success=jnp.array([True, True]),
        end=jnp.array([2, 9]),
    )
    feedback = EnvFeedback(
        slot=jnp.array([3, 0]),
        is_used=jnp.array([True, False]),
        tokens=jnp.zeros((width, 1), jnp.int32),
        length=jnp.ones(width, jnp.int32),
        **by_slot,
    )
    found = record.record_turn(driver.plan, state.episodes, slots, feedback)
    episode = int(slots.episode[0])
    assert (found.turns[episode], found.end[episode]) == (2, 2)
    assert found.success.tolist() == [e == episode for e in range(driver.plan.episodes)]
    written = dict(reward=0.5, is_valid=True, actions=6, reply_tokens=4, reply_end=2)
    for name, value in (written | dict(thought_tokens=3, grounded=0.25)).items():
        values = np.asarray(getattr(found, name))
        assert values[episode, 1] == value, name
        assert np.count_nonzero(values) == 1, name


def _feedback(driver, state, slot, is_used) -> EnvFeedback:
    """What the games say to the chosen slots' replies."""
    task, slots = driver.task, jax.device_get(state.slots)
    rows = np.asarray(state.rows.tokens)
    messages, outcomes = [], []
    for index in slot[is_used]:
        game = driver.games[slots.episode[index]]
        end = slots.length[index] + 1
        reply = rows[game.episode, end - slots.sampled[index] : end].tolist()
        reward, is_valid, taken = game.play(reply)
        # Nobody reads the message of an ended episode.
        message = [] if game.end else game.next_message(reply, reward)
        messages.append(driver.host.tokens(message) or [0])
        outcomes.append((reward, is_valid, taken, game.success, game.end))
    unused = int((~is_used).sum())
    messages += [[0]] * unused
    reward, is_valid, taken, success, end = zip(
        *outcomes, *[(0.0, False, 0, False, 0)] * unused, strict=True
    )
    return EnvFeedback(
        slot=jnp.asarray(slot),
        is_used=jnp.asarray(is_used),
        tokens=_padded(messages, task.tokens.next_capacity),
        length=jnp.array([len(tokens) for tokens in messages]),
        reward=jnp.array(reward),
        is_valid=jnp.array(is_valid),
        grounded=jnp.zeros(len(outcomes) + unused),
        actions=jnp.array(taken),
        success=jnp.array(success),
        end=jnp.array(end),
    )


def _padded(messages: list[list[int]], width: int) -> jax.Array:
    table = np.zeros((len(messages), width), np.int32)
    for row, tokens in zip(table, messages, strict=True):
        row[: len(tokens)] = tokens
    return jnp.asarray(table)
