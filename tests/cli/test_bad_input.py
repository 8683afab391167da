"""Wrong input of every kind: one sentence, exit code 2, nothing compiled, nothing left.

Each command line goes through the script itself. All run one after the other in a
process that has compiled nothing before; a few also in processes of their own.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import hostile_input, runs, warm_process, wrong_input
from helpers.warm_process import COPY, files
from helpers.wrong_input import Wrong

from ragen_jax.text import reply_parser

WRONG = wrong_input.WRONG | hostile_input.WRONG
LAUNCH = runs.ROOT / "launch"
# Tried as a user starts them, too.
ALONE = ("devices: episodes", "models: truncated", "workdirs: another run")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with all that the command lines name."""
    folder = tmp_path_factory.mktemp("place")
    wrong_input.make_place(folder)
    hostile_input.make_place(folder)
    return folder


@pytest.fixture(scope="module")
def refusals(place):
    """What each wrong command line ends in."""
    return {
        name: warm_process.submit(LAUNCH / wrong.script, _filled(wrong, place), place)
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


def test_the_same_command_without_a_mistake_comes_to_compile(place):
    right = wrong_input.train()
    code, output, errors, compiled, made = warm_process.attempt(
        LAUNCH / right.script, _filled(right, place), place
    )
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

    before = files(place)
    with ThreadPoolExecutor(2) as pool:
        ended = dict(zip(ALONE, pool.map(start, ALONE), strict=True))
    assert files(place) == before
    return ended


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.slow
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
        (
            (b"</think><answer>Jump||Up</answer>", b"</think><answer>", b"Up</answer>"),
            2,
        ),
        ((b"</think><answer>", b"U", b"p", b"<", b"/answer>", b""), 5),
    ],
)
def test_the_shortest_valid_reply_is_counted_in_tokens(tokens, fewest):
    tables = reply_parser.reply_tables(
        tokens, ("Up", "Down"), b"<think>", thinking=True
    )
    assert reply_parser.fewest_tokens(tables) == fewest


def test_tokens_that_cannot_write_a_valid_reply_are_refused():
    tokens = (b"</think>", b"<answer>", b"Jump", b"</answer>")
    tables = reply_parser.reply_tables(
        tokens, ("Up", "Down"), b"<think>", thinking=True
    )
    with pytest.raises(ValueError, match="choose a model"):
        reply_parser.fewest_tokens(tables)
