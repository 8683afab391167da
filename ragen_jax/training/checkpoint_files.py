"""A folder of checkpoints on disk: its steps, their records and digests, and damage.

No array is read here. Whatever a folder holds, damaged or half copied, is either read
or reported in one sentence.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ragen_jax.errors import UserError
from ragen_jax.training import checkpoint_records
from ragen_jax.training.checkpoint_scores import best
from ragen_jax.utils import atomic_files, json_files

FOLDER = "checkpoints"  # inside a workdir
FORMAT = "ragen_jax checkpoint, version 2"
_FORMAT_WITHOUT_DIGESTS = "ragen_jax checkpoint, version 1"
INFO = Path("info") / "info.json"
DIGESTS = "digests.json"
STATE = "state"
DAMAGED = ".damaged"  # suffix of a damaged step that was set aside
_DELETING = ".deleting"  # suffix of a step that is being deleted
UNFINISHED = ".orbax-checkpoint-tmp"  # in a folder's name until Orbax has finished it
# Files that Orbax writes after the digests; nothing is read from them.
_NOT_DIGESTED = ("_CHECKPOINT_METADATA", "commit_success.txt")
# Errors of a file that is not there.
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_PIECE = 1 << 22  # bytes read at a time
_READERS = 4  # threads; zlib.crc32 releases the GIL


class DamagedError(UserError):
    """A checkpoint that cannot be used, though an older one may be whole."""


class UnreadableError(UserError):
    """A checkpoint that this machine cannot read now, though it may be whole."""


class Found(NamedTuple):
    """A checkpoint on disk: the folder of steps, the step, and why this step."""

    directory: Path
    step: int
    which: str  # "best" or "last" of its run, or "given" when the path named the step

    @property
    def workdir(self) -> Path:
        """The run's folder; that of the steps, where they lie in no run's."""
        is_of_run = self.directory.name == FOLDER
        return self.directory.parent if is_of_run else self.directory


class Survey(NamedTuple):
    """What a folder of checkpoints holds, as far as names, sizes and records say."""

    scores: dict[int, float | None]  # of the whole steps, in order
    damaged: dict[int, str]  # steps that are not whole, each with the reason
    foreign: list[str]  # names that look like a step's but are not


def scores(directory: str | Path) -> dict[int, float | None]:
    """The whole steps in a folder of steps, in order, each with its score."""
    return survey(directory).scores


def survey(directory: str | Path) -> Survey:
    """Looks at every step of a folder, without reading its arrays.

    Raises:
      UnreadableError: if one cannot be read, and so may be whole.
    """
    result = Survey({}, {}, [])
    steps = []
    for path in Path(directory).glob("*"):
        if (number := step_of(path)) is not None and path.is_dir():
            steps.append((number, path))
        # `lexists`: a running training may have deleted it just now.
        elif _is_like_a_number(path.name) and os.path.lexists(path):
            result.foreign.append(path.name)
    for step, path in sorted(steps):
        try:
            record = read_record(path)
            _check_sizes(path, record)
        except UserError as error:
            if path.exists():  # Else it was deleted just now.
                if isinstance(error, UnreadableError):
                    raise
                result.damaged[step] = str(error)
        else:
            result.scores[step] = record["score"]
    return result


def find(path: str | Path) -> Found:
    """The checkpoint that a path means.

    Args:
      path: a workdir or its folder of checkpoints (the best step by validation
        success, or the last one where none has been evaluated), or one step's folder.

    Raises:
      UserError: when there is no such path, no checkpoint of ragen_jax in it, or one
        that is damaged, which could have been the best.
    """
    # Not resolved: `checkpoints` may be a link, and its run is where the link is.
    path = Path(os.path.abspath(Path(path).expanduser()))
    if not path.is_dir():
        raise UserError(
            f"there is no folder {path}; give the workdir of a run, or a step's folder"
            f" such as WORKDIR/{FOLDER}/100"
        )
    if (given := step_of(path)) is not None and (path / INFO).exists():
        read_record(path)
        return Found(path.parent, given, "given")
    directory = path / FOLDER if (path / FOLDER).is_dir() else path
    step_scores, damaged, _ = survey(directory)
    for sentence in damaged.values():
        others = ", ".join(f"{directory / str(step)}" for step in step_scores)
        others = f"; whole are {others}" if others else ""
        raise DamagedError(f"{sentence}{others}")
    if (step := best(step_scores)) is not None:
        return Found(directory, step, "best")
    if step_scores:
        return Found(directory, max(step_scores), "last")
    raise UserError(
        f"{path} holds no complete ragen_jax checkpoint; give the workdir of a run that"
        " has saved one (every.checkpoint says how often), or a step's folder; to"
        " launch/evaluate.py a model's folder is --model"
    )


def step_of(path: Path) -> int | None:
    """The step that a folder's name means; None for any other name."""
    if re.fullmatch("0|[1-9][0-9]{0,9}", path.name) and int(path.name) < 2**31:
        return int(path.name)
    return None


