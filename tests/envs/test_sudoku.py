"""Sudoku against reasoning-gym and a second implementation; the reading of answers."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import GOLDEN, ROOT
from helpers.plain_sudoku import related, solutions

from ragen_jax import cli
from ragen_jax import settings as settings_lib
from ragen_jax.envs import base
from ragen_jax.envs.sudoku import env as sudoku
from ragen_jax.envs.sudoku.env import State, Sudoku
from ragen_jax.errors import UserError


@functools.cache
def _play(settings):
    """Compiled (State, int32[T] actions) -> states and outcomes of a game, [B, T]."""

    def one_step(state, action):
        state, outcome = sudoku.step(jax.random.key(0), state, action, settings)
        return state, (state, outcome)

    return jax.jit(jax.vmap(functools.partial(jax.lax.scan, one_step)))


def _code(size, row, column, number):
    return (row * size + column) * size + number - 1


def _state(cells, solution):
    """A State of numpy arrays; `cells` are the numbers given."""
    cells = np.asarray(cells, np.int32)
    return State(
        cells=cells,
        solution=np.asarray(solution, np.int32),
        given=cells > 0,
        done=np.zeros(cells.shape[:-2], bool),
    )


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "sudoku.npz") as file:
        return {name: file[name] for name in file}


# Rules.


@pytest.mark.parametrize("size", [4, 9])
def test_placements_are_refused_where_reasoning_gym_lets_no_number_stand(golden, size):
    boards, full = golden[f"boards{size}"], golden[f"solutions{size}"]
    is_open = (boards != full).any(axis=(1, 2))
    boards = boards[is_open].astype(np.int32)
    states = _state(golden[f"puzzles{size}"][is_open], full[is_open])
    states = states.replace(cells=boards)
    actions = jnp.arange(size**3, dtype=jnp.int32)
    settings = Sudoku(size=size, clues=size * size - 1)

    def alone(state, action):
        return sudoku.step(jax.random.key(0), state, action, settings)

    every = jax.jit(jax.vmap(jax.vmap(alone, (None, 0)), (0, None)))
    after, outcome = jax.tree.map(np.asarray, every(states, actions))
    fits = golden[f"fits{size}"][is_open] & ~states.given[..., None]
    row, column, number = np.unravel_index(np.arange(size**3), (size,) * 3)
    expected = np.repeat(boards[:, None], size**3, axis=1)
    expected[:, np.arange(size**3), row, column] = number + 1
    fits = fits.reshape(len(boards), -1)
    expected = np.where(fits[..., None, None], expected, boards[:, None])
    np.testing.assert_array_equal(after.cells, expected)
    assert (outcome.reward[~fits] == np.float32(-0.1)).all()
    right = states.solution[:, None]
    gained = (expected == right).sum(axis=(2, 3)) - (boards[:, None] == right).sum(
        axis=(2, 3)
    )
    expected_reward = 0.1 * gained + outcome.success
    np.testing.assert_allclose(outcome.reward[fits], expected_reward[fits], rtol=1e-6)
    assert 0 < fits.mean() < 1


@pytest.mark.parametrize("size", [4, 9])
def test_reasoning_gyms_puzzles_are_solved_by_its_solutions_in_any_order(golden, size):
    puzzles, full = golden[f"puzzles{size}"], golden[f"solutions{size}"]
    states, rng = _state(puzzles, full), random.Random(size)
    longest = int((puzzles == 0).sum(axis=(1, 2)).max())
    actions = np.full((len(puzzles), longest + 1), base.NO_ACTION, np.int32)
    for row, puzzle, solution in zip(actions, puzzles, full, strict=True):
        assert solutions(puzzle) == [solution.tolist()]
        places = np.argwhere(puzzle == 0).tolist()
        rng.shuffle(places)
        row[: len(places)] = [_code(size, r, c, int(solution[r, c])) for r, c in places]
    last, (_, outcome) = _play(Sudoku(size=size, clues=40 if size == 9 else 8))(
        states, actions
    )
    np.testing.assert_array_equal(last.cells, full)
    count = (puzzles == 0).sum(axis=(1, 2))
    np.testing.assert_allclose(outcome.reward.sum(axis=1), 1 + 0.1 * count, rtol=1e-5)
    ends = np.argmax(np.asarray(outcome.success), axis=1)
    np.testing.assert_array_equal(ends, count - 1)
    assert last.done.all() and (outcome.success.sum(axis=1) == 1).all()


def test_random_play_equals_a_second_implementation(golden):
    settings = Sudoku(clues=11, correct_reward=0.25, wrong_reward=-0.5)
    fresh = _state(golden["puzzles4"], golden["solutions4"])
    games, turns = len(fresh.done), 40
    rng = np.random.default_rng(3)
    # Mostly cells that are empty at first, else the games would hardly continue.
    actions = rng.integers(-1, 64, (games, turns), np.int32)
    for game in range(games):
        places = np.flatnonzero(fresh.cells[game].ravel() == 0)
        likely = rng.choice(places, turns)
        right = fresh.solution[game].ravel()[likely] - 1
        number = np.where(rng.random(turns) < 0.5, right, rng.integers(0, 4, turns))
        is_likely = rng.random(turns) < 0.8
        actions[game] = np.where(is_likely, likely * 4 + number, actions[game])
    _, (states, outcome) = _play(settings)(fresh, actions)
    states, outcome = jax.tree.map(np.asarray, (states, outcome))
    for game in range(games):
        cells, done = fresh.cells[game].copy(), False
        solution, given = fresh.solution[game], fresh.given[game]
        for turn, action in enumerate(actions[game].tolist()):
            reward, success = 0.0, False
            if not done and action >= 0:
                row, column, number = action // 16, action // 4 % 4, action % 4 + 1
                beside = [cells[place] for place in related(4, row, column)]
                if given[row, column] or number in beside:
                    reward = -0.5
                else:
                    right = solution[row, column]
                    reward -= 0.25 * (cells[row, column] == right)
                    cells[row, column] = number
                    reward += 0.25 * (number == right)
                    done = success = bool((cells == solution).all())
                    reward += success
            np.testing.assert_array_equal(states.cells[game, turn], cells)
            assert outcome.reward[game, turn] == reward
            assert outcome.success[game, turn] == success
            assert outcome.done[game, turn] == states.done[game, turn] == done
    solved = outcome.success.any(axis=1).mean()
    assert 0.02 < solved < 1 and (outcome.reward == -0.5).mean() > 0.1


def test_a_hand_worked_game():
    solution = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]
    state = _state([[0, 0, 3, 4], [3, 4, 0, 0], [2, 1, 4, 3], [4, 3, 2, 1]], solution)
    texts_and_rewards = [
        ("place 2 at row 1 col 1", -0.1),  # Column 1 holds a 2.
        ("place 1 at row 1 col 1", 0.1),
        ("place 1 at row 1 col 2", -0.1),  # Row 1 and the box hold a 1.
        ("place 3 at row 1 col 3", -0.1),  # Given.
        ("2,3,1", 0.1),
        ("2, 4, 2", 0.1),
        ("2 4 2", 0.0),  # It is there.
        ("1,2,2", 1.1),
        ("1,2,2", 0.0),  # The game is over.
    ]
    actions = [
        sudoku.read_action_text(t.encode(), None, 4) for t, _ in texts_and_rewards
    ]
    batch = jax.tree.map(lambda leaf: leaf[None], state)
    last, (_, outcome) = _play(Sudoku())(batch, np.array([actions], np.int32))
    expected = [reward for _, reward in texts_and_rewards]
    np.testing.assert_allclose(outcome.reward[0], expected, rtol=1e-6)
    np.testing.assert_array_equal(last.cells[0], solution)
    assert outcome.success[0].tolist() == [False] * 7 + [True, False]


def test_a_wrong_number_is_replaced_and_what_it_earned_is_lost_with_it():
    solution = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]
    cells = np.zeros((4, 4), int)
    cells[0, 2:] = 3, 4
    state = jax.tree.map(lambda leaf: leaf[None], _state(cells, solution))
    actions = [_code(4, 0, 0, 2), _code(4, 0, 0, 1), _code(4, 0, 0, 2)]
    last, (_, outcome) = _play(Sudoku())(state, np.array([actions], np.int32))
    np.testing.assert_allclose(outcome.reward[0], [0, 0.1, -0.1], rtol=1e-6)
    assert last.cells[0, 0, 0] == 2


def test_solve_leads_on_from_wrong_numbers_and_gives_up_where_they_block_each_other():
    solution = np.array([[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]])
    state = _state(np.where(np.eye(4) > 0, solution, 0), solution)
    cells = state.cells.copy()
    cells[0, 1], cells[3, 0] = 3, 2  # Wrong, and only in the way of others.
    wrong = state.replace(cells=cells)
    plan = sudoku.solve(wrong)
    batch = jax.tree.map(lambda leaf: leaf[None], wrong)
    last, _ = _play(Sudoku())(batch, np.array([plan], np.int32))
    np.testing.assert_array_equal(last.cells[0], solution)
    cells[0, 1:3] = 3, 2  # Each of the two keeps the other's right number out.
    assert sudoku.solve(state.replace(cells=cells)) == ()
    assert sudoku.solve(state.replace(cells=np.int32(solution))) == ()


# Answers.


@pytest.mark.parametrize("size", [4, 9])
def test_every_action_is_read_from_its_name_and_from_its_short_form(size):
    names = sudoku.action_names(size)
    assert len(names) == len(set(names)) == size**3
    for action, name in enumerate(names):
        place, number = divmod(action, size)
        row, column = divmod(place, size)
        assert name == f"place {number + 1} at row {row + 1} col {column + 1}"
        for text in (name, f"{row + 1},{column + 1},{number + 1}"):
            assert sudoku.read_action_text(text.encode(), None, size) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (b"2,3,4", _code(4, 1, 2, 4)),
        (b"2, 3,   4", _code(4, 1, 2, 4)),
        (b"place 4 at row 2, col 3", _code(4, 1, 2, 4)),
        (b"place\t4 at\nrow 2 col 3,", _code(4, 1, 2, 4)),
        (b"2,3,5", -1),
        (b"0,3,4", -1),
        (b"2,3", -1),
        (b"2,3,4,1", -1),
        (b"23,4", -1),
        (b"(2,3,4)", -1),
        (b"place 44 at row 2 col 3", -1),
        (b"place 4 at row 2", -1),
        (b"place 4 at col 3 row 2", -1),
        (b"put 4 at row 2 col 3", -1),
        (b"place v at row r col c", -1),
        (b"2,3,\xb4", -1),
        (b"2,3,4\x00", -1),
        (b"2,3,4" + b" " * 250, -1),
        (b",", -1),
    ],
)
def test_texts_mean_what_they_say_or_nothing(text, action):
    texts, lengths = _encoded([text])
    if len(text) == 255:  # White space does not count, however much.
        action = _code(4, 1, 2, 4)
    assert sudoku.read_action_text(text, None, 4) == action
    assert _read(4)(texts, lengths).tolist() == [action]


@pytest.mark.parametrize("size", [4, 9])
def test_the_device_reads_any_bytes_as_the_host_does(size):
    rng = random.Random(size)
    texts = [_any_text(rng) for _ in range(20_000)]
    read = np.asarray(_read(size)(*_encoded(texts)))
    meant = [sudoku.read_action_text(text, None, size) for text in texts]
    np.testing.assert_array_equal(read, meant)
    assert len(set(meant)) > 60 and 0.1 < np.mean(read >= 0) < 0.9


@functools.cache
def _read(size):
    read = functools.partial(sudoku.read_action, state=None, size=size)
    return jax.jit(jax.vmap(read))


def _encoded(texts):
    encoded = np.zeros((len(texts), 256), np.uint8)
    for row, text in zip(encoded, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return encoded, np.array([len(text) for text in texts], np.int32)


def _any_text(rng):
    """Right and nearly right texts, and bytes without sense; never empty."""
    gap = [b" ", b" ", b" ", b",", b", ", b"  ", b"\t", b"\r\n", b"\v\f", b" , ,"]
    digits = [b"%d" % rng.choice([1, 2, 3, 4, 1, 2, 3, 4, 5, 9, 0]) for _ in "123"]
    kind = rng.random()
    if kind < 0.45:
        words = digits
    elif kind < 0.9:
        words = [b"place", digits[0], b"at", b"row", digits[1], b"col", digits[2]]
    else:
        parts = [
            b"place",
            b"at",
            b"row",
            b"col",
            b"1",
            b"2",
            b"x",
            b"\x00",
            b"\xff",
            *gap,
        ]
        return b"".join(rng.choices(parts, k=rng.randint(1, 25)))
    text = b"".join(word + rng.choice(gap) for word in words)
    if rng.random() < 0.8:
        text = text.strip()
    if rng.random() < 0.2:  # One byte is lost, added or changed.
        place, byte = rng.randrange(len(text)), bytes([rng.randrange(256)])
        end = place + rng.randrange(2)
        text = text[:place] + rng.choice([byte, b""]) + text[end:]
    return text or b" "


# Observations and words.


@pytest.mark.parametrize("size", [4, 9])
def test_the_observation_reads_as_the_host_renders_it(golden, size):
    env = sudoku.make(Sudoku(size=size, clues=15 if size == 4 else 80))
    states = _state(golden[f"boards{size}"], golden[f"solutions{size}"])
    ids = np.asarray(jax.jit(jax.vmap(env.observe))(states))
    for cells, row in zip(states.cells.tolist(), ids, strict=True):
        lines = [" ".join(str(v) if v else "." for v in line) for line in cells]
        expected = "State:\n" + "".join(f" {line}\n" for line in lines)
        assert base.text_of(env.phrases, row) == expected


def test_the_instruction_is_computed_from_the_settings():
    text = sudoku.instruction(9)
    for part in ("9 x 9 cells", "boxes of 3 x 3", "from 1 to 9 once"):
        assert part in text
    assert len(text) <= 450


# Settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 6}, "sudoku.size = 6 .* square .* choose 4 or 9"),
        ({"size": 16}, "sudoku.size = 16 .* one digit: choose 4 or 9"),
        ({"clues": 3}, "sudoku.clues = 3 with sudoku.size = 4 .* from 4 to 15"),
        ({"clues": 16}, "sudoku.clues = 16 .* from 4 to 15"),
        ({"size": 9}, "sudoku.clues = 8 with sudoku.size = 9 .* from 17 to 80"),
        ({"correct_reward": float("nan")}, "sudoku.correct_reward = nan"),
        ({"wrong_reward": -11.0}, "sudoku.wrong_reward = -11.0 .* -10 to 10"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence_with_the_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        sudoku.make(Sudoku(**changes))


@pytest.mark.parametrize("variant", ["", "nine", "smoke", "paper"])
def test_the_config_asks_for_puzzles_that_its_actions_can_fill(variant):
    path = f"{ROOT}/configs/sudoku.py:{variant}"
    made = settings_lib.from_dict(cli.load_config(path).to_dict())
    chosen = settings_lib.env_settings(made.env.options, Sudoku)
    env, limits = sudoku.make(chosen), made.rollout
    assert made.env.name == env.name
    large = Sudoku(size=9, clues=45)
    assert chosen == (large if variant == "nine" else Sudoku(clues=10))
    empty = chosen.size**2 - chosen.clues
    assert empty < limits.actions <= limits.turns * limits.actions_per_turn
    longest = " || ".join([env.action_names[0]] * limits.actions_per_turn)
    assert len(longest) <= env.answer_bytes
    assert made.iterations == {"smoke": 2, "paper": 200}.get(variant, 60)


def test_an_unknown_variant_of_the_config_is_refused():
    with pytest.raises(UserError, match="'big': choose one of 'nine'"):
        cli.load_config(f"{ROOT}/configs/sudoku.py:big")
