"""Files are read and written as UTF-8, whatever the locale."""

import re

from helpers.paths import LAUNCH, ROOT

# Also of a file that holds ASCII alone: whoever adds other letters would not think of
# it. `atomic_files.write_text` knows its own.
_BARE = re.compile(
    r"""\.read_text\((?![^()]*encoding=)|\bopen\((?:"[rwa]\+?")?\)"""
    r"""|\bopen\([^()"]*, "[rwa]\+?"\)"""
    r"""|(?<!atomic_files)\.write_text\((?!(?s:.{0,150}?)encoding=)"""
)


def test_text_files_of_the_package_are_opened_with_their_encoding():
    places = ((ROOT / "ragen_jax").rglob("*.py"), LAUNCH.glob("*.py"))
    found = [
        f"{path.name}: {bare[0]}"
        for folder in places
        for path in folder
        for bare in _BARE.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
