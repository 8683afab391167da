"""Demonstrated Sokoban replies: valid, true to the room, and as good as they mean."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sokoban_rooms import one_by_one, room

from ragen_jax.envs import base
from ragen_jax.envs.sokoban import demonstrations, distances
from ragen_jax.envs.sokoban import env as sokoban
from ragen_jax.envs.sokoban.demonstrations import Demonstrator
from ragen_jax.envs.sokoban.distances import UNSOLVABLE
from ragen_jax.envs.sokoban.env import Sokoban
from ragen_jax.envs.sokoban.solver import shortest_solution
from ragen_jax.envs.sokoban.texts import ACTION_NAMES
from ragen_jax.envs.sokoban.types import MOVES, TARGET, WALL
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
        demonstrations.plan(key, state, demonstrations.next_task(state, 1), player),
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
    is_open = jnp.stack([jnp.asarray(s.tiles != WALL) for s in states])
    targets = jnp.array([np.argmax(s.tiles == TARGET) for s in states])
    players, boxes = jnp.divmod(jnp.arange(36 * 36), 36)
    count = lambda *room: distances.actions_left(
        distances.measure(*room), players, boxes
    )
    left = jax.jit(jax.vmap(count))(is_open, targets)
    left = np.asarray(left).reshape(3, 6, 6, 6, 6)
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


@functools.cache
def rooms_of_two():
    """32 training levels of 7 x 7 cells with two boxes, leaves as numpy."""
    draw = jax.jit(jax.vmap(lambda key: env_of_two().reset(key, base.TRAIN)))
    return jax.device_get(draw(jax.random.split(jax.random.key(2), 32)))


def env_of_two() -> base.Environment:
    settings = Sokoban(size=7, boxes=2)
    player = Demonstrator(ignore_target=0.0, noise=0.0)
    return demonstrations.with_demonstrations(
        sokoban.make(settings), settings, player, thinking=True
    )


@pytest.mark.slow
def test_of_two_boxes_plans_bring_one_after_the_other_to_its_target():
    env = env_of_two()
    player = Demonstrator(ignore_target=0.0, noise=0.0, longest=5)

    def play(key, state):
        def turn(state, key):
            task = demonstrations.next_task(state, 2)
            actions, cells, _ = demonstrations.plan(key, state, task, player)
            for action in actions:
                state, _ = env.step(key, state, action)
            return state, (cells, state.player, state.boxes)

        return jax.lax.scan(turn, state, jax.random.split(key, 20))

    keys = jax.random.split(jax.random.key(3), 32)
    after, (cells, players, _) = jax.jit(jax.vmap(play))(keys, rooms_of_two())
    # What a thought says of the player's last place is so, up to the end.
    last = jnp.where(cells >= 0, cells, -1)
    last = jnp.take_along_axis(last, (last >= 0).sum(-1, keepdims=True) - 1, axis=-1)
    assert (last[:, 0, 0] == players[:, 0] @ np.array([7, 1])).all()
    assert after.done.mean() > 0.9


@pytest.mark.slow
def test_the_first_box_of_a_plan_takes_fewer_actions_than_both_in_a_solution():
    task = jax.jit(jax.vmap(lambda state: demonstrations.next_task(state, 2)))
    states = rooms_of_two()
    found = task(states)
    count = jax.vmap(distances.actions_left)
    at = states.player @ np.array([7, 1])
    left = np.asarray(count(found.left, at.astype(np.int32), found.box))
    for index, state in enumerate(one_by_one(states)):
        shortest = shortest_solution(state.tiles, state.boxes, state.player)
        is_box = state.boxes.reshape(-1)
        assert is_box[found.box[index]]
        assert state.tiles.reshape(-1)[found.target[index]] == TARGET
        assert 0 < left[index] < len(shortest) or left[index] == UNSOLVABLE
    assert (left != UNSOLVABLE).mean() > 0.5


@pytest.mark.slow
def test_who_misreads_a_room_walks_through_its_walls_as_often_as_the_room_is_misread():
    careful = dict(ignore_target=0.0, noise=0.0, longest=5)
    keys = jax.random.split(jax.random.key(3), 400)
    shares = []
    for most in (0.0, 0.5, 1.0):
        env = env_of(Demonstrator(**careful, misread=most), thinking=True)
        show = jax.jit(jax.vmap(env.demonstrate, (0, None)))
        for top in ("#____#", "#_#__#"):
            state = room("######", top, "#P#X_#", "#__#O#", "######", "######")
            texts = [
                base.text_of(env.reply_phrases, row)
                for row in np.asarray(show(keys, state))
            ]
            shares.append(np.mean(["Right (2, 2)" in text for text in texts]))
    none, _, half, other_half, all_of_it, other = shares
    assert none == 0
    # Each room has its own share of what is misread most.
    assert abs(half - all_of_it / 2) < 0.1 and abs(other_half - other / 2) < 0.1
    assert abs(all_of_it - other) > 0.1


def test_three_boxes_are_refused():
    settings = Sokoban(size=8, boxes=3)
    with pytest.raises(ValueError, match="sokoban.boxes = 3 .*: choose 1 or 2"):
        demonstrations.with_demonstrations(
            sokoban.make(settings), settings, Demonstrator(), thinking=True
        )
