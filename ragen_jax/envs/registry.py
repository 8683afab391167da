"""Environments by name: the built-in ones, and those that users write in a file."""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import re
import textwrap
import tokenize
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ragen_jax.envs import traced_checks, wording
from ragen_jax.envs.base import Environment, check_environment
from ragen_jax.errors import SettingsError
from ragen_jax.settings import (
    TEXTS,
    EnvironmentSettings,
    TaskSettings,
    env_settings,
    nearest,
    type_remedy,
)
from ragen_jax.utils import user_modules

Maker = Callable[[Any], Environment]  # takes the environment's own frozen settings

# Name -> (module, its class of settings). Each module has a function `make`, and is
# imported only when its environment is asked for.
_BUILT_IN = {
    "frozen_lake": ("frozen_lake.env", "FrozenLake"),
    "bandit": ("bandit.env", "Bandit"),
    "countdown": ("countdown.env", "Countdown"),
    "sokoban": ("sokoban.env", "Sokoban"),
    "sudoku": ("sudoku.env", "Sudoku"),
    "2048": ("game_2048", "Game2048"),
    "rubik": ("rubik.env", "Rubik"),
    "webshop": ("webshop.env", "WebShop"),
    "math": ("math_problems.env", "Math"),
    "household": ("household.env", "Household"),
    "search_qa": ("search_qa.env", "SearchQA"),
}
NAMES = tuple(_BUILT_IN)
_FIELD_TYPES = (int, float, bool, str)  # of settings, beside tuple[str, ...]
# Keys that the sections `env`, `env.mix` and `env.evaluate` use themselves, so that no
# setting of an environment can have one of these names.
_RESERVED = {
    field.name
    for section in (EnvironmentSettings, TaskSettings)
    for field in dataclasses.fields(section)
}


def make(
    name: str, options: Iterable[tuple[str, Any]], section: str = "env."
) -> Environment:
    """Reads and checks an environment's settings, and makes the environment.

    Args:
      name: see `lookup`.
      options: (key, value) pairs; other settings keep their defaults. The texts
        `instruction` and `note` (settings.TEXTS) are options of every environment.
      section: what precedes the keys in the config, ending in a dot; for messages.

    Raises:
      SettingsError: in one sentence, for a name, key or value that cannot be used.
    """
    key = f"{section}name"
    settings_type, maker = lookup(name, key)
    given = dict(options)
    texts = {key: given.pop(key) for key in TEXTS if key in given}
    wording.check(texts, section)
    try:
        settings = env_settings(given.items(), settings_type, section, name)
    except SettingsError:
        raise
    except Exception as error:  # From a __post_init__ of the settings.
        raise _failed(error, name, "Settings", key) from error
    try:
        with user_modules.warn_if_slow(f"{key} = {name!r}: make(settings)"):
            env = maker(settings)
        if isinstance(env, Environment):
            check_environment(env)
            return wording.reworded(env, texts)
    except ValueError as error:
        # The environment says frozen_lake.size where the config's key is env.size.
        own_keys = rf"\b{re.escape(Path(name).stem)}\.(?=[A-Za-z_])"
        raise SettingsError(re.sub(own_keys, lambda _: section, str(error))) from error
    except (Exception, SystemExit) as error:  # Also if the user's file calls exit().
        if not user_modules.is_path(name):
            raise
        raise _failed(error, name, "make(settings)", key) from error
    raise SettingsError(
        f"{key} = {name!r}: its function make returns {type(env).__name__}: let it"
        " return a ragen_jax.envs.base.Environment"
    )


def check_file(env: Environment, name: str, key: str = "env.name") -> None:
    """Traces the functions of a user's environment, before anything is compiled.

    Built-in environments are skipped: their tests cover this.

    Args:
      env: made by `make`.
      name: see `lookup`.
      key: the config's key that names the environment; for messages.

    Raises:
      SettingsError: in one sentence, if a function fails or returns something else than
        `base.Environment` says.
    """
    if not user_modules.is_path(name):
        return
    try:
        with user_modules.warn_if_slow(f"{key} = {name!r}: tracing the functions"):
            traced_checks.check_functions(env)
    except traced_checks.InterfaceError as error:
        raise SettingsError(f"{key} = {name!r}: {error}") from error
    except traced_checks.FunctionError as error:
        assert error.__cause__ is not None
        raise _failed(error.__cause__, name, error.part, key) from error


def _failed(error: BaseException, name: str, what: str, key: str) -> SettingsError:
    """Turns an exception raised by a user's file into an error of one sentence."""
    line = user_modules.in_one_line(error, user_modules.resolved(name))
    return SettingsError(f"{key} = {name!r}: {what} fails: {line}")


def lookup(name: str, key: str = "env.name") -> tuple[type, Maker]:
    """The class of settings and the function `make` of an environment.

    Args:
      name: one of NAMES, or the path of a Python file ("my_env.py") that defines a
        frozen dataclass `Settings` and a function `make(settings) -> Environment`.
      key: the config's key that names the environment; for messages.

    Raises:
      SettingsError: if there is no such environment, or the file defines none.
    """
    if user_modules.is_path(name):
        return _from_file(name, key)
    if name not in _BUILT_IN:
        raise SettingsError(
            f"{key} = {name!r} is not an environment, and a file of yours would end"
            f" in .py: {nearest(name, NAMES)}"
        )
    module_name, settings = _BUILT_IN[name]
    module = importlib.import_module(f"ragen_jax.envs.{module_name}")
    return getattr(module, settings), module.make


