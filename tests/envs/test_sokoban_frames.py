"""Rooms among more walls: the same rooms, drawn with any number of rows and columns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sokoban_rooms import room

from ragen_jax.envs import base
from ragen_jax.envs.sokoban import demonstrations, frames
from ragen_jax.envs.sokoban import env as sokoban
from ragen_jax.envs.sokoban.env import Sokoban

ROOM = room("#####", "#_PO#", "#_X_#", "#___#", "#####")


def framed(*shapes, level=ROOM):
    """Of an environment whose one level is `level`: in frames, and its settings."""
    settings = Sokoban(size=5)
    env = dataclasses.replace(sokoban.make(settings), reset=lambda key, split: level)
    return frames.in_frames(env, settings, shapes)


def drawing(env, state):
    text = base.text_of(env.phrases, np.asarray(env.observe(state)))
    return text.removeprefix("State:\n").replace(" ", "").splitlines()


def test_a_room_lies_somewhere_in_a_drawing_of_walls_of_each_shape():
    shapes = [(5, 6), (7, 5), (6, 8)]
    env, settings = framed(*shapes)
    assert settings.size == 8
    assert env.observation_phrases == 1 + 64
    seen = set()
    reset, observe = jax.jit(env.reset), jax.jit(env.observe)
    for seed in range(160):
        state = reset(jax.random.key(seed), base.TRAIN)
        text = base.text_of(env.phrases, np.asarray(observe(state)))
        rows = text.removeprefix("State:\n").replace(" ", "").splitlines()
        height, width = len(rows), len(rows[0])
        assert {len(row) for row in rows} == {width}
        row, column = np.asarray(state.player) - ROOM.player
        inside = [r[column : column + 5] for r in rows[row : row + 5]]
        assert inside == ["#####", "#_PO#", "#_X_#", "#___#", "#####"]
        assert "".join(rows).count("#") == height * width - 9
        seen.add((height, width, int(row), int(column)))
    # Each shape, and each place in it: 2, 3, and 2 x 4.
    places = {(5, 6, 0, c) for c in range(2)} | {(7, 5, r, 0) for r in range(3)}
    assert seen == places | {(6, 8, r, c) for r in range(2) for c in range(4)}


def test_a_frame_changes_no_move_and_no_reward():
    env, _ = framed((6, 7))
    state, plain = env.reset(jax.random.key(3), base.TRAIN), ROOM
    moved = np.asarray(state.player) - ROOM.player
    step = jax.jit(sokoban.step)
    for action in (1, 1, 3, 0, 2, 2, 0, 3, 1, 3, 0):
        state, outcome = step(jax.random.key(0), state, action)
        plain, wanted = step(jax.random.key(0), plain, action)
        assert outcome == wanted
        np.testing.assert_array_equal(state.player - moved, plain.player)
        np.testing.assert_array_equal(
            np.argwhere(state.boxes) - moved, np.argwhere(plain.boxes)
        )


@pytest.mark.slow
def test_a_demonstration_names_places_as_they_are_drawn_and_ends_in_the_room():
    env, settings = framed((9, 7))
    perfect = demonstrations.Demonstrator(ignore_target=0.0, noise=0.0)
    player = demonstrations.with_demonstrations(env, settings, perfect, thinking=True)
    state = env.reset(jax.random.key(5), base.TRAIN)
    rows = drawing(env, state)
    place = lambda symbol: next(
        (r, row.index(symbol)) for r, row in enumerate(rows) if symbol in row
    )
    told = np.asarray(player.demonstrate(jax.random.key(0), state))
    text = base.text_of(player.reply_phrases, told)
    head = " At ({}, {}), box ({}, {}), target ({}, {}):"
    assert text.startswith(head.format(*place("P"), *place("X"), *place("O")))


def test_the_instruction_names_the_drawings_shape():
    env, _ = framed((7, 9))
    assert "a room of 7 x 9 cells." in env.instruction
    assert "5 x 5" not in env.instruction
    other = frames.with_named_shape(env, (7, 9), (6, 8))
    assert "a room of 6 x 8 cells." in other.instruction


@pytest.mark.parametrize(
    ("observation", "shapes"), [("grid", [(5, 4)]), ("both", [(6, 6)])]
)
def test_what_cannot_be_framed_is_refused(observation, shapes):
    settings = Sokoban(size=5, observation=observation)
    told = f"rooms of 5 x 5 cells shown as '{observation}' cannot be drawn in"
    with pytest.raises(ValueError, match=told):
        frames.in_frames(sokoban.make(settings), settings, shapes)


@pytest.mark.slow
def test_no_drawing_is_longer_than_the_longest():
    env, _ = framed((7, 9), (9, 6))
    lengths = np.array([len(phrase) for phrase in env.phrases])
    states = jax.vmap(lambda k: env.reset(k, base.TRAIN))(
        jax.random.split(jax.random.key(0), 30)
    )
    ids = np.asarray(jax.vmap(env.observe)(states))
    used = np.where(ids >= 0, lengths[np.maximum(ids, 0)], 0).sum(1)
    assert used.max() <= env.longest_observation(lengths)
    assert jnp.unique(jnp.array(used)).size > 1
