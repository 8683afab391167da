"""The report's page: template, style, script and data in one file.

The data stands in a script element that is never run, its `<` written as \\u003c: no
text of a model can end the element. The page's script puts text into the document by
textContent alone.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragen_jax.diagnostics.report import data as data_lib

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
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(page, encoding="utf-8")
    scratch.replace(path)
    return path


def render(data: dict[str, Any]) -> str:
    """The page as text.

    Args:
      data: as `data.gather` gives it.
    """
    parts = {
        "STYLE": (_FOLDER / "style.css").read_text(),
        "SCRIPT": "\n".join((_FOLDER / name).read_text() for name in _SCRIPTS),
        "DATA": embedded(data),
    }
    # Cut once, so that what is put in is never searched for the next mark.
    page, *pieces = (_FOLDER / "page.html").read_text().split("@@")
    for index in range(0, len(pieces), 2):
        page += parts[pieces[index]] + pieces[index + 1]
    return page


def embedded(data: Any) -> str:
    """JSON that may stand within a script element, whatever its texts hold."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # Half a surrogate pair is no UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")
