"""Environments by name and by file: values of `env.name`, and sentences on others."""

import jax
import pytest
from helpers import runs

from ragen_jax import envs
from ragen_jax.envs.frozen_lake.env import FrozenLake
from ragen_jax.errors import SettingsError

COIN_WALK = runs.ROOT / "docs" / "examples" / "coin_walk.py"
SOUND = COIN_WALK.read_text()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes my_env.py into the current directory."""
    monkeypatch.chdir(tmp_path)

    def write_file(text, name="my_env.py"):
        (tmp_path / name).write_text(text)
        return name

    return write_file


def test_a_name_leads_to_the_settings_and_the_maker_of_an_environment():
    settings, maker = envs.lookup("frozen_lake")
    assert settings is FrozenLake
    assert maker(FrozenLake(size=3)).observation_phrases == 10


@pytest.mark.parametrize("name", envs.NAMES)
def test_every_name_leads_to_an_environment_of_that_name(name):
    env = envs.make(name, ())
    assert env.name == name
    assert env.picture is not None


def test_a_path_leads_to_the_environment_of_the_file(write):
    name = write(SOUND)
    settings, _ = envs.lookup(name)
    assert settings().length == 8
    env = envs.make(f"./{name}", [("length", 12), ("step_cost", 0)])
    assert (env.name, env.observation_phrases) == ("coin_walk", 13)


@pytest.mark.parametrize(
    "change",
    [
        ("class Settings", "class Options"),
        ("def make(", "def made("),
        ("length: int = 8", "length: list = 8"),
        ("return base.Environment(", "return dict("),
    ],
)
def test_a_file_in_a_mix_is_refused_under_the_key_that_names_it(write, change):
    name = write(SOUND.replace(*change))
    with pytest.raises(SettingsError, match=r"^env\.mix\.walk\.name = 'my_env.py'"):
        envs.make(name, (), "env.mix.walk.")


def test_a_file_is_executed_once_and_again_after_a_change(write, tmp_path):
    name = write(SOUND)
    first = envs.lookup(name)
    assert envs.lookup(str(tmp_path / name)) == first
    write(SOUND.replace("length: int = 8", "length: int = 15"))
    assert envs.lookup(name)[0]().length == 15


def test_a_files_dataclasses_are_pytrees_that_jax_compiles(write):
    env = envs.make(write(SOUND), ())
    state = jax.jit(env.reset)(jax.random.key(0), 0)
    assert int(state.coins.sum()) == 3


WRONG = {
    "unknown": (
        "frozen_lak",
        None,
        r"'frozen_lak' is not an environment.*: did you mean frozen_",
    ),
    "strange": (
        "zzz",
        None,
        "is not an environment, .* end in .py: choose one of .*frozen_lake",
    ),
    "missing": (
        "no.py",
        None,
        r"'no.py': there is no such file in /.*: choose the path",
    ),
    "suffix": ("./my_env.txt", "", "choose a file that ends in .py"),
    "syntax": (
        "my_env.py",
        "a = 1\nb = (",
        "cannot be imported: line 2: .*: fix it$",
    ),
    "name": (
        "my_env.py",
        "\nx = y\n",
        "line 2: NameError: name 'y' is not defined: fix",
    ),
    "module": ("my_env.py", "import nothing_there", "line 1: ModuleNotFoundError"),
    "settings": ("my_env.py", "x = 1", "defines no Settings: add a frozen dataclass"),
    "class": ("my_env.py", "class Settings: pass", "defines no Settings"),
    "env": (
        "my_env.py",
        SOUND.replace("def make(", "def an_environment("),
        r"has no function make: add make\(settings\)",
    ),
    "thawed": (
        "my_env.py",
        SOUND.replace("(frozen=True)", ""),
        r"Settings is mutable: write @dataclasses.dataclass\(frozen=True\)",
    ),
    "type": (
        "my_env.py",
        SOUND.replace("length: int = 8", "length: dict = 8"),
        r"Settings.length is a dict, which a config cannot hold: choose int, float,"
        r" bool, str or tuple\[str, ...\]$",
    ),
    "numbers": (
        "my_env.py",
        SOUND.replace("length: int = 8", "length: tuple[int, ...] = (8,)"),
        r"Settings.length is a tuple\[int, ...\], which a config cannot hold: choose",
    ),
    "text": (
        "my_env.py",
        "from __future__ import annotations\n" + SOUND,
        "Settings.length has its type as a text, 'int': write it without quotes",
    ),
    "taken": (
        "my_env.py",
        SOUND.replace("length: int = 8", "label: str = 'a'\n    length: int = 8"),
        "Settings.label has a name that is reserved in the config, like ",
    ),
    "instruction": (
        "my_env.py",
        SOUND.replace("length: int = 8", "instruction: str = 'a'\n    length: int = 8"),
        "Settings.instruction has a name that is reserved in the config, like ",
    ),
    "note": (
        "my_env.py",
        SOUND.replace("length: int = 8", "note: str = 'a'\n    length: int = 8"),
        "Settings.note has a name that is reserved in the config, like ",
    ),
    "exits": (
        "my_env.py",
        SOUND.replace("return base.Environment(", "raise SystemExit(0)\n    dict("),
        r"make\(settings\) fails: line .*SystemExit: 0: fix it",
    ),
    "default": (
        "my_env.py",
        SOUND.replace("length: int = 8", "length: int"),
        "Settings.length has no default: add one",
    ),
    "result": (
        "my_env.py",
        SOUND.replace("return base.Environment(", "return dict("),
        "its function make returns dict: let it return a"
        " ragen_jax.envs.base.Environment",
    ),
    "value": (
        "my_env.py",
        SOUND.replace("length: int = 8", "length: int = 99").replace(
            "coin_walk.length", "my_env.length"
        ),
        "^env.length = 99: choose a number from 8 to 20",
    ),
    "actions": (
        "my_env.py",
        SOUND.replace('("Left", "Right")', '("Left", "left")'),
        "action name 'Left' is repeated",
    ),
    "fault": (
        "my_env.py",
        SOUND.replace("coins = settings.length,", "coins = settings.size,"),
        "my_env.py.: make.settings. fails: line 43: AttributeError: .*: fix it$",
    ),
    "a list": (
        "my_env.py",
        SOUND.replace('("Left", "Right")', '["Left", "Right"]'),
        "action_names has to be a tuple of texts",
    ),
    "no text": (
        "my_env.py",
        SOUND.replace('phrases=("State:', 'phrases=(7, "State:'),
        "phrases has to be a tuple of texts",
    ),
    "no actions": (
        "my_env.py",
        SOUND.replace('("Left", "Right")', "()"),
        "has no action_names: add one",
    ),
    "example": (
        "my_env.py",
        SOUND.replace("example_actions=ACTION_NAMES", 'example_actions=("Jump",)'),
        r"example_actions holds \['Jump'\], .* choose from Left, Right",
    ),
    "no example": (
        "my_env.py",
        SOUND.replace("example_actions=ACTION_NAMES", "example_actions=()"),
        "example_actions is empty: name one or two",
    ),
    "a comma too many": (
        "my_env.py",
        SOUND.replace("in few steps. Actions: {', '.join(ACTION_NAMES)}.\"\n", '."\n,'),
        r"'coin_walk': instruction is \('You walk .*: make it a text that is not empty",
    ),
    "a name that is none": (
        "my_env.py",
        SOUND.replace('name="coin_walk"', "name=None"),
        "name is None: make it a text",
    ),
    "half a phrase": (
        "my_env.py",
        SOUND.replace(
            "observation_phrases=1 + length", "observation_phrases=length / 2"
        ),
        "observation_phrases is 4.0: make it a whole number of 1 or more",
    ),
    "a function called": (
        "my_env.py",
        SOUND.replace("picture=picture", "picture=COLOURS"),
        "picture is of type ndarray: make it a function",
    ),
    "a default of another type": (
        "my_env.py",
        SOUND.replace("length: int = 8", "length: int = 8.0"),
        "Settings.length has the default 8.0, which is of another type: choose a whole",
    ),
    "settings that refuse themselves": (
        "my_env.py",
        SOUND.replace(
            "    coins: int = 3\n",
            "    coins: int = 3\n    def __post_init__(self): raise ValueError(7)\n",
        ),
        r"Settings fails: line \d+: ValueError: 7: fix it",
    ),
    "limit": (
        "my_env.py",
        SOUND.replace('phrases=("State:', 'phrases=65_536 * ("a",) + ("State:'),
        r"has \d+ phrases; between 1 and 65536 are possible: build observations from",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_environment_that_cannot_be_made_is_refused_in_one_sentence(write, case):
    name, text, message = WRONG[case]
    if text is not None:
        write(text, name.removeprefix("./"))
    with pytest.raises(SettingsError, match=message) as found:
        envs.make(name, ())
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("file", "said", "read"),
    [
        ("walk.py", "coin_walk.length = 9", "coin_walk.length = 9"),
        ("s.py", "s.length = 9: a walk takes 8 cells.", "env.length = 9: {}"),
        ("e.py", "e.length = 9: choose one.two = 3", "env.length = 9: {}"),
    ],
)
def test_a_message_names_the_section_in_place_of_the_file_and_is_left_alone_else(
    write, file, said, read
):
    sentence = 'f"coin_walk.length = {length}: choose a number from 8 to 20"'
    assert sentence in SOUND
    name = write(SOUND.replace(sentence, repr(said)), file)
    with pytest.raises(SettingsError) as found:
        envs.make(name, [("length", 99)])
    assert str(found.value) == read.format(said.partition(": ")[2])


def test_settings_are_read_from_texts_by_their_types():
    texts = ("size=5", "success_probability=1", "symbols=a,b,c,d,e,f", "observation=5")
    assert envs.parse_options("frozen_lake", texts) == (
        ("observation", "5"),
        ("size", 5),
        ("success_probability", 1),
        ("symbols", tuple("abcdef")),
    )
    assert envs.parse_options("frozen_lake", ["size=x"]) == (("size", "x"),)


@pytest.mark.parametrize(
    "text", ["a,(,'", " a, ( ,'", "('a','(',\"'\")", "['a', '(', \"'\"]"]
)
def test_texts_of_a_tuple_lie_between_commas_or_are_written_as_in_python(text):
    options = envs.parse_options("frozen_lake", [f"symbols={text}"])
    assert options == (("symbols", ("a", "(", "'")),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size", "'size' sets nothing: write KEY=VALUE, as in size=4"),
        ("size=4.5", "env.size = 4.5 cannot be used: choose a whole number"),
        ("symbols=('P','.','O'", r"symbols = \('P','.','O' cannot be used: write a,b"),
        ("symbols=(P,O,G)", "with each text in quotes"),
        ("symbols=('P', 1)", "with each text in quotes"),
        ("siz=4", "unknown key env.siz = '4': did you mean env.size"),
    ],
)
def test_a_text_that_sets_nothing_is_refused(text, message):
    with pytest.raises(SettingsError, match=message):
        envs.make("frozen_lake", envs.parse_options("frozen_lake", [text]))


def test_a_setting_of_another_environment_is_refused_by_the_environments_name():
    options = [("frozen_probability", 0.9), ("size", 6)]
    with pytest.raises(SettingsError) as caught:
        envs.make("sokoban", options)
    message = str(caught.value)
    assert message.startswith("env.name = 'sokoban': unknown key env.frozen_probab")
    assert message.endswith("or a config made for 'sokoban'")


def test_a_text_may_be_true_or_false(write):
    name = write(
        SOUND.replace("coins: int = 3", "coins: int = 3\n    loud: bool = True")
    )
    for text, value in (("loud=false", False), ("loud=True", True), ("loud=1", "1")):
        assert envs.parse_options(name, [text]) == (("loud", value),)
