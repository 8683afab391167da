"""The text of --help: headings of flags and settings."""

import re

import pytest
from absl import flags
from ml_collections import ConfigDict

from ragen_jax import settings as settings_lib
from ragen_jax.cli import help_text
from ragen_jax.cli.flags import load_config
from ragen_jax.settings.meanings import SECTIONS

CONFIG = "configs/frozenlake.py"


def test_every_section_of_settings_has_its_purpose_and_no_other_does():
    keys = [*settings_lib.known_keys(), "env.size"]
    assert set(SECTIONS) == {key.rpartition(".")[0] for key in keys}


def test_settings_stand_under_their_sections_in_the_order_of_the_tree():
    text = help_text.settings_list(load_config(CONFIG), CONFIG)
    _, *sections = text.split("\n\n")[1:]
    assert len(sections) == len(SECTIONS)
    for section, (name, purpose) in zip(sections, SECTIONS.items(), strict=True):
        heading, *lines = section.splitlines()
        assert heading == (f"{name}: {purpose}" if name else purpose)
        keys = [line for line in lines if line.startswith("  --config.")]
        prefix = f"  --config.{name}." if name else "  --config."
        assert keys and all(key.startswith(prefix) for key in keys)
    assert text.index("optimizer.actor_lr") < text.index("optimizer.beta1")


def test_every_setting_of_a_config_is_listed_once():
    config = load_config(CONFIG)
    text = help_text.settings_list(config, CONFIG)
    listed = re.findall(r"^  --config\.([\w.]+)=", text, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(settings_lib.flatten(config.to_dict())) <= set(listed)


def test_the_config_of_another_script_has_its_own_sections_and_no_presets():
    config = ConfigDict(dict(model="tiny", mesh=dict(size=3), bandit=dict(rows=2)))
    text = help_text.settings_list(config, "own.py")
    assert "estimator" not in text and SECTIONS["mesh"] not in text
    assert text.endswith(
        "The settings of own.py:\n\n  --config.model=tiny\n\nbandit\n"
        "  --config.bandit.rows=2\n\nmesh\n  --config.mesh.size=3"
    )


def test_grouped_flags_have_a_heading_and_follow_the_others(monkeypatch):
    monkeypatch.setattr(help_text, "_GROUPS", {})
    help_text.group("The time", "hours", "days")
    help_text.group("Of another script", "absent")
    listed = (
        "--days: the days.\n    (an integer)\n  --hours: the hours.\n  --seed: one."
    )
    whole = f"\nmain.py:\n  --[no]all: all of it.\n    (default: 'false')\n  {listed}"
    monkeypatch.setattr(flags.FlagValues, "main_module_help", lambda _: whole)
    text = help_text.flag_list(flags.FlagValues())
    assert text == (
        "Flags:\n  --[no]all: all of it.\n    (default: 'false')\n  --seed: one.\n\n"
        "The time:\n  --hours: the hours.\n  --days: the days.\n    (an integer)"
    )


@pytest.mark.parametrize("path", [None, CONFIG])
def test_help_names_a_config_to_list_where_none_was_chosen(path, capsys):
    values = flags.FlagValues()
    flags.DEFINE_string("config", None, "the config.", flag_values=values)
    config = load_config(path) if path else None
    help_text.show(config, CONFIG, values, full=False)
    shown = capsys.readouterr().out
    assert (f"Add --config={CONFIG} to list" in shown) == (path is None)
    assert ("--config.seed=" in shown) == (path is not None)
