"""Files of --flagfile, checked before absl reads them."""

import re
from collections.abc import Sequence
from pathlib import Path

from ragen_jax.errors import UserError
from ragen_jax.utils import json_files

_MOST_BYTES = 2**20


def check(arguments: Sequence[str], within: tuple[str, ...] = ()) -> None:
    """Refuses flag files that are not texts, or that name each other in a circle.

    Args:
      arguments: of a command line, or the lines of a flag file.
      within: the flag files that led to these.

    Raises:
      UserError: naming the first one.
    """
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            return
        match = re.fullmatch(r"--?flagfile(?:=(.*))?", argument.strip(), re.DOTALL)
        if not match:
            continue
        path = match[1] if match[1] is not None else next(remaining, "")
        try:
            file = Path(path).expanduser().resolve()
            json_files.check_regular(file, _MOST_BYTES)
            lines = file.read_text(encoding="utf-8").split("\n")
            if any("\0" in line for line in lines):
                raise ValueError("it is not a text file")
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"check the path of --flagfile={path} ({reason}): name a text file with"
                " one flag a line"
            ) from None
        if str(file) in within:
            raise UserError(
                f"--flagfile={path} leads back to itself: take that line out of it"
            )
        check(lines, (*within, str(file)))
