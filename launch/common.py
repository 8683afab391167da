"""What every launch script shares: flags, the config, and mistakes told in a sentence.

A script says `_CONFIG = common.define_config()`, defines its other absl flags, writes
`main()`, and ends in `common.run(main)`. A script's folder is the first place where
Python looks, hence plain `import common`.
"""

import contextlib
import dataclasses
import difflib
import importlib.util
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

# Must be set before transformers is imported: it advises to install PyTorch, which
# nothing here needs.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from absl import app, flags, logging  # noqa: E402
from ml_collections import ConfigDict, config_flags

from ragen_jax import distributed
from ragen_jax import settings as settings_lib
from ragen_jax.settings import Settings, SettingsError, UserError

# Flags defined here belong, in --help, to the script that asks for them.
flags.disclaim_key_flags()

_EXAMPLE = "configs/frozenlake.py"
_HELP = ("--help", "-help", "-h", "-?", "--helpshort", "--helpfull")
_GIVEN: list[str] = []  # the values of --config, which its flag does not keep
_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
_OVERRIDING = """\
--config=FILE[:VARIANT] names a Python file with get_config(variant). Each of its keys
is overridden by --config.KEY=VALUE; one that is true or false also by --config.KEY
or --noconfig.KEY. What is None is decided by algorithm and estimator."""


def define_config(
    default: str | None = None, flag_values: flags.FlagValues = flags.FLAGS
) -> flags.FlagHolder:
    """Gives the script a --config; within `main`, `.value` is the ConfigDict.

    Args:
      default: FILE or FILE:VARIANT; None: the user has to name one.
      flag_values: where to define it.
    """
    return flags.DEFINE_string(
        "config", default, "FILE[:VARIANT], a config.", flag_values=flag_values
    )


def run(main: Callable[[], None]) -> None:
    """Parses the command line and calls `main`; does not return.

    A mistake of the user (UserError), at any time, ends the process with `error: ...`
    in one sentence and exit code 2; an interrupt with exit code 130; anything else with
    its traceback.
    """

    def parser(arguments: list[str]) -> None:
        with _ending_in_one_sentence():
            parse(arguments)

    def call(_: None) -> None:
        # Orbax and JAX tell every step of a save; only their warnings are for users.
        logging.set_verbosity(logging.WARNING)
        with _ending_in_one_sentence():
            enable_compilation_cache()
            main()

    app.run(call, flags_parser=parser)


_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.")
_PROCESSES = flags.DEFINE_integer("processes", None, "Processes of the run.")
_PROCESS = flags.DEFINE_integer("process", None, "Which of them this is, from 0.")


def start_jax(deterministic: bool) -> None:
    """Joins the run's processes, with the XLA flags that its settings ask for.

    Args:
      deterministic: only operations that give the same numbers in every run; GPU.
    """
    if deterministic:
        flag = "--xla_gpu_exclude_nondeterministic_ops=true"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    distributed.start(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)


def use_every_core(settings: Settings) -> None:
    """Makes each CPU core a device of its own, where the settings can share them.

    A rollout's many small operations keep one core busy; shards on two devices keep
    two. Says nothing to GPUs and TPUs. XLA_FLAGS and JAX_NUM_CPU_DEVICES win.
    """
    import jax

    forced = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if forced or "JAX_NUM_CPU_DEVICES" in os.environ or _COORDINATOR.value:
        return
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available else os.cpu_count() or 1
    for count in range(cores, 0, -1):
        with contextlib.suppress(SettingsError):
            settings_lib.check_devices(settings, count)
            jax.config.update("jax_num_cpu_devices", count)
            return
    # No count fits: `check_devices` says so for the one that JAX finds.


def silence() -> TextIO:
    """A stream that nobody reads: for all processes but the first."""
    return open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)


def find_checkpoint(path: str, model: str | None = None):
    """(checkpoints.Found, the Settings it was saved with) of what --checkpoint names.

    Args:
      path: a workdir or one step's folder.
      model: where the run's model lies now; None: where it lay.

    Raises:
      UserError: if there is none, or none that this version can read.
    """
    from ragen_jax import checkpoints  # Brings JAX, which wrong flags do not wait for.

    found = checkpoints.find(path)
    info = checkpoints.read_info(found.directory, found.step)
    try:
        settings = settings_lib.from_dict(info["settings"])
    except (KeyError, ValueError) as error:
        raise UserError(
            f"{found.directory / str(found.step)} was saved with settings that this"
            f" version cannot read ({error}): use it with the version that trained it"
        ) from None
    return found, with_model(settings, model)


def with_model(settings: Settings, path: str | None) -> Settings:
    """The settings with another `model.path`; None leaves it."""
    if path is None:
        return settings
    chosen = dataclasses.replace(settings.model, path=path)
    return dataclasses.replace(settings, model=chosen)


def config_path() -> str:
    """FILE[:VARIANT] as the user gave it."""
    return _GIVEN[-1]


def read_settings(config: ConfigDict) -> Settings:
    """The checked Settings of a config. Raises SettingsError."""
    return settings_lib.from_dict(config.to_dict())


