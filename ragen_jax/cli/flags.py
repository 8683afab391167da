"""The command line: absl's flags, and a config whose keys they override."""

import ast
import contextlib
import difflib
import functools
import importlib.util
import inspect
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, FrozenConfigDict, config_dict, config_flags

from ragen_jax import settings as settings_lib
from ragen_jax.cli import environment_keys, flag_files, help_text
from ragen_jax.errors import SettingsError, UserError
from ragen_jax.settings import Settings

# Flags defined here belong, in --help, to the script that asks for them.
flags.disclaim_key_flags()

_EXAMPLE = "configs/frozenlake.py"
_HELP = ("--help", "-help", "-h", "-?", "--helpshort", "--helpfull")
_VERSION = ("--version", "-version")
# Of each command line that was parsed, the last one counts (tests parse several): the
# value of --config, and the leaves of that file by dotted key, before overrides.
_CONFIG_PATHS: list[str] = []
_FILE_LEAVES: list[dict[str, Any]] = []
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def define_config(
    default: str | None = None, flag_values: flags.FlagValues = flags.FLAGS
) -> flags.FlagHolder:
    """Gives the script a --config; within `main`, `.value` is the ConfigDict.

    Args:
      default: FILE or FILE:VARIANT; None: the user has to name one.
      flag_values: where to define it.
    """
    return flags.DEFINE_string(
        "config", default, "FILE[:VARIANT], the config.", flag_values=flag_values
    )


def config_path() -> str:
    """FILE[:VARIANT] as the user gave it."""
    return _CONFIG_PATHS[-1]


def read_settings(config: ConfigDict) -> Settings:
    """The checked Settings of a config. Raises SettingsError."""
    return settings_lib.from_dict(config.to_dict())


def changed_keys(config: ConfigDict) -> list[str]:
    """The dotted keys whose values are not those of the file that --config names."""
    now = settings_lib.flatten(config.to_dict())
    return [key for key, value in now.items() if value != _FILE_LEAVES[-1].get(key)]


def keys_set() -> tuple[str, ...]:
    """The dotted keys that the command line sets by --config.KEY."""
    matches = _arguments_like(r"--?(?:no)?config\.([^=]*)")
    return tuple(match[1] for match in matches)


def chooses_config() -> bool:
    """Whether the command line has --config, even with the default value."""
    return bool(_arguments_like(r"--?config(=|$)"))


def names_config() -> bool:
    """Whether the command line has --config, or sets a key by --config.KEY."""
    return bool(_arguments_like(r"--?(no)?config\b"))


def _arguments_like(pattern: str) -> list[re.Match]:
    arguments = flags.FLAGS.read_flags_from_files(sys.argv[1:], force_gnu=False)
    return [match for each in arguments if (match := re.match(pattern, each))]


def refuse_unread(unread: Iterable[str], *, beside: str = "", alone: str = "") -> None:
    """Raises UserError if a flag is given that would have no effect.

    Args:
      unread: flags.
      beside: the one that, if it is set, leaves them unread.
      alone: or the one that does so unless it is set.
    """
    other = beside or alone
    if bool(flags.FLAGS[other].value) != bool(beside):
        return
    how = f"with --{other}: leave one" if beside else f"without --{other}: leave it"
    for name in unread:
        if flags.FLAGS[name].present:
            raise UserError(f"--{name} has no effect {how} out")