def parse_options(name: str, texts: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """Parses texts KEY=VALUE into the `options` of `make`.

    Args:
      name: see `lookup`.
      texts: a value is read by its field's type. A tuple of texts is written a,b or
        as in Python, ('a', 'b').

    Raises:
      SettingsError: if there is no such environment, or a text has another form.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(lookup(name)[0])}
    options = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            raise SettingsError(f"{text!r} sets nothing: write KEY=VALUE, as in size=4")
        options[key] = _parse(key, value, kinds.get(key, str))
    return tuple(sorted(options.items()))


def option_meanings(name: str, section: str) -> dict[str, str]:
    """The comments beside an environment's settings, by their key; for --help.

    Args:
      name: for `lookup`; there are none for a name that it refuses, such as "mix".
      section: put before each key, with a dot at its end.
    """
    try:
        source = textwrap.dedent(inspect.getsource(lookup(name)[0]))
    except (SettingsError, OSError):
        return {}
    lines, comments = source.splitlines(), _comments(source)
    meanings = {}
    for field in ast.parse(source).body[0].body:
        if not isinstance(field, ast.AnnAssign):
            continue
        first = field.lineno
        while lines[first - 2].lstrip().startswith("#"):
            first -= 1
        # Those above, and beside the field's first and last line.
        numbers = sorted({*range(first, field.lineno + 1), field.end_lineno})
        if texts := [comments[number] for number in numbers if number in comments]:
            meanings[section + ast.unparse(field.target)] = " ".join(texts)
    return meanings


def _comments(source: str) -> dict[int, str]:
    """The comments of Python code by their line, from 1; a # in a text begins none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokens
        if token.type == tokenize.COMMENT
    }


def _parse(key: str, text: str, kind: Any) -> Any:
    """A text parsed as a field's type; if that fails the text, which `make` refuses."""
    if typing.get_origin(kind) is tuple:
        return _parse_texts(key, text)
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind in (int, float):
        for number in (int, float):
            with contextlib.suppress(ValueError):
                return number(text)
    return text


def _parse_texts(key: str, text: str) -> tuple[str, ...]:
    """A tuple of texts from a,b or ('a', 'b'); without quotes, spaces around go."""
    if not text.startswith(("(", "[", "'", '"')):
        return tuple(part.strip() for part in text.split(","))
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    if isinstance(value, tuple | list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise SettingsError(
        f"{key} = {text} cannot be used: write a,b or, with each text in quotes,"
        " ('a', 'b')"
    )


def _from_file(name: str, key: str) -> tuple[type, Maker]:
    """`lookup` for the path of a Python file."""
    others = f", or one of {', '.join(NAMES)}"
    module = user_modules.load(name, key, others)
    settings, maker = (getattr(module, part, None) for part in ("Settings", "make"))
    if not (isinstance(settings, type) and dataclasses.is_dataclass(settings)):
        raise SettingsError(
            f"{key} = {name!r} defines no Settings: add a frozen dataclass of that"
            " name, as docs/environments.md shows"
        )
    if not callable(maker):
        raise SettingsError(
            f"{key} = {name!r} has no function make: add make(settings), which"
            " returns a ragen_jax.envs.base.Environment, as docs/environments.md shows"
        )
    _check_settings(settings, f"{key} = {name!r}")
    return settings, maker


def _check_settings(settings: type, where: str) -> None:
    """Raises SettingsError unless a config can set every field, or leave it out.

    `where` is the key that names the environment, with its value.
    """
    if not settings.__dataclass_params__.frozen:
        raise SettingsError(
            f"{where}: Settings is mutable: write"
            " @dataclasses.dataclass(frozen=True) above it"
        )
    for field in dataclasses.fields(settings):
        if field.name in _RESERVED:
            raise SettingsError(
                f"{where}: Settings.{field.name} has a name that is"
                f" reserved in the config, like {', '.join(sorted(_RESERVED))}:"
                " rename it"
            )
        is_texts = typing.get_origin(field.type) is tuple
        is_texts &= typing.get_args(field.type) == (str, ...)
        if isinstance(field.type, str):  # By quotes, or for the whole file.
            raise SettingsError(
                f"{where}: Settings.{field.name} has its type as a text,"
                f" {field.type!r}: write it without quotes, and the file without"
                " from __future__ import annotations"
            )
        if field.type not in _FIELD_TYPES and not is_texts:
            # Of list[int] the name would be list.
            is_class = typing.get_origin(field.type) is None
            kind = getattr(field.type, "__name__", "") if is_class else ""
            raise SettingsError(
                f"{where}: Settings.{field.name} is a {kind or field.type}, which"
                " a config cannot hold: choose int, float, bool, str or"
                " tuple[str, ...]"
            )
        if field.default is dataclasses.MISSING:
            raise SettingsError(
                f"{where}: Settings.{field.name} has no default: add one"
            )
        if remedy := type_remedy(field.default, field.type):
            raise SettingsError(
                f"{where}: Settings.{field.name} has the default"
                f" {field.default!r}, which is of another type: choose {remedy}"
            )
