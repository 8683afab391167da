"""The report's page: template, style, script and data in one file.

The data is in a script element that is never executed, with `<` written as \\u003c, so
that no text of a model can end the element. The page's script inserts texts by
textContent alone.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragen_jax.diagnostics.report import data as data_lib
from ragen_jax.utils import atomic_files

FILE = "report.html"
_FOLDER = Path(__file__).parent
_SCRIPTS = ("series.js", "boards.js", "script.js")


def write_report(workdir: Path, others: Sequence[Path] = ()) -> Path:
    """Writes WORKDIR/report.html and gives its path.

    Args:
      workdir: of the run.
      others: runs to compare with.

    Raises:
      UserError: if one of the folders holds no run.
    """
    page = render(data_lib.gather([workdir, *others]))
    path = workdir / FILE
    atomic_files.write_text(path, page)
    return path


def render(data: dict[str, Any]) -> str:
    """The page as text.

    Args:
      data: as `data.gather` gives it.
    """
    parts = {
        "STYLE": (_FOLDER / "style.css").read_text(encoding="utf-8"),
        "SCRIPT": "\n".join(
            (_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS
        ),
        "DATA": embedded(data),
    }
    # Split at @@NAME@@ once, so that inserted text is never searched for marks.
    page, *pieces = (_FOLDER / "page.html").read_text(encoding="utf-8").split("@@")
    for index in range(0, len(pieces), 2):
        page += parts[pieces[index]] + pieces[index + 1]
    return page


def embedded(data: Any) -> str:
    """JSON that is safe within a script element, whatever its texts contain."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A lone surrogate cannot be encoded as UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")
