"""2048 against Jumanji's, hand-worked boards and a plain count of random tiles."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import GOLDEN, ROOT

from ragen_jax import cli
from ragen_jax import settings as settings_lib
from ragen_jax.envs import base, game_2048
from ragen_jax.envs.game_2048 import DOWN, LEFT, RIGHT, UP, Game2048, State
from ragen_jax.errors import UserError

slide = jax.jit(jax.vmap(game_2048.slide))
can_move = jax.jit(jax.vmap(game_2048.can_move))


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "2048.npz") as file:
        return {name: file[name] for name in file}


@functools.cache
def _step(settings):
    step = functools.partial(game_2048.step, settings=settings)
    return jax.jit(jax.vmap(step, (0, None, None)))


def _board(*rows):
    """A State from rows of tiles' numbers."""
    numbers = np.array([row.split() for row in rows], int)
    exponents = np.where(numbers == 0, 0, np.log2(np.maximum(numbers, 1)))
    tiles = jnp.asarray(exponents.astype(np.int32))
    return State(tiles=tiles, done=jnp.array(False))


# Rules.


def test_every_move_and_its_score_equal_jumanjis(golden):
    boards = np.repeat(golden["boards"].astype(np.int32), 4, axis=0)
    actions = np.tile(np.arange(4, dtype=np.int32), len(golden["boards"]))
    slid, score = (np.asarray(result) for result in slide(boards, actions))
    np.testing.assert_array_equal(slid, golden["moved"].reshape(-1, 4, 4))
    np.testing.assert_array_equal(score, golden["reward"].reshape(-1))
    legal = (slid != boards).any(axis=(1, 2))
    np.testing.assert_array_equal(legal, golden["legal"].reshape(-1))
    assert (~legal).sum() > 500 and score.max() > 2**12


def test_a_game_is_lost_exactly_where_jumanji_has_no_legal_action(golden):
    boards = golden["boards"].astype(np.int32)
    has_move = golden["legal"].any(axis=1)
    np.testing.assert_array_equal(np.asarray(can_move(boards)), has_move)
    assert (~has_move).sum() > 10
    states = State(tiles=boards[~has_move], done=np.zeros((~has_move).sum(), bool))
    step = functools.partial(game_2048.step, settings=Game2048(target=65536))
    step = jax.jit(jax.vmap(step))
    keys = jax.random.split(jax.random.key(0), len(states.done))
    for action in range(4):
        actions = jnp.full(len(keys), action)
        after, outcome = step(keys, states, actions)
        np.testing.assert_array_equal(after.tiles, states.tiles)
        assert outcome.done.all() and not outcome.success.any()
        assert (outcome.reward == 0).all()


def test_the_nearest_to_the_border_merge_first_and_each_tile_once():
    start = _board("2 2 2 0", "4 4 8 8", "2 2 4 8", "0 2 0 2").tiles
    left = _board("4 2 0 0", "8 16 0 0", "4 4 8 0", "4 0 0 0").tiles
    right = _board("0 0 2 4", "0 0 8 16", "0 4 4 8", "0 0 0 4").tiles
    for action, expected, score in ((LEFT, left, 36), (RIGHT, right, 36)):
        for board, wanted, turned in (
            (start, expected, action),
            (start.T, expected.T, {LEFT: UP, RIGHT: DOWN}[action]),
        ):
            slid, merged = slide(board[None], jnp.array([turned]))
            np.testing.assert_array_equal(slid[0], wanted)
            assert merged[0] == score


def test_rewards_are_shares_of_the_target_and_the_target_ends_the_game():
    settings = Game2048(target=32, merge_reward=0.5, success_reward=3.0)
    state = _board("16 8 8 0", "0 0 0 0", "0 0 0 0", "0 0 0 0")
    keys, left = jax.random.split(jax.random.key(1), 1), jnp.int32(LEFT)
    after, outcome = _step(settings)(keys, state, left)
    # 8 + 8 made 16: half of the target.
    assert outcome.reward.tolist() == [0.25]
    assert not outcome.success[0] and not outcome.done[0]
    board = jax.tree.map(lambda leaf: leaf[0], after)
    after, outcome = _step(settings)(keys, board, left)
    assert outcome.reward.tolist() == [3.5]
    assert outcome.success[0] and outcome.done[0] and after.done[0]
    board = jax.tree.map(lambda leaf: leaf[0], after)
    again, outcome = _step(settings)(keys, board, jnp.int32(DOWN))
    np.testing.assert_array_equal(again.tiles, after.tiles)
    assert outcome.reward[0] == 0 and outcome.done[0] and not outcome.success[0]