def parse(arguments: list[str], flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Parses a command line into the flags, --config and its overrides among them.

    Args:
      arguments: the program's name, then its arguments.
      flag_values: where the script's flags are defined.

    Raises:
      UserError: for an argument or a config that cannot be used.
      SystemExit: after a request for help.
    """
    try:
        arguments = flag_values.read_flags_from_files(arguments, force_gnu=False)
    except flags.Error as error:
        raise UserError(f"check the path of --flagfile: {_one_line(error)}") from None
    takes_config = "config" in flag_values
    path = flag_values["config"].default if takes_config else None
    if takes_config:
        path, arguments = _take_config(arguments, path)
    if asked := set(arguments[1:]) & set(_HELP):
        if hasattr(signal, "SIGPIPE"):  # `--help | head` ends as `cat | head` does.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        _print_help(path, "--helpfull" in asked, flag_values)
        sys.exit(0)
    config = None
    if takes_config:
        if not path:
            raise UserError(f"--config is missing: pass --config={_EXAMPLE}")
        config = load_config(path)
        _GIVEN.append(path)
        _check_overrides(arguments, config)
        # The path has served; from here on the flag is the config that it led to.
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
    if not Path(path).is_file():
        raise UserError(
            f"--config={path_and_variant}: there is no file {path!r} in {os.getcwd()}:"
            f" pass --config={_EXAMPLE}, or the path of a config of yours"
        )
    spec = importlib.util.spec_from_file_location("config", path)
    if spec is None:
        raise UserError(f"--config={path_and_variant}: choose a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(
            f"--config={path_and_variant}: {error.filename} is not Python from line"
            f" {error.lineno} on ({error.msg}): mend that line"
        ) from None
    get_config = getattr(module, "get_config", None)
    if get_config is None:
        raise UserError(
            f"--config={path_and_variant}: {path} has no function get_config: add one,"
            f" as {_EXAMPLE} does"
        )
    if variant and not inspect.signature(get_config).parameters:
        raise UserError(
            f"--config={path_and_variant}: {path} has no variants: pass --config={path}"
        )
    try:
        config = get_config(*variant)
    except ValueError as error:
        raise UserError(f"--config={path_and_variant}: {_one_line(error)}") from error
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"--config={path_and_variant}: get_config of {path} returns"
            f" {type(config).__name__}: let it return a ConfigDict, as {_EXAMPLE} does"
        )
    return config.lock()


@contextlib.contextmanager
def user_mistakes() -> Iterator[None]:
    """Within it a ValueError or an OSError is told as the user's mistake.

    For checks of settings and for opening files before training starts. Not for
    training itself, where such an error is a fault whose traceback is wanted.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(_one_line(error)) from error


def make_workdir(path: str | None) -> Path:
    """Makes the run's folder if it is not there, and checks that it can be written to.

    Raises:
      UserError: if no path was given, or nothing can be written there.
    """
    if not path:
        raise UserError("--workdir is missing: pass --workdir=runs/NAME")
    workdir = Path(path).expanduser().absolute()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / f".writable.{os.getpid()}").touch()
        (workdir / f".writable.{os.getpid()}").unlink()
    except OSError as error:
        raise UserError(
            f"--workdir={path} cannot be written to ({error.strerror}): choose a folder"
            " of yours on a disk with room"
        ) from error
    return workdir


def enable_compilation_cache() -> None:
    """Keeps compiled programs on disk, so that the next run starts at once.

    In ~/.cache/ragen_jax/jax, unless JAX_COMPILATION_CACHE_DIR names another folder;
    JAX_ENABLE_COMPILATION_CACHE=false switches it off. What JAX's own variables say
    wins.
    """
    import jax  # Slow to import, and the first errors should not wait for it.

    if not jax.config.jax_compilation_cache_dir:
        folder = Path.home() / ".cache" / "ragen_jax" / "jax"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@contextlib.contextmanager
def _ending_in_one_sentence() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


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
    """Raises SettingsError for an override of a key that the config does not have."""
    leaves = settings_lib.flatten(config.to_dict())
    for argument in arguments[1:]:
        match = re.fullmatch(
            r"--?(?:no)?config\.([^=]*)(?:=(.*))?", argument, re.DOTALL
        )
        if match is None or match[1] in leaves:
            continue
        key, value = match[1], match[2] or ""
        inner = [leaf for leaf in leaves if leaf.startswith(f"{key}.")]
        if inner:
            raise SettingsError(
                f"--config.{key}={value}: {key} is a section: set its keys one by one,"
                f" as in --config.{inner[0]}={leaves[inner[0]]}"
            )
        raise SettingsError(
            f"unknown key {key} in {argument}: {settings_lib.nearest(key, leaves)}"
        )


def _parse_flags(
    arguments: list[str], flag_values: flags.FlagValues, config: ConfigDict | None
) -> None:
    """Lets absl parse the arguments; its complaints become UserErrors with a remedy."""
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
        message = _one_line(error)
        wrong = re.match(r"flag --config\.([\w.]+)=(.*?): ", message)
        if wrong is None or config is None:
            raise UserError(f"{message}; --help lists the flags") from None
        key, value = wrong[1], wrong[2]
        *section, leaf = key.split(".")
        kind = (config[section[0]] if section else config).get_type(leaf)
        remedy = _KINDS.get(kind, f"a {kind.__name__}")
        raise SettingsError(
            f"{key} = {value!r} cannot be used: choose {remedy}"
        ) from None
    if positional:
        raise UserError(
            f"unexpected argument {positional[0]!r}: write settings as"
            " --config.KEY=VALUE; --help lists the flags"
        )


def _print_help(path: str | None, full: bool, flag_values: flags.FlagValues) -> None:
    """Prints what the script does, its flags, and the config's keys and values."""
    print((sys.modules["__main__"].__doc__ or "").strip())
    print("\nFlags:")
    print(flag_values.get_help() if full else flag_values.main_module_help())
    if "config" not in flag_values:
        return
    print(f"\n{_OVERRIDING}")
    if not path:
        print(f"With --config={_EXAMPLE} --help lists that config's keys too.")
        return
    print(f"\nKeys and values of {path}:")
    for key, value in sorted(settings_lib.flatten(load_config(path).to_dict()).items()):
        print(f"  --config.{key}={value}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
