"""Demonstrated Sokoban replies: valid, true to the room, and as good as they mean."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sokoban_rooms import one_by_one, room

from ragen_jax.envs import base
from ragen_jax.envs.sokoban import demonstrations
from ragen_jax.envs.sokoban import env as sokoban
from ragen_jax.envs.sokoban.demonstrations import UNSOLVABLE, Demonstrator
from ragen_jax.envs.sokoban.env import Sokoban
from ragen_jax.envs.sokoban.generator import MOVES, TARGET, WALL
from ragen_jax.envs.sokoban.solver import shortest_solution
from ragen_jax.envs.sokoban.texts import ACTION_NAMES
from ragen_jax.text.reference_parser import parse_reply

COUNT = 240
LONGEST = 12  # actions of the plans looked at by themselves
PLACE = r"\((\d+), (\d+)\)"
NAMES = "|".join(ACTION_NAMES)


@functools.cache
def rooms():
    """COUNT states, leaves as numpy; drawn on the host, for demonstrations only."""
    random, states = np.random.default_rng(0), []
    while len(states) < COUNT:
        tiles = np.full((6, 6), WALL, np.int32)
        tiles[1:5, 1:5] = np.where(random.random((4, 4)) < 0.25, WALL, 0)
        floor = random.permutation(np.argwhere(tiles != WALL))
        if len(floor) < 4:
            continue
        tiles[tuple(floor[0])] = TARGET
        boxes = np.zeros((6, 6), bool)
        boxes[tuple(floor[1])] = True
        state = sokoban.State(
            tiles=tiles,
            boxes=boxes,
            player=floor[2].astype(np.int32),
            done=np.zeros((), bool),
        )
        # A third may be beyond hope.
        if sokoban.solve(state) or len(states) % 3 == 0:
            states.append(state)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)


def env_of(player: Demonstrator, thinking: bool) -> base.Environment:
    return demonstrations.with_demonstrations(
        sokoban.make(Sokoban()), Sokoban(), player, thinking=thinking
    )


@functools.partial(jax.jit, static_argnames=("longest", "thinking"))
def _demonstrate(states, ignore_target, random_plan, noise, *, longest, thinking):
    """Phrase ids, int32[COUNT, Md], and the plans behind them."""
    player = Demonstrator(ignore_target, random_plan, noise, longest)
    env = env_of(player, thinking)
    show = lambda key, state: (
        env.demonstrate(key, state),
        demonstrations.plan(key, state, player),
    )
    return jax.vmap(show)(jax.random.split(jax.random.key(1), COUNT), states)


def demonstrate(player: Demonstrator, thinking: bool = True):
    """(texts, (actions, cells, random_plan)) for each of `rooms`."""
    shares = (player.ignore_target, player.random_plan, player.noise)
    static = dict(longest=player.longest, thinking=thinking)
    ids, plans = _demonstrate(rooms(), *shares, **static)
    phrases = env_of(player, thinking).reply_phrases
    texts = [base.text_of(phrases, row) for row in np.asarray(ids)]
    return texts, jax.tree.map(np.asarray, plans)


def walk(state, actions):
    """The player's and the box's places after each action, by the rules in Python."""
    at, (box,) = state.player, np.argwhere(state.boxes)
    for action in actions:
        ahead = at + MOVES[action]
        if (ahead == box).all():
            beyond = box + MOVES[action]
            if state.tiles[tuple(beyond)] != WALL:
                at, box = ahead, beyond
        elif state.tiles[tuple(ahead)] != WALL:
            at = ahead
        yield tuple(at.tolist()), tuple(box.tolist())


PLAYERS = {
    "usual": Demonstrator(longest=LONGEST),
    "careful": Demonstrator(ignore_target=0.0, noise=0.0, longest=LONGEST),
    "ignore_target": Demonstrator(ignore_target=1.0, noise=0.0, longest=LONGEST),
    "random": Demonstrator(noise=1.0, longest=LONGEST),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "usual" else pytest.param(name, marks=pytest.mark.slow)
        for name in PLAYERS
    ],
)
def test_replies_are_valid_and_their_thoughts_true(name):
    texts, (actions, cells, _) = demonstrate(PLAYERS[name])
    lengths = set()
    for index, (text, state) in enumerate(zip(texts, one_by_one(rooms()), strict=True)):
        thought, answer = text.split("</think>")
        read = parse_reply(b"<think>", text.encode(), ACTION_NAMES, LONGEST)
        assert read.is_valid
        names = [ACTION_NAMES[action] for action in read.actions]
        assert answer == f"<answer>{' || '.join(names)}</answer>"
        assert re.findall(NAMES, thought) == names
        at, box, target, *stated = [
            (int(r), int(c)) for r, c in re.findall(PLACE, thought)
        ]
        assert thought.startswith(f" At {at}, box {box}, target {target}:")
        assert at == tuple(state.player) and state.boxes[box]
        assert state.tiles[target] == TARGET
        walked = list(walk(state, read.actions))
        assert stated == [place for place, _ in walked]
        # What is written is the plan, which ends at its length or with the game.
        taken = actions[index] >= 0
        assert actions[index][taken].tolist() == list(read.actions)
        assert cells[index][taken].tolist() == [6 * r + c for r, c in stated]
        assert (taken[1:] <= taken[:-1]).all()
        assert all(box != target for _, box in walked[:-1])
        lengths.add(len(names))
    assert {1, LONGEST} <= lengths


def test_a_careful_player_walks_a_shortest_solution():
    _, (actions, _, _) = demonstrate(PLAYERS["careful"])
    finished = 0
    for plan, state in zip(actions, one_by_one(rooms()), strict=True):
        solution = sokoban.solve(state)
        if not solution:
            continue
        taken = [action for action in plan if action >= 0]
        *_, (at, box) = walk(state, taken)
        boxes = np.zeros_like(state.boxes)
        boxes[box] = True
        after = state.replace(boxes=boxes, player=np.array(at))
        assert len(sokoban.solve(after)) == len(solution) - len(taken)
        finished += state.tiles[box] == TARGET
    # Lengths up to 12 are equally likely, and most solutions are far shorter.
    assert finished > COUNT / 4


def test_a_player_that_ignores_walls_goes_straight_to_the_box_and_pushes_it_on():
    _, (actions, _, _) = demonstrate(PLAYERS["ignore_target"])
    pushes = unwise = 0
    for plan, state in zip(actions, one_by_one(rooms()), strict=True):
        taken = [action for action in plan if action >= 0]
        (box,) = np.argwhere(state.boxes)
        ways = [list(walk(state, [action])) for action in range(4)]
        far = {
            action: np.abs(state.player + MOVES[action] - box).sum()
            for action, ((at, _),) in enumerate(ways)
            if at != tuple(state.player)
        }
        if far:
            assert far[taken[0]] == min(far.values())
            pushes += far[taken[0]] == 0
            solution = sokoban.solve(state)
            unwise += bool(solution) and taken[0] != solution[0]
    assert pushes > 10 and unwise > 10


def test_a_random_plan_names_no_box_and_draws_every_action():
    player = Demonstrator(
        ignore_target=0.0, random_plan=0.5, noise=0.0, longest=LONGEST
    )
    texts, (actions, _, random_plan) = demonstrate(player)
    np.testing.assert_array_equal(["box" in text for text in texts], ~random_plan)
    np.testing.assert_array_equal(["target" in text for text in texts], ~random_plan)
    # Binomial(240, 1/2): standard deviation 7.7.
    assert abs(random_plan.sum() - COUNT / 2) < 4 * 7.7
    expected = random_plan.sum() / 4
    drawn = np.bincount(actions[random_plan][:, 0], minlength=4)
    assert (abs(drawn - expected) < 4 * expected**0.5).all()


def test_without_thinking_the_reply_is_the_bare_answer():
    texts, (actions, _, _) = demonstrate(Demonstrator(), thinking=False)
    for text, plan in zip(texts, actions, strict=True):
        names = [ACTION_NAMES[action] for action in plan if action >= 0]
        assert text == f"{' || '.join(names)}</answer>"


def test_actions_left_equal_the_solvers_from_every_place():
    states = [
        room("######", "#P___#", "#_X__#", "#_#O_#", "#____#", "######"),
        room("######", "#PX_O#", "#_##_#", "#_##_#", "#____#", "######"),
        room("######", "##P#X#", "#___O#", "##_###", "######", "######"),
    ]
    is_open = jnp.stack([jnp.asarray(s.tiles != WALL).reshape(-1) for s in states])
    targets = jnp.array([np.argmax(s.tiles == TARGET) for s in states])
    count = jax.jit(jax.vmap(demonstrations.actions_left))
    left = np.asarray(count(is_open, targets)).reshape(3, 6, 6, 6, 6)
    for state, table in zip(states, left, strict=True):
        floor = np.argwhere(state.tiles != WALL)
        expected = np.full_like(table, UNSOLVABLE)
        for at in floor:
            for box in floor:
                if (at == box).all():
                    continue
                boxes = np.zeros((6, 6), bool)
                boxes[tuple(box)] = True
                start = state.replace(boxes=boxes, player=at)
                found = shortest_solution(start.tiles, start.boxes, start.player)
                if found is not None:
                    expected[*at, *box] = len(found)
        np.testing.assert_array_equal(table, expected)


def test_several_boxes_are_refused():
    settings = Sokoban(size=8, boxes=2)
    with pytest.raises(ValueError, match="sokoban.boxes = 2 .*: choose 1"):
        demonstrations.with_demonstrations(
            sokoban.make(settings), settings, Demonstrator(), thinking=True
        )
