"""The text of --help: what a script does, its flags, and the config's settings.

flags.py prints it. A script, or a module that defines flags for several scripts, calls
`group` to give some of its flags a heading of their own.
"""

import contextlib
import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from absl import flags
from ml_collections import ConfigDict

import ragen_jax
from ragen_jax import settings as settings_lib
from ragen_jax.cli import environment_keys
from ragen_jax.errors import SettingsError
from ragen_jax.settings.meanings import MEANINGS, SECTIONS

_GROUPS: dict[str, tuple[str, ...]] = {}  # By heading: names of flags.
_OVERRIDING = """\
--config=FILE[:VARIANT] names a Python file with get_config(variant). Override a setting
by --config.KEY=VALUE; one that is true or false also by --config.KEY or --noconfig.KEY.
"""
_PRESETS = """\
A setting that is None takes the value that the algorithm or the estimator prescribes.
"""


def group(heading: str, *names: str) -> None:
    """Lists these flags under a heading, in this order, after the script's others."""
    _GROUPS[heading] = names


def version() -> str:
    """The versions that a report of a fault needs: ragen_jax, jax, Python."""
    jax = importlib.metadata.version("jax")  # Without the second that importing takes.
    python = platform.python_version()
    return f"ragen_jax {ragen_jax.__version__}, jax {jax}, python {python}"


def flag_list(flag_values: flags.FlagValues, *, full: bool = False) -> str:
    """The script's flags, with a heading for each group.

    Args:
      flag_values: where they are defined.
      full: list also the flags of libraries, as absl does for --helpfull.
    """
    if full:
        return f"Flags:\n{flag_values.get_help()}"
    _, *blocks = re.split(
        r"^(?=  --)", flag_values.main_module_help(), flags=re.MULTILINE
    )
    by_name = {_name(block): block.rstrip() for block in blocks}
    groups = []
    for heading, names in _GROUPS.items():
        grouped = [by_name.pop(name) for name in names if name in by_name]
        if grouped:
            groups.append("\n".join([f"{heading}:", *grouped]))
    return "\n\n".join(["\n".join(["Flags:", *by_name.values()]), *groups])


def _name(block: str) -> str:
    """The flag's name, from "  --name: help" or "  --[no]name: help"."""
    match = re.match(r"  --(?:\[no\])?([\w.-]+)", block)
    assert match is not None  # `flag_list` splits the text before "  --".
    return match[1]


def settings_list(config: ConfigDict, path: str) -> str:
    """Every setting of a config with its value and meaning, under its section.

    Settings of a training run are in the order of the config files in configs/; a
    script with a config of its own has other keys: first those outside any section,
    then all by alphabet.

    Args:
      config: from `path`.
      path: as the user wrote it.
    """
    from ragen_jax.envs.registry import option_meanings

    leaves = settings_lib.flatten(config.to_dict())
    with contextlib.suppress(SettingsError):  # A name that is wrong is shown as it is.
        leaves |= environment_keys.unnamed(leaves)
    is_run = leaves.keys() >= {"algorithm", "estimator"}
    meanings = {}
    if is_run:
        meanings = MEANINGS | option_meanings(str(leaves.get("env.name")), "env.")
    order = {key: place for place, key in enumerate(meanings)}
    keys = sorted(leaves, key=lambda k: (order.get(k, len(order)), "." in k, k))
    by_section: dict[str, list[str]] = {name: [] for name in SECTIONS if is_run}
    for key in keys:
        section = key.rpartition(".")[0].split(".")[0]
        by_section.setdefault(section, []).append(key)
    lines = [_OVERRIDING + (_PRESETS if is_run else "")]
    lines.append(f"The settings of {path}:")
    for section, section_keys in by_section.items():
        if section_keys:
            purpose = SECTIONS[section] if is_run and section in SECTIONS else ""
            lines += ["", *_section(section, purpose, section_keys, leaves, meanings)]
    return "\n".join(lines)


def _section(
    name: str,
    purpose: str,
    keys: list[str],
    leaves: Mapping[str, Any],
    meanings: Mapping[str, str],
) -> Iterator[str]:
    """The lines of one section: a heading, then each key with its meaning."""
    heading = ": ".join(filter(None, [name, purpose]))
    if heading:
        yield heading
    for key in keys:
        yield f"  --config.{key}={leaves[key]}"
        if key in meanings:
            yield f"      {meanings[key]}"


def show(config: ConfigDict | None, path: str, flag_values, *, full: bool) -> None:
    """Prints what the script does, its flags, and the settings of its config.

    Args:
      config: from `path`; None: the script takes none, or none was named.
      path: of the config, or of one to name in an example.
      flag_values: where the script's flags are defined.
      full: list also the flags of libraries.
    """
    print((sys.modules["__main__"].__doc__ or "").strip(), end="\n\n")
    print(flag_list(flag_values, full=full))
    if "config" not in flag_values:
        return
    if config is None:
        print(f"\n{_OVERRIDING}{_PRESETS}")
        print(f"Add --config={path} to list the settings of that config here.")
        return
    print(f"\n{settings_list(config, path)}")
