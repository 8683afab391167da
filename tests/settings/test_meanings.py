"""The meanings of settings, as --help prints them."""

import dataclasses
import re

from ragen_jax import envs
from ragen_jax import settings as settings_lib
from ragen_jax.envs.registry import option_meanings
from ragen_jax.settings.meanings import MEANINGS


def test_every_setting_has_a_meaning_and_every_meaning_a_setting():
    assert set(MEANINGS) == set(settings_lib.known_keys())


def test_a_meaning_is_one_short_line_without_a_full_stop():
    for key, meaning in MEANINGS.items():
        assert len(f"      {meaning}") <= 100, key
        assert meaning.strip(" .") == meaning and "\n" not in meaning, key


def _choices(kind=settings_lib.Settings, prefix=""):
    """The names that each leaf may have, of those that have a list."""
    for field in dataclasses.fields(kind):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            yield from _choices(field.type, f"{prefix}{field.name}.")
        elif "limit" in field.metadata:
            remedy = field.metadata["limit"].remedy
            if remedy.startswith("one of "):
                yield prefix + field.name, remedy.removeprefix("one of ").split(", ")


def test_a_meaning_names_every_choice_or_the_page_that_does():
    choices = dict(_choices())
    assert {"health.on_collapse", "optimizer.critic_schedule"} <= set(choices)
    for key, names in choices.items():
        meaning = MEANINGS[key]
        missing = [name for name in names if name not in meaning]
        assert not missing or "docs/algorithms.md" in meaning, (key, missing)


def test_the_comments_beside_an_environments_settings_are_its_meanings():
    meanings = option_meanings("frozen_lake", "env.")
    assert meanings["env.size"] == "S, rows and columns"
    assert meanings["env.symbols"].startswith("Player, ice, hole, goal, player in")
    assert meanings["env.success_probability"].endswith("else at a right angle")
    merging = option_meanings("2048", "")["merge_reward"]
    assert merging.startswith("For merged tiles") and merging.endswith(
        "as `success_reward`."
    )
    assert option_meanings("docs/examples/coin_walk.py", "")["step_cost"] == (
        "cost of each action"
    )


_SETTINGS = """
import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    wall: str = "#"  # what a wall looks like
    # Of the first # player
    symbols: tuple[str, ...] = (
        "P # no comment",
        "Q",  # within
    )  # and the second
    bare: int = 1

    def __post_init__(self):
        # Of a variable.
        count: int = 2
        assert count


def make(settings):
    raise NotImplementedError
"""


def test_a_number_sign_in_a_default_neither_begins_nor_hides_a_meaning(tmp_path):
    path = tmp_path / "hashes.py"
    path.write_text(_SETTINGS)
    assert option_meanings(str(path), "") == {
        "wall": "what a wall looks like",
        "symbols": "Of the first # player and the second",
    }
    assert option_meanings("sokoban", "")["symbols"].startswith("Wall, floor, target")


def test_the_meaning_of_an_environments_setting_names_no_constant_of_the_code():
    for name in envs.NAMES:
        for key, meaning in option_meanings(name, f"{name}.").items():
            assert not re.search(r"\bone of [\w.]*[A-Z]{3}", meaning), (key, meaning)


def test_an_environment_without_a_class_of_settings_has_no_meanings():
    assert "mix" not in envs.NAMES
    assert option_meanings("mix", "env.") == {}
    assert option_meanings("nothing.py", "env.") == {}