def read_info(directory: str | Path, step: int) -> dict[str, Any]:
    """The `info` that was saved with a step; restores no array."""
    return read_record(Path(directory) / str(step))["info"]


def read_record(folder: Path) -> dict[str, Any]:
    """What a step's info.json holds: format, step, score and info.

    Raises:
      UserError: if there is no such folder.
      DamagedError: if that file is not there, or not as it was written.
      UnreadableError: if it cannot be read.
    """
    if not folder.is_dir():
        # By names alone: `survey` calls this function.
        numbers = (step_of(path) for path in folder.parent.glob("*"))
        steps = sorted(step for step in numbers if step is not None)
        raise UserError(
            f"There is no checkpoint {folder}; the steps in {folder.parent} are"
            f" {', '.join(map(str, steps)) or 'none'}."
        )
    record = _read_json(folder / INFO)
    has_format = isinstance(record, dict) and record.get("format") in (
        FORMAT,
        _FORMAT_WITHOUT_DIGESTS,
    )
    if not has_format:
        raise DamagedError(
            f"{folder} is not a ragen_jax checkpoint (no {INFO} that says"
            f" '{FORMAT}'); delete that folder, or give a workdir or a step's folder of"
            " this program."
        )
    if problem := checkpoint_records.problem(record):
        raise damage(folder, str(INFO), problem)
    if record.get("step") != step_of(folder):
        raise DamagedError(
            f"Checkpoint {folder} was saved as step {record.get('step')!r}: give the"
            " folder that name again, or delete it."
        )
    if record["format"] == FORMAT:
        digest = read_digests(folder).get(str(INFO))
        if digest is None:
            raise damage(folder, DIGESTS, f"lacks {INFO}")
        if problem := _problem(folder, str(INFO), digest):
            raise damage(folder, str(INFO), problem)
    return record


def is_there(folder: Path) -> bool:
    """Whether a step was written to its end: the digests come last."""
    return (folder / DIGESTS).is_file()


def delete(folder: Path) -> None:
    """Deletes a step. If interrupted, it leaves nothing that looks like a step."""
    doomed = folder.with_name(folder.name + _DELETING)
    atomic_files.remove(doomed)
    with contextlib.suppress(FileNotFoundError):  # Deleted by hand already.
        os.rename(folder, doomed)
    atomic_files.remove(doomed)


def set_aside(directory: Path) -> dict[int, Path]:
    """The folders of damaged steps that were given another name, by step."""
    steps = ((step_of(path.with_suffix("")), path) for path in directory.glob("*"))
    return {
        step: path
        for step, path in steps
        if step is not None and path.suffix == DAMAGED
    }


def clear_leftovers(directory: Path) -> None:
    """Deletes what was being written or deleted in a folder of steps."""
    for path in directory.iterdir():
        if UNFINISHED in path.name or path.name.endswith(_DELETING):
            atomic_files.remove(path)


def has_digests(folder: Path) -> bool:
    """Whether a step was written with digests: older ones were not."""
    return read_record(folder)["format"] == FORMAT


def damage(folder: Path, name: str, problem: str) -> DamagedError:
    """The sentence about a damaged file of a step."""
    leaf = leaf_of(name)
    what = f"{leaf} ({name})" if leaf else name
    return DamagedError(
        f"Checkpoint {folder} is damaged: {what} {problem}; delete that folder and use"
        " another step."
    )


# Digests -----------------------------------------------------------------------------


