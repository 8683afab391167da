"""Wrong input of every kind: one sentence, exit code 2, nothing compiled, nothing left.

Each command line goes through the script itself. All run one after the other in a
process that has compiled nothing before; a few also in processes of their own.
"""

import contextlib
import io
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
import runs
import wrong_input
from absl import flags
from wrong_input import WRONG, Wrong

from ragen_jax.text import replies

LAUNCH = runs.ROOT / "launch"
COMPILE = "/jax/core/compile/backend_compile_duration"
# What `jnp.asarray` compiles: one copy or change of type; nothing is computed. As JAX
# names it, and as its file in the cache of compiled programs is named.
COPY = re.compile(r"jit[(_](stage|convert_element_type)[)-]")
# Tried as a user starts them, too.
ALONE = ("devices: episodes", "models: truncated", "workdirs: another run")


class Ended(NamedTuple):
    """How a script ended."""

    code: int | None  # None: it was about to compile, and was stopped
    output: str
    errors: str
    compiled: list[str]  # names of the programs that XLA was given
    made: list[str]  # files and folders that were not there before


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with all that the command lines name."""
    folder = tmp_path_factory.mktemp("place")
    wrong_input.make_place(folder)
    return folder


# The process in which they run --------------------------------------------------------

_compiled: list[str] = []


class AboutToCompileError(Exception):
    """Stops a script in front of its first program."""


def watch_compiler() -> None:
    """Notes what this process gives to XLA, and refuses all but copies."""

    def note(event: str, started: float, *, fun_name: str = "", **_) -> None:
        if event == COMPILE:
            _compiled.append(fun_name)
            if not COPY.match(fun_name):
                raise AboutToCompileError(fun_name)

    # The event's start: its duration is told when it is too late to stop.
    jax.monitoring.register_scalar_listener(note)
    import common  # noqa: F401  (its flags belong to every script)


def attempt(script: str, arguments: list[str], place: Path) -> Ended:
    """Runs a script of launch/ as this process's main module."""
    before, known, argv = _files(place), set(flags.FLAGS), sys.argv
    _compiled.clear()
    code, output, errors = None, io.StringIO(), io.StringIO()
    sys.argv = [script, *arguments]
    try:
        with (
            contextlib.chdir(place),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
        ):
            runpy.run_path(str(LAUNCH / script), run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    except AboutToCompileError:
        pass
    finally:
        sys.argv = argv
        for name in set(flags.FLAGS) - known:  # Those of the script and its config.
            delattr(flags.FLAGS, name)
        flags.FLAGS.unparse_flags()
    made = sorted(_files(place) - before)
    return Ended(code, output.getvalue(), errors.getvalue(), list(_compiled), made)


def _files(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


@pytest.fixture(scope="module")
def process():
    """A process with eight devices that has compiled nothing."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=watch_compiler) as pool:
        yield pool


@pytest.fixture(scope="module")
def refusals(place, process):
    """What each wrong command line ends in."""
    return {
        name: process.submit(attempt, wrong.script, _filled(wrong, place), place)
        for name, wrong in WRONG.items()
    }


def _filled(wrong: Wrong, place: Path) -> list[str]:
    return [argument.replace("{place}", str(place)) for argument in wrong.arguments]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_ends_in_one_sentence_before_anything_is_compiled(
    place, refusals, name
):
    code, output, errors, compiled, made = refusals[name].result()
    assert (code, output, made) == (2, "", []), errors
    assert errors.startswith("error: ") and errors.count("\n") == 1, errors
    assert errors.endswith("\n") and "Traceback" not in errors
    parts = [part.replace("{place}", str(place)) for part in WRONG[name].parts]
    assert [part for part in parts if part not in errors] == [], errors
    assert [program for program in compiled if not COPY.match(program)] == []


def test_the_same_command_without_a_mistake_goes_on_to_compile(place, process):
    right = wrong_input.train()
    ended = process.submit(attempt, right.script, _filled(right, place), place)
    code, output, errors, compiled, made = ended.result()
    shutil.rmtree(place / "new")
    assert (code, errors) == (None, "")
    assert "iterations in" in output
    assert not COPY.match(compiled[-1])
    assert "new/run/settings.json" in made


@pytest.fixture(scope="module")
def alone(place):
    """The same in processes as a user starts them, each with an empty cache."""

    def start(name: str) -> tuple[subprocess.CompletedProcess, list[str]]:
        cache = place.with_name(f"cache{ALONE.index(name)}")
        cache.mkdir()
        kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        environment = {
            **kept,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        script = LAUNCH / WRONG[name].script
        done = subprocess.run(
            [sys.executable, str(script), *_filled(WRONG[name], place)],
            env=environment,
            cwd=place,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done, [path.name for path in cache.iterdir()]

    before = _files(place)
    with ThreadPoolExecutor(2) as pool:
        ended = dict(zip(ALONE, pool.map(start, ALONE), strict=True))
    assert _files(place) == before
    return ended


@pytest.mark.parametrize("name", ALONE)
def test_a_process_ends_with_the_same_sentence_and_caches_no_program(
    alone, refusals, name
):
    done, cached = alone[name]
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == refusals[name].result().errors
    assert [program for program in cached if not COPY.match(program)] == []


@pytest.mark.parametrize(
    ("tokens", "fewest"),
    [
        # Without a thought's end, an answer, a known action or its end: not valid.
        ((b"</think>", b"<answer>", b"Up", b"</answer>"), 4),
        ((b"</think><answer>", b"Down", b"Up</answer>"), 2),
        ((b"</think><answer>", b"</answer>", b"Jump||", b"U", b"p"), 4),
        ((b"</think><answer>Jump</answer>", b"</think><answer>Up</answer>"), 1),
        ((b"</think><answer>", b"U", b"p", b"<", b"/answer>", b""), 5),
    ],
)
def test_the_shortest_valid_reply_is_counted_in_tokens(tokens, fewest):
    tables = replies.reply_tables(tokens, ("Up", "Down"), b"<think>", thinking=True)
    assert replies.fewest_tokens(tables) == fewest


def test_tokens_that_cannot_write_a_valid_reply_are_refused():
    tokens = (b"</think>", b"<answer>", b"Jump", b"</answer>")
    tables = replies.reply_tables(tokens, ("Up", "Down"), b"<think>", thinking=True)
    with pytest.raises(ValueError, match="choose a model"):
        replies.fewest_tokens(tables)
