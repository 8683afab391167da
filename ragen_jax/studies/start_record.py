"""What a run was started with, kept in its folder and compared with the study's plan.

A folder is named after its arm, whose changes may have been edited since. So may what
its settings name: an environment or a reward hook of the user's, a model's folder.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragen_jax import settings as settings_lib
from ragen_jax.errors import SettingsError, UserError
from ragen_jax.studies import arm_settings, record_checks
from ragen_jax.studies.definition import PlannedRun
from ragen_jax.training import checkpoint_files
from ragen_jax.utils import atomic_files, user_modules, workdir_files
from ragen_jax.utils.words import listed

FILE = "study_run.json"
_LOOKED_AT = 2**20  # bytes at the beginning, the middle and the end of a weights' file
_SHOWN = 3  # runs that a message names; of more it tells the number


def write(workdir: Path, run: PlannedRun) -> None:
    """Records what a run is started with: arguments, digests of own files and model.

    Raises:
      UserError: for a config that can no longer be used, or an own file that has
        changed since the run began.
      OSError: if it cannot be written.
    """
    check_code({str(workdir): code(workdir)}, "move the folder away to make it again")
    settings = arm_settings.read(run, is_new=False)
    names = [*settings.files(), settings.model.path]
    digests = {name: _digest(name) for name in names}
    known = {name: digest for name, digest in digests.items() if digest}
    # A file that is absent at the moment is still what the run was begun with.
    record = {"arguments": _arguments(run), "code": code(workdir) | known}
    atomic_files.write_text(workdir / FILE, json.dumps(record) + "\n")


def _read(workdir: Path) -> dict[str, Any]:
    """What `write` wrote, or less; an older file is the list of arguments alone."""
    if not (workdir / FILE).is_file():
        return {}
    found = record_checks.read_json(
        workdir / FILE, "the record of a run's start", record_checks.check_start
    )
    return {"arguments": found} if isinstance(found, list) else found


def code(workdir: Path) -> dict[str, str]:
    """Digests of own files and model that a run was begun with; {} if not known.

    Raises:
      UserError: if the record is damaged.
    """
    return _read(workdir).get("code", {}) if has_begun(workdir) else {}


def check(workdir: Path, run: PlannedRun) -> None:
    """Raises UserError if the workdir of a run holds one with other settings."""
    if not has_begun(workdir):
        return
    if record := _read(workdir):
        earlier = record["arguments"]
        gone = [argument for argument in earlier if argument not in _arguments(run)]
        new = [argument for argument in _arguments(run) if argument not in earlier]
        if gone or new:
            raise UserError(
                f"{workdir} was made with {' '.join(gone) or 'less'}, and the study now"
                f" asks for {' '.join(new) or 'less'}: move the folder away to make"
                " the run again"
            )
    if not (workdir / workdir_files.SETTINGS).is_file():
        return
    # Older folders lack that record: compare what the study sets today. And the config
    # that it begins from may have been edited.
    settings = record_checks.read_json(
        workdir / workdir_files.SETTINGS, "a run's settings", record_checks.check_object
    )
    changes = json.loads(json.dumps(dict(run.changes)))  # A tuple is a list there.
    for key, chosen in changes.items():
        value = settings
        for part in key.split("."):
            value = value.get(part, chosen) if isinstance(value, dict) else chosen
        if value != chosen:
            raise UserError(
                f"{workdir} was trained with {key}={value}, and the study now asks for"
                f" {key}={chosen}: move the folder away to make the run again"
            )
    _check_config(settings, workdir, run)


def _check_config(saved: Mapping[str, Any], workdir: Path, run: PlannedRun) -> None:
    """Refuses a run whose config file, which may be the user's own, has other values.

    Raises:
      UserError: naming the first setting that differs.
    """
    now = settings_lib.to_dict(arm_settings.read(run, is_new=False))
    try:
        was = settings_lib.to_dict(settings_lib.from_dict(saved))
    except SettingsError:  # Of another version, which nothing here can compare.
        return
    if changes := settings_lib.differences(was, now):
        raise UserError(
            f"{workdir} was trained with other settings than {run.config} has now:"
            f" {changes[0]}: go back to the saved value, or move the folder away to"
            " make the run again"
        )


def check_code(code_of: Mapping[str, Mapping[str, str]], remedy: str) -> None:
    """Refuses runs of another version of an own file than the one that is there now.

    A file that is no longer there has no other version: its runs still count.

    Args:
      code_of: label of a run -> file's name -> digest when it was trained.
      remedy: how to train such runs again; the message's end, behind "or".

    Raises:
      UserError: naming the first such file and its runs.
    """
    names = dict.fromkeys(name for code in code_of.values() for name in code)
    for name in names:
        now = _digest(name)
        runs = [run for run, code in code_of.items() if code.get(name, now) != now]
        if now and runs:
            were = "was" if len(runs) == 1 else "were"
            raise UserError(
                f"{_few(runs)} {were} trained with another {name} than the one that is"
                f" there now: restore it, or {remedy}"
            )


def _digest(name: str) -> str:
    """Of a Python file or a model's weights; "" where none can be read."""
    path = Path(name).expanduser()
    weights = [path] if path.suffix == ".gguf" else sorted(path.glob("*.safetensors"))
    if not weights:
        return user_modules.digest_if_there(name)
    found = hashlib.sha256()
    with contextlib.suppress(OSError):
        for file in weights:
            found.update(file.name.encode() + _looked_at(file))
        return found.hexdigest()
    return ""


def _looked_at(path: Path) -> bytes:
    """The size and three parts of a file that may be of many GiB."""
    size = path.stat().st_size
    parts = [str(size).encode()]
    with path.open("rb") as file:
        for start in (0, size // 2, max(0, size - _LOOKED_AT)):
            file.seek(start)
            parts.append(file.read(_LOOKED_AT))
    return b"".join(parts)


def _few(runs: Sequence[str]) -> str:
    more = len(runs) - _SHOWN
    return listed([*runs[:_SHOWN], f"{more} more"] if more > 0 else runs)


def has_begun(workdir: Path) -> bool:
    """Whether a workdir holds something of a run that could count or be continued."""
    if (workdir / workdir_files.TEST).is_file():
        return True
    steps = workdir / checkpoint_files.FOLDER
    return steps.is_dir() and any(entry.name.isdecimal() for entry in steps.iterdir())


def _arguments(run: PlannedRun) -> list[str]:
    """The arguments that define a run, of its training and of its diagnosis."""
    return [*run.arguments(), *run.diagnose]
