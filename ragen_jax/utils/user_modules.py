"""Loads the user's Python files that a config names: environments and reward hooks.

A checkpoint's settings can name files too: `restrict` (cli/trust.py) then allows only
those that the user has vouched for.
"""

import contextlib
import hashlib
import importlib.util
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from ragen_jax.errors import SettingsError, UserError

PATIENCE = 60.0  # seconds until `telling` says what the process waits for
_LOADED: dict[tuple[Path, str], ModuleType] = {}  # by path and digest
# One pair of (the files that may be executed, the message for any other); empty: every
# file may be.
_TRUSTED: list[tuple[frozenset[Path], str]] = []


def is_path(name: str) -> bool:
    """Whether a name in a config is the path of a file."""
    return name.endswith(".py") or "/" in name


def restrict(files: Iterable[Path], why: str) -> None:
    """From now on, `load` executes only these files.

    Args:
      files: resolved paths.
      why: the message of `load` for any other file, with `{name}` for its name.
    """
    _TRUSTED[:] = [(frozenset(files), why)]


def trust_everything() -> None:
    """Undoes `restrict`: every named file may be executed."""
    _TRUSTED.clear()


def resolved(name: str) -> Path:
    """The absolute path of a file that a config names.

    Raises:
      SettingsError: if no file can have that name.
    """
    try:
        return Path(name).expanduser().resolve()
    except (RuntimeError, OSError, ValueError) as error:
        raise SettingsError(f"{name!r} is not the path of a file ({error})") from None


def digest(path: Path) -> str:
    """The SHA-256 of a file, by which a run recognizes it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_if_there(name: str) -> str:
    """The digest of a file that a config names; "" where none can be read."""
    with contextlib.suppress(SettingsError, OSError):
        return digest(resolved(name))
    return ""


def digests(names: Iterable[str]) -> dict[str, str]:
    """The digest of each file, by its name in the config."""
    return {name: digest(resolved(name)) for name in names}


def load(name: str, setting: str, others: str = "") -> ModuleType:
    """Executes a Python file and returns its module; again only if the file changed.

    An unchanged file thus gives the same function objects, which JAX need not compile
    again.

    Args:
      name: path of a Python file.
      setting: the key of the config that names it; for messages.
      others: the alternatives to a file, beginning with a comma; for messages.

    Raises:
      SettingsError: if there is no such file, or it cannot be imported.
    """
    path = resolved(name)
    if not path.is_file():
        raise SettingsError(
            f"{setting} = {name!r}: there is no such file in {Path.cwd()}: choose the"
            f" path of a Python file{others}"
        )
    if path.suffix != ".py":
        raise SettingsError(f"{setting} = {name!r}: choose a file that ends in .py")
    for trusted, why in _TRUSTED:
        if path not in trusted:
            sentence = why.replace("{name}", name)  # A path in it may hold braces.
            raise SettingsError(f"{setting} = {name!r}: {sentence}")
    source = path.read_bytes()
    version = path, hashlib.sha256(source).hexdigest()
    if version in _LOADED:
        return _LOADED[version]
    unique = f"ragen_jax_user_{len(_LOADED)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None  # The file ends in .py.
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # Dataclasses look up the module they are defined in.
    try:
        # Not by the module's loader, which might run an outdated .pyc file instead.
        code = compile(source, path, "exec", dont_inherit=True)
        with warn_if_slow(f"{setting} = {name!r}: executing the file"):
            exec(code, module.__dict__)
    except (Exception, SystemExit) as error:  # sys.exit in the file is an error too.
        del sys.modules[unique]
        raise SettingsError(
            f"{setting} = {name!r} cannot be imported: {in_one_line(error, path)}"
        ) from error
    _LOADED[version] = module
    return module


@contextlib.contextmanager
def refusing_exits() -> Iterator[None]:
    """A context in which a sys.exit is the user's mistake: this package calls none.

    A call of it in a reward hook would else end the command as if all had gone well.

    Raises:
      UserError: in place of SystemExit.
    """
    try:
        yield
    except SystemExit as error:
        frames = traceback.extract_tb(error.__traceback__)
        # `exit()` is a function of Python's own site module.
        own = [frame for frame in frames if "_sitebuiltins" not in frame.filename]
        raise UserError(
            f"{own[-1].filename}, line {own[-1].lineno}, exits ({error.code!r}):"
            " raise an error with the reason there"
        ) from error


@contextlib.contextmanager
def warn_if_slow(what: str) -> Iterator[None]:
    """A context of the user's code, which may loop for ever: stderr tells it once.

    It is not ended, as a file may have much to read or to import.

    Args:
      what: runs in it.
    """

    def tell() -> None:
        # The stream may be closed, as its terminal is gone.
        with contextlib.suppress(OSError, ValueError):
            print(
                f"{what} takes more than {PATIENCE:g} s: if it never ends, interrupt"
                " this command and look for a loop",
                file=sys.stderr,
                flush=True,
            )

    timer = threading.Timer(PATIENCE, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def in_one_line(error: BaseException, path: Path) -> str:
    """An error that code of the file raised, in one line, with its line number.

    It ends with what to do: a remedy for what JAX cannot trace, else "fix it".
    """
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"line {error.lineno}: {error.msg}: fix it"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    where = f"line {lines[-1]}: " if lines else ""
    kind, message = type(error).__name__, " ".join(str(error).split())
    if "not a valid JAX type" in message:
        return f"{where}{kind}: {message}: {_ARRAYS}"
    if cure := _CURES.get(kind):
        # The rest of JAX's message is several sentences of advice and a link.
        message = re.split(r"\. | The error occurred| See https", message)[0]
    return f"{where}{kind}: {message}: {cure or 'fix it'}"


_ARRAYS = "return arrays, or a flax.struct.dataclass of arrays"
_STATIC = "let sizes, ranges and indices of Python follow from the settings alone"
# By the name of the error, so that JAX need not be imported.
_CURES = {
    "TracerBoolConversionError": "choose with jnp.where, not with if, while, and, or",
    "TracerArrayConversionError": "write jnp for np",
    "TracerIntegerConversionError": _STATIC,
    "ConcretizationTypeError": _STATIC,
    "NonConcreteBooleanIndexError": "keep the shape, and choose with jnp.where",
}