def test_an_action_that_moves_nothing_brings_no_tile():
    state = _board("2 4 0 0", "8 0 0 0", "2 0 0 0", "4 0 0 0")
    keys = jax.random.split(jax.random.key(2), 50)
    for action in (LEFT, base.NO_ACTION):
        after, outcome = _step(Game2048())(keys, state, jnp.int32(action))
        assert (np.asarray(after.tiles) == np.asarray(state.tiles)).all()
        assert (outcome.reward == 0).all() and not outcome.done.any()


def test_new_tiles_come_to_every_gap_alike_and_are_fours_as_often_as_set():
    draws = 20_000
    state = _board("2 4 0 2", "8 0 0 0", "2 0 4 0", "4 16 0 8")
    for four in (0.1, 0.6):
        step = _step(Game2048(four_probability=four))
        keys = jax.random.split(jax.random.key(3), draws)
        after, outcome = step(keys, state, jnp.int32(LEFT))
        slid, _ = slide(state.tiles[None], jnp.array([LEFT]))
        new = np.asarray(after.tiles) - np.asarray(slid)
        assert (np.count_nonzero(new, axis=(1, 2)) == 1).all()
        gaps = np.asarray(slid[0]) == 0
        assert set(np.unique(new)) == {0, 1, 2} and not new[:, ~gaps].any()
        for counts, rng in (
            ((new > 0).sum(axis=0)[gaps], 1 / gaps.sum()),
            ((new == 2).sum(), four),
        ):
            error = np.sqrt(draws * rng * (1 - rng))
            assert (abs(counts - draws * rng) < 4.5 * error).all()
        assert not outcome.done.any()


def test_the_last_gap_is_filled_and_ends_the_game_if_nothing_can_merge():
    state = _board("4 8 4 8", "8 4 8 4", "4 8 4 8", "0 8 16 32")
    keys = jax.random.split(jax.random.key(5), 64)
    after, outcome = _step(Game2048(target=2048))(keys, state, jnp.int32(LEFT))
    # The row becomes 8 16 32 and a new tile: no two neighbours are equal.
    assert (np.asarray(after.tiles[:, 3, :3]) == [3, 4, 5]).all()
    assert set(np.asarray(after.tiles[:, 3, 3])) == {1, 2}
    assert outcome.done.all() and not outcome.success.any()


# Levels.


@pytest.mark.parametrize("four", [0.05, 0.95])
def test_fresh_boards_have_two_tiles_and_belong_to_their_split(four):
    draws = 4000  # of each split
    settings = Game2048(four_probability=four)
    reset = jax.jit(jax.vmap(functools.partial(game_2048.reset, settings=settings)))
    keys = jax.random.split(jax.random.key(4), 3 * draws)
    splits = np.repeat(np.arange(3, dtype=np.int32), draws)
    fresh = jax.tree.map(np.asarray, reset(keys, splits))
    assert not fresh.done.any()
    # Every board there is, by its content, with its probability in its split.
    boards, rngs = {}, np.zeros((3, 480))
    for cells in itertools.combinations(range(16), 2):
        for exponents in itertools.product((1, 2), repeat=2):
            board = np.zeros(16, np.int32)
            board[list(cells)] = exponents
            rng = np.prod([(1 - four, four)[e - 1] for e in exponents])
            rngs[_host_split(board), len(boards)] = rng / 120
            boards[board.tobytes()] = len(boards)
    assert rngs.sum() == pytest.approx(1) and rngs.sum(axis=1).min() > 0.05
    for split, tiles in enumerate(np.split(fresh.tiles, 3)):
        drawn = np.bincount([boards[t.tobytes()] for t in tiles], minlength=480)
        expected = draws * rngs[split] / rngs[split].sum()
        assert (drawn[expected == 0] == 0).all()
        error = np.sqrt(expected)
        assert (abs(drawn - expected) <= 5 * error + 3).all()


