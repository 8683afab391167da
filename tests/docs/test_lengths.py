"""Code is no longer than CONTRIBUTING.md says."""

import ast
import re

from helpers.paths import LAUNCH, ROOT

PACKAGE = sorted((ROOT / "ragen_jax").rglob("*.py"))
SCRIPTS = sorted(LAUNCH.glob("*.py"))
RULES = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
FILE, FUNCTION, SCRIPT = map(
    int,
    re.search(
        r"Files of the package stay below (\d+) lines, functions up to (\d+) without"
        r" their docstrings, launch scripts below (\d+);",
        RULES,
    ).groups(),
)


def _length(node):
    """Lines of a function, those of its docstring left out."""
    first = node.body[0]
    said = ast.get_docstring(node) is not None
    return (
        node.end_lineno - node.lineno + 1 - said * (first.end_lineno - first.lineno + 1)
    )


def test_files_scripts_and_functions_are_as_short_as_the_rules_say():
    too_long = []
    for path in (*PACKAGE, *SCRIPTS):
        text, most = path.read_text(), SCRIPT if path in SCRIPTS else FILE
        if len(text.splitlines()) >= most:
            too_long.append(path.name)
        too_long += [
            f"{path.name}:{node.lineno} {node.name}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and _length(node) > FUNCTION
        ]
    assert too_long == []
