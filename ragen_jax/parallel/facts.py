"""What the processes of a run must have in common, compared at the roll call."""

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path

import ragen_jax
from ragen_jax import settings as settings_lib
from ragen_jax.errors import SettingsError
from ragen_jax.settings import Settings
from ragen_jax.utils import user_modules

_MAY_DIFFER = ("model.path",)  # model files are compared by digest instead

# transformers and tokenizers cut texts into tokens.
_LIBRARIES = (
    "jax",
    "jaxlib",
    "orbax-checkpoint",
    "numpy",
    "transformers",
    "tokenizers",
)


def of_run(settings: Settings) -> dict[str, str]:
    """Settings by dotted key, and the versions of all code that runs, as texts.

    Code: this package, its main libraries, and the user's own Python files.
    """
    leaves = settings_lib.flatten(settings_lib.to_dict(settings))
    facts = {
        key: json.dumps(value)
        for key, value in leaves.items()
        if key not in _MAY_DIFFER
    }
    facts["the code of ragen_jax"] = code_version()
    for package in _LIBRARIES:
        facts[f"the version of {package}"] = importlib.metadata.version(package)
    for name in settings.files():
        with contextlib.suppress(SettingsError, OSError):  # Reported when it is loaded.
            path = user_modules.resolved(name)
            if path.is_file():
                facts[f"the file {name}"] = user_modules.digest(path)[:16]
    return facts


def code_version() -> str:
    """A digest of this package's files."""
    folder, digest = Path(ragen_jax.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def difference(process: int, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """A sentence about how a process's facts differ from process 0's, or ""."""
    differences = [
        f"{key} is {theirs.get(key, 'absent')} there and {ours.get(key, 'absent')} here"
        for key in sorted({*theirs, *ours})
        if theirs.get(key) != ours.get(key)
    ]
    if not differences:
        return ""
    more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
    return (
        f"process {process} was started for another run than process 0:"
        f" {'; '.join(differences[:3])}{more}: start all of them with the same"
        " settings, code and model"
    )
