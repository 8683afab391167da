"""launch/benchmark.py from the command line: what it measures, and what it cannot."""

import importlib.util
import json

import pytest
from helpers import runs

pytestmark = pytest.mark.slow  # Compiles and times a run and two samplers.

SCRIPT = runs.ROOT / "launch" / "benchmark.py"
SMALL = (
    *("--batch=2", "--prompt_tokens=6", "--new_tokens=4", "--repeats=1"),
    *("--turns=2", "--observation_tokens=5", "--reply_tokens=4"),
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(the report, what was printed) of one iteration and of others' conversations."""
    folder = tmp_path_factory.mktemp("benchmark")
    config, _, *overrides = runs.arguments(folder)
    wanted = ("--iterations=1", "--peers", f"--out={folder / 'out.json'}")
    process = runs.start([config, *overrides, *wanted, *SMALL], SCRIPT)
    code, output, errors = runs.finish(process)
    assert code == 0, errors
    return json.loads((folder / "out.json").read_text()), output


def test_every_phase_is_measured(measured):
    report, output = measured
    for title, names in {
        "at best": (
            "matmul float32, TFLOP/s",
            "copy, GB/s read and written",
            "read, GB/s",
        ),
        "compiling": ("compiled before the first iteration, s",),
        "first iteration": ("first iteration, s", "of it compiling, s"),
        "iteration": (
            *("rollout, s", "update, s", "peak memory, GiB"),
            *("slot utilization", "rollout, share of reading"),
        ),
        "sampler, generating": (
            *("prefill, tokens/s", "prefill, model FLOP utilization"),
            *("decode, tokens/s", "decode, share of reading"),
        ),
    }.items():
        assert all(report[title][name] > 0 for name in names)
        assert f"{title}\n" in output
    assert report["model"]["weights"] == str(runs.model())
    assert report["lengths"]["several turns"] == "2 x 2 x (5 + 4) tokens"


@pytest.mark.parametrize("other", ["transformers", "google-tunix"])
def test_a_peer_is_measured_or_said_to_be_unmeasured(measured, other):
    found = measured[0][f"beside {other}"]
    module = {"transformers": "torch", "google-tunix": "tunix"}[other]
    if importlib.util.find_spec(module) is None:
        assert list(found) == ["state"] and found["state"].startswith("unmeasured: ")
        assert found["state"] in measured[1]
        return
    assert found["state"].startswith(other)
    for conversation in ("generating", "several turns"):
        assert found[f"{conversation}, times faster than {other}"] > 0
        assert found[f"{conversation}, same reply tokens as {other}"] > 0.9


def test_the_instruments_and_the_report_are_measured(tmp_path):
    config, _, *overrides = runs.arguments(tmp_path, env__thinking=True)
    wanted = ("--instruments", "--iterations=1", f"--out={tmp_path / 'out.json'}")
    code, _, errors = runs.finish(runs.start([config, *overrides, *wanted], SCRIPT))
    assert code == 0, errors
    found = json.loads((tmp_path / "out.json").read_text())
    titles = [title.partition(",")[0] for title in found]
    assert titles == [
        "an iteration",
        "recording episodes",
        "mutual information",
        "mutual information",
        "report of a run",
    ]
    spent = found["an iteration"]
    assert spent["diagnostics on, s wall"] > spent["diagnostics off, s wall"] > 0
    for title, figures in list(found.items())[1:]:
        assert figures["s wall"] > 0, title
    assert found["report of a run"]["iterations"] == 200
    assert found["report of a run"]["episodes"] == 2000
