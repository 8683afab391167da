"""Imitation: its loss by the definition, and episodes as the host would write them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models, replay

from ragen_jax.envs import base
from ragen_jax.envs.frozen_lake import demonstrations
from ragen_jax.envs.frozen_lake.demonstrations import Demonstrator
from ragen_jax.envs.frozen_lake.env import GOAL, FrozenLake
from ragen_jax.learning import supervised
from ragen_jax.models import transformer
from ragen_jax.rollout import demonstrate, prng
from ragen_jax.text import prompts as prompts_lib
from ragen_jax.text.phrases import tokenize_phrases
from ragen_jax.text.prompts import TurnLimits
from ragen_jax.text.tiny_tokenizer import END
from ragen_jax.trajectory import OUT_OF_TURNS, UNFINISHED

# The loss ----------------------------------------------------------------------------

CONFIG = models.small_config(30)
OPENING = (7, 2, 9)
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_reply_tokens():
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 30, (3, 12)).astype(np.int32)
    tokens[:, :3] = OPENING
    is_reply = rng.random((3, 12)) < 0.4
    is_reply[:, :4] = False
    is_reply[1, 6:] = False  # rows of different weight
    counts = rng.integers(1, 4, (3, 12)).astype(np.float32)

    @functools.partial(jax.jit, compiler_options=QUICK_TO_COMPILE)
    def compute(weights, prefix):
        hidden = transformer.hidden_states(weights, tokens, CONFIG)
        logits = transformer.vocabulary_logits(weights, hidden)
        given = weights, tokens, is_reply, CONFIG
        losses = [supervised.imitation_loss(*given, p) for p in (None, prefix)]
        losses.append(supervised.imitation_loss(*given, weight=counts))
        return jax.nn.log_softmax(logits, axis=-1), *losses

    log_policy, whole, shared, weighed = jax.device_get(
        compute(models.random_parameters(CONFIG), jnp.array(OPENING))
    )
    said = [log_policy[r, t - 1, tokens[r, t]] for r, t in np.argwhere(is_reply)]
    assert 5 < len(said) < 20
    np.testing.assert_allclose([whole, shared], -np.mean(said), rtol=1e-5)
    expected = -np.average(said, weights=counts[is_reply])
    np.testing.assert_allclose(weighed, expected, rtol=1e-5)


# Demonstrated episodes ---------------------------------------------------------------

LAKE = FrozenLake(size=4, frozen_probability=0.8)
PLAYER = Demonstrator(ignore_holes=0.5, random_plan=0.3, noise=0.1, longest=5)
# Tokens that hold every plan of up to five actions, and such that cut them all. The
# test's tokenizer has never seen the replies and needs many tokens for them.
ENOUGH, TOO_FEW = 170, 12
LIMITS = TurnLimits(turns=3, actions_per_turn=4, actions=9, reply_tokens=ENOUGH)
COUNT = 12


@dataclasses.dataclass(frozen=True)
class Demonstrated:
    """Episodes as `demonstrate_episode` wrote them, and what they are checked with."""

    host: replay.Host
    keys: jax.Array  # [COUNT]
    tokens: np.ndarray  # int32[COUNT, T]
    is_reply: np.ndarray  # bool[COUNT, T]
    success: np.ndarray  # bool[COUNT]


@functools.cache
def task_of(reply_tokens: int) -> models.Task:
    """A lake with demonstrations; one environment object, which compiles once."""
    limits = dataclasses.replace(LIMITS, reply_tokens=reply_tokens)
    if reply_tokens == ENOUGH:
        task = models.make_task(limits, settings=LAKE)
        env = demonstrations.with_demonstrations(task.env, LAKE, PLAYER, thinking=True)
        return dataclasses.replace(task, env=env)
    task = task_of(ENOUGH)
    texts = prompts_lib.make_dialogue(task.env, limits, task.pieces, thinking=True)
    tokens = prompts_lib.tokenize_dialogue(
        texts, task.env, task.pieces, task.tokenizer, task.config.vocabulary
    )
    return dataclasses.replace(task, dialogue=texts, tokens=tokens)


@functools.cache
def demonstrated(reply_tokens: int) -> Demonstrated:
    task = task_of(reply_tokens)
    table = tokenize_phrases(task.tokenizer, task.env.reply_phrases)
    end = task.tokenizer.convert_tokens_to_ids(END)
    context = task.tokens.first_capacity + LIMITS.turns * (
        reply_tokens + task.tokens.next_capacity
    )

    @functools.partial(jax.jit, compiler_options=QUICK_TO_COMPILE)
    def play(episode_keys):
        return jax.vmap(
            lambda key: demonstrate.demonstrate_episode(
                key, task.env, task.dialogue, task.tokens, table, end, context
            )
        )(episode_keys)

    episode_keys = jax.random.split(jax.random.key(4), COUNT)
    return Demonstrated(
        replay.Host(task), episode_keys, *jax.device_get(play(episode_keys))
    )


def written_by_the_host(found: Demonstrated, index: int):
    """(tokens, is_reply, game): the episode played and written in Python."""
    host = found.host
    key, most = found.keys[index], host.limits.reply_tokens
    game = replay.HostGame(host, key, base.TRAIN, group=0, episode=0)
    tokens = host.tokens(game.first_message())
    is_reply = [False] * len(tokens)
    while game.end == UNFINISHED:
        turn = game.turn
        demonstrate = jax.jit(host.task.env.demonstrate)
        ids = demonstrate(prng.token_key(key, turn, turn, turn), game.state)
        phrases = host.task.env.reply_phrases
        said = host.tokens([base.text_of(phrases, [i]) for i in ids.tolist()])
        reply = said[: most - 1] + host.tokens([END])
        assert host.read(reply).is_valid == (len(said) < most)
        game.episode = turn  # whose key the demonstrations take
        reward, _, _ = game.play(reply)
        is_over = game.end != UNFINISHED
        message = [] if is_over else host.tokens(game.next_message(reply, reward))
        tokens += reply + message
        is_reply += [True] * len(reply) + [False] * len(message)
    return tokens, is_reply, game


@pytest.mark.slow
@pytest.mark.parametrize("reply_tokens", [ENOUGH, TOO_FEW])
def test_a_demonstrated_episode_is_the_dialogue_that_the_host_writes(reply_tokens):
    found = demonstrated(reply_tokens)
    ends, turns = set(), set()
    for i in range(COUNT):
        tokens, is_reply, game = written_by_the_host(found, i)
        length = len(tokens)
        np.testing.assert_array_equal(found.tokens[i, :length], tokens)
        np.testing.assert_array_equal(found.is_reply[i, :length], is_reply)
        assert not found.tokens[i, length:].any()
        assert not found.is_reply[i, length:].any()
        row, column = np.asarray(game.state.player)
        assert found.success[i] == (game.state.tiles[row, column] == GOAL)
        ends.add(game.end)
        turns.add(game.turn)
    if reply_tokens == ENOUGH:
        assert len(ends) >= 2 and len(turns) >= 2
        assert 0 < found.success.sum() < COUNT
    else:
        assert ends == {OUT_OF_TURNS}


@pytest.mark.slow
@pytest.mark.parametrize("reply_tokens", [ENOUGH, TOO_FEW])
def test_every_reply_ends_with_the_end_of_turn_and_within_its_limit(reply_tokens):
    found = demonstrated(reply_tokens)
    end = found.host.task.tokenizer.convert_tokens_to_ids(END)
    lengths = []
    for reply in _replies(found):
        assert reply[-1] == end and end not in reply[:-1]
        lengths.append(len(reply))
    if reply_tokens == ENOUGH:
        assert COUNT < len(lengths) and 10 < min(lengths)
        assert max(lengths) < reply_tokens
    else:
        assert lengths == [reply_tokens] * (COUNT * LIMITS.turns)


@pytest.mark.slow
def test_a_demonstrated_episode_reads_as_the_chat_that_it_is():
    found = demonstrated(ENOUGH)
    task = found.host.task
    text = task.tokenizer.decode(found.tokens[0])
    opening, *turns = text.split("<|im_start|>assistant\n<think>")
    assert task.dialogue.system in opening
    for i, turn in enumerate(turns):
        assert f"Turn {i + 1} of 3. Actions left: " in (opening, *turns)[i]
        assert re.match(r" At \(\d, \d\).*</think><answer>[A-Z]", turn)
        assert f"</answer>{END}" in turn


def _replies(found: Demonstrated) -> list[np.ndarray]:
    """The tokens of every reply of every episode."""
    said = []
    for tokens, is_reply in zip(found.tokens, found.is_reply, strict=True):
        edges = np.flatnonzero(np.diff(np.pad(is_reply.astype(int), 1)))
        said += [tokens[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return said


@pytest.mark.slow
def test_all_episodes_begin_with_the_opening_that_is_computed_once():
    found = demonstrated(ENOUGH)
    opening = prompts_lib.opening_tokens(found.host.task.tokens)
    assert len(opening) > 50
    assert (found.tokens[:, : len(opening)] == opening).all()
    assert not found.is_reply[:, : len(opening) + 1].any()
