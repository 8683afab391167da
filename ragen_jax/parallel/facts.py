"""What the processes of a run must have in common, compared at the roll call."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
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
# Environment variables that decide what is computed. Not so those of a host's own, and
# any that names a path.
_VARIABLES = re.compile("JAX_.*|NVIDIA_TF32_OVERRIDE")
_OF_A_HOST = re.compile(
    "COORDINATOR|PROCESS|RANK|HOST|NODE|DEVICES|DEVICE_IDS|CACHE|LOG|DUMP|TRACEBACK"
    "|TIMEOUT|DISTRIBUTED|DEBUG|CAPTURED|/"
)
_DEVICE_COUNT = "--xla_force_host_platform_device_count"  # compared by the devices


def of_run(settings: Settings) -> dict[str, str]:
    """Settings by dotted key, and the versions of all code that runs, as texts.

    And the environment variables that change what JAX computes.

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
    return facts | _of_environment()


def _of_environment() -> dict[str, str]:
    """JAX's environment variables and XLA's flags, less what may differ by host."""
    facts = {
        f"the environment variable {name}": value
        for name, value in os.environ.items()
        if _VARIABLES.fullmatch(name) and not _OF_A_HOST.search(f"{name}={value}")
    }
    options = [
        option
        for option in os.environ.get("XLA_FLAGS", "").split()
        if not option.startswith((_DEVICE_COUNT, "--xla_dump")) and "/" not in option
    ]
    if options:
        facts["XLA_FLAGS"] = " ".join(sorted(options))
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
