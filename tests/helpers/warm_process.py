"""One process that has everything imported, to try many command lines one by one.

A process of its own costs a command line seconds of imports. Here scripts run one after
the other as the main module; their flags are forgotten in between. Programs are not
compiled: a script that is about to is stopped, which is what a wrong command line must
never come to.
"""

import atexit
import contextlib
import functools
import io
import multiprocessing
import re
import resource
import runpy
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
from absl import flags

from ragen_jax.utils import endings

COMPILE = "/jax/core/compile/backend_compile_duration"
# What `jnp.asarray` compiles: one copy or change of type; nothing is computed. As JAX
# names it, and as its file in the cache of compiled programs is named.
COPY = re.compile(r"jit[(_](stage|convert_element_type)[)-]")

_compiled: list[str] = []


class Ended(NamedTuple):
    """How a script ended."""

    code: int | None  # None: it was about to compile, and was stopped
    output: str
    errors: str
    compiled: list[str]  # names of the programs that XLA was given
    made: list[str]  # files and folders in `place` that were not there before


class AboutToCompileError(Exception):
    """Stops a script in front of its first program."""


@functools.cache
def process() -> ProcessPoolExecutor:
    """The process: eight devices, nothing compiled before. One for each of pytest's."""
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, spawn, initializer=_watch_compiler)
    atexit.register(pool.shutdown)
    return pool


def submit(script: Path, arguments: list[str], place: Path) -> Future:
    """Starts a script with the folder `place` as its own; a Future of `Ended`."""
    return process().submit(_attempt, script, list(arguments), place)


def attempt(script: Path, arguments: list[str], place: Path) -> Ended:
    """The same, waited for."""
    return submit(script, arguments, place).result(timeout=300)


def used() -> tuple[float, float]:
    """The most MiB that a process has held, and its processor's seconds so far.

    Here and not in the test that asks for it: the process finds modules of this folder
    by name, as it does not those of the tests.
    """
    own = resource.getrusage(resource.RUSAGE_SELF)
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = own.ru_utime + own.ru_stime + started.ru_utime + started.ru_stime
    return own.ru_maxrss / 1024, seconds


def files(place: Path) -> set[str]:
    """All that lies below a folder."""
    found = (path.relative_to(place) for path in place.rglob("*"))
    # Python keeps what it compiles of the files that it executes.
    return {str(path) for path in found if "__pycache__" not in path.parts}


def _watch_compiler() -> None:
    """Notes what this process gives to XLA, and refuses all but copies."""

    def note(event: str, started: float, *, fun_name: str = "", **_) -> None:
        if event == COMPILE:
            _compiled.append(fun_name)
            if not COPY.match(fun_name):
                raise AboutToCompileError(fun_name)

    # The event's start: its duration is reported when it is too late to stop.
    jax.monitoring.register_scalar_listener(note)
    # Their flags are defined once, and belong to every script that asks for them.
    from ragen_jax import cli  # noqa: F401
    from ragen_jax.cli import profiling, trust  # noqa: F401


def _attempt(script: Path, arguments: list[str], place: Path) -> Ended:
    """Runs a script as this process's main module."""
    before, known, argv = files(place), set(flags.FLAGS), sys.argv
    platforms = jax.config.jax_platforms
    _compiled.clear()
    code, output, errors = None, io.StringIO(), io.StringIO()
    sys.argv = [str(script), *arguments]
    try:
        with (
            contextlib.chdir(place),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
        ):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    except AboutToCompileError:
        pass
    finally:
        sys.argv = argv
        endings.release()
        jax.config.update("jax_platforms", platforms)
        for name in set(flags.FLAGS) - known:  # Those of the script and its config.
            delattr(flags.FLAGS, name)
        flags.FLAGS.unparse_flags()
    made = sorted(files(place) - before)
    return Ended(code, output.getvalue(), errors.getvalue(), list(_compiled), made)
