"""The folder of a run: its settings, and the lock that keeps out a second run."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from ragen_jax import settings as settings_lib
from ragen_jax.diagnostics import episode_log, rollbacks
from ragen_jax.errors import UserError
from ragen_jax.parallel.agreement import who_sees
from ragen_jax.reporting import metrics
from ragen_jax.settings import Settings
from ragen_jax.training import checkpoints, lost_checkpoints
from ragen_jax.utils import atomic_files, folder_lock, json_files, workdir_files

# Files that a run replaces as a whole. Reports and diagnoses are not among them:
# another process may be writing those.
_WRITTEN = (
    workdir_files.SETTINGS,
    metrics.FILE,
    metrics.PICTURE,
    episode_log.FILE,
    rollbacks.FILE,
    workdir_files.TEST,
)
_STORAGE_SECONDS = 10.0  # after which a host sees what another has written


def check_workdir(workdir: Path, settings: Settings) -> None:
    """Refuses a workdir with a run of other settings, and the file system's root.

    A workdir with settings alone is of a run that ended before its first iteration did,
    and may be reused. Not so one with rollbacks: its run went back to the very
    beginning, and resumes from there.

    Raises:
      UserError: naming the keys that differ, or a file that is none or cannot be read;
        or where the run's checkpoints have vanished.
    """
    absolute = os.path.realpath(workdir)  # Unlike `resolve` it accepts circular links.
    if absolute == Path(absolute).anchor:  # The superuser could write there.
        raise UserError(
            f"--workdir={workdir} is the root of the file system, where a run's files"
            " would lie among the machine's; choose a folder below it"
        )
    lost_checkpoints.check_link(workdir / checkpoints.FOLDER)
    _check_files(workdir)
    path = workdir / workdir_files.SETTINGS
    now = settings_lib.to_dict(settings)
    has_rolled_back = (workdir / rollbacks.FILE).exists()
    if path.exists():
        try:
            saved = json_files.read_object(path)
        except ValueError:
            raise UserError(
                f"{path} is not readable as JSON: restore it from a copy (the info.json"
                " of each checkpoint holds the settings too), or give another --workdir"
            ) from None
        found = checkpoints.survey(workdir / checkpoints.FOLDER)
        # Read in any case: a damaged line is named before anything is compiled.
        recorded = metrics.read(workdir)
        if found.scores or has_rolled_back or recorded:
            settings_lib.check_same_run(saved, now, str(workdir))
        rollbacks.check_remedy(workdir, settings)
        noted = rollbacks.read_rollbacks(workdir)
        lost_checkpoints.check(workdir, found, saved, settings, recorded, noted)
    elif has_rolled_back or (workdir / checkpoints.FOLDER).exists():
        what = rollbacks.FILE if has_rolled_back else "checkpoints"
        raise UserError(
            f"{workdir} holds {what} but no {workdir_files.SETTINGS}, so it is not"
            " known what settings a run had there; give another --workdir"
        )


def _check_files(workdir: Path) -> None:
    """Raises UserError for a folder, a pipe or a device where a run writes a file."""
    for name in _WRITTEN:
        if (path := workdir / name).exists() and not path.is_file():
            raise UserError(
                f"{path} is a folder, a pipe or a device, where a run writes a file:"
                " move it away, or choose another --workdir"
            )


@contextlib.contextmanager
def only_run(
    workdir: Path, settings: Settings, report: Callable[[str], None]
) -> Iterator[None]:
    """Within it no other run trains in the workdir. Entered by all processes together.

    Processes that only read, such as an evaluation, need no lock.

    Raises:
      UserError: naming who trains there, or as `check_workdir`, which is called again:
        a run of other settings may have trained there since the first call; or if not
        all processes have the same folder.
    """
    refusal: UserError | None = None
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            try:
                if not stack.enter_context(folder_lock.held(workdir, "trains")):
                    report(
                        f"warning: the file system of {workdir} has no locks: start no"
                        " second run there"
                    )
                check_workdir(workdir, settings)
                atomic_files.clear_scraps(workdir, _WRITTEN)
            except UserError as error:
                refusal = error
        if _anywhere(refusal is not None):
            raise refusal or UserError("process 0 was refused; its output says why")
        _check_seen(workdir)
        yield


def _check_seen(workdir: Path) -> None:
    """Refuses a workdir that is another folder for some of the processes.

    Each writes its parts of a checkpoint there, and process 0 waits for all of them:
    apart they would wait for ever, at the first checkpoint.

    Raises:
      UserError: naming the processes that do not see the folder of process 0.
    """
    if jax.process_count() == 1:
        return
    seen = who_sees(workdir, seconds=_STORAGE_SECONDS)
    # Where process 0 cannot write its mark, it says why when it writes the settings.
    if seen[0] and not seen.all():
        blind = ", ".join(map(str, np.flatnonzero(~seen)))
        raise UserError(
            f"--workdir={workdir} of process {blind} is another folder than that of"
            " process 0: give all of them one folder, on storage that all hosts see"
        )


def check_same_everywhere(fingerprint: Mapping[str, str]) -> None:
    """Refuses processes that have read different models. Called by all together.

    Args:
      fingerprint: of this process's model, from `weights.model_fingerprint`, or from
        `weights.played_fingerprint`.

    Raises:
      UserError: naming the processes whose model differs from that of process 0.
    """
    for what, own in sorted(fingerprint.items()):
        if others := _who_differs(own):
            raise UserError(
                f"process {others} has a model of other {what}"
                " than process 0: copy one model to all hosts, or give all of them one"
                " OWNER/NAME@COMMIT of the hub"
            )


def check_same_texts(mark: str) -> None:
    """Refuses processes whose environments have other texts. Called by all together.

    Args:
      mark: of this process's, from `run.texts_fingerprint`.

    Raises:
      UserError: naming the processes whose texts differ from those of process 0.
    """
    if others := _who_differs(mark):
        raise UserError(
            f"the environments of process {others} have other texts than those of"
            " process 0: let no text depend on the host, or on the order of a set of"
            " strings, which each process has its own of (sort it, or set"
            " PYTHONHASHSEED=0 for all)"
        )


def _who_differs(text: str) -> str:
    """The processes with another text than process 0's, as "1, 3"; or ""."""
    if jax.process_count() == 1:
        return ""
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)
    every = np.asarray(multihost_utils.process_allgather(digest))
    return ", ".join(map(str, np.flatnonzero((every != every[0]).any(axis=1))))


def _anywhere(value: bool) -> bool:
    """Whether it is True in any process."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.process_allgather(np.bool_(value)).any())


def claim_workdir(workdir: Path, settings: Settings) -> None:
    """Writes the settings into the workdir, once all checks are passed."""
    if jax.process_index() == 0:
        text = json.dumps(settings_lib.to_dict(settings), indent=2)
        with atomic_files.new_file(workdir / workdir_files.SETTINGS) as file:
            file.write(text + "\n")
