"""Every world keeps to the contract, and the contract finds what breaks it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax import envs
from ragen_jax.envs import contract_rules as rules
from ragen_jax.envs import contract_texts as texts
from ragen_jax.envs import frozen_lake
from ragen_jax.envs.contract import ContractError, check_contract
from ragen_jax.envs.frozen_lake import FrozenLake

# Settings of each world for which all parts of its observation, or its end, are seen.
CASES = [
    ("frozen_lake", dict(size=6, success_probability=1.0, observation="both")),
    ("bandit", {}),
    ("countdown", {}),
    ("sokoban", dict(boxes=2, observation="both")),
    ("sudoku", {}),
    ("2048", dict(target=16)),
    ("rubik", dict(depth=1, faces="URF", half_turns=True)),
]


def test_every_world_of_the_table_is_checked_here():
    assert {name for name, _ in CASES} == set(envs.NAMES)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_world_keeps_to_the_contract(name, options):
    world = envs.make(name, options.items())
    assert world.name == name
    check_contract(world)


# What breaks it ----------------------------------------------------------------------

LAKE = FrozenLake(size=2, frozen_probability=0.5, success_probability=1.0)


@pytest.fixture(scope="module")
def lake():
    return frozen_lake.world(LAKE)


@pytest.fixture(scope="module")
def functions(lake):
    return rules.compile_functions(lake)


@pytest.fixture(scope="module")
def games(lake):
    return rules.make_player(lake, 48, 20)()


def _goes_on_after_the_end(key, state, action):
    open_state = state.replace(done=jnp.zeros_like(state.done))
    return frozen_lake.step(key, open_state, action, LAKE)


def _changes_types(key, state, action):
    state, outcome = frozen_lake.step(key, state, action, LAKE)
    return state.replace(player=state.player * 0.5), outcome


def _counts_rewards(key, state, action):
    state, outcome = frozen_lake.step(key, state, action, LAKE)
    return state, outcome.replace(reward=outcome.success.astype(jnp.int32))


def _loses_the_end(key, state, action):
    state, outcome = frozen_lake.step(key, state, action, LAKE)
    return (state.tiles, state.player), outcome


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"step": _goes_on_after_the_end}, "an ended game went on"),
        ({"step": _changes_types}, r"State.player from int32\[2\] into float32\[2\]"),
        ({"step": _counts_rewards}, r"outcome.reward as int32\[\]: make it float32"),
        ({"step": _loses_the_end}, "return the same fields"),
        ({"example_actions": ("Jump",)}, "Jump"),
        ({"example_actions": ()}, "example_actions is empty"),
        ({"instruction": "Go.\n"}, "white space around it"),
        ({"action_names": ("Left", "left")}, "'Left' is empty, repeated"),
        ({"answer_bytes": 5}, "free-form answers need both"),
    ],
)
def test_the_contract_finds_a_world_that_breaks_it(lake, fault, message):
    with pytest.raises(ContractError, match=message):
        check_contract(dataclasses.replace(lake, **fault))


def _with(games, **leaves):
    """The games with other leaves: of the outcome, the state, or the games."""
    outcome = {k: v for k, v in leaves.items() if hasattr(games.outcome, k)}
    states = {
        k: v for k, v in leaves.items() if hasattr(games.states, k) and k != "done"
    }
    rest = {k: v for k, v in leaves.items() if k not in outcome | states}
    return games.replace(
        outcome=games.outcome.replace(**outcome),
        states=games.states.replace(**states),
        **rest,
    )


def test_sound_games_pass(games):
    rules.check_finite(games)
    rules.check_starts(games)
    rules.check_end(games, must_end=True)
    rules.check_no_action(games)


def test_an_end_that_is_none_is_found(games):
    done, reward = games.outcome.done, games.outcome.reward
    was_done = np.pad(done[:, :-1], [(0, 0), (1, 0)])
    is_over = np.pad(done, [(0, 0), (1, 0)])[..., None]
    faults = {
        "no game of 48 ended in 20 random": dict(done=np.zeros_like(done)),
        "over when they begin": dict(done=np.ones_like(done)),
        "an ended game went on": dict(done=done & (np.arange(20) % 2 == 1)),
        "success came twice": dict(success=done),
        "success came without the end": dict(success=np.roll(done, 1) & ~done),
        "an ended game gave a reward": dict(reward=np.where(was_done, 1, reward)),
        r"changed its state \(State.player\)": dict(
            player=np.where(is_over, np.arange(21)[:, None], games.states.player)
        ),
    }
    for message, leaves in faults.items():
        with pytest.raises(ContractError, match=message):
            rules.check_end(_with(games, **leaves), must_end=True)
    rules.check_end(
        _with(games, done=np.zeros_like(done), success=done & False, reward=0 * reward),
        must_end=False,
    )


def test_a_move_without_an_action_is_found(games):
    is_idle = games.actions == -1
    faults = {
        "never played": dict(actions=np.zeros_like(games.actions)),
        "NO_ACTION gave a reward": dict(reward=is_idle.astype(np.float32)),
        "NO_ACTION gave success": dict(success=is_idle),
        "NO_ACTION changed the state": dict(
            player=games.states.player + np.arange(21)[:, None]
        ),
    }
    for message, leaves in faults.items():
        with pytest.raises(ContractError, match=message):
            rules.check_no_action(_with(games, **leaves))


def test_levels_that_ignore_their_split_or_their_group_are_found(lake, games):
    same = np.broadcast_to(games.observation[:1], games.observation.shape)
    with pytest.raises(ContractError, match="one level came up in two splits"):
        rules.check_starts(games.replace(observation=same))
    tiles = games.states.tiles + np.arange(48)[:, None, None, None]
    with pytest.raises(ContractError, match="members of a group begin differently"):
        rules.check_starts(_with(games, tiles=tiles))


def test_numbers_that_are_not_finite_are_found(games):
    with pytest.raises(ContractError, match="not finite"):
        rules.check_finite(
            _with(games, reward=np.full_like(games.outcome.reward, np.inf))
        )


def test_chance_from_elsewhere_is_found(lake, functions, games):
    rules.check_repeats(lake, functions, games, games)
    other = _with(games, player=games.states.player[::-1])
    with pytest.raises(ContractError, match="another game when played again"):
        rules.check_repeats(lake, functions, games, other)
    with pytest.raises(ContractError, match="depends on the batch"):
        rules.check_repeats(lake, functions, other, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids.astype(np.int64), "observe gives int64"),
        (lambda ids: ids[..., :-1], r"observe gives \[4\] phrases: the world says 5"),
        (lambda ids: np.where(ids == 0, 99, ids), r"gives the id \[99\]"),
        (lambda ids: np.full_like(ids, -1), "an observation is empty"),
        (lambda ids: np.where(np.arange(5) == 2, -1, ids), "a gap inside"),
        (lambda ids: np.roll(ids, 1, axis=2), "begin without white space"),
    ],
)
def test_observations_that_cannot_be_read_are_found(lake, games, change, message):
    texts.check_observations(lake, games)
    with pytest.raises(ContractError, match=message):
        texts.check_observations(
            lake, games.replace(observation=change(games.observation))
        )


def test_phrases_that_fit_no_message_are_found(lake, games):
    for longest, message in ((4, "is too small"), (999, "wastes tokens")):
        wrong = dataclasses.replace(lake, longest_observation=lambda _, n=longest: n)
        with pytest.raises(ContractError, match=message):
            texts.check_longest(wrong, games)
    wrong = dataclasses.replace(lake, longest_observation=lambda lengths: 4)
    with pytest.raises(ContractError, match="the tokens of an observation read"):
        texts.check_tokens(wrong, games)
    control = ("<|im_end|>\n", *lake.phrases[1:])
    with pytest.raises(ContractError, match="control tokens"):
        texts.check_tokens(dataclasses.replace(lake, phrases=control), games)


def test_helpers_that_mislead_are_found(lake, functions, games):
    assert rules.check_solve(lake, functions, games)
    rules.check_picture(lake, games)
    rules.check_landmarks(lake, games)

    def landmarks(state):
        return state.player - 1

    def check(**changes):
        wrong = dataclasses.replace(lake, **changes)
        if "solve" in changes:
            rules.check_solve(wrong, functions, games)
        elif "picture" in changes:
            rules.check_picture(wrong, games)
        else:
            rules.check_landmarks(wrong, games)

    for changes, message in (
        (dict(solve=lambda state: (4,)), "choose actions from 0 to 3"),
        (dict(solve=lambda state: ()), "finds nothing for any level"),
        (dict(solve=lambda state: (0, 1)), "does not lead to success"),
        (dict(picture=lambda state: state.tiles), "NumPy array of uint8"),
        (dict(picture=lambda state: np.zeros((9, 9), np.uint8)), "height, width, 3"),
        (dict(landmarks=landmarks), r"landmarks gives int32\[2\]"),
        (dict(landmarks=lambda state: state.player[None] - 1), "negative place"),
    ):
        with pytest.raises(ContractError, match=message):
            check(**changes)


# Free-form answers: the digits of the four directions.


def _read_digit(text, length, state):
    digit = text[0].astype(jnp.int32) - ord("0")
    is_digit = (length == 1) & (digit >= 0) & (digit < 4)
    return jnp.where(is_digit & ~state.done, digit, -1)


def _read_digit_text(text, state):
    return int(text) if text in (b"0", b"1", b"2", b"3") and not state.done else -1


def test_free_form_readers_that_disagree_are_found(lake, games):
    sound = dataclasses.replace(
        lake,
        answer_bytes=8,
        example_actions=("0", "3"),
        read_action=_read_digit,
        read_action_text=_read_digit_text,
    )
    texts.check_free_form(sound, games)
    for changes, message in (
        (
            dict(
                read_action_text=lambda text, state: _read_digit_text(text[:1], state)
            ),
            "make them agree",
        ),
        (dict(action_names=("Left", "Down", "Right")), "there are actions 0 to 2"),
        (
            dict(
                read_action=lambda text, length, state: jnp.int32(-1),
                read_action_text=lambda text, state: -1,
            ),
            "all, or none, mean an action",
        ),
    ):
        with pytest.raises(ContractError, match=message):
            texts.check_free_form(dataclasses.replace(sound, **changes), games)
    with pytest.raises(ContractError, match="no read_action_text beside it"):
        check_contract(dataclasses.replace(sound, read_action_text=None))
