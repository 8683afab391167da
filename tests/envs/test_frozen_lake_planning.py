"""Distances and values of planners against hand-worked and independent numbers."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from ragen_jax.envs.frozen_lake import planning, types

FAR = planning.UNREACHABLE
distances = jax.jit(planning.distances)
slip_values = jax.jit(planning.slip_values, static_argnums=2)


def test_distances_match_a_labyrinth_worked_by_hand():
    passable = np.array([[1, 1, 1], [0, 0, 1], [1, 0, 1]], bool)
    expected = [[0, 1, 2], [FAR, FAR, 3], [FAR, FAR, 4]]
    np.testing.assert_array_equal(distances(passable, jnp.array([0, 0])), expected)


def test_the_goal_itself_need_not_be_passable():
    steps = distances(np.array([[0, 1], [0, 0]], bool), jnp.array([0, 0]))
    np.testing.assert_array_equal(steps, [[0, 1], [FAR, FAR]])


def test_the_longest_snake_of_a_board_is_followed_to_its_end():
    passable = np.zeros((10, 10), bool)
    passable[::2] = True
    passable[1::4, -1] = True
    passable[3::4, 0] = True
    steps = np.asarray(distances(passable, jnp.array([0, 0])))
    assert steps[8, 9] == 5 * 9 + 4 * 2
    assert sorted(steps[passable]) == list(range(passable.sum()))


@pytest.mark.parametrize("side", [2, 5, 8])
def test_distances_equal_a_breadth_first_search_on_random_boards(side):
    random = np.random.default_rng(side)
    passable = random.random((60, side, side)) < random.uniform(0.3, 1, (60, 1, 1))
    goals = random.integers(0, side, (60, 2))
    found = jax.jit(jax.vmap(planning.distances))(passable, jnp.asarray(goals))
    for board, goal, steps in zip(passable, goals, np.asarray(found), strict=True):
        np.testing.assert_array_equal(steps, _breadth_first(board, tuple(goal)))


def test_values_on_the_smallest_slippery_lake_are_worked_out_by_hand():
    # Start left of the goal, ice below it, a hole below the goal. p = 0.8, sides 0.1.
    tiles = jnp.array([[types.ICE, types.GOAL], [types.ICE, types.HOLE]])
    values, actions = slip_values(tiles, 0.8, 2)
    # One move: right from the start 0.8. From below no move reaches the goal.
    # Two moves, start: right again: 0.8 * 1 + 0.1 * 0.8 (up stays) + 0.1 * 0 = 0.88.
    # Two moves, below: up 0.8 * 0.8 = 0.64; its slips stay, or fall into the hole.
    expected = [[[0, 1], [0, 0]], [[0.8, 1], [0, 0]], [[0.88, 1], [0.64, 0]]]
    np.testing.assert_allclose(values, expected, atol=1e-6)
    assert actions[0].tolist() == [[-1, -1], [-1, -1]]
    assert actions[1, 0].tolist() == [types.RIGHT, -1]
    assert actions[2].tolist() == [[types.RIGHT, -1], [types.UP, -1]]


@pytest.mark.parametrize("success", [1 / 3, 0.8, 1.0])
def test_values_and_actions_are_optimal_under_gymnasiums_transitions(success):
    for seed in range(3):
        tiles = _random_tiles(np.random.default_rng(seed), side=4)
        values, actions = slip_values(jnp.asarray(tiles), success, 6)
        expected, action_values = _gymnasium_values(tiles, success, horizon=6)
        np.testing.assert_allclose(values, expected, atol=1e-5)
        taken = np.asarray(actions)[1:]
        of_taken = np.take_along_axis(action_values, taken[..., None].clip(0), -1)
        is_ice = np.broadcast_to(tiles == types.ICE, taken.shape)
        np.testing.assert_allclose(
            of_taken[..., 0][is_ice], expected[1:][is_ice], atol=1e-5
        )
        assert (taken[is_ice] >= 0).all() and (taken[~is_ice] == -1).all()


def test_values_never_fall_when_more_moves_are_left():
    tiles = jnp.asarray(_random_tiles(np.random.default_rng(7), side=5))
    values, _ = slip_values(tiles, 0.8, 30)
    assert (np.diff(values, axis=0) >= -1e-6).all()
    assert values.min() >= 0 and values.max() <= 1 + 1e-6


def test_a_planner_with_time_to_spare_still_takes_a_shortest_path():
    tiles = _random_tiles(np.random.default_rng(2), side=6)
    goal = np.argwhere(tiles == types.GOAL)[0]
    steps = np.asarray(distances(tiles == types.ICE, jnp.asarray(goal)))
    _, actions = slip_values(jnp.asarray(tiles), 1.0, 40)
    starts = np.argwhere((tiles == types.ICE) & (steps < FAR))
    assert len(starts) > 10
    for row, column in starts:
        after = np.array([row, column]) + types.MOVES[actions[40, row, column]]
        assert steps[tuple(after)] == steps[row, column] - 1


def _breadth_first(passable, goal):
    steps = np.full(passable.shape, FAR)
    steps[goal] = 0
    queue = collections.deque([goal])
    while queue:
        row, column = queue.popleft()
        for place in (
            (row + 1, column),
            (row - 1, column),
            (row, column + 1),
            (row, column - 1),
        ):
            is_inside = min(place) >= 0 and max(place) < len(passable)
            if is_inside and passable[place] and steps[place] == FAR:
                steps[place] = steps[row, column] + 1
                queue.append(place)
    return steps


def _random_tiles(random, side):
    tiles = np.where(random.random(side * side) < 0.8, types.ICE, types.HOLE)
    tiles[random.integers(side * side)] = types.GOAL
    return tiles.reshape(side, side).astype(np.int32)


def _gymnasium_values(tiles, success, horizon):
    """float[H + 1, S, S] and, with h = 1..H moves left, float[H, S, S, 4]."""
    letters = np.array(["F", "H", "G"])[tiles]
    letters[tuple(np.argwhere(tiles == types.ICE)[0])] = "S"
    lake = FrozenLakeEnv(desc=["".join(row) for row in letters], success_rate=success)
    values, action_values = [(tiles == types.GOAL).astype(float)], []
    for _ in range(horizon):
        flat = values[-1].ravel()
        table = [
            [sum(p * flat[after] for p, after, _, _ in lake.P[s][a]) for a in range(4)]
            for s in range(tiles.size)
        ]
        action_values.append(np.array(table).reshape(*tiles.shape, 4))
        values.append(action_values[-1].max(axis=-1))
    return np.array(values), np.array(action_values)
