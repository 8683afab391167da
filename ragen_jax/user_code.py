"""Python files of the user's own, named by path in a config."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from ragen_jax.settings import SettingsError

_LOADED: dict[tuple[Path, int], ModuleType] = {}  # by path and time of change


def load(name: str, setting: str, others: str = "") -> ModuleType:
    """The module of a file, executed once as long as the file stays as it is.

    The same file thus gives the same functions, and what was compiled for them holds.

    Args:
      name: path of a Python file.
      setting: the key of the config that names it; for messages.
      others: what else may be chosen, beginning with a comma; for messages.

    Raises:
      SettingsError: if there is no such file, or it cannot be imported.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        raise SettingsError(
            f"{setting} = {name!r}: there is no such file in {Path.cwd()}: choose the"
            f" path of a Python file{others}"
        )
    if path.suffix != ".py":
        raise SettingsError(f"{setting} = {name!r}: choose a file that ends in .py")
    path = path.resolve()
    version = path, path.stat().st_mtime_ns
    if version in _LOADED:
        return _LOADED[version]
    unique = f"ragen_jax_user_{len(_LOADED)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(unique, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # Dataclasses look their own module up.
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[unique]
        raise SettingsError(
            f"{setting} = {name!r} cannot be imported: {told(error, path)}: mend it"
        ) from error
    _LOADED[version] = module
    return module


def told(error: Exception, path: Path) -> str:
    """An error that code of the file raised, in one line with the file's own line."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    where = f"line {lines[-1]}: " if lines else ""
    message = " ".join(str(error).split())
    return f"{where}{type(error).__name__}: {message}"
