"""Sokoban against games of gym-sokoban and host renderings."""

import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import CONFIGS, GOLDEN
from helpers.sokoban_rooms import one_by_one, play, room

from ragen_jax.envs import base
from ragen_jax.envs.sokoban import env as sokoban
from ragen_jax.envs.sokoban import texts
from ragen_jax.envs.sokoban.env import Sokoban, State
from ragen_jax.envs.sokoban.types import FLOOR, TARGET, WALL

UP, DOWN, LEFT, RIGHT = range(4)
OTHER_SYMBOLS = ("W", ".", "G", "B", "C", "A", "@")


# Rules.


@pytest.mark.parametrize("kind", ["6x1", "8x2", "7x3"])
def test_every_action_does_what_it_does_in_gym_sokoban(kind):
    names = ("tiles", "start_boxes", "start_player")
    with np.load(GOLDEN / "sokoban.npz") as file:
        tiles, boxes, player = (file[f"{kind}_{name}"] for name in names)
        recorded = {
            name: file[f"{kind}_{name}"]
            for name in ("action", "reward", "done", "player", "boxes")
        }
    start = State(
        tiles=jnp.asarray(tiles, jnp.int32),
        boxes=jnp.asarray(boxes),
        player=jnp.asarray(player, jnp.int32),
        done=jnp.zeros(len(tiles), bool),
    )
    is_played = recorded["action"] != 255
    actions = jnp.where(is_played, recorded["action"], RIGHT).astype(jnp.int32)
    states, outcome = jax.tree.map(np.asarray, jax.vmap(play)(start, actions))

    reward = np.where(is_played, recorded["reward"], 0)
    np.testing.assert_allclose(outcome.reward, reward, rtol=1e-6)
    np.testing.assert_array_equal(outcome.done, recorded["done"])
    np.testing.assert_array_equal(outcome.success, recorded["done"] & is_played)
    size = tiles.shape[1]
    at = states.player @ np.array([size, 1])
    np.testing.assert_array_equal(at[is_played], recorded["player"][is_played])
    boxes = [np.flatnonzero(b) for b in states.boxes[is_played]]
    np.testing.assert_array_equal(boxes, recorded["boxes"][is_played])
    # What can happen did: boxes onto and off targets, ends and games without an end.
    rounded = set(np.round(recorded["reward"][is_played], 1).tolist())
    assert rounded == ({-0.1, 10.9} if kind == "6x1" else {-0.1, 0.9, -1.1, 10.9})
    assert 0.2 < recorded["done"][:, -1].mean() < 0.9
    assert len(tiles) >= 400


def test_walks_and_pushes_are_worked_out_by_hand():
    state = room("######", "#PXOX#", "#___O#", "#____#", "######", "######")
    story = (
        (UP, -0.1, (1, 1)),  # into the wall
        (base.NO_ACTION, 0.0, (1, 1)),
        (RIGHT, 0.9, (1, 2)),  # a box onto a target
        (RIGHT, -0.1, (1, 2)),  # two boxes at once: nothing moves
        (DOWN, -0.1, (2, 2)),
        (RIGHT, -0.1, (2, 3)),
        (UP, -0.1, (2, 3)),  # a box with a wall behind it
        (RIGHT, -0.1, (2, 4)),  # onto a target oneself
        (LEFT, -0.1, (2, 3)),
    )
    actions, rewards, places = zip(*story, strict=True)
    states, outcome = play(state, jnp.array(actions, jnp.int32))
    np.testing.assert_allclose(outcome.reward, rewards, rtol=1e-6)
    np.testing.assert_array_equal(states.player, places)
    assert np.argwhere(states.boxes[-1]).tolist() == [[1, 3], [1, 4]]
    assert not outcome.done.any() and not outcome.success.any()