def write_digests(folder: Path) -> None:
    """Writes size and checksum of every file of a step; to be called last.

    All of the step is on disk then: an older one may be deleted.
    """
    names = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name not in _NOT_DIGESTED
    )
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        measured = pool.map(lambda name: _measure(folder / name, sync=True), names)
        digests = dict(zip(names, measured, strict=True))
    with (folder / DIGESTS).open("w", encoding="utf-8") as file:
        json.dump({"crc32": digests}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for path in (folder, *filter(Path.is_dir, folder.rglob("*"))):
        atomic_files.sync_folder(path)


def read_digests(folder: Path) -> dict[str, tuple[int, str]]:
    """(bytes, checksum) of each file of a step, by its path within the folder.

    Raises:
      DamagedError: if they are not there, or not as they were written.
      UnreadableError: if they cannot be read.
    """
    written = _read_json(folder / DIGESTS)
    if (digests := checkpoint_records.digests(written)) is None:
        raise damage(folder, DIGESTS, "is missing or is not as it was written")
    return digests


def fingerprint(folder: Path) -> str:
    """Equal for copies of one step; "" where it has no digests."""
    path = folder / DIGESTS
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def leaf_of(name: str) -> str:
    """The leaf of the state that a file belongs to; "" if to no single one."""
    first, *rest = Path(name).parts
    inner = rest[:-1]
    shared = not inner or inner[0] in ("array_metadatas", "d")
    return "" if first != STATE or shared else "/".join(inner)


def damaged_file(
    folder: Path,
    leaves: Collection[str] | None = None,
    is_mine: Callable[[int], bool] = lambda number: True,
) -> tuple[str, str] | None:
    """The first file of a step that is not as it was written, and what is wrong.

    Args:
      folder: of a step with digests.
      leaves: the leaves that are going to be read; None: all.
      is_mine: which files to read, by their number in alphabetical order.
    """
    digests = read_digests(folder)
    names = [
        name
        for number, name in enumerate(sorted(digests))
        if is_mine(number)
        and (leaves is None or not leaf_of(name) or leaf_of(name) in leaves)
    ]
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        problems = pool.map(lambda name: _problem(folder, name, digests[name]), names)
        pairs = zip(names, problems, strict=True)
        return next(((name, problem) for name, problem in pairs if problem), None)


def _is_like_a_number(name: str) -> bool:
    """Whether a name has digits and no letters: 007, 4.5, or other scripts' digits."""
    return any(c.isdigit() for c in name) and not any(c.isalpha() for c in name)


def _check_sizes(folder: Path, record: Mapping[str, Any]) -> None:
    """Raises DamagedError for a file that is not there or has another size."""
    if record["format"] != FORMAT:
        if not (folder / STATE).is_dir():
            raise damage(folder, STATE, "is missing")
        return
    for name, (size, _) in read_digests(folder).items():
        if problem := _size_problem(folder / name, size):
            raise damage(folder, name, problem)


def _problem(folder: Path, name: str, digest: tuple[int, str]) -> str:
    """What is wrong with a file; "" if it is as it was written."""
    path, (size, checksum) = folder / name, digest
    if problem := _size_problem(path, size):
        return problem
    try:
        _, actual = _measure(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return "" if actual == checksum else "has another content than was written"


def _size_problem(path: Path, size: int) -> str:
    try:
        found = path.stat()
    except (*_ABSENT, ValueError):  # Or its name has a null character.
        return "is missing"
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return "is missing"
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        return "is missing"
    if found.st_size != size:
        return f"has {found.st_size} bytes of the {size} that were written"
    return ""


def _unreadable(path: Path, error: OSError) -> UnreadableError:
    """For an error that says nothing of what was written."""
    return UnreadableError(
        f"{path} cannot be read ({error.strerror}), so it is not known whether this"
        " checkpoint is whole: let this host read it, or delete the step's folder"
        " to use another step"
    )


def _measure(path: Path, *, sync: bool = False) -> tuple[int, str]:
    """(bytes, CRC-32) of a file; detects damage, not forgery. `sync`: to disk."""
    size = checksum = 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while piece := file.read(_PIECE):
            size += len(piece)
            checksum = zlib.crc32(piece, checksum)
    return size, f"{checksum:08x}"


def _read_json(path: Path) -> Any:
    """What a file holds; None if it is not there, or is no JSON of a usual size."""
    try:
        return json_files.read(path)
    except (*_ABSENT, ValueError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
