"""Every environment passes the checks, and the checks find what is wrong with one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers import endless

from ragen_jax import envs
from ragen_jax.envs import base, first_levels
from ragen_jax.envs.frozen_lake import env as frozen_lake
from ragen_jax.envs.frozen_lake.env import FrozenLake
from ragen_jax.testing import check_demonstrations as demonstrations
from ragen_jax.testing import check_dynamics as dynamics
from ragen_jax.testing import check_helpers, play_report
from ragen_jax.testing import check_splits as splits
from ragen_jax.testing import check_texts as texts
from ragen_jax.testing.check_env import CheckError, check_env, main
from ragen_jax.testing.check_splits import check_every_split_comes, check_splits

# Settings of each environment in which every part of its observation, or its end,
# is seen.
CASES = [
    ("frozen_lake", dict(size=6, success_probability=1.0, observation="both")),
    ("bandit", {}),
    ("countdown", {}),
    ("sokoban", dict(boxes=2, observation="both")),
    ("sudoku", {}),
    ("2048", dict(target=16)),
    ("rubik", dict(depth=1, faces="URF", half_turns=True)),
    ("webshop", dict(products=200, observation="rich")),
    ("search_qa", dict(people=40)),
    ("math", dict(fractions=True)),
    ("household", {}),
]
QUICK = ("bandit",)  # and tests/docs checks the documents' own environment


def test_every_environment_of_the_table_is_checked_here():
    assert {name for name, _ in CASES} == set(envs.NAMES)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # The rest take seconds each to compile.
        case if case[0] in QUICK else pytest.param(*case, marks=pytest.mark.slow)
        for case in CASES
    ],
)
def test_an_environment_passes_the_checks(name, options):
    env = envs.make(name, options.items())
    assert env.name == name
    lines = []
    check_env(env, report=lines.append)
    assert "base.NO_ACTION changes nothing" in lines


# Faults -------------------------------------------------------------------------------

LAKE = FrozenLake(size=2, frozen_probability=0.5, success_probability=1.0)


@pytest.fixture(scope="module")
def lake():
    return frozen_lake.make(LAKE)


@pytest.fixture(scope="module")
def functions(lake):
    return dynamics.compile_functions(lake)


@pytest.fixture(scope="module")
def plays(lake):
    return dynamics.make_player(lake, 48, 20)()


def _continues_after_the_end(key, state, action):
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
        ({"step": _continues_after_the_end}, "an ended episode continued"),
        ({"step": _changes_types}, r"State.player from int32\[2\] into float32\[2\]"),
        ({"step": _counts_rewards}, r"outcome.reward as int32\[\]: make it float32"),
        ({"step": _loses_the_end}, "return the same fields"),
        ({"example_actions": ("Jump",)}, "Jump"),
        ({"example_actions": ()}, "example_actions is empty"),
        ({"instruction": "Go.\n"}, "white space around it"),
        ({"action_names": ("Left", "left")}, r"'Left' is repeated \(capital and small"),
        ({"action_names": ("Left", " ")}, "action name ' ' is empty: name every"),
        ({"action_names": ("Left", "a|b")}, r"'a\|b' contains one of < \| >, which"),
        ({"answer_bytes": 5}, "free-form answers need both"),
        ({"read_action_text": max}, "only one of read_action and read_action_text"),
        ({"demonstrate": max}, "has demonstrate and no reply_phrases: add the texts"),
        (
            {"action_size": 2, "sample_action": max, "action_text": max},
            "has action_size = 2: actions of several numbers need read_action, sample_",
        ),
    ],
)
def test_a_faulty_environment_is_found(lake, fault, message):
    with pytest.raises(CheckError, match=message):
        check_env(dataclasses.replace(lake, **fault))


def _with(plays, **leaves):
    """The plays with other leaves: of the outcome, the state, or the plays."""
    outcome = {k: v for k, v in leaves.items() if hasattr(plays.outcome, k)}
    states = {
        k: v for k, v in leaves.items() if hasattr(plays.states, k) and k != "done"
    }
    rest = {k: v for k, v in leaves.items() if k not in outcome | states}
    return plays.replace(
        outcome=plays.outcome.replace(**outcome),
        states=plays.states.replace(**states),
        **rest,
    )


def test_sound_plays_pass(plays):
    dynamics.check_finite(plays)
    dynamics.check_starts(plays)
    dynamics.check_end(plays, must_end=True)
    dynamics.check_no_action(plays)


def test_an_environment_of_thousands_of_actions_passes_even_if_one_ends_it(lake):
    def end_at_once(key, state, action):
        done = state.done | (action != base.NO_ACTION)
        nothing = base.Outcome(jnp.float32(0), jnp.zeros((), bool), done)
        return state.replace(done=done), nothing

    names = tuple(f"open {number}" for number in range(9999))
    env = dataclasses.replace(lake, action_names=names, step=end_at_once)
    plays = dynamics.make_player(env, 48, 4)()
    dynamics.check_end(plays, must_end=True)
    dynamics.check_no_action(plays)
    assert plays.actions.max() > 9000


def test_an_end_that_is_none_is_found(plays):
    done, reward = plays.outcome.done, plays.outcome.reward
    was_done = np.pad(done[:, :-1], [(0, 0), (1, 0)])
    is_over = np.pad(done, [(0, 0), (1, 0)])[..., None]
    faults = {
        "no play of 48 ended in 20 random": dict(done=np.zeros_like(done)),
        "over when they begin": dict(done=np.ones_like(done)),
        "an ended episode continued": dict(done=done & (np.arange(20) % 2 == 1)),
        "success came twice": dict(success=done),
        "success came without the end": dict(success=np.roll(done, 1) & ~done),
        "an ended episode gave a reward": dict(reward=np.where(was_done, 1, reward)),
        r"changed its state \(State.player\)": dict(
            player=np.where(is_over, np.arange(21)[:, None], plays.states.player)
        ),
    }
    for message, leaves in faults.items():
        with pytest.raises(CheckError, match=message):
            dynamics.check_end(_with(plays, **leaves), must_end=True)
    late = np.arange(20) == 19  # Nothing was done after it.
    with pytest.raises(CheckError, match="no play of 48 ended in 20 random"):
        dynamics.check_end(_with(plays, done=done & late), must_end=True)
    dynamics.check_end(
        _with(plays, done=np.zeros_like(done), success=done & False, reward=0 * reward),
        must_end=False,
    )


def test_a_move_without_an_action_is_found(plays):
    is_idle = plays.actions == -1
    faults = {
        "never played": dict(actions=np.zeros_like(plays.actions)),
        "NO_ACTION gave a reward": dict(reward=is_idle.astype(np.float32)),
        "NO_ACTION gave success": dict(success=is_idle),
        "NO_ACTION changed the state": dict(
            player=plays.states.player + np.arange(21)[:, None]
        ),
    }
    for message, leaves in faults.items():
        with pytest.raises(CheckError, match=message):
            dynamics.check_no_action(_with(plays, **leaves))


def test_groups_whose_members_begin_differently_are_found(plays):
    tiles = plays.states.tiles + np.arange(48)[:, None, None, None]
    with pytest.raises(CheckError, match="members of a group begin differently"):
        dynamics.check_starts(_with(plays, tiles=tiles))


def _of_any_split(lake):
    """The lake with a reset that lets the split decide no more than chance."""

    def reset(key, split):
        return lake.reset(jax.random.fold_in(key, split), base.TRAIN)

    return dataclasses.replace(lake, reset=reset)


@pytest.mark.slow
def test_levels_that_are_of_several_splits_are_found_and_counted(monkeypatch):
    monkeypatch.setattr(splits, "_SECONDS", 600.0)  # However busy the machine is.
    lake = frozen_lake.make(dataclasses.replace(LAKE, size=3))
    drawn = check_splits(lake)
    assert drawn.count == 2048
    assert all(1 < number < 2048 for number in drawn.different)
    with pytest.raises(CheckError, match=r"of 2048 test levels \d+ are train levels"):
        check_splits(_of_any_split(lake))


@struct.dataclass
class Secret:
    """A level of which nothing is shown."""

    number: jax.Array  # int32[] or uint32[]
    noise: jax.Array  # float32[]


def _draws_secrets(spread, dtype=jnp.int32):
    """A reset of hidden numbers, of which splits share `spread` with their next."""

    def reset(key, split):
        noise = jax.random.uniform(key)
        number = jax.random.randint(key, (), 0, 10 + spread) + 10 * split
        return Secret(number=number.astype(dtype), noise=noise)

    return reset


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32])
def test_levels_that_are_not_shown_are_told_apart_by_their_states(lake, dtype):
    no = jnp.zeros((), bool)
    nothing = base.Outcome(reward=jnp.float32(0), success=no, done=no)

    def secret(spread):
        return dataclasses.replace(
            lake,
            reset=_draws_secrets(spread, dtype),
            step=lambda key, state, action: (state, nothing),
            observe=lambda state: jnp.zeros(1, jnp.int32),
        )

    check_splits(secret(spread=0))
    with pytest.raises(CheckError, match="are train levels too"):
        check_splits(secret(spread=11))


def test_a_reset_that_ignores_its_key_is_found(lake):
    def reset(key, split):
        return lake.reset(jax.random.key(0), split)

    with pytest.raises(CheckError, match="one train level for all of 2048 keys"):
        check_splits(dataclasses.replace(lake, reset=reset))


def test_a_search_for_a_level_that_never_ends_is_found(lake, monkeypatch):
    monkeypatch.setattr(first_levels, "PATIENCE", 0.5)
    with (
        endless.without_levels(lake, base.VALIDATION) as env,
        pytest.raises(CheckError, match="has drawn no validation level in 0.5 s"),
    ):
        check_every_split_comes(env)


def test_numbers_that_are_not_finite_are_found(plays):
    why = "holds a number that is not finite: look for a division by 0, a log or"
    with pytest.raises(CheckError, match=rf"^outcome\.reward {why}"):
        dynamics.check_finite(
            _with(plays, reward=np.full_like(plays.outcome.reward, np.inf))
        )
    with pytest.raises(CheckError, match=rf"^State\.player {why}"):
        dynamics.check_finite(
            _with(plays, player=np.full(plays.states.player.shape, np.nan))
        )


def test_randomness_from_elsewhere_is_found(lake, functions, plays):
    dynamics.check_repeats(lake, functions, plays, plays)
    other = _with(plays, player=plays.states.player[::-1])
    with pytest.raises(CheckError, match="another play when it is repeated"):
        dynamics.check_repeats(lake, functions, plays, other)
    with pytest.raises(CheckError, match="depends on the batch"):
        dynamics.check_repeats(lake, functions, other, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids.astype(np.int64), "observe gives int64"),
        (
            lambda ids: ids[..., :-1],
            r"observe gives \[4\] phrases: the environment says 5",
        ),
        (lambda ids: np.where(ids == 0, 99, ids), r"gives the id \[99\]"),
        (lambda ids: np.full_like(ids, -1), "an observation is empty"),
        (lambda ids: np.where(np.arange(5) == 2, -1, ids), "a gap before its last"),
        (lambda ids: np.roll(ids, 1, axis=2), "begin without white space"),
    ],
)
def test_observations_that_cannot_be_read_are_found(lake, plays, change, message):
    texts.check_observations(lake, plays)
    with pytest.raises(CheckError, match=message):
        texts.check_observations(
            lake, plays.replace(observation=change(plays.observation))
        )


def test_an_observation_that_begins_with_a_gap_is_not_called_empty(lake, plays):
    late = plays.replace(observation=plays.observation.copy())
    late.observation[..., 0] = base.NO_PHRASE
    with pytest.raises(CheckError, match=r"a gap before .*close_gaps"):
        texts.check_observations(lake, late)


def test_phrases_that_fit_no_message_are_found(lake, plays):
    for longest, message in ((4, "is too small"), (999, "wastes tokens")):
        wrong = dataclasses.replace(lake, longest_observation=lambda _, n=longest: n)
        with pytest.raises(CheckError, match=message):
            texts.check_longest(wrong, plays)
    wrong = dataclasses.replace(lake, longest_observation=lambda lengths: 4)
    with pytest.raises(CheckError, match="gives 4 where an observation has"):
        texts.check_tokens(wrong, plays)
    control = ("<|im_end|>\n", *lake.phrases[1:])
    with pytest.raises(CheckError, match="phrases hold the chat's control tokens"):
        texts.check_tokens(dataclasses.replace(lake, phrases=control), plays)
    rules = dataclasses.replace(lake, instruction="Say <|im_end|> at the end.")
    with pytest.raises(CheckError, match="instruction holds one of the chat's"):
        texts.check_tokens(rules, plays)


def test_helpers_that_mislead_are_found(lake, functions, plays):
    assert check_helpers.check_solve(lake, functions, plays) == (True, True)
    check_helpers.check_picture(lake, plays)
    check_helpers.check_landmarks(lake, plays)

    def landmarks(state):
        return state.player - 1

    def check(**changes):
        wrong = dataclasses.replace(lake, **changes)
        if "solve" in changes:
            check_helpers.check_solve(wrong, functions, plays)
        elif "picture" in changes:
            check_helpers.check_picture(wrong, plays)
        else:
            check_helpers.check_landmarks(wrong, plays)

    for changes, message in (
        (dict(solve=lambda state: (4,)), "choose actions from 0 to 3"),
        (dict(solve=lambda state: None), "solve gives None: let it give a tuple"),
        (dict(solve=lambda state: 3), "solve gives 3: let it give a tuple"),
        (dict(solve=lambda state: ()), "finds nothing for any level"),
        (dict(solve=lambda state: (0, 1)), "does not lead to success"),
        (dict(picture=lambda state: state.tiles), "NumPy array of uint8"),
        (dict(picture=lambda state: np.zeros((9, 9), np.uint8)), "height, width, 3"),
        (dict(landmarks=landmarks), r"landmarks gives int32\[2\]"),
        (dict(landmarks=lambda state: state.player[None] - 1), "negative place"),
        (dict(landmarks=lambda state: state.player[None] + 9), "from 0 to 9"),
        (
            dict(landmarks=lambda s: jnp.where(s.done, -1, 12) + 0 * s.player[None]),
            "from 0 to 9",
        ),
    ):
        with pytest.raises(CheckError, match=message):
            check(**changes)


def _never_done(key, state, action):
    after, outcome = frozen_lake.step(key, state, action, LAKE)
    return state.replace(player=after.player), outcome.replace(done=state.done)


def test_a_solution_that_does_not_end_is_found(lake, plays):
    never = dynamics.compile_functions(dataclasses.replace(lake, step=_never_done))
    with pytest.raises(CheckError, match="leads to success without the end"):
        check_helpers.check_solve(lake, never, plays)


@pytest.mark.parametrize("awake", range(4))
def test_an_end_that_one_of_the_actions_undoes_is_found(lake, plays, awake):
    def step(key, state, action):
        after, outcome = frozen_lake.step(key, state, action, LAKE)
        done = after.done & ~(state.done & (action == awake))
        return after.replace(done=done), outcome.replace(done=done)

    functions = dynamics.compile_functions(dataclasses.replace(lake, step=step))
    with pytest.raises(CheckError, match="continued after its solution"):
        check_helpers.check_solve(lake, functions, plays)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(sample_action=lambda key: jax.random.randint(key, (), 0, 5)),
            r"sample_action gives action \[4\]: there are actions 0 to 3, and base.NO",
        ),
        (
            dict(rule=lambda state: state.player[0] - 2),
            r"rule gives action \[-2\]: there are actions 0 to 3",
        ),
    ],
)
def test_choices_that_are_no_actions_are_found(lake, plays, changes, message):
    sound = dict(
        sample_action=lambda key: jax.random.randint(key, (), 0, 4),
        rule=lambda state: state.player[0] - 1,
    )
    check_helpers.check_choices(dataclasses.replace(lake, **sound), plays)
    with pytest.raises(CheckError, match=message):
        check_helpers.check_choices(dataclasses.replace(lake, **changes), plays)


def test_a_rule_is_not_asked_about_ended_episodes(lake, plays):
    assert plays.outcome.done.any()
    rule = lambda state: jnp.where(state.done, 5, state.player[0])
    check_helpers.check_choices(dataclasses.replace(lake, rule=rule), plays)


# Demonstrations: two ways around the corners, at random.

REPLIES = tuple(
    f" I go.</think><answer>{d}</answer>" for d in ("Down || left", "Up || Right")
)


def _demonstrate(key, state):
    # In an ended episode, which none is asked about, no phrase at all.
    return jnp.where(state.done, 9, jax.random.randint(key, (1,), 0, 2))


def _check_demonstrations(lake, functions, plays, **changes):
    sound = dict(demonstrate=_demonstrate, reply_phrases=REPLIES)
    env = dataclasses.replace(lake, **(sound | changes))
    return demonstrations.check_demonstrations(env, functions, plays, must_end=True)


def test_demonstrations_are_played_to_their_ends(lake, functions, plays):
    line = _check_demonstrations(lake, functions, plays)
    begin = "demonstrated replies are valid with env.thinking = True: of 12 episodes "
    assert line.startswith(begin) and "12 ended" in line
    bare = tuple(text.removeprefix(" I go.</think><answer>") for text in REPLIES)
    line = _check_demonstrations(lake, functions, plays, reply_phrases=bare)
    assert line == _check_demonstrations(lake, functions, plays).replace(
        "True", "False"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(reply_phrases=REPLIES[:1]),
            r"gives the id \[1\]: there are reply_phrases",
        ),
        (
            dict(reply_phrases=(REPLIES[0], REPLIES[1].replace("Right", "east"))),
            r"\|\| east</answer>', which is not valid behind <think>: let it write '",
        ),
        (
            dict(reply_phrases=tuple(text[:-1] for text in REPLIES)),
            "which is not valid behind <think>",
        ),
        (
            dict(reply_phrases=("Down</answer>", "<answer>Down</answer>")),
            "'<answer>Down</answer>', which is not valid behind <answer>: let it write",
        ),
    ],
)
def test_demonstrations_that_cannot_be_read_are_found(
    lake, functions, plays, changes, message
):
    with pytest.raises(CheckError, match=message):
        _check_demonstrations(lake, functions, plays, **changes)


def test_demonstrations_that_lead_to_no_end_are_found(lake, plays):
    never = dynamics.compile_functions(dataclasses.replace(lake, step=_never_done))
    with pytest.raises(CheckError, match="no demonstrated episode of 12 ended in 40"):
        _check_demonstrations(lake, never, plays)


def test_it_is_said_how_plays_ended_and_whether_success_was_seen(plays):
    outcome = plays.outcome
    ended, solved = outcome.done[:, -1].sum(), outcome.success.any(axis=1).sum()
    assert 0 < solved < ended
    line = (
        f"of 48 random plays of 20 actions {ended} ended, {solved} in success; returns"
        " were from 0 to 1"
    )
    assert play_report.outcomes_seen(plays, has_succeeded=False) == line
    none = _with(plays, success=np.zeros_like(outcome.success))
    assert "No success was" in play_report.outcomes_seen(none, has_succeeded=False)
    assert "No success was" not in play_report.outcomes_seen(none, has_succeeded=True)


# Free-form answers: the digits of the four directions.


def _read_digit(text, length, state):
    digit = text[0].astype(jnp.int32) - ord("0")
    is_digit = (length == 1) & (digit >= 0) & (digit < 4)
    return jnp.where(is_digit & ~state.done, digit, -1)


def _read_digit_text(text, state):
    return int(text) if text in (b"0", b"1", b"2", b"3") and not state.done else -1


def _answered_by_digits(lake, **changes):
    return dataclasses.replace(
        lake,
        answer_bytes=8,
        example_actions=("0", "3"),
        read_action=_read_digit,
        read_action_text=_read_digit_text,
        **changes,
    )


def test_free_form_readers_that_disagree_are_found(lake, plays):
    sound = _answered_by_digits(lake)
    texts.check_free_form(sound, plays)
    for changes, message in (
        (
            dict(
                read_action_text=lambda text, state: _read_digit_text(text[:1], state)
            ),
            "make them agree",
        ),
        (
            # Takes a byte 0 for the end of the text.
            dict(
                read_action=lambda text, length, state: _read_digit(
                    text, (text != 0).sum(), state
                )
            ),
            r"the answer b'\d\\x00' is action \d for read_action and -1",
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
        with pytest.raises(CheckError, match=message):
            texts.check_free_form(dataclasses.replace(sound, **changes), plays)
    with pytest.raises(
        CheckError, match="only one of read_action and read_action_text"
    ):
        check_env(dataclasses.replace(sound, read_action_text=None))


def test_what_an_environment_writes_and_cannot_read_is_found(lake, plays):
    digits = _answered_by_digits(lake, action_text=lambda action, state: str(action))
    said = texts.check_written(digits, plays)
    assert said == "the prompt's examples are read as actions"
    # Answers come in lower case, and no longer than can be read.
    for text in ("7", "East", "0" * 9):
        said = texts.check_written(
            dataclasses.replace(digits, example_actions=("0", text)), plays
        )
        assert said.startswith(f"the prompt's examples {[text]} name no action in ")
        wrong = dataclasses.replace(digits, action_text=lambda a, state, t=text: t)
        with pytest.raises(CheckError, match=f"of solve as '{text}', which is read as"):
            texts.check_written(wrong, plays)


def test_help_of_the_checks_says_how_to_call_them(capsys):
    assert main(["--help"]) == 0
    assert "--endless" in capsys.readouterr().out
