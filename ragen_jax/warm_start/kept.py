"""The model of the last whole stage, kept in a folder until a supervised start is done.

Whatever ends the command after its first stage, the finished stages are then not lost.
"""

import contextlib
import itertools
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ragen_jax.errors import UserError
from ragen_jax.utils import endings, machine_errors
from ragen_jax.warm_start import STAGES

_NEXT = {a: b for stages in STAGES.values() for a, b in itertools.pairwise(stages)}
_NAMES = sorted({name for stages in STAGES.values() for name in stages})


class KeptStages:
    """A folder `OUT.after_STAGE` beside the one that is asked for, OUT.

    Attributes:
      folder: the newest one; None before the first stage is done.
    """

    def __init__(self, out: Path, start: str | None):
        """Looks for folders that an earlier command has left beside `out`.

        Args:
          out: the folder to write in the end; it need not exist.
          start: the model that the stages go on from, which may be such a folder. It
            then is this command's own, and goes when a later stage is whole.

        Raises:
          UserError: if there is another such folder.
          OSError: if no such folder could have its name.
        """
        self._out, self.folder, self._stage = out, None, ""
        # With what `atomic_files.new_folder` adds: the longest name that there will be.
        longest = max(_NAMES, key=len)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            out.with_name(f".{out.name}.after_{longest}_100.{'0' * 8}").stat()
        pattern = re.compile(
            rf"{re.escape(out.name)}\.after_({'|'.join(_NAMES)})(_\d+)?"
        )
        begun = Path(start).expanduser().absolute() if start else None
        for path in sorted(out.parent.iterdir()) if out.parent.is_dir() else ():
            if not (match := pattern.fullmatch(path.name)):
                continue
            if begun and begun.exists() and path.samefile(begun):
                self.folder, self._stage = path, match[1]
                continue
            raise UserError(
                f"{path} is what a command with --out={out} kept of a model after the"
                f" stage {match[1]}: {_remedy(path, match[1])}; or delete it, or give"
                " another --out"
            )

    def keep(self, stage: str, write: Callable[[Path], None]) -> None:
        """Keeps the model as it is after a stage, and no longer that of the one before.

        Args:
          stage: the one that is done.
          write: makes a folder of the model, whole or not at all.
        """
        path = self._out.with_name(f"{self._out.name}.after_{stage}")
        # Another command with the same --out may have come first.
        others = (path.with_name(f"{path.name}_{n}") for n in itertools.count(2))
        path = next(p for p in itertools.chain((path,), others) if not p.exists())
        write(path)
        before, self.folder, self._stage = self.folder, path, stage
        if before is not None:
            with endings.delete_on_exit(before):
                shutil.rmtree(before, ignore_errors=True)

    def finish(self) -> None:
        """Gives the folder of the last stage the name that was asked for.

        Raises:
          UserError: if there is something by now.
        """
        try:
            if self._out.exists():
                self._out.rmdir()  # Only if it is empty.
            os.rename(self.folder, self._out)
        except OSError as error:
            raise UserError(
                f"--out={self._out} cannot be written any more ({error.strerror}):"
                f" the model is whole in {self.folder}: move it to where you want it"
            ) from None
        self.folder = None

    @contextlib.contextmanager
    def adding_remedy(self) -> Iterator[None]:
        """A context whose end by a mistake or a signal says how to go on."""
        with endings.listening(self._stop):
            try:
                yield
            except UserError as error:
                if self.folder is None or str(self.folder) in str(error):
                    raise
                raise UserError(f"{error}; {self.remedy()}") from error
            except (MemoryError, RuntimeError, ValueError) as error:
                if not machine_errors.needs_more_memory(error):
                    raise
                how = f"; {self.remedy()}" if self.folder else ""
                raise UserError(
                    f"memory is full ({machine_errors.brief(error)}): lower rows, or"
                    f" context, of the stage{how}"
                ) from error

    def remedy(self) -> str:
        """How to go on from the folder, once there is one; else nothing."""
        if self.folder is None:
            return ""
        return f"{self._stage} is done, {_remedy(self.folder, self._stage)}"

    def _stop(self, number: int) -> None:
        endings.exit_on_signal(number, self.remedy())


def _remedy(folder: Path, stage: str) -> str:
    if stage not in _NEXT:
        return f"its model is in {folder}: move it to where you want it"
    flags = shlex.join([f"--start={folder}", f"--first_stage={_NEXT[stage]}"])
    return f"go on from it by the same command with {flags}"