def _host_split(tiles):
    """The split of a board, in Python's integers: see `base.content_hash`."""
    value = 2166136261
    for word in tiles.tolist():
        value = ((value ^ word) * 16777619) % 2**32
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) % 2**32
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) % 2**32
    value ^= value >> 16
    return {0: base.TEST, 1: base.VALIDATION}.get(value % 8, base.TRAIN)


# Observations, words, solver.


def test_the_board_reads_as_the_host_renders_it():
    settings = Game2048(target=2048)
    env = game_2048.make(settings)
    random = np.random.default_rng(0)
    tiles = random.integers(0, 12, (40, 4, 4), np.int32)
    states = State(tiles=tiles, done=np.zeros(40, bool))
    ids = np.asarray(jax.jit(jax.vmap(env.observe))(states))
    for board, row in zip(tiles.tolist(), ids, strict=True):
        lines = [" ".join("." if e == 0 else str(2**e) for e in r) for r in board]
        expected = "State:\n" + "".join(f" {line}\n" for line in lines)
        assert base.text_of(env.phrases, row) == expected


def test_the_instruction_names_the_target():
    assert "a tile of 128." in game_2048.instruction(Game2048(target=128))


def test_the_solver_sees_the_boards_that_actions_lead_to(golden):
    for board, moved, legal in zip(
        golden["boards"], golden["moved"], golden["legal"], strict=True
    ):
        seen = game_2048.following(board.astype(int))
        assert list(seen) == np.flatnonzero(legal).tolist()
        for action, after in seen.items():
            np.testing.assert_array_equal(after, moved[action])


def test_the_solver_keeps_the_largest_tiles_in_their_corner_and_stops_at_the_end():
    state = _board("64 32 16 8", "0 0 2 0", "0 0 0 0", "0 0 0 0")
    assert game_2048.solve(state) in ((LEFT,), (RIGHT,))  # DOWN is the only other.
    assert game_2048.solve(state.replace(done=jnp.array(True))) == ()
    stuck = _board("2 4 2 4", "4 2 4 2", "2 4 2 4", "4 2 4 2")
    assert game_2048.solve(stuck) == ()


# Settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 48}, "2048.target = 48 .* power of two from 8 to 65536"),
        ({"target": 4}, "2048.target = 4 .* from 8"),
        ({"target": 131072}, "2048.target = 131072 .* to 65536"),
        ({"four_probability": 0.0}, "2048.four_probability = 0.0 .* 0.05 to 0.95"),
        ({"four_probability": float("nan")}, "2048.four_probability = nan"),
        ({"merge_reward": 11.0}, "2048.merge_reward = 11.0 .* -10 to 10"),
        ({"success_reward": float("inf")}, "2048.success_reward = inf .* -10 to 10"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence_with_the_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        game_2048.make(Game2048(**changes))


@pytest.mark.parametrize(
    ("variant", "target", "actions"),
    [("", 32, 20), ("smoke", 32, 20), ("paper", 128, 100)],
)
def test_the_config_asks_for_a_target_that_its_actions_can_reach(
    variant, target, actions
):
    path = f"{ROOT}/configs/game_2048.py:{variant}"
    made = settings_lib.from_dict(cli.load_config(path).to_dict())
    chosen = settings_lib.env_settings(made.env.options, Game2048)
    assert made.env.name == game_2048.make(chosen).name == "2048"
    assert chosen == Game2048(target=target)
    limits = made.rollout
    assert limits.turns * limits.actions_per_turn == limits.actions == actions
    # An action adds 2.2 to the tiles' sum on average.
    assert target < 2.2 * actions + 4.4
    assert made.iterations == {"smoke": 2, "paper": 200}.get(variant, 60)


def test_an_unknown_variant_of_the_config_is_refused():
    with pytest.raises(UserError, match="'big': choose one of 'smoke'"):
        cli.load_config(f"{ROOT}/configs/game_2048.py:big")


def test_each_first_board_of_the_test_is_one_of_training_turned_as_documented():
    boards = game_2048.FIRST_BOARDS
    splits = np.asarray(base.split_of(jax.vmap(base.content_hash)(boards)))
    training = {
        np.rot90(side, turns).tobytes()
        for board in boards[splits == base.TRAIN]
        for side in (board, board.T)
        for turns in range(4)
    }
    tested = [board.tobytes() for board in boards[splits == base.TEST]]
    assert (len(boards), len(tested)) == (480, 41) and set(tested) <= training
