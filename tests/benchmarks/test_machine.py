"""Figures of whole iterations: what is known when, and bytes counted by hand."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models

from ragen_jax.benchmarks import device, machine, sampler, stages, suite, suite_sizes

BEST = sampler.DeviceLimits(matmul=1e9, copy=2e9, read=1e9, dtype="float32")
VALUES = {
    "time/rollout_seconds": 4.0,
    "time/update_seconds": 2.0,
    "rollout/tokens_per_second": 1.0,
    "rollout/utilization": 1.0,
    "rollout/episode_tokens": 1.0,
    "rollout/turns": 1.0,
    "rollout/reply_tokens": 1.0,
    "update/logprob_gap": 0.0,
}
WORK = {
    "decode passes": 8.0,
    "message passes": 2.0,
    "ms a decode pass": 1.0,
    "update tokens/s": 1.0,
    "update flop/s": 1.0,
    "decode bytes/s": 1.0,
}


def seen(printed: str) -> str:
    """What a terminal shows of a line in the end."""
    shown: list[str] = []
    for part in printed.split("\r"):
        shown[: len(part)] = part
    return "".join(shown).strip()


def test_an_iteration_is_known_before_the_next_has_ended(monkeypatch, capsys):
    ends = iter([0.0, 3.0, 5.0])  # The first compiles; the fourth never ends.

    def iterate(run, programs, state):
        try:
            return state, VALUES | {"time/rollout_seconds": next(ends)}, None
        except StopIteration:
            raise TimeoutError from None

    monkeypatch.setattr(machine.weights, "new_state", lambda run: None)
    monkeypatch.setattr(machine.programs_lib, "make_programs", lambda run: None)
    monkeypatch.setattr(machine.programs_lib, "compile_ahead", lambda *_: (None, None))
    monkeypatch.setattr(machine.starpo, "iterate", iterate)
    monkeypatch.setattr(machine, "_work", lambda *_: WORK)
    known = []
    with pytest.raises(TimeoutError):
        for found in machine.iteration_figures(None, 3):
            known.append(found)
            assert seen(capsys.readouterr().out + "at best") == "at best"
    assert [title for title, _ in known[:2]] == ["compiling", "first iteration"]
    assert {title for title, _ in known[2:]} == {"iteration"}
    compiled, first, *known = [figures for _, figures in known]
    assert list(compiled) == ["compiled before the first iteration, s"]
    assert first["first iteration, s"] >= 0 and first["programs compiled"] == 0
    assert [figures["iterations timed"] for figures in known] == [1, 2]
    assert [figures["iteration, s"] for figures in known] == [5.0, 6.0]


def test_the_ceilings_take_no_memory_before_the_iterations_peak_is_read(monkeypatch):
    done = []
    figures = {"update, model TFLOP/s": 5e-4, "rollout, GB/s in decoding": 0.25}
    run = types.SimpleNamespace(
        model=types.SimpleNamespace(dtype="float32"),
        tasks=[types.SimpleNamespace(env=None)],
    )

    def iterate(*_):
        done.append("iterations")
        yield "iteration", figures

    def limits():
        done.append("ceilings")
        return BEST

    monkeypatch.setattr(machine.run_lib, "prepare", lambda _: run)
    monkeypatch.setattr(machine.weights, "check_weights", lambda _: None)
    monkeypatch.setattr(machine, "_env_figures", lambda _: {})
    monkeypatch.setattr(machine, "_conversations", lambda *_: iter(()))
    monkeypatch.setattr(machine, "iteration_figures", iterate)
    monkeypatch.setattr(machine.device, "device_limits", limits)
    settings = types.SimpleNamespace(model=types.SimpleNamespace(path="x"))
    request = types.SimpleNamespace(shape=None, iterations=1)
    found = dict(machine.measure(settings, request, None))
    assert done == ["iterations", "ceilings"]
    assert found["at best"]["read, GB/s"] == 1.0
    assert found["iteration"] == figures | {
        "update, model FLOP utilization": 0.5,
        "rollout, share of reading": 0.25,
    }


def test_a_stage_adds_the_shares_of_the_limits_to_the_last_iterations(monkeypatch):
    figures = {"update, model TFLOP/s": 5e-4, "rollout, GB/s in decoding": 0.25}
    known = [("compiling", {}), ("iteration", {}), ("iteration", figures)]
    for module, name, found in (
        (stages.cli, "use_every_core", None),
        (stages.cli, "start_jax", None),
        (machine, "with_shape", None),
        (machine.run_lib, "prepare", None),
        (machine, "iteration_figures", known),
        (device, "device_limits", BEST),
    ):
        monkeypatch.setattr(module, name, lambda *_, found=found: found)
    stage = suite.find(stages.stages(suite_sizes.SMOKE), "replies_6")
    *before, last = stages.measure(stage, suite_sizes.SMOKE, None)
    assert before == known
    assert last == ("iteration", machine.with_shares(figures, BEST))


def test_a_loop_of_rounds_does_every_round_on_what_the_last_one_made():
    x = jax.random.normal(jax.random.key(0), (16, 16)) / 4
    six = jax.jit(device.repeated, static_argnums=(0, 1))(lambda y, x: y @ x, 5, x, x)
    np.testing.assert_allclose(six, np.linalg.matrix_power(x, 6), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_8_bits_are_counted_as_one_byte_each(tied):
    config = models.small_config(50, tied=tied)
    matrices = 32 * (4 + 2 + 2 + 4) * 8 + 3 * 32 * 48  # q, k, v, o; mlp
    outputs = (4 + 2 + 2) * 8 + 32 + 2 * 48 + 32  # a factor of 4 bytes each
    rest = (4 + 2 + 2) * 8 + 2 * 32  # biases and norms, of 2 bytes
    vocabulary = 50 * 32
    whole = 2 * (2 * (matrices + rest) + vocabulary)
    eight = 2 * (matrices + 4 * outputs + 2 * rest) + vocabulary + 4 * 50
    assert sampler.decoding_bytes(config, jnp.bfloat16) == whole
    assert sampler.decoding_bytes(config, jnp.bfloat16, "int8") == eight
    assert sampler.decoding_bytes(config, jnp.bfloat16, "float8") == eight


def _short_run(kind="same", **changes):
    """A run and its rollout: a reply of two tokens behind three."""
    settings = types.SimpleNamespace(
        optimizer=types.SimpleNamespace(epochs=1, reuse=1),
        loss=types.SimpleNamespace(sampler_correction=0.0),
        has_reference=False,
        rollout=types.SimpleNamespace(decode_weights=kind),
        has_critic=False,
    )
    model = types.SimpleNamespace(
        config=models.small_config(50), dtype=jnp.dtype(jnp.bfloat16), adapters=None
    )
    for name, value in changes.items():
        setattr(settings if hasattr(settings, name) else model, name, value)
    rollout = types.SimpleNamespace(
        rows=types.SimpleNamespace(
            is_reply=jnp.array([[False, False, False, True, True]])
        ),
        passes=types.SimpleNamespace(
            decode_passes=jnp.array([5]), extend_passes=jnp.array([1])
        ),
    )
    return types.SimpleNamespace(model=model, settings=settings), rollout


@pytest.mark.parametrize("kind", ["same", "int8"])
def test_decoding_reads_the_weights_that_it_samples_with(kind):
    run, rollout = _short_run(kind)
    config = run.model.config
    found = machine._work(run, rollout, VALUES | {"filter/kept_fraction": 1.0})
    entries = 7 * sampler.cache_entry(config) * 2  # They look at 3 and 4 entries.
    read = 5 * sampler.decoding_bytes(config, jnp.bfloat16, kind) + entries
    assert found["decode bytes/s"] == pytest.approx(read / 4.0)


@pytest.mark.parametrize("adapters, each", [(None, 6), (object(), 4)])
def test_weights_that_adapters_freeze_have_no_gradient_of_their_own(adapters, each):
    run, rollout = _short_run(adapters=adapters, has_critic=True)
    values = VALUES | {"filter/kept_fraction": 1.0}
    layers, vocabulary = sampler.weight_counts(run.model.config)
    actor = each * (layers * 5 + vocabulary * 2)
    critic = (each + 2) * layers * 5
    found = machine._work(run, rollout, values)
    seconds = values["time/update_seconds"]
    assert found["update flop/s"] == pytest.approx((actor + critic) / seconds)


def test_reused_episodes_and_a_reference_are_counted():
    optimizer = types.SimpleNamespace(epochs=2, reuse=3)
    run, rollout = _short_run(has_reference=True, optimizer=optimizer)
    layers, vocabulary = sampler.weight_counts(run.model.config)
    found = machine._work(run, rollout, VALUES | {"filter/kept_fraction": 1.0})
    flop = 3 * (2 * 6 + 2) * (layers * 5 + vocabulary * 2)
    assert found["update flop/s"] == pytest.approx(flop / VALUES["time/update_seconds"])


def test_the_cache_entries_of_many_long_replies_are_counted():
    run, rollout = _short_run()
    rollout.rows.is_reply = jnp.ones((4096, 1100), bool)
    found = machine._work(run, rollout, VALUES | {"filter/kept_fraction": 1.0})
    entries = 4096 * 1100 * 1099 / 2  # More than an int32 holds.
    assert found["decode bytes/s"] * 4.0 > entries * 2


def test_versions_of_cuda_are_written_as_they_are_called(monkeypatch):
    loaded = types.SimpleNamespace(
        cuda_runtime_get_version=lambda: 13050, cudnn_get_version=lambda: 92801
    )
    monkeypatch.setattr(jax._src.lib, "cuda_versions", loaded)
    assert device.cuda_versions() == {"CUDA": "13.5", "cuDNN": "9.28.1"}
    monkeypatch.setattr(jax._src.lib, "cuda_versions", None)
    assert device.cuda_versions() == {}
