"""Sokoban's levels and solver against plain searches on the host."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import split_levels
from helpers.sokoban_rooms import one_by_one, play, room

from ragen_jax.envs import base
from ragen_jax.envs.sokoban import env as sokoban
from ragen_jax.envs.sokoban import generator
from ragen_jax.envs.sokoban.env import Sokoban
from ragen_jax.envs.sokoban.solver import shortest_solution
from ragen_jax.envs.sokoban.types import FLOOR, MOVES, TARGET, WALL

LEVELS = 100  # of each split, for each of `levels`
DOWN, LEFT, RIGHT = 1, 2, 3
levels = functools.partial(split_levels.drawn, sokoban.reset, count=LEVELS, seed=11)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(Sokoban(), id="6x6"),
        pytest.param(Sokoban(size=8, boxes=2), id="8x8", marks=pytest.mark.slow),
    ],
)
def test_every_level_is_well_formed_solvable_and_of_its_split(settings):
    rooms, lengths = {split: set() for split in range(3)}, []
    for lane, state in enumerate(one_by_one(levels(settings))):
        tiles, boxes = state.tiles, state.boxes
        assert set(np.unique(tiles)) == {FLOOR, WALL, TARGET}
        edge = np.concatenate([tiles[0], tiles[-1], tiles[:, 0], tiles[:, -1]])
        assert (edge == WALL).all()
        assert boxes.sum() == (tiles == TARGET).sum() == settings.boxes
        assert (tiles[boxes] == FLOOR).all(), "a box is in place already"
        assert tiles[tuple(state.player)] != WALL
        assert not boxes[tuple(state.player)] and not state.done
        split = lane // LEVELS
        assert split_levels.split_of(tiles.ravel().tolist()) == split
        rooms[split].add(tiles.tobytes())
        assert _reachable(tiles) == (tiles != WALL).sum(), "floor out of reach"
        lengths.append(len(sokoban.solve(state)))
    assert min(lengths) >= 1, "a level cannot be solved"
    for left, right in itertools.combinations(rooms.values(), 2):
        assert not left & right, "two splits share a room"
    # Measured on 500 levels each: means 4.4 and 9.7.
    low, high = {6: (3.5, 5.3), 8: (8.5, 11)}[settings.size]
    assert low < np.mean(lengths) < high


def test_the_first_move_of_reverse_play_pulls_a_box_in_any_direction_that_has_room():
    tiles = np.full((7, 7), WALL, np.int32)
    tiles[1:6, 1:6], tiles[3, 3], tiles[1, 3] = FLOOR, TARGET, WALL
    keys = jax.random.split(jax.random.key(0), 100)
    back = functools.partial(generator.play_backward, boxes=1, moves=1)
    level, is_level = jax.jit(jax.vmap(back, in_axes=(0, None)))(keys, tiles)
    assert is_level.all()
    pulls = []
    level = jax.tree.map(np.asarray, level)
    for boxes, player in zip(level.boxes, level.player, strict=True):
        (box,) = np.argwhere(boxes)
        assert (player - box == box - [3, 3]).all(), "the player does not stand before"
        pulls.append(tuple((box - [3, 3]).tolist()))
    # Not up: there the player would stand in the wall. The others alike, 33 each.
    assert set(pulls) == {(1, 0), (0, -1), (0, 1)}
    assert min(pulls.count(pull) for pull in set(pulls)) > 33 - 4 * 4.7


def test_a_level_is_turned_into_any_of_its_looks_that_fits_the_split():
    level = room("######", "#XP_O#", "#_#__#", "#__###", "######", "######")
    keys = jax.random.split(jax.random.key(0), 200)
    turn = jax.jit(jax.vmap(generator.turn_to_fit, in_axes=(0, None, None)))
    at = np.zeros((6, 6), bool)
    at[tuple(level.player)] = True
    expected = {split: set() for split in range(3)}
    for mirror, turns in itertools.product((False, True), range(4)):
        look = [
            np.rot90(grid.T if mirror else grid, turns)
            for grid in (level.tiles, level.boxes, at)
        ]
        split = split_levels.split_of(look[0].ravel().tolist())
        expected[split].add(b"".join(grid.tobytes() for grid in look))
    for split, looks in expected.items():
        turned, is_fit = jax.tree.map(np.asarray, turn(keys, level, jnp.int32(split)))
        assert is_fit.all() == is_fit.any() == bool(looks)
        found = set()
        for tiles, boxes, player in zip(
            turned.tiles, turned.boxes, turned.player, strict=True
        ):
            at = np.zeros((6, 6), bool)
            at[tuple(player)] = True
            found.add(b"".join(grid.tobytes() for grid in (tiles, boxes, at)))
        assert not looks or found == looks
    assert sum(map(bool, expected.values())) >= 2


# The solver.


@pytest.mark.slow
def test_solutions_are_as_short_as_a_plain_search_finds_and_solve_the_level():
    random = np.random.default_rng(0)
    states = list(one_by_one(levels(Sokoban())))[::2]
    for state in states[:100]:  # Boxes and players anywhere: many are beyond hope.
        places = random.permutation(np.argwhere(state.tiles != WALL))[:2]
        boxes = np.zeros_like(state.boxes)
        boxes[tuple(places[0])] = True
        states.append(state.replace(boxes=boxes, player=places[1].astype(np.int32)))
    # Two boxes in the smaller of the larger rooms, which the plain search can search.
    large = [
        state
        for state in one_by_one(levels(Sokoban(size=8, boxes=2)))
        if (state.tiles != WALL).sum() < 14
    ]
    assert len(large) > 5
    answers = []
    for state in states + large:
        solution = shortest_solution(state.tiles, state.boxes, state.player)
        answers.append(solution)
        expected = _plain_search(state)
        assert (None if solution is None else len(solution)) == expected
    assert None in answers and () in answers
    padded = [(*(answer or ()), *[base.NO_ACTION] * 40)[:40] for answer in answers]
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
    actions = jnp.array(padded[: len(states)], jnp.int32)
    _, outcome = jax.vmap(play)(batch, actions)
    solved = [bool(answer) for answer in answers[: len(states)]]
    np.testing.assert_array_equal(outcome.success.any(axis=1), solved)


def test_a_solution_is_worked_out_by_hand():
    state = room("######", "#_P__#", "#_X__#", "#__O_#", "######", "######")
    # Down to the target's row with it, round it, and on to the right.
    assert sokoban.solve(state) == (DOWN, LEFT, DOWN, RIGHT)
    stuck = room("######", "#X_P_#", "#____#", "#__O_#", "######", "######")
    assert sokoban.solve(stuck) == ()
    assert shortest_solution(stuck.tiles, stuck.boxes, stuck.player) is None


def _plain_search(state):
    """Length of a shortest solution, or None: every play, breadth first."""
    walls, targets = (
        {tuple(p) for p in np.argwhere(state.tiles == kind).tolist()}
        for kind in (WALL, TARGET)
    )
    boxes = frozenset(map(tuple, np.argwhere(state.boxes).tolist()))
    here = {(tuple(state.player.tolist()), boxes)}
    seen, count = set(here), 0
    while here:
        if any(stand == targets for _, stand in here):
            return count
        there = set()
        for (row, column), stand in here:
            for down, right in MOVES.tolist():
                ahead = (row + down, column + right)
                beyond = (ahead[0] + down, ahead[1] + right)
                if ahead in walls:
                    continue
                if ahead in stand:
                    if beyond in walls or beyond in stand:
                        continue
                    there.add((ahead, stand - {ahead} | {beyond}))
                else:
                    there.add((ahead, stand))
        here, count = there - seen, count + 1
        seen |= here
    return None


def _reachable(tiles):
    """How many cells a walker from some floor cell can reach."""
    start = tuple(np.argwhere(tiles != WALL)[0])
    seen, queue = {start}, [start]
    for row, column in queue:
        for down, right in MOVES:
            place = (row + down, column + right)
            if place not in seen and tiles[place] != WALL:
                seen.add(place)
                queue.append(place)
    return len(seen)
