"""launch/benchmark.py from the command line: what it measures, and what it cannot."""

import importlib.util
import json

import pytest
import runs

SCRIPT = runs.ROOT / "launch" / "benchmark.py"
SMALL = (
    *("--batch=2", "--prompt_tokens=6", "--new_tokens=4", "--repeats=1"),
    *("--turns=2", "--observation_tokens=5", "--reply_tokens=4"),
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(the report, what was printed) of one iteration and of talks beside peers."""
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
        "device": (
            "matmul float32, TFLOP/s",
            "copy, GB/s read and written",
            "read, GB/s",
        ),
        "iteration": (
            *("rollout, s", "update, s", "of it compiling, s", "peak memory, GiB"),
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


@pytest.mark.parametrize("peer", ["transformers", "google-tunix"])
def test_a_peer_is_measured_or_said_to_be_unmeasured(measured, peer):
    found = measured[0][f"beside {peer}"]
    module = {"transformers": "torch", "google-tunix": "tunix"}[peer]
    if importlib.util.find_spec(module) is None:
        assert list(found) == ["state"] and found["state"].startswith("unmeasured: ")
        assert found["state"] in measured[1]
        return
    assert found["state"].startswith(peer)
    for talk in ("generating", "several turns"):
        assert found[f"{talk}, times faster than {peer}"] > 0
        assert found[f"{talk}, same reply tokens as {peer}"] > 0.9
