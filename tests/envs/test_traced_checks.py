"""What the functions of a file's environment give is looked at before compiling."""

import dataclasses

import pytest
from helpers import runs

from ragen_jax import envs
from ragen_jax.errors import SettingsError

SOUND = (runs.ROOT / "docs" / "examples" / "coin_walk.py").read_text()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes my_env.py into the current directory."""
    monkeypatch.chdir(tmp_path)

    def write_file(text, name="my_env.py"):
        (tmp_path / name).write_text(text)
        return name

    return write_file


FAULTY = {
    "a Python if": (
        (
            "    moves = ~state.done &",
            "    if state.done: 1\n    moves = ~state.done &",
        ),
        r"step fails: line \d+: TracerBoolConversionError: [^.]*: choose with"
        " jnp.where, not with if, while, and, or$",
    ),
    "a size by the state": (
        ("    moves = ~state.done &", "    range(action)\n    moves = ~state.done &"),
        r"step fails: line \d+: TracerIntegerConversionError: [^.]*: let sizes, ranges"
        " and indices of Python follow from the settings alone$",
    ),
    "NumPy of the state": (
        (
            "    moves = ~state.done &",
            "    np.asarray(action)\n    moves = ~state.done &",
        ),
        r"step fails: line \d+: TracerArrayConversionError: .*: write jnp for np$",
    ),
    "a shape by the state": (
        ("jnp.zeros(1, jnp.int32), 1 + shown", "shown[state.coins], 1 + shown"),
        r"observe fails: line \d+: NonConcreteBooleanIndexError: .*: keep the shape",
    ),
    "a state that is not a pytree": (
        ("@struct.dataclass", "@dataclasses.dataclass"),
        "reset fails: .* is not a valid JAX type: return arrays, or a"
        " flax.struct.dataclass of arrays$",
    ),
    "arguments in another order": (
        ("    key: jax.Array, state: State, action", "    state: State, key, action"),
        r"step fails: line \d+: AttributeError: .*: fix it$",
    ),
    "another type": (
        ("(coins=coins, player=player,", "(coins=coins, player=player * 0.5,"),
        r"step turns State.player from int32\[\] into float32\[\]: let it keep",
    ),
    "a hash of floats": (
        ("base.content_hash(is_coin, player)", "base.content_hash(player / 9)"),
        r"reset fails: line \d+: TypeError: content_hash takes integers and"
        r" bools, not float32\[\]: hash what the agent is shown",
    ),
    "another length": (
        ("1 + shown])", "1 + shown, 1 + shown])"),
        r"observe gives int32\[17\]: make it int32\[9\], as observation_phrases = 9",
    ),
    "a value kept outside": (
        (
            "    moves = ~state.done &",
            "    last = step.__dict__.setdefault('last', state.player)\n"
            "    state = state.replace(player=last)\n    moves = ~state.done &",
        ),
        "step reads what a function has stored outside the State, as in a global"
        " list: keep all that is computed in the State$",
    ),
    "a call that is not for batches": (
        (
            "    moves = ~state.done &",
            "    jax.pure_callback(lambda x: x, state.player, state.player)\n"
            "    moves = ~state.done &",
        ),
        r"step fails: line \d+: NotImplementedError: vmap is only supported for the"
        " pure_callback primitive when vmap_method is one of .*: fix it$",
    ),
    "no outcome": (
        ("done=done), outcome", "done=done), {}"),
        r"step gives \(State, dict\): let it return \(State, base.Outcome\)",
    ),
    "the five of Gymnasium": (
        ("done=done), outcome", "done=done), gain, done, done, {}"),
        r"step gives \(State, float32\[\], bool\[\], bool\[\], dict\): let it return"
        r" \(State, base.Outcome\)",
    ),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(landmarks=lambda state: state.player),
            r"landmarks gives int32\[\]: make",
        ),
        (
            dict(landmarks=lambda state: state.nothing),
            "landmarks fails: AttributeError",
        ),
        (
            dict(read_action=lambda text, length, state: length * 0.5, answer_bytes=8),
            r"read_action gives float32\[\]: make it int32\[\]",
        ),
        (
            dict(rule=lambda state: state.player > 3),
            r"rule gives bool\[\]: make it int",
        ),
        (
            dict(demonstrate=lambda key, state: state.player, reply_phrases=("Left",)),
            r"demonstrate gives int32\[\]: make it int32\[n\]",
        ),
        (
            dict(longest_observation=lambda lengths: None),
            "longest_observation gives No",
        ),
        (
            dict(longest_observation=lambda lengths: 30.0),
            "gives 30.0: make it a whole number above 0, of Python or NumPy",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_functions_that_an_environment_may_have_are_looked_at_too(
    write, changes, message
):
    env = envs.make(name := write(SOUND), ())
    with pytest.raises(SettingsError, match=message) as e:
        envs.check_file(dataclasses.replace(env, **changes), name)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("part", ["instruction", "action_names", "phrases"])
def test_half_a_character_in_a_text_is_shown_where_it_stands(write, part):
    env = envs.make(name := write(SOUND), ())
    text = "Le\ud800"
    changed = text if part == "instruction" else (text, *getattr(env, part)[1:])
    said = rf"^env.name = 'my_env.py': {part} holds '\\ud800' in 'Le\\ud800', half of"
    with pytest.raises(SettingsError, match=said):
        envs.check_file(dataclasses.replace(env, **{part: changed}), name)


def test_half_a_character_in_an_action_name_of_a_file_is_shown_where_it_stands(write):
    """It is read when the environment is made, before it is looked at."""
    changed = SOUND.replace('("Left", ', '("\\ud800", ')
    name = write(changed)
    with pytest.raises(SettingsError, match=r"instruction holds '\\ud800' in"):
        envs.check_file(envs.make(name, ()), name)


@pytest.mark.parametrize("case", FAULTY)
def test_functions_that_break_their_promise_are_refused_before_compiling(write, case):
    (old, new), message = FAULTY[case]
    assert old in SOUND
    env = envs.make(name := write(SOUND.replace(old, new)), ())
    with pytest.raises(SettingsError, match=f"^env.name = 'my_env.py': {message}") as e:
        envs.check_file(env, name)
    assert "\n" not in str(e.value)


def test_functions_that_keep_their_promise_pass(write):
    envs.check_file(envs.make(name := write(SOUND), ()), name)
