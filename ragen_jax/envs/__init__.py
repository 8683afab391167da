"""Worlds by name: those that are built in, and files of one's own."""

import contextlib
import dataclasses
import importlib
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ragen_jax import user_code
from ragen_jax.envs.base import World, check_world
from ragen_jax.settings import SettingsError, nearest, world_settings

Maker = Callable[[Any], World]  # takes the world's own frozen settings

# Name -> module and class of settings; a module is imported when its world is asked
# for. Each has a function `world`, its maker.
_BUILT_IN = {
    "frozen_lake": ("frozen_lake", "FrozenLake"),
    "bandit": ("bandit", "Bandit"),
    "countdown": ("countdown", "Countdown"),
    "sokoban": ("sokoban", "Sokoban"),
    "sudoku": ("sudoku", "Sudoku"),
    "2048": ("game_2048", "Game2048"),
    "rubik": ("rubik", "Rubik"),
}
NAMES = tuple(_BUILT_IN)
_TYPES = (int, float, bool, str)


def make(name: str, options: Iterable[tuple[str, Any]], section: str = "env.") -> World:
    """A world with its own settings read and checked.

    Args:
      name: for `lookup`.
      options: pairs of the world's keys and values; its defaults hold for the others.
      section: where they stand in the config, with a dot at its end; for messages.

    Raises:
      SettingsError: in one sentence, for a name, key or value that cannot be used.
    """
    settings, maker = lookup(name)
    chosen = world_settings(options, settings, section)
    try:
        world = maker(chosen)
        if isinstance(world, World):
            check_world(world)
            return world
    except ValueError as error:
        # A world calls its settings by its own name, a config by that of the section.
        own = f"{Path(name).stem}."
        raise SettingsError(str(error).replace(own, section)) from error
    raise SettingsError(
        f"env.name = {name!r}: its function world returns {type(world).__name__}: let"
        " it return a ragen_jax.envs.base.World"
    )


def lookup(name: str) -> tuple[type, Maker]:
    """The settings' class and the maker of a world.

    Args:
      name: one of NAMES, or the path of a Python file ("my_world.py") that defines a
        frozen dataclass `Settings` and a function `world(settings) -> World`.

    Raises:
      SettingsError: if there is no such world or the file defines none.
    """
    if is_path(name):
        return _from_file(name)
    if name not in _BUILT_IN:
        raise SettingsError(
            f"env.name = {name!r} is no world, and a file of yours would end in .py:"
            f" {nearest(name, NAMES)}"
        )
    module_name, settings = _BUILT_IN[name]
    module = importlib.import_module(f"{__name__}.{module_name}")
    return getattr(module, settings), module.world


def parse_options(name: str, texts: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """A world's settings from texts KEY=VALUE, for `make`.

    Args:
      name: for `lookup`.
      texts: a value is read by its field's type; texts in a tuple lie between commas.

    Raises:
      SettingsError: if there is no such world, or a text has another form.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(lookup(name)[0])}
    options = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            raise SettingsError(f"{text!r} sets nothing: write KEY=VALUE, as in size=4")
        options[key] = _parse(value, kinds.get(key, str))
    return tuple(sorted(options.items()))


def _parse(text: str, kind: Any) -> Any:
    """The value that a text means for a field of the type; itself if it means none."""
    if typing.get_origin(kind) is tuple:
        return tuple(text.split(","))
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind in (int, float):
        for number in (int, float):
            with contextlib.suppress(ValueError):
                return number(text)
    return text


def is_path(name: str) -> bool:
    """Whether the name of a world is that of a file."""
    return name.endswith(".py") or "/" in name


def _from_file(name: str) -> tuple[type, Maker]:
    others = f", or one of {', '.join(NAMES)}"
    module = user_code.load(name, "env.name", others)
    settings, maker = (getattr(module, part, None) for part in ("Settings", "world"))
    if not (isinstance(settings, type) and dataclasses.is_dataclass(settings)):
        raise SettingsError(
            f"env.name = {name!r} defines no Settings: add a frozen dataclass of that"
            " name, as docs/environments.md shows"
        )
    if not callable(maker):
        raise SettingsError(
            f"env.name = {name!r} defines no world: add a function world(settings) that"
            " returns a ragen_jax.envs.base.World, as docs/environments.md shows"
        )
    _check_settings(settings, name)
    return settings, maker


def _check_settings(settings: type, name: str) -> None:
    """Raises SettingsError unless a config can hold every field and lacks may stand."""
    if not settings.__dataclass_params__.frozen:
        raise SettingsError(
            f"env.name = {name!r}: Settings can be changed: write"
            " @dataclasses.dataclass(frozen=True) above it"
        )
    for field in dataclasses.fields(settings):
        is_texts = typing.get_origin(field.type) is tuple
        if field.type not in _TYPES and not is_texts:
            raise SettingsError(
                f"env.name = {name!r}: Settings.{field.name} is a {field.type}, which"
                " a config cannot hold: choose int, float, bool, str or"
                " tuple[str, ...], not as a text"
            )
        if field.default is dataclasses.MISSING:
            raise SettingsError(
                f"env.name = {name!r}: Settings.{field.name} has no default: add one"
            )
