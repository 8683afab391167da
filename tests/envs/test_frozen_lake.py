"""FrozenLake against Gymnasium's, host renderings and a host search."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from helpers import split_levels

from ragen_jax.envs import base
from ragen_jax.envs.frozen_lake import env as frozen_lake
from ragen_jax.envs.frozen_lake import generator, texts
from ragen_jax.envs.frozen_lake.env import FrozenLake, State
from ragen_jax.envs.frozen_lake.planning import distances
from ragen_jax.envs.frozen_lake.types import (
    DOWN,
    GOAL,
    HOLE,
    ICE,
    LEFT,
    MOVES,
    RIGHT,
    UP,
)
from ragen_jax.envs.grid_text import OBSERVATIONS

LAKES = 200  # A split, for each of `_lakes`.
move = jax.jit(frozen_lake.move)
step = jax.jit(frozen_lake.step, static_argnums=3)
_lakes = functools.partial(split_levels.drawn, frozen_lake.reset, count=LAKES, seed=11)


def _host_lake(tiles, player, **options):
    letters = np.array(["F", "H", "G"])[tiles]
    letters[tuple(player)] = "S"
    lake = FrozenLakeEnv(desc=["".join(row) for row in letters], **options)
    lake.reset(seed=0)
    return lake


# Rules.


@pytest.mark.parametrize("size", [4, pytest.param(7, marks=pytest.mark.slow)])
def test_every_move_equals_gymnasiums_before_and_after_the_end(size):
    lakes = _lakes(FrozenLake(size=size, frozen_probability=0.8))
    directions = np.random.default_rng(0).integers(0, 4, (30, 3 * LAKES), np.int32)

    def one_move(state, direction):
        state, outcome = jax.vmap(frozen_lake.move)(state, direction)
        return state, (state.player, outcome)

    scan = jax.jit(functools.partial(jax.lax.scan, one_move))
    last, (players, outcome) = jax.tree.map(np.asarray, scan(lakes, directions))
    for lane in range(3 * LAKES):
        host = _host_lake(lakes.tiles[lane], lakes.player[lane], is_slippery=False)
        for turn in range(30):
            place, reward, done, _, _ = host.step(directions[turn, lane])
            assert divmod(place, size) == tuple(players[turn, lane])
            assert outcome.reward[turn, lane] == reward
            assert outcome.success[turn, lane] == (reward == 1)
            assert outcome.done[turn, lane] == done
    # Both ends, and lakes that never ended, were among them.
    end_tiles = lakes.tiles[np.arange(3 * LAKES), *last.player.T]
    assert set(end_tiles) == {ICE, HOLE, GOAL}
    np.testing.assert_array_equal(last.tiles, lakes.tiles)


@pytest.mark.parametrize("success", [0.0, 1 / 3, 0.8, 1.0])
def test_slips_are_as_frequent_as_in_gymnasiums_transition_table(success):
    draws = 20_000
    settings = FrozenLake(success_probability=success)
    # From (1, 1): ice, goal, hole and ice around it; from (0, 0): two borders.
    tiles = np.zeros((4, 4), np.int32)
    tiles[1, 2], tiles[2, 1] = HOLE, GOAL
    many = jax.jit(jax.vmap(functools.partial(frozen_lake.step, settings=settings)))
    for player, action in itertools.product([(1, 1), (0, 0)], range(4)):
        state = State(
            tiles=jnp.asarray(tiles), player=jnp.array(player), done=jnp.array(False)
        )
        repeated = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf[None], (draws, *leaf.shape)), state
        )
        keys = jax.random.split(jax.random.key(action), draws)
        after, outcome = many(keys, repeated, jnp.full((draws,), action))
        ours = collections.Counter(
            zip(
                np.asarray(after.player) @ [4, 1],
                outcome.reward.tolist(),
                outcome.done.tolist(),
                strict=True,
            )
        )
        expected = collections.Counter()
        host = _host_lake(tiles, player, success_rate=success)
        for rng, place, reward, done in host.P[4 * player[0] + player[1]][action]:
            expected[place, float(reward), done] += rng
        assert set(ours) <= set(expected)
        for event, rng in expected.items():
            error = np.sqrt(rng * max(0.0, 1 - rng) / draws)
            assert abs(ours[event] / draws - rng) <= 4 * error + 1e-9, event


def test_a_player_walks_to_the_goal_and_earns_one_once():
    state = State(
        tiles=jnp.array([[ICE, ICE], [HOLE, GOAL]]),
        player=jnp.array([0, 0]),
        done=jnp.array(False),
    )
    rewards, places = [], []
    for direction in (LEFT, UP, RIGHT, DOWN, UP, LEFT):
        state, outcome = move(state, jnp.int32(direction))
        rewards.append(float(outcome.reward))
        places.append(tuple(state.player.tolist()))
    assert rewards == [0, 0, 0, 1, 0, 0]
    assert places == [(0, 0), (0, 0), (0, 1), (1, 1), (1, 1), (1, 1)]
    assert bool(state.done) and bool(outcome.done) and not outcome.success


def test_no_action_keeps_the_player_in_place_even_on_ice_that_always_slips():
    state = State(
        tiles=jnp.zeros((4, 4), jnp.int32),
        player=jnp.array([1, 2]),
        done=jnp.array(False),
    )
    settings = FrozenLake(success_probability=0.0)
    for seed in range(20):
        key, nothing = jax.random.key(seed), jnp.int32(base.NO_ACTION)
        after, outcome = step(key, state, nothing, settings)
        assert after.player.tolist() == [1, 2]
        assert outcome.reward == 0 and not outcome.done


# Levels.


@pytest.mark.parametrize(
    "settings",
    [
        FrozenLake(),
        FrozenLake(size=2, frozen_probability=0.5),
        pytest.param(
            FrozenLake(size=5, frozen_probability=0.0), marks=pytest.mark.slow
        ),
        pytest.param(
            FrozenLake(size=8, frozen_probability=0.6), marks=pytest.mark.slow
        ),
    ],
)
def test_every_lake_is_well_formed_solvable_and_of_its_split(settings):
    lakes = _lakes(settings)
    content_of = {split: set() for split in range(3)}
    for lane, (tiles, player) in enumerate(zip(lakes.tiles, lakes.player, strict=True)):
        split = lane // LAKES
        assert (tiles == GOAL).sum() == 1 and tiles[tuple(player)] == ICE
        assert np.isin(tiles, (ICE, HOLE, GOAL)).all()
        assert _has_path(tiles, tuple(player))
        content = [*tiles.ravel().tolist(), *player.tolist()]
        assert split_levels.split_of(content) == split
        content_of[split].add(tuple(content))
    assert not lakes.done.any()
    for left, right in itertools.combinations(content_of.values(), 2):
        assert not left & right, "two splits share a lake"


def test_ice_is_as_frequent_as_the_settings_say_before_lakes_are_sorted_out():
    count = 4000
    settings = FrozenLake(frozen_probability=0.7)
    keys = jax.random.split(jax.random.key(3), count)
    draw = functools.partial(generator.random_lake, settings=settings)
    lakes = jax.tree.map(np.asarray, jax.jit(jax.vmap(draw))(keys))
    # 14 tiles a lake are neither start nor goal.
    holes = (lakes.tiles == HOLE).sum()
    error = np.sqrt(0.3 * 0.7 * 14 * count)
    assert abs(holes - 0.3 * 14 * count) <= 4 * error
    # All 240 pairs of start and goal come up, about equally often.
    starts = lakes.player @ [4, 1]
    goals = (lakes.tiles == GOAL).reshape(count, 16).argmax(axis=1)
    pairs = np.bincount(16 * starts + goals, minlength=256).reshape(16, 16)
    assert (np.diag(pairs) == 0).all()
    off_diagonal = pairs[~np.eye(16, dtype=bool)]
    rng = 1 / 240
    assert off_diagonal.min() > 0
    assert off_diagonal.max() <= count * rng + 5 * np.sqrt(count * rng)


@pytest.mark.slow
def test_different_keys_give_different_lakes():
    # On 8 x 8 there are far too many lakes for two of 600 to agree by accident.
    lakes = _lakes(FrozenLake(size=8, frozen_probability=0.6))
    assert len(np.unique(lakes.tiles.reshape(3 * LAKES, -1), axis=0)) == 3 * LAKES


@pytest.mark.parametrize("size", range(2, 11))
def test_every_split_has_a_fair_share_of_lakes_even_without_ice_and_without_holes(size):
    # Without ice only a goal beside the start can be reached: the hardest settings.
    for filler, is_open in ((HOLE, False), (ICE, True)):
        accepted = np.zeros(3)
        for start, goal in itertools.permutations(np.ndindex(size, size), 2):
            is_beside = abs(start[0] - goal[0]) + abs(start[1] - goal[1]) == 1
            if is_open or is_beside:
                tiles = np.full((size, size), filler)
                tiles[start], tiles[goal] = ICE, GOAL
                accepted[split_levels.split_of([*tiles.ravel().tolist(), *start])] += 1
        share = accepted / (size**2 * (size**2 - 1))
        if (size, is_open) == (2, True):
            assert share.min() == 0  # The settings that `check` refuses.
        else:
            assert share.min() > 1 / 350


def test_the_smallest_lakes_have_a_fair_share_in_every_split_up_to_the_limit():
    shares = {p: np.zeros(3) for p in (0.05, 0.5, 0.95)}
    for start, goal in itertools.permutations(range(4), 2):
        free = [tile for tile in range(4) if tile not in (start, goal)]
        for fill in itertools.product((ICE, HOLE), repeat=2):
            tiles = np.zeros(4, int)
            tiles[goal] = GOAL
            tiles[free] = fill
            player = divmod(start, 2)
            if _has_path(tiles.reshape(2, 2), player):
                split = split_levels.split_of([*tiles.tolist(), *player])
                for p, share in shares.items():
                    rngs = [p if tile == ICE else 1 - p for tile in fill]
                    share[split] += np.prod(rngs) / 12
    assert min(share.min() for share in shares.values()) > 1 / 350


# Observations and words.


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("size", [2, 4, 10])
def test_the_observation_reads_as_the_host_renders_it(observation, size):
    symbols = ("@", ".", "O", "goal", "✗", "√")
    settings = FrozenLake(
        size=size, frozen_probability=0.6, observation=observation, symbols=symbols
    )
    random = np.random.default_rng(size)
    tiles = random.choice([ICE, HOLE], (40, size * size), p=[0.7, 0.3])
    tiles[0] = ICE  # A lake without holes, and one with as many as there can be.
    tiles[1] = HOLE
    places = np.stack([random.permutation(size * size)[:2] for _ in tiles])
    tiles[np.arange(40), places[:, 0]] = ICE
    tiles[np.arange(40), places[:, 1]] = GOAL
    tiles = tiles.reshape(40, size, size).astype(np.int32)
    player = np.stack(np.divmod(places[:, 0], size), axis=1).astype(np.int32)
    # In the later half the player stands anywhere: on ice, on the goal, in a hole.
    player[20:] = random.integers(0, size, (20, 2))
    player[20] = np.argwhere(tiles[20] == GOAL)[0]
    done = np.array([t[tuple(p)] != ICE for t, p in zip(tiles, player, strict=True)])

    env = frozen_lake.make(settings)
    ids = jax.jit(jax.vmap(env.observe))(State(tiles=tiles, player=player, done=done))
    assert ids.shape == (40, env.observation_phrases) and ids.dtype == jnp.int32
    for lake, place, row in zip(tiles, player, np.asarray(ids), strict=True):
        expected = ""
        if observation in ("grid", "both"):
            expected += _render_grid(lake, place, symbols)
        if observation in ("coordinates", "both"):
            expected += _render_coordinates(lake, place)
        assert base.text_of(env.phrases, row) == expected


def test_the_default_observation_looks_as_documented():
    tiles = np.zeros((4, 4), np.int32)
    tiles[0, 3], tiles[1, 2], tiles[3, 1] = HOLE, HOLE, GOAL
    state = State(
        tiles=jnp.asarray(tiles), player=jnp.array([0, 0]), done=jnp.array(False)
    )
    env = frozen_lake.make(FrozenLake(observation="both"))
    text = base.text_of(env.phrases, np.asarray(env.observe(state)))
    assert text == (
        "State:\n P _ _ O\n _ _ O _\n _ _ _ _\n _ G _ _\n"
        "Player: (0, 0)\nGoal: (3, 1)\nHoles: (0, 3), (1, 2)\n"
    )


def test_the_instruction_is_computed_from_the_settings():
    text = texts.instruction(FrozenLake())
    for part in ("4 x 4", "P you,", "X you in a hole", "Reach G, avoid O", "80%"):
        assert part in text
    assert "Left, Down, Right, Up" in text
    assert len(text) <= 450
    other = FrozenLake(size=6, success_probability=1 / 3, symbols=tuple("abcdef"))
    text = texts.instruction(other)
    for part in ("6 x 6", "a you,", "e you in a hole", "Reach d, avoid c", "33.33%"):
        assert part in text


def test_the_instruction_speaks_of_slipping_and_symbols_only_where_they_exist():
    sure = texts.instruction(FrozenLake(success_probability=1.0))
    assert "not slippery" in sure and "probability" not in sure
    places = texts.instruction(FrozenLake(observation="coordinates"))
    assert "Symbols" not in places and "Reach the goal, avoid the holes" in places


# Helpers.


@pytest.mark.slow
def test_the_solver_walks_a_shortest_way_over_firm_ice():
    lakes = _lakes(FrozenLake(size=8, frozen_probability=0.6))
    reached = jax.jit(jax.vmap(lambda s: distances(s.tiles != HOLE, s.player)))(lakes)
    for lane in range(3 * LAKES):
        lake = jax.tree.map(lambda leaf, lane=lane: leaf[lane], lakes)
        way, place = frozen_lake.solve(lake), lake.player
        for direction in way:
            assert lake.tiles[tuple(place)] == ICE
            place = place + MOVES[direction]
            assert place.min() >= 0 and place.max() < 8
        assert lake.tiles[tuple(place)] == GOAL
        assert len(way) == reached[lane][tuple(place)]


def test_the_solver_finds_no_way_where_there_is_none():
    tiles = np.array([[ICE, HOLE], [HOLE, GOAL]])
    state = State(tiles=tiles, player=np.array([0, 0]), done=np.array(False))
    assert frozen_lake.solve(state) == ()
    there = state.replace(player=np.array([1, 1]), done=np.array(True))
    assert frozen_lake.solve(there) == ()


def test_landmarks_are_the_player_and_the_goal():
    tiles = jnp.zeros((4, 4), jnp.int32).at[3, 1].set(GOAL).at[0, 0].set(HOLE)
    state = State(tiles=tiles, player=jnp.array([1, 2]), done=jnp.array(False))
    assert texts.landmarks(state).tolist() == [[1, 2], [3, 1]]


def test_the_picture_shows_ice_holes_goal_and_player_apart():
    tiles = np.array([[ICE, HOLE], [GOAL, ICE]])
    state = State(tiles=tiles, player=np.array([0, 0]), done=np.array(False))
    image = frozen_lake.picture(state)
    cell = len(image) // 2
    ice, hole, goal, empty = (
        image[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
        for row, column in np.ndindex(2, 2)
    )
    ground = [part[3, 3].tolist() for part in (ice, hole, goal, empty)]
    assert ground[0] == ground[3] and len(set(map(tuple, ground))) == 3
    assert (ice != empty).any(), "the player is not seen"
    fallen = frozen_lake.picture(state.replace(player=np.array([0, 1])))
    assert (fallen[:cell, cell:] != hole).any()


# Settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 1}, "frozen_lake.size = 1 .* 2 to 10"),
        ({"size": 11}, "frozen_lake.size = 11 .* 2 to 10"),
        ({"size": 4.5}, "frozen_lake.size = 4.5 .* whole number"),
        ({"frozen_probability": 1.1}, "frozen_probability = 1.1 .* 0 to 1"),
        ({"success_probability": -0.1}, "success_probability = -0.1 .* 0 to 1"),
        ({"success_probability": float("nan")}, "success_probability = nan"),
        ({"size": 2, "frozen_probability": 0.96}, "0.96 .*size = 2 .* 0.05 to 0.95"),
        ({"size": 2, "frozen_probability": 0.0}, "0.0 .*size = 2 .* 0.05 to 0.95"),
        ({"observation": "image"}, "'image' .* grid, coordinates, both"),
        ({"symbols": tuple("P_OGXX")}, "6 different texts"),
        ({"symbols": ("P", "_", "O", "G", "X", "")}, "6 different texts"),
        ({"symbols": ("P", "_", "O", "G", "X", "a b")}, "without white space"),
        ({"symbols": ("P ", "_", "O", "G", "X", "Y")}, "without white space"),
        ({"symbols": ("P", "_", "O", "G", "X", "Y\n")}, "without white space"),
        ({"symbols": tuple("P_OGX")}, "6 different texts"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence_with_the_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        frozen_lake.make(FrozenLake(**changes))


def test_the_extremes_that_still_make_lakes_are_accepted():
    for changes in (
        {"size": 2},
        {"size": 10, "frozen_probability": 0.0},
        {"size": 3, "frozen_probability": 1.0},
        {"success_probability": 0.0},
    ):
        settings = dataclasses.replace(FrozenLake(), **changes)
        base.check_environment(frozen_lake.make(settings))


def _has_path(tiles, start):
    seen, queue = {start}, collections.deque([start])
    while queue:
        row, column = queue.popleft()
        for down, right in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            place = (row + down, column + right)
            is_inside = min(place) >= 0 and max(place) < len(tiles)
            if is_inside and place not in seen and tiles[place] != HOLE:
                seen.add(place)
                queue.append(place)
    return any(tiles[place] == GOAL for place in seen)


def _render_grid(tiles, player, symbols):
    text = "State:\n"
    for row, line in enumerate(tiles):
        for column, tile in enumerate(line):
            names = {ICE: symbols[1], HOLE: symbols[2], GOAL: symbols[3]}
            if (row, column) == tuple(player):
                names = {ICE: symbols[0], HOLE: symbols[4], GOAL: symbols[5]}
            text += f" {names[int(tile)]}"
        text += "\n"
    return text


def _render_coordinates(tiles, player):
    def places(found):
        return ", ".join(f"({row}, {column})" for row, column in found) or "none"

    return (
        f"Player: {places([player])}\nGoal: {places(np.argwhere(tiles == GOAL))}\n"
        f"Holes: {places(np.argwhere(tiles == HOLE))}\n"
    )