def parse(arguments: list[str], flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Parses a command line into the flags, --config and its overrides among them.

    Args:
      arguments: the program's name, then its arguments.
      flag_values: where the script's flags are defined.

    Raises:
      UserError: for an argument or a config that cannot be used.
      SystemExit: after a request for help or the version.
    """
    flag_files.check(arguments[1:])
    try:
        arguments = flag_values.read_flags_from_files(arguments, force_gnu=False)
    except flags.Error as error:
        raise UserError(f"check the path of --flagfile: {one_line(error)}") from None
    if set(arguments[1:]) & set(_VERSION):
        print(help_text.version())
        sys.exit(0)
    takes_config = "config" in flag_values
    path = flag_values["config"].default if takes_config else None
    if takes_config:
        path, arguments = _take_config(arguments, path)
    if asked := set(arguments[1:]) & set(_HELP):
        config = load_config(path) if path else None
        help_text.show(
            config, path or _EXAMPLE, flag_values, full="--helpfull" in asked
        )
        sys.exit(0)
    config = None
    if takes_config:
        if not path:
            raise UserError(f"--config is missing: pass --config={_EXAMPLE}")
        config = load_config(path)
        _CONFIG_PATHS.append(path)
        _FILE_LEAVES.append(settings_lib.flatten(config.to_dict()))
        _check_overrides(arguments, config)
        # From here on the flag's value is the ConfigDict instead of its path.
        delattr(flag_values, "config")
        config_flags.DEFINE_config_dict(
            "config", config, flag_values=flag_values, sys_argv=arguments
        )
    _parse_flags(arguments, flag_values, config)


def load_config(path_and_variant: str) -> ConfigDict:
    """The config of a Python file: what its get_config returns, locked.

    Args:
      path_and_variant: "FILE" or "FILE:VARIANT".

    Raises:
      UserError: if there is no such file, function or variant, if the file is not
        Python or its function returns no ConfigDict. Another mistake within the file
        keeps its traceback.
    """
    path, *variant = path_and_variant.split(":", 1)
    # A shell leaves the ~ of --config=~/mine.py to the program.
    if path.startswith("~"):
        path = os.path.expanduser(path)
    if not Path(path).is_file():
        raise UserError(
            f"--config={path_and_variant}: there is no file {path!r} in {os.getcwd()}:"
            f" pass --config={_EXAMPLE}, or the path of your own config"
        )
    config = _get_config(path_and_variant, path, *variant)
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"--config={path_and_variant}: get_config of {path} returns"
            f" {type(config).__name__}: let it return a ConfigDict, as {_EXAMPLE} does"
        )
    if isinstance(config, FrozenConfigDict):
        config = ConfigDict(config)
    try:
        config.to_dict()
    except config_dict.RequiredValueError as error:
        raise UserError(
            f"--config={path_and_variant}: a required_placeholder in it has no value:"
            " give it one in the file"
        ) from error
    return config.lock()


def _get_config(path_and_variant: str, path: str, *variant: str) -> Any:
    """What get_config of the file at `path` returns. Raises UserError."""
    spec = importlib.util.spec_from_file_location("config", path)
    if spec is None:
        raise UserError(f"--config={path_and_variant}: choose a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(
            f"--config={path_and_variant}: {error.filename or path} is not Python from"
            f" line {error.lineno or 1} on ({error.msg}): fix that line"
        ) from None
    except ValueError as error:
        raise UserError(f"--config={path_and_variant}: {one_line(error)}") from error
    except SystemExit:
        raise _exits(path_and_variant) from None
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise UserError(
            f"--config={path_and_variant}: {path} has no function get_config: add one,"
            f" as {_EXAMPLE} does"
        )
    signature = inspect.signature(get_config)
    if variant and not signature.parameters:
        raise UserError(
            f"--config={path_and_variant}: {path} has no variants: pass --config={path}"
        )
    try:
        signature.bind(*variant)
    except TypeError as error:
        raise UserError(
            f"--config={path_and_variant}: get_config of {path} cannot be called with"
            f" {'a variant' if variant else 'nothing'} ({error}): give its parameters"
            " defaults, as the configs of the package do"
        ) from None
    try:
        return get_config(*variant)
    except ValueError as error:
        raise UserError(f"--config={path_and_variant}: {one_line(error)}") from error
    except SystemExit:
        raise _exits(path_and_variant) from None


def _exits(config: str) -> UserError:
    """The error of a config file that calls sys.exit, which would end the command."""
    return UserError(f"--config={config} exits: raise a ValueError with the reason")


def _take_config(
    arguments: list[str], path: str | None
) -> tuple[str | None, list[str]]:
    """The last value of --config, or else `path`, and the arguments without it."""
    others = []
    remaining = iter(arguments)
    for argument in remaining:
        if re.fullmatch("--?config", argument):
            path = next(remaining, None)
        elif match := re.fullmatch("--?config=(.*)", argument):
            path = match[1]
        else:
            others.append(argument)
    return path, others


def _check_overrides(arguments: list[str], config: ConfigDict) -> None:
    """Checks overridden keys; adds those that an environment has and the file omits.

    Raises:
      SettingsError: for an override of a key that cannot be set.
    """
    leaves = settings_lib.flatten(config.to_dict())
    overrides = list(_overrides(arguments))
    if any(key.startswith("env.") and key not in leaves for _, key, _ in overrides):
        names = {key: value for _, key, value in overrides if key.endswith(".name")}
        leaves |= {key: name for key, name in names.items() if key in leaves}
        unnamed = environment_keys.unnamed(leaves)
        for _, key, _ in overrides:
            if key in unnamed:
                environment_keys.add(config, key, unnamed[key])
        leaves |= unnamed
    for argument, key, value in overrides:
        if key in leaves:
            _check_texts(key, value, leaves[key])
            continue
        inner = [leaf for leaf in leaves if leaf.startswith(f"{key}.")]
        if inner:
            raise SettingsError(
                f"--config.{key}={value}: {key} is a section: set its keys one by one,"
                f" as in --config.{inner[0]}={leaves[inner[0]]}"
            )
        is_env = key.startswith("env.")
        advise = environment_keys.advice if is_env else settings_lib.nearest
        raise SettingsError(f"unknown key {key} in {argument}: {advise(key, leaves)}")


def _check_texts(key: str, value: str, default: Any) -> None:
    """Refuses P,_,O for a tuple of texts, which absl would take for a single text."""
    if not isinstance(default, tuple):
        return
    with contextlib.suppress(ValueError, SyntaxError):
        if isinstance(ast.literal_eval(value), tuple | list):
            return
    raise SettingsError(
        f"{key} = {value!r} cannot be used: choose texts in quotes and parentheses, as"
        f' in --config.{key}="{default or ("a", "b")}"'
    )


def _overrides(arguments: list[str]) -> Iterator[tuple[str, str, str]]:
    """Arguments that set a key of the config: as written, the key, and the value."""
    for argument, after in itertools.pairwise([*arguments[1:], ""]):
        match = re.fullmatch(
            r"--?(?:no)?config\.([^=]*)(?:=(.*))?", argument, re.DOTALL
        )
        if match is not None:
            next_word = "" if after.startswith("-") else after
            yield argument, match[1], next_word if match[2] is None else match[2]


def _parse_flags(
    arguments: list[str], flag_values: flags.FlagValues, config: ConfigDict | None
) -> None:
    """Lets absl parse the arguments; its complaints become UserErrors with a remedy."""
    for argument, after in itertools.pairwise([*arguments[1:], ""]):
        given = argument if "=" in argument else f"{argument} {after}"
        # absl accepts 0x10 and the like; here that is more likely a slip.
        if match := re.fullmatch(r"--?([\w.-]+)[= ]([+-]?0[xob]\w+)", given, re.I):
            flag = flag_values[match[1]] if match[1] in flag_values else None
            if flag is not None and isinstance(flag.parser, flags.IntegerParser):
                raise UserError(f"{given}: write the number in decimal digits")
    try:
        positional = flag_values(arguments)[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(flag_values), 2)
        remedy = f"did you mean {' or '.join(f'--{name}' for name in near)}?"
        raise UserError(
            f"unknown flag --{error.flagname}:"
            f" {remedy if near else '--help lists the flags'}"
        ) from None
    except flags.Error as error:
        message = one_line(error)
        wrong = re.match(r"flag --config\.([\w.]+)=(.*?): ", message)
        if wrong is None or config is None:
            raise UserError(f"{message}; --help lists the flags") from None
        key, value = wrong[1], wrong[2]
        *section, leaf = key.split(".")
        parent = functools.reduce(lambda part, name: part[name], section, config)
        kind = parent.get_type(leaf)
        remedy = _KINDS.get(kind, f"a {kind.__name__}")
        raise SettingsError(
            f"{key} = {value!r} cannot be used: choose {remedy}"
        ) from None
    except ValueError as error:  # Of --noKEY=VALUE, which has no class of absl's.
        raise UserError(
            f"{one_line(error)}: write --KEY=VALUE, or --noKEY without a value"
        ) from None
    if positional:
        raise UserError(
            f"unexpected argument {positional[0]!r}: write settings as"
            " --config.KEY=VALUE; --help lists the flags"
        )


def one_line(error: Exception) -> str:
    """The error's message without line breaks."""
    return " ".join(str(error).split())
