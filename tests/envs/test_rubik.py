"""The 2 x 2 x 2 cube against Jumanji's, the identities of its group, and a search."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import split_levels
from helpers.paths import GOLDEN, ROOT

from ragen_jax import cli
from ragen_jax import settings as settings_lib
from ragen_jax.envs import base
from ragen_jax.envs.rubik import cube
from ragen_jax.envs.rubik import env as rubik
from ragen_jax.envs.rubik.env import Rubik, State
from ragen_jax.errors import UserError

CUBES = 300  # a split, for `_fresh`
EVERY = Rubik(faces="URFDLB", half_turns=True)
TURNS = dict(zip(rubik.action_names(EVERY), rubik.turns(EVERY), strict=True))
SOLVED = np.arange(6, dtype=np.int32).repeat(4)
_fresh = functools.partial(split_levels.drawn, rubik.reset, count=CUBES, seed=6)


@functools.cache
def _step(settings):
    return jax.jit(functools.partial(rubik.step, settings=settings))


def _turned(stickers, names):
    for name in names.split():
        stickers = stickers[TURNS[name]]
    return stickers


def _state(stickers):
    return State(stickers=jnp.asarray(stickers, jnp.int32), done=jnp.array(False))


# Turns.


def test_every_turn_and_every_solved_cube_equal_jumanjis():
    with np.load(GOLDEN / "rubik.npz") as file:
        golden = {name: file[name] for name in file}
    names = golden["names"].tolist()
    stickers = np.tile(SOLVED, (len(golden["actions"]), 1))
    table = np.stack([TURNS[name] for name in names])
    is_solved = jax.jit(jax.vmap(rubik.is_solved))
    for turn, actions in enumerate(golden["actions"].T):
        stickers = np.take_along_axis(stickers, table[actions], axis=1)
        np.testing.assert_array_equal(stickers, golden["cubes"][:, turn])
        solved = np.asarray(is_solved(stickers))
        np.testing.assert_array_equal(solved, golden["solved"][:, turn])
    assert set(golden["actions"].ravel()) == set(range(18))
    assert 0 < golden["solved"].sum() < golden["solved"].size


@pytest.mark.parametrize(
    ("sequence", "times"),
    [
        *((face, 4) for face in "URFDLB"),
        *((f"{face} {face}'", 1) for face in "URFDLB"),
        *((f"{face}2", 2) for face in "URFDLB"),
        ("R U R' U'", 6),
        ("R U", 15),  # 105 on the 3 x 3 x 3 cube, which has edges.
        ("R U'", 9),
        ("U R2", 6),
        ("R' D' R D", 6),
        ("R U R' U R U2 R'", 6),
    ],
)
def test_a_sequence_has_its_order(sequence, times):
    identity = np.arange(24)
    stickers, order = _turned(identity, sequence), 1
    while (stickers != identity).any():
        stickers, order = _turned(stickers, sequence), order + 1
    assert order == times


def test_opposite_turns_hold_the_cube_in_another_way_only():
    for pair in ("R L'", "U D'", "F B'"):
        stickers = _turned(SOLVED, pair)
        assert (stickers != SOLVED).any() and rubik.is_solved(stickers)
    assert not rubik.is_solved(jnp.asarray(_turned(SOLVED, "R L")))


def test_turns_never_take_a_corner_apart():
    # Corners by their stickers, Up, Front, Right, Back, Left, Down in reading order.
    corners = [(0, 16, 13), (1, 12, 9), (2, 4, 17), (3, 8, 5)]
    corners += [(20, 19, 6), (21, 7, 10), (22, 15, 18), (23, 11, 14)]
    whole = {frozenset(SOLVED[list(corner)].tolist()) for corner in corners}
    assert len(whole) == 8
    for name, turn in TURNS.items():
        assert sorted(turn) == list(range(24)), name
        after = SOLVED[turn]
        assert {frozenset(after[list(c)].tolist()) for c in corners} == whole, name


def test_a_step_turns_the_face_that_its_action_names_and_solves_once():
    settings = Rubik(faces="URF", half_turns=True, step_reward=-0.25)
    names = rubik.action_names(settings)
    assert names == ("U", "U'", "U2", "R", "R'", "R2", "F", "F'", "F2")
    state = _state(_turned(SOLVED, "F R2"))
    rewards = []
    for name in ("U", "U'", "R2", "F'", "F'", "U"):
        expected = _turned(np.asarray(state.stickers), name)
        was_done = bool(state.done)
        action = jnp.int32(names.index(name))
        state, outcome = _step(settings)(jax.random.key(0), state, action)
        rewards.append(float(outcome.reward))
        assert bool(outcome.success) == (len(rewards) == 4)
        if not was_done:
            np.testing.assert_array_equal(state.stickers, expected)
    assert rewards == [-0.25, -0.25, -0.25, 1, 0, 0]
    np.testing.assert_array_equal(state.stickers, SOLVED)
    state = _state(_turned(SOLVED, "F"))
    after, outcome = _step(settings)(jax.random.key(0), state, jnp.int32(-1))
    np.testing.assert_array_equal(after.stickers, state.stickers)
    assert outcome.reward == 0 and not outcome.done


def test_a_cube_is_solved_however_it_is_held():
    state = _state(_turned(SOLVED, "R"))
    action = jnp.int32(rubik.action_names(Rubik()).index("L'"))
    after, outcome = _step(Rubik())(jax.random.key(0), state, action)
    assert outcome.success and outcome.done and outcome.reward == 1
    assert (np.asarray(after.stickers) != SOLVED).any()


# Levels.


@pytest.mark.parametrize(
    "settings",
    [
        Rubik(depth=2, faces="URF"),
        pytest.param(Rubik(depth=1), marks=pytest.mark.slow),
        pytest.param(Rubik(depth=4, half_turns=True), marks=pytest.mark.slow),
    ],
)
def test_cubes_are_scrambled_by_so_many_turns_and_belong_to_their_split(settings):
    cubes = _fresh(settings)
    hashes = jax.jit(jax.vmap(base.content_hash))(cubes.stickers)
    splits = np.repeat(np.arange(3), CUBES)
    np.testing.assert_array_equal(base.split_of(hashes), splits)
    assert not cubes.done.any()
    lengths = set()
    for stickers in cubes.stickers[::12]:
        plan = rubik.solve(_state(stickers), settings)
        names = [rubik.action_names(settings)[action] for action in plan]
        assert rubik.is_solved(_turned(stickers, " ".join(names)))
        lengths.add(len(plan))
    assert max(lengths) == settings.depth and min(lengths) >= 1


@pytest.mark.slow
def test_turns_that_undo_each_other_are_drawn_again():
    # Six half turns of two faces, one after the other, lead back: one draw in 12,000.
    settings = Rubik(depth=6, faces="URF", half_turns=True)
    keys = jax.random.split(jax.random.key(9), 40_000)
    drawn = jax.jit(jax.vmap(functools.partial(rubik.scramble, settings=settings)))
    first = drawn(jax.vmap(lambda key: jax.random.split(key)[1])(keys))
    (solved,) = np.nonzero(jax.jit(jax.vmap(rubik.is_solved))(first))
    reset = jax.jit(functools.partial(rubik.reset, settings=settings))
    for place in solved:  # Of the split of the solved cube, for which it would do.
        split = base.split_of(base.content_hash(first[place]))
        assert not rubik.is_solved(reset(keys[place], split).stickers)
    assert len(solved)


def test_one_turn_makes_144_cubes_of_which_every_split_has_its_share():
    held = np.unique(
        [_turned(way, name) for way in cube.HELD for name in "U U' R R' F F'".split()],
        axis=0,
    )
    hashes = jax.jit(jax.vmap(base.content_hash))(held.astype(np.int32))
    shares = np.bincount(np.asarray(base.split_of(hashes)), minlength=3)
    assert shares.sum() == 144 and shares.min() >= 10
    # In 300 draws each of some 100 cubes is missed with a probability of 5%.
    drawn = _fresh(Rubik(depth=1)).stickers[:CUBES]
    assert 0.85 * shares[0] <= len(np.unique(drawn, axis=0)) <= shares[0]


def test_no_scramble_turns_a_face_back_or_its_opposite_next():
    # So cubes of two turns always need two.
    keys = jax.random.split(jax.random.key(8), CUBES)
    for settings in (Rubik(depth=2), Rubik(depth=2, faces="URF")):
        draw = functools.partial(rubik.scramble, settings=settings)
        cubes = np.asarray(jax.jit(jax.vmap(draw))(keys))
        assert len(np.unique(cubes, axis=0)) > 150
        for stickers in cubes[::6]:
            assert len(rubik.solve(_state(stickers), settings)) == 2


@pytest.mark.parametrize("half_turns", [False, True])
def test_solutions_are_as_short_as_a_search_from_the_solved_cube_says(half_turns):
    settings = Rubik(faces="URF", half_turns=half_turns)
    depths, front = {tuple(SOLVED): 0}, [tuple(SOLVED)]
    moves = rubik.turns(settings)
    counts = [1]
    for depth in range(1, 5):
        further = {tuple(np.array(s)[m].tolist()) for s in front for m in moves}
        front = [stickers for stickers in further if stickers not in depths]
        depths |= dict.fromkeys(front, depth)
        counts.append(len(front))
    # The known numbers of positions of the pocket cube by distance.
    known = {False: [1, 6, 27, 120, 534], True: [1, 9, 54, 321, 1847]}
    assert counts == known[half_turns]
    for stickers in list(depths)[:: len(depths) // 80]:
        plan = rubik.solve(_state(stickers), settings)
        assert len(plan) == depths[stickers]


def test_cubes_of_many_turns_are_solved_in_at_most_14():
    random = np.random.default_rng(1)
    names = rubik.action_names(Rubik())
    for _ in range(2):
        deep = _turned(SOLVED, " ".join(random.choice(names, 40)))
        plan = rubik.solve(_state(deep), Rubik())
        assert 6 < len(plan) <= 14
        assert rubik.is_solved(_turned(deep, " ".join(names[a] for a in plan)))


# Observations and words.


def test_the_faces_read_as_documented():
    env = rubik.make(Rubik())
    ids = jax.jit(env.observe)(_state(_turned(SOLVED, "U R")))
    assert base.text_of(env.phrases, np.asarray(ids)) == (
        "State:\nUp:\n W R\n W G\nFront:\n R Y\n G Y\nRight:\n R B\n R B\n"
        "Back:\n W O\n W B\nLeft:\n G G\n O O\nDown:\n Y B\n Y O\n"
    )


def test_the_instruction_names_the_actions_of_the_settings():
    text = rubik.instruction(Rubik(faces="URF", half_turns=True))
    assert "Actions: U, U', U2, R, R', R2, F, F', F2." in text and "half turn" in text
    text = rubik.instruction(Rubik())
    assert "Actions: U, U', R, R', F, F', D, D', L, L', B, B'." in text
    assert "half" not in text


# Settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "rubik.depth = 0 .* 1 to 20"),
        ({"depth": 21}, "rubik.depth = 21 .* 1 to 20"),
        ({"faces": "UR"}, "rubik.faces = 'UR' .* URF, URFDLB"),
        ({"step_reward": -1.5}, "rubik.step_reward = -1.5 .* -1 to 1"),
        ({"step_reward": float("nan")}, "rubik.step_reward = nan"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence_with_the_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        rubik.make(Rubik(**changes))


@pytest.mark.parametrize(("variant", "depth"), [("", 2), ("smoke", 2), ("paper", 5)])
def test_the_config_asks_for_cubes_that_its_actions_can_solve(variant, depth):
    path = f"{ROOT}/configs/rubik.py:{variant}"
    made = settings_lib.from_dict(cli.load_config(path).to_dict())
    chosen = settings_lib.env_settings(made.env.options, Rubik)
    assert made.env.name == rubik.make(chosen).name
    assert chosen == Rubik(depth=depth)
    assert made.rollout.actions >= 4 * depth
    assert made.iterations == {"smoke": 2, "paper": 200}.get(variant, 60)


def test_an_unknown_variant_of_the_config_is_refused():
    with pytest.raises(UserError, match="'big': choose one of 'smoke'"):
        cli.load_config(f"{ROOT}/configs/rubik.py:big")


@pytest.mark.parametrize(
    ("depth", "levels", "patterns", "tested"),
    [(1, 144, 6, 24), (2, 576, 24, 79), (3, 2304, 96, 302)],
)
def test_each_test_level_is_a_training_level_in_other_colours_as_documented(
    depth, levels, patterns, tested
):
    """All levels of a depth, from every orientation by every sequence of turns."""
    reached = {(tuple(held), -1) for held in cube.HELD.tolist()}
    table = rubik.turns(Rubik(depth=depth))
    axes = [(action // 2) % 3 for action in range(len(table))]
    for _ in range(depth):
        reached = {
            (tuple(np.array(stickers)[turn].tolist()), axis)
            for stickers, last in reached
            for turn, axis in zip(table, axes, strict=True)
            if axis != last
        }
    cubes = np.array(sorted({stickers for stickers, _ in reached}), np.int32)
    splits = np.asarray(jax.vmap(lambda x: base.split_of(base.content_hash(x)))(cubes))
    # Colours by their first appearance.
    names = [[list(dict.fromkeys(x)).index(c) for c in x] for x in cubes.tolist()]
    by_split = [
        [tuple(x) for x, of in zip(names, splits, strict=True) if of == split]
        for split in (base.TRAIN, base.TEST)
    ]
    assert len(cubes) == levels and len(set(map(tuple, names))) == patterns
    assert len(by_split[1]) == tested and set(by_split[1]) <= set(by_split[0])
    told = " ".join((ROOT / "docs" / "environments.md").read_text().split())
    told_of = {1: "all 24 at `depth` 1", 2: "the 79 test levels", 3: "all 302 at"}
    assert told_of[depth] in told and str(tested) in told_of[depth]
