"""Demonstrated replies: valid, true to the board, and safe where they mean to be."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs import base
from ragen_jax.envs.frozen_lake import demonstrations, types
from ragen_jax.envs.frozen_lake import env as frozen_lake
from ragen_jax.envs.frozen_lake.demonstrations import Demonstrator
from ragen_jax.envs.frozen_lake.env import FrozenLake
from ragen_jax.envs.frozen_lake.texts import ACTION_NAMES
from ragen_jax.text.reference_parser import parse_reply

COUNT = 300
LONGEST = 9  # actions of a plan by itself
LAKE = FrozenLake(size=4, frozen_probability=0.7)
PLACE = r"\((\d+), (\d+)\)"


@functools.cache
def lakes():
    keys = jax.random.split(jax.random.key(0), COUNT)
    split = jnp.int32(base.TRAIN)
    return jax.jit(jax.vmap(lambda key: frozen_lake.reset(key, split, LAKE)))(keys)


def env_of(player: Demonstrator, thinking: bool) -> base.Environment:
    return demonstrations.with_demonstrations(
        frozen_lake.make(LAKE), LAKE, player, thinking=thinking
    )


@functools.partial(jax.jit, static_argnums=2)
def demonstrate(ignore_holes, noise, thinking: bool):
    """Phrase ids, int32[COUNT, Md]; compiled once for all players."""
    env = env_of(Demonstrator(ignore_holes, noise=noise), thinking)
    keys = jax.random.split(jax.random.key(1), COUNT)
    return jax.vmap(env.demonstrate)(keys, lakes())


@jax.jit
def plan(ignore_holes, noise, states):
    player = Demonstrator(ignore_holes, noise=noise, longest=LONGEST)
    keys = jax.random.split(jax.random.key(2), states.done.shape[0])
    return jax.vmap(lambda k, s: demonstrations.plan(k, s, player))(keys, states)


def replies(player: Demonstrator, thinking: bool = True) -> list[str]:
    lakes()  # Made outside of the program that it is a constant of.
    ids = np.asarray(demonstrate(player.ignore_holes, player.noise, thinking))
    phrases = env_of(player, thinking).reply_phrases
    return [base.text_of(phrases, row) for row in ids]


def plans(ignore_holes: float, noise: float):
    """(actions, tiles, states): int[COUNT, LONGEST], -1 behind the end."""
    actions, tiles = map(np.asarray, plan(ignore_holes, noise, lakes())[:2])
    return actions, tiles, jax.tree.map(np.asarray, lakes())


PLAYERS = [
    Demonstrator(),
    Demonstrator(ignore_holes=0.0, noise=0.0),
    Demonstrator(ignore_holes=1.0, noise=1.0),
]


@pytest.fixture(scope="module", params=PLAYERS, ids=["usual", "careful", "random"])
def player(request):
    return request.param


def test_every_reply_is_valid_and_says_what_it_thought(player):
    lengths = set()
    for reply in replies(player):
        assert "</think><answer>" in reply and reply.endswith("</answer>")
        thought, answer = reply.split("</think>")
        read = parse_reply(b"<think>", reply.encode(), ACTION_NAMES, player.longest)
        assert read.is_valid
        names = [ACTION_NAMES[action] for action in read.actions]
        assert answer == f"<answer>{' || '.join(names)}</answer>"
        assert re.findall("Left|Down|Right|Up", thought) == names
        lengths.add(len(names))
    assert lengths == set(range(1, player.longest + 1))


def test_the_thought_states_where_player_and_goal_are_and_where_actions_lead(player):
    states = jax.tree.map(np.asarray, lakes())
    for i, reply in enumerate(replies(player)):
        places = [(int(r), int(c)) for r, c in re.findall(PLACE, reply)]
        at, goal, *walk = places
        assert reply.startswith(f" At {at}, goal {goal}:")
        assert at == tuple(states.player[i])
        assert goal == tuple(np.argwhere(states.tiles[i] == types.GOAL)[0])
        names = re.findall("Left|Down|Right|Up", reply.split("</think>")[0])
        for name, stated in zip(names, walk, strict=True):
            change = types.MOVES[ACTION_NAMES.index(name)]
            at = tuple(np.clip(np.add(at, change), 0, LAKE.size - 1))
            assert stated == at


def test_a_random_plan_neither_names_the_goal_nor_walks_to_it():
    player = Demonstrator(ignore_holes=0.0, random_plan=0.5, noise=0.0, longest=LONGEST)
    keys = jax.random.split(jax.random.key(4), COUNT)
    show = lambda key, state: (
        env_of(player, True).demonstrate(key, state),
        demonstrations.plan(key, state, player),
    )
    ids, (actions, _, random_plan) = jax.jit(jax.vmap(show))(keys, lakes())
    phrases, random_plan = env_of(player, True).reply_phrases, np.asarray(random_plan)
    named = ["goal" in base.text_of(phrases, row) for row in np.asarray(ids)]
    np.testing.assert_array_equal(named, ~random_plan)
    # Binomial(300, 1/2): standard deviation 8.7.
    assert abs(random_plan.sum() - COUNT / 2) < 4 * 8.7
    drawn = np.asarray(actions)[random_plan][:, 0]  # each of four directions alike
    expected = random_plan.sum() / 4
    assert (abs(np.bincount(drawn, minlength=4) - expected) < 4 * expected**0.5).all()


def test_without_thinking_the_reply_is_the_bare_answer():
    for reply in replies(Demonstrator(), thinking=False):
        read = parse_reply(b"<answer>", reply.encode(), ACTION_NAMES, 5, thinking=False)
        assert read.is_valid
        names = [ACTION_NAMES[action] for action in read.actions]
        assert reply == f"{' || '.join(names)}</answer>"


def test_a_careful_player_walks_a_shortest_safe_path():
    actions, tiles, states = plans(ignore_holes=0.0, noise=0.0)
    reached = 0
    for i in range(COUNT):
        board, at = states.tiles[i], tuple(states.player[i])
        left = _steps_to_goal(board)
        walk = [divmod(tile, LAKE.size) for tile in tiles[i] if tile >= 0]
        for tile in walk:
            assert board[tile] != types.HOLE
            assert left[tile] == left[at] - 1
            at = tile
        reached += board[at] == types.GOAL
        assert len(walk) == (actions[i] >= 0).sum() >= 1
    # Lengths up to 9 are equally likely, and most goals are 1 to 4 steps away.
    assert reached > COUNT / 2


def test_a_player_that_ignores_holes_walks_the_shortest_path_whatever_is_on_it():
    _, tiles, states = plans(ignore_holes=1.0, noise=0.0)
    holes = 0
    for board, start, walk in zip(states.tiles, states.player, tiles, strict=True):
        goal = np.argwhere(board == types.GOAL)[0]
        walk = [np.array(divmod(tile, LAKE.size)) for tile in walk if tile >= 0]
        far = [np.abs(at - goal).sum() for at in [start, *walk]]
        assert far == list(range(far[0], far[0] - len(far), -1))
        holes += sum(board[tuple(at)] == types.HOLE for at in walk)
    assert holes > 0


def test_a_plan_ends_at_the_goal_or_at_its_length():
    _, tiles, states = plans(ignore_holes=0.5, noise=0.5)
    for board, walk in zip(states.tiles, tiles, strict=True):
        walked = walk[walk >= 0]
        assert (walk[len(walked) :] == -1).all()
        assert (board.ravel()[walked[:-1]] != types.GOAL).all()


def test_equally_short_ways_are_equally_likely_and_so_are_lengths():
    tiles = jnp.full((4, 4), types.ICE).at[3, 3].set(types.GOAL)
    one = frozen_lake.State(
        tiles=tiles, player=jnp.zeros(2, jnp.int32), done=jnp.zeros((), bool)
    )
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (1800, *x.shape)), one)
    actions = np.asarray(plan(0.0, 0.0, many)[0])
    counts = np.bincount(actions[:, 0], minlength=4)
    assert counts[[types.LEFT, types.UP]].tolist() == [0, 0]
    # Binomial(1800, 1/2): standard deviation 21.2.
    assert abs(counts[types.DOWN] - 900) < 4 * 21.2
    # Lengths 1 to 9, cut at the goal, six steps away: 200 each, and 800 of six.
    lengths = np.bincount((actions >= 0).sum(axis=1), minlength=7)
    assert (np.abs(lengths[1:6] - 200) < 4 * 13.3).all()
    assert abs(lengths[6] - 800) < 4 * 21.1


def _steps_to_goal(board):
    """Steps over ice to the goal from every tile, by repeated relaxation."""
    left = np.where(board == types.GOAL, 0, 99)
    for _ in range(board.size):
        padded = np.pad(left, 1, constant_values=99)
        around = np.stack(
            [padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]]
        )
        left = np.where(
            board == types.ICE, np.minimum(left, around.min(axis=0) + 1), left
        )
    return left