@pytest.mark.parametrize(
    ("rows", "actions", "rewards"),
    [
        # Off a target, onto the other, round the second box and up: solved, then over.
        (
            ("#P√_O#", "#_X__#", "#____#"),
            (RIGHT, RIGHT, DOWN, DOWN, LEFT, UP, UP, DOWN, LEFT),
            (-1.1, 0.9, -0.1, -0.1, -0.1, 10.9, 0, 0, 0),
        ),
        # From one target straight onto another nothing is earned.
        (
            ("#PXOO#", "#_X__#", "#____#"),
            (RIGHT, RIGHT, *[UP] * 7),
            (0.9, *[-0.1] * 8),
        ),
    ],
)
def test_rewards_are_worked_out_by_hand(rows, actions, rewards):
    state = room("######", *rows, "######", "######")
    states, outcome = play(state, jnp.array(actions, jnp.int32))
    np.testing.assert_allclose(outcome.reward, rewards, rtol=1e-6)
    solved = np.isclose(rewards, 10.9)
    np.testing.assert_array_equal(outcome.success, solved)
    np.testing.assert_array_equal(outcome.done, np.cumsum(solved) > 0)
    np.testing.assert_array_equal(states.done, outcome.done)


# What is said.


@pytest.mark.parametrize(
    "settings",
    [
        Sokoban(symbols=OTHER_SYMBOLS),
        Sokoban(size=8, boxes=2, observation="both"),
        Sokoban(observation="coordinates"),
    ],
)
def test_observations_equal_a_host_rendering(settings):
    size, count = settings.size, 60
    random = np.random.default_rng(size)
    tiles = np.full((count, size, size), WALL, np.int32)
    boxes = np.zeros((count, size, size), bool)
    inner = [(r, c) for r in range(1, size - 1) for c in range(1, size - 1)]
    player = []
    for index in range(count):
        cells = random.permutation(inner)
        # The first room without inner walls, the second with as many as there can be.
        most = len(cells) - 2 * settings.boxes
        walls = {0: 0, 1: most}.get(index, random.integers(0, most + 1))
        floor = cells[walls:]
        tiles[index][tuple(floor.T)] = FLOOR
        tiles[index][tuple(floor[: settings.boxes].T)] = TARGET
        # Boxes anywhere, on targets too; the player where no box is.
        stand = random.permutation(len(floor))[: settings.boxes + 1]
        boxes[index][tuple(floor[stand[1:]].T)] = True
        player.append(floor[stand[0]])
    state = State(
        tiles=tiles,
        boxes=boxes,
        player=np.array(player, np.int32),
        done=np.zeros(count, bool),
    )
    env = sokoban.make(settings)
    ids = np.asarray(jax.jit(jax.vmap(env.observe))(state))
    assert ids.shape == (count, env.observation_phrases) and ids.dtype == np.int32
    for one, row in zip(one_by_one(state), ids, strict=True):
        expected = ""
        if settings.observation != "coordinates":
            expected += _render_grid(one, settings.symbols)
        if settings.observation != "grid":
            expected += _render_coordinates(one)
        assert base.text_of(env.phrases, row) == expected


def test_the_observation_looks_as_documented():
    state = room("######", "#√_X_#", "#__S##", "######", "######", "######")
    env = sokoban.make(Sokoban(boxes=2, observation="both"))
    ids, places = jax.jit(lambda s: (env.observe(s), env.landmarks(s)))(state)
    assert base.text_of(env.phrases, np.asarray(ids)) == (
        "State:\n # # # # # #\n # √ _ X _ #\n # _ _ S # #\n"
        " # # # # # #\n # # # # # #\n # # # # # #\n"
        "Player: (2, 3)\nBoxes: (1, 1), (1, 3)\nTargets: (1, 1), (2, 3)\n"
        "Walls: (2, 4), (3, 1), (3, 2), (3, 3), (3, 4),"
        " (4, 1), (4, 2), (4, 3), (4, 4)\n"
    )
    # The player, the boxes, the targets.
    assert places.tolist() == [[2, 3], [1, 1], [1, 3], [1, 1], [2, 3]]


