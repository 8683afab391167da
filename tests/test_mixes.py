"""Several worlds in one batch: each plays as if it were alone, in any layout."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from ragen_jax import mesh as meshes
from ragen_jax.envs import frozen_lake
from ragen_jax.learning.summary import summarize_worlds
from ragen_jax.rollout import sample, scenes
from ragen_jax.text import dialogue
from ragen_jax.text.dialogue import TurnLimits

SIZE = 4  # episodes of each prompt


@pytest.fixture(scope="module")
def made():
    """A 3 x 3 lake of three turns with 4 prompts; a 4 x 4 one of two with 4, too."""
    scene = models.usual_scene()
    other = frozen_lake.world(frozen_lake.FrozenLake(4, 0.8, observation="both"))
    limits = TurnLimits(turns=2, actions_per_turn=1, actions=2, reply_tokens=5)
    texts = dialogue.make_dialogue(other, limits, scene.pieces, thinking=True)
    tokens = dialogue.tokenize_dialogue(
        texts, other, scene.pieces, scene.tokenizer, scene.config.vocabulary
    )
    shares = (scene.share(4), scenes.Scene("wide", other, texts, 4))
    return scene, shares, (scene.tokens, tokens)


def play(made, mesh, shards, **sizes):
    scene, shares, tokens = made
    usual = dict(group_size=SIZE, slots=0, context=0, decode_chunk=2, buckets=1)
    plan = sample.make_plan(shares, tokens, shards=shards, **(usual | sizes))
    setting = dataclasses.replace(scene.setting(mesh), scenes=shares)
    rollout = sample.make_rollout(setting, plan)
    return jax.device_get(rollout(scene.parameters, tokens, models.call()))


@pytest.fixture(scope="module")
def mixed(made):
    return play(made, models.one_device(), 1)


def test_each_world_has_its_groups_and_its_own_limits(mixed):
    episodes = mixed.episodes
    assert episodes.environment.tolist() == [0] * 16 + [1] * 16
    assert episodes.group.tolist() == [i // SIZE for i in range(32)]
    wide = episodes.environment == 1
    assert episodes.turns[~wide].max() == 3 and episodes.turns[wide].max() == 2
    assert episodes.actions[~wide].max() == 2 and episodes.actions[wide].max() == 1
    assert sample.is_finished(episodes)


def test_a_world_in_a_mix_plays_what_it_plays_alone(mixed):
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


def test_fewer_slots_play_the_same_episodes(made, mixed):
    fewer = play(made, models.one_device(), 1, slots=10)
    models.check_same_record(fewer, mixed)


def test_eight_devices_play_the_same_episodes_under_the_same_numbers(made, mixed):
    mesh = meshes.make_mesh(data=8, fsdp=1, tensor=1)
    spread = play(made, mesh, 8)
    # Each device holds a share of each world, so the rows come in another order.
    order = np.lexsort((np.arange(32), spread.episodes.group))
    names = ("group", "environment", "success", "reward", "actions", "reply_tokens")
    for name in names:
        ours, theirs = (getattr(r.episodes, name) for r in (spread, mixed))
        np.testing.assert_array_equal(ours[order], theirs, err_msg=name)
    np.testing.assert_array_equal(spread.rows.tokens[order], mixed.rows.tokens)
    owner = spread.rows.episode.max(axis=1)
    assert owner.tolist() == list(range(32))  # Rows point at their own episodes.


def test_each_worlds_figures_are_over_its_own_episodes(mixed):
    figures = summarize_worlds(jax.tree.map(jnp.asarray, mixed.episodes), 2)
    for world in (0, 1):
        own = mixed.episodes.environment == world
        success = mixed.episodes.success[own].mean()
        np.testing.assert_allclose(figures["success"][world], success, rtol=1e-6)
        returns = mixed.episodes.reward[own].sum(axis=1).mean()
        np.testing.assert_allclose(figures["return"][world], returns, rtol=1e-6)


def test_what_all_rows_begin_with_is_what_the_worlds_share(made, mixed):
    opening = scenes.common_opening(made[2])
    assert 0 < len(opening) < min(map(len, map(dialogue.opening_tokens, made[2])))
    assert (mixed.rows.tokens[:, : len(opening)] == np.array(opening)).all()
    following = mixed.rows.tokens[:, len(opening)]
    assert len(set(following.tolist())) > 1
