"""The engine driven from Python: `advance`, `choose_waiting`, `feed`, `finish`."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from replay import Host, HostGame

from ragen_jax.envs.base import TRAIN
from ragen_jax.rollout import cache as kv
from ragen_jax.rollout import engine, keys
from ragen_jax.rollout.sample import Passes, Rollout
from ragen_jax.rollout.slots import (
    DECODING,
    IDLE,
    WAITING,
    Answer,
    Inputs,
    Prompts,
)


class Engine:
    """The compiled functions of one plan, and the usual scene's prompts and games."""

    def __init__(self):
        self.scene = scene = models.usual_scene()
        self.plan = plan = scene.plan(slots=5, buckets=4)
        self.policy = kv.Policy(scene.config, jnp.float32)
        self.key = keys.iteration_key(jnp.uint32(0), TRAIN, 2)
        host = Host(scene)
        self.host = host
        self.games = [
            HostGame(host, self.key, TRAIN, episode // 4, episode)
            for episode in range(plan.episodes)
        ]
        firsts = [host.tokens(game.first_message()) for game in self.games[::4]]
        prompts = Prompts(
            tokens=_padded(firsts, scene.tokens.first_capacity),
            lengths=jnp.array([len(tokens) for tokens in firsts]),
            group=jnp.arange(plan.episodes) // 4,
            group_name=jnp.arange(plan.episodes) // 4,
            number=jnp.arange(plan.episodes),
            first_place=jnp.int32(0),
        )
        weights = kv.lay_out(scene.parameters, jnp.float32)
        prefill = jax.jit(kv.prefill_prompts, static_argnums=1)
        self.inputs = Inputs(
            weights=weights,
            prompts=prompts,
            prompt_cache=prefill(weights, self.policy, prompts.tokens),
            tables=(scene.tokens.replies,),
            is_stop=scene.tokens.is_stop,
            key=self.key,
            temperature=jnp.float32(1),
        )
        bind = lambda f: functools.partial(f, plan, self.policy)  # noqa: E731
        self.start = jax.jit(bind(engine.start))
        self.advance = jax.jit(bind(engine.advance))
        self.feed = jax.jit(bind(engine.feed))
        self.finish = jax.jit(functools.partial(engine.finish, plan))


@pytest.fixture(scope="module")
def driver():
    return Engine()


def test_frozen_lake_stepped_from_python_gives_the_identical_record(driver):
    plan, inputs = driver.plan, driver.inputs
    state = driver.start(inputs)
    taken_up = list(range(plan.slots))
    while True:
        state = driver.advance(inputs, state)
        slot, is_used = jax.device_get(engine.choose_waiting(plan, state))
        if not is_used.any():
            break
        state, new = driver.feed(inputs, state, _answer(driver, state, slot, is_used))
        taken_up += [episode for episode in new.tolist() if episode >= 0]
    rows, episodes = driver.finish(inputs, state, jnp.int32(7))
    passes = Passes(state.decode_passes, state.feed_passes)
    models.check_same_record(Rollout(rows, episodes, passes), models.sample_usual())
    assert taken_up == list(range(plan.episodes))  # In the queue's order.


def test_a_slot_that_waits_is_not_touched_while_others_decode(driver):
    """It may be longer than the bucket that the others decode in."""
    plan, inputs = driver.plan, driver.inputs
    assert plan.buckets == (264, 352)
    state = driver.start(inputs)
    noise = lambda x: x.at[0].set(jax.random.normal(jax.random.key(1), x.shape[1:]))  # noqa: E731
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


def _answer(driver, state, slot, is_used) -> Answer:
    """What the games say to the chosen slots' replies."""
    scene, slots = driver.scene, jax.device_get(state.slots)
    rows = np.asarray(state.rows.tokens)
    messages, told = [], []
    for index in slot[is_used]:
        game = driver.games[slots.episode[index]]
        end = slots.length[index] + 1
        reply = rows[game.episode, end - slots.sampled[index] : end].tolist()
        reward, is_valid, taken = game.play(reply)
        # Nobody reads what an ended episode is told.
        message = [] if game.end else game.next_message(reply, reward)
        messages.append(driver.host.tokens(message) or [0])
        told.append((reward, is_valid, taken, game.success, game.end))
    unused = int((~is_used).sum())
    messages += [[0]] * unused
    reward, is_valid, taken, success, end = zip(
        *told, *[(0.0, False, 0, False, 0)] * unused, strict=True
    )
    return Answer(
        slot=jnp.asarray(slot),
        is_used=jnp.asarray(is_used),
        tokens=_padded(messages, scene.tokens.next_capacity),
        length=jnp.array([len(tokens) for tokens in messages]),
        reward=jnp.array(reward),
        is_valid=jnp.array(is_valid),
        grounded=jnp.zeros(len(told) + unused),
        taken=jnp.array(taken),
        success=jnp.array(success),
        end=jnp.array(end),
    )


def _padded(messages: list[list[int]], width: int) -> jax.Array:
    table = np.zeros((len(messages), width), np.int32)
    for row, tokens in zip(table, messages, strict=True):
        row[: len(tokens)] = tokens
    return jnp.asarray(table)
