"""The settings in tables of names, as methods' and other libraries', can be chosen."""

import re

import pytest
from absl import flags as absl_flags
from helpers.paths import ROOT

from ragen_jax import cli
from ragen_jax import settings as settings_lib

SETTING = re.compile(r"`([a-z_.]+=[\w.]+)`")
SHORT = re.compile(r"`([a-z_.]+)`")


def rows(document, heading):
    """The cells of each row of the table under a heading, the table's head left out."""
    text = (ROOT / "docs" / document).read_text().split(f"\n## {heading}\n")[1]
    lines = [line for line in text.split("\n## ")[0].splitlines() if line[:1] == "|"]
    return [[x.strip() for x in line[1:-1].split("|")] for line in lines[2:]]


METHODS = rows("algorithms.md", "By name")
OPTIONS = rows("from_ragen.md", "From TRL and verl")


def read(monkeypatch, *given):
    """The settings of a run with these changes of the first config."""
    monkeypatch.chdir(ROOT)
    values = absl_flags.FlagValues()
    cli.define_config("configs/frozenlake.py", values)
    cli.parse(["train.py", *(f"--config.{change}" for change in given)], values)
    settings = cli.read_settings(values["config"].value)
    return settings, cli.changed_keys(values["config"].value)


@pytest.mark.parametrize("method", METHODS, ids=lambda row: row[0].split(",")[0])
def test_each_method_by_name_is_a_run_whose_settings_all_matter(method, monkeypatch):
    given = SETTING.findall(method[1])
    assert "".join(method[1].split()) == "".join(f"`{one}`" for one in given)
    settings_lib.check_changed(*read(monkeypatch, *given))


def test_the_tables_of_names_hold_every_estimator_and_each_other_librarys_option():
    named = {one for row in METHODS for cell in row for one in re.findall(r"\w+", cell)}
    assert named >= settings_lib.ESTIMATORS.keys() - {"turn_wise_gae"}
    assert len(METHODS) > 10 and len(OPTIONS) > 20
    assert all(len(row) == 4 for row in OPTIONS) and all(len(x) == 3 for x in METHODS)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda row: row[2])
def test_each_setting_beside_another_librarys_option_exists(option, monkeypatch):
    keys = settings_lib.known_keys()
    for span in re.findall(r"`([^`]+)`", option[2]):
        key, _, value = span.partition("=")
        assert key in keys or key in settings_lib.AGGREGATIONS, span
        if value:
            read(monkeypatch, "algorithm=starpo", "estimator=grpo", span)


def test_the_settings_of_a_real_model_are_those_of_its_variants():
    variants = [
        settings_lib.flatten(cli.load_config(f"configs/frozenlake.py{name}").to_dict())
        for name in ("", ":smollm2", ":paper")
    ]
    found = rows("real_models.md", "What changes in the settings?")
    assert len(found) == 10
    for keys, *said, _ in found:
        for values, cell in zip(variants, said, strict=True):
            wanted = " x ".join(_written(values[key]) for key in SHORT.findall(keys))
            assert cell.replace("`", "") == wanted, keys


def _written(value):
    """A setting's value as people write it: 1e-4, 1/3."""
    if not isinstance(value, float):
        return str(value)
    if value == 1 / 3:
        return "1/3"
    return f"{value:.0e}".replace("e-0", "e-") if value < 0.01 else f"{value:g}"
