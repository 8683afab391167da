"""Several environments in one batch: each plays as if it were alone, in any layout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models

from ragen_jax.envs.frozen_lake import env as frozen_lake
from ragen_jax.learning.summary import summarize_tasks
from ragen_jax.learning.token_scores import score_tokens
from ragen_jax.parallel import mesh as meshes
from ragen_jax.rollout import rollout as rollout_lib
from ragen_jax.rollout import tasks as tasks_lib
from ragen_jax.text import prompts as prompts_lib
from ragen_jax.text.prompts import TurnLimits
from ragen_jax.trajectory import UNFINISHED

SIZE = 4  # episodes of each prompt


@pytest.fixture(scope="module")
def made():
    """A 3 x 3 lake of three turns with 4 prompts; a 4 x 4 one of two with 4, too."""
    task = models.usual_task()
    other = frozen_lake.make(frozen_lake.FrozenLake(4, 0.8, observation="both"))
    limits = TurnLimits(turns=2, actions_per_turn=1, actions=2, reply_tokens=5)
    texts = prompts_lib.make_dialogue(other, limits, task.pieces, thinking=True)
    tokens = prompts_lib.tokenize_dialogue(
        texts, other, task.pieces, task.tokenizer, task.config.vocabulary
    )
    shares = (task.share(4), tasks_lib.Task("wide", other, texts, 4))
    return task, shares, (task.tokens, tokens)


def play(made, mesh, shards, **sizes):
    task, shares, tokens = made
    usual = dict(group_size=SIZE, slots=0, context=0, decode_chunk=2, buckets=1)
    plan = models.make_plan(shares, tokens, shards=shards, **(usual | sizes))
    setting = dataclasses.replace(task.rollout_context(mesh), tasks=shares)
    rollout = rollout_lib.make_rollout(setting, plan)
    return jax.device_get(rollout(task.parameters, tokens, models.call()))


@pytest.fixture(scope="module")
def mixed(made):
    return play(made, models.one_device(), 1)


@pytest.mark.slow
def test_each_environment_has_its_groups_and_its_own_limits(mixed):
    episodes = mixed.episodes
    assert episodes.environment.tolist() == [0] * 16 + [1] * 16
    assert episodes.group.tolist() == [i // SIZE for i in range(32)]
    wide = episodes.environment == 1
    assert episodes.turns[~wide].max() == 3 and episodes.turns[wide].max() == 2
    assert episodes.actions[~wide].max() == 2 and episodes.actions[wide].max() == 1
    assert (np.asarray(episodes.end) != UNFINISHED).all()


@pytest.mark.slow
def test_an_environment_in_a_mix_plays_what_it_plays_alone(mixed):
    """The first one's groups have the same numbers, so the same noise."""
    alone = jax.device_get(models.sample_usual())
    first = jax.tree.map(lambda x: x[:16], mixed.episodes)
    jax.tree.map(np.testing.assert_array_equal, first, alone.episodes)
    width = alone.rows.tokens.shape[1]
    np.testing.assert_array_equal(
        mixed.rows.tokens[:16, :width], alone.rows.tokens[:, :width]
    )
    np.testing.assert_allclose(
        mixed.rows.logprobs[:16, :width], alone.rows.logprobs, atol=2e-5
    )


@pytest.mark.slow
def test_fewer_slots_play_the_same_episodes(made, mixed):
    fewer = play(made, models.one_device(), 1, slots=10)
    models.check_same_record(fewer, mixed)


@pytest.mark.slow
def test_eight_devices_play_the_same_episodes_under_the_same_numbers(made, mixed):
    mesh = meshes.make_mesh(data=8, fsdp=1, tensor=1)
    spread = play(made, mesh, 8)
    # Each device holds a share of each environment, so the rows come in another order.
    order = np.lexsort((np.arange(32), spread.episodes.group))
    names = ("group", "environment", "success", "reward", "actions", "reply_tokens")
    for name in names:
        ours, theirs = (getattr(r.episodes, name) for r in (spread, mixed))
        np.testing.assert_array_equal(ours[order], theirs, err_msg=name)
    np.testing.assert_array_equal(spread.rows.tokens[order], mixed.rows.tokens)
    owner = spread.rows.episode.max(axis=1)
    assert owner.tolist() == list(range(32))  # Rows point at their own episodes.


@pytest.mark.slow
def test_each_environments_figures_are_over_its_own_episodes(mixed):
    figures = summarize_tasks(jax.tree.map(jnp.asarray, mixed.episodes), 2)
    for env in (0, 1):
        own = mixed.episodes.environment == env
        success = mixed.episodes.success[own].mean()
        np.testing.assert_allclose(figures["success"][env], success, rtol=1e-6)
        returns = mixed.episodes.reward[own].sum(axis=1).mean()
        np.testing.assert_allclose(figures["return"][env], returns, rtol=1e-6)


@pytest.mark.slow
def test_what_all_rows_begin_with_is_what_the_environments_share(made, mixed):
    opening = tasks_lib.common_opening(made[2])
    assert 0 < len(opening) < min(map(len, map(prompts_lib.opening_tokens, made[2])))
    assert (mixed.rows.tokens[:, : len(opening)] == np.array(opening)).all()
    following = mixed.rows.tokens[:, len(opening)]
    assert len(set(following.tolist())) > 1


@pytest.mark.slow
def test_long_messages_of_one_environment_leave_the_rows_of_another_whole():
    """Near their end they have no room for a message of that width."""
    lake = models.make_task(TurnLimits(6, 1, 12, 3))
    wide = frozen_lake.FrozenLake(8, 0.8, observation="both")
    wide = models.make_task(TurnLimits(1, 2, 8, 3), settings=wide)
    made = lake, (lake.share(2), wide.share(2)), (lake.tokens, wide.tokens)
    rows = play(made, models.one_device(), 1).rows
    width = wide.tokens.next_capacity
    fed = (rows.turn == 2) & ~rows.is_reply
    first = fed.argmax(axis=1)[fed.any(axis=1)]
    assert len(first) and (first + width > rows.tokens.shape[1]).all()
    score = jax.jit(score_tokens, static_argnums=2)
    scores = score(lake.parameters, rows.tokens, lake.config, 1.0)
    expected = np.where(rows.is_reply, scores.logprobs, 0)
    np.testing.assert_allclose(rows.logprobs, expected, rtol=0, atol=1e-4)