def test_a_picture_shows_walls_boxes_targets_and_the_player():
    state = room("######", "#√_X_#", "#__S##", "######", "######", "######")
    picture = sokoban.picture(state)
    assert picture.shape == (144, 144, 3) and picture.dtype == np.uint8
    corner = picture[2::24, 2::24]  # a pixel of each cell, beside its text
    kinds = {"#": (0, 0), "_": (1, 2), "X": (1, 3), "√": (1, 1), "S": (2, 3)}
    colours = {name: tuple(corner[place]) for name, place in kinds.items()}
    assert len(set(colours.values())) == len(kinds)
    np.testing.assert_array_equal(corner[1, 2], corner[2, 1])  # floor is floor


def test_the_instruction_is_computed_from_the_settings():
    text = texts.instruction(Sokoban())
    for part in ("6 x 6", "# wall,", "√ box on target", "S you on target.", "the box"):
        assert part in text
    assert "Up, Down, Left, Right" in text and len(text) <= 450
    text = texts.instruction(Sokoban(size=8, boxes=2, symbols=OTHER_SYMBOLS))
    for part in ("8 x 8", "W wall,", "@ you on target.", "each of the 2 boxes"):
        assert part in text
    places = texts.instruction(Sokoban(observation="coordinates"))
    assert "Symbols" not in places and "border" in places


# Settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 4}, "sokoban.size = 4 .* 5 to 10"),
        ({"size": 6.5}, "sokoban.size = 6.5 .* whole number"),
        ({"boxes": 0}, "sokoban.boxes = 0 .*size = 6.* 1 to 2"),
        ({"boxes": 3}, "sokoban.boxes = 3 .*size = 6.* 1 to 2"),
        ({"size": 10, "boxes": 5}, "sokoban.boxes = 5 .*size = 10.* 1 to 4"),
        ({"search_depth": 0}, "search_depth = 0 .* 1 to 10000"),
        ({"boxes": 2, "search_depth": 29}, "search_depth = 29 .*boxes = 2.* 30 to"),
        ({"observation": "image"}, "'image' .* grid, coordinates, both"),
        ({"symbols": tuple("#_OXXPS")}, "7 different texts"),
        ({"symbols": tuple("#_OXPS")}, "7 different texts"),
        ({"symbols": ("a b", *"_OX√PS")}, "without white space"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence_with_the_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        sokoban.make(Sokoban(**changes))


def test_every_variant_of_the_config_makes_an_environment():
    path = CONFIGS / "sokoban.py"
    get_config = runpy.run_path(str(path))["get_config"]
    sizes = {}
    for variant in ("", "larger", "newvocab", "coordinates", "smoke", "paper"):
        options = get_config(variant).env.to_dict()
        assert options.pop("name") == "sokoban" and options.pop("thinking")
        settings = Sokoban(**options)
        base.check_environment(sokoban.make(settings))
        sizes[variant] = settings
    assert sizes[""] == sizes["smoke"] == sizes["paper"] == Sokoban()
    assert sizes["larger"] == Sokoban(size=8, boxes=2)
    assert sizes["newvocab"] == Sokoban(symbols=OTHER_SYMBOLS)
    assert sizes["coordinates"] == Sokoban(observation="coordinates")
    with pytest.raises(ValueError, match="'huge': choose one of 'solver'"):
        get_config("huge")


# Independent of the package.


def _render_grid(state, symbols):
    wall, floor, target, box, box_on, player, player_on = symbols
    text = "State:\n"
    for row, line in enumerate(state.tiles):
        for column, tile in enumerate(line):
            names = {WALL: wall, FLOOR: floor, TARGET: target}
            if state.boxes[row, column]:
                names = {FLOOR: box, TARGET: box_on}
            if (row, column) == tuple(state.player):
                names = {FLOOR: player, TARGET: player_on}
            text += f" {names[int(tile)]}"
        text += "\n"
    return text


def _render_coordinates(state):
    def places(found):
        return ", ".join(f"({row}, {column})" for row, column in found) or "none"

    inner = state.tiles[1:-1, 1:-1]
    return (
        f"Player: {places([state.player])}\nBoxes: {places(np.argwhere(state.boxes))}\n"
        f"Targets: {places(np.argwhere(state.tiles == TARGET))}\n"
        f"Walls: {places(1 + np.argwhere(inner == WALL))}\n"
    )
