"""Why a process failed, from what it said."""

import re

# How the line begins that names an error, Python's or one of this project's scripts.
_ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception)\b|error: ")


def reason(said: str) -> str:
    """The line of a failed process's output that best says why it failed.

    That is the last line that names an error, or else the last line. A
    CalledProcessError is passed over: the output of the called process says more.
    """
    lines = [line.rstrip() for line in said.splitlines()]
    lines = [
        line
        for line in lines
        if line.strip(" -") and not line.startswith("For simplicity, JAX")
    ]
    named = [line for line in lines if _ERROR.match(line)]
    named = [line for line in named if "CalledProcessError" not in line]
    return (named or lines or ["nothing was said"])[-1].strip()[:300]
