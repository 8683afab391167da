"""Runs are lowered and compiled for TPUs that are not there."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest
from helpers import absent
from helpers.absent import Compiled

from ragen_jax.models import presets
from ragen_jax.planning import compiling, devices, programs, report, target
from ragen_jax.planning.compiling import ROLLOUT, UPDATE
from ragen_jax.training import memory_plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # Compiling is not interrupted half-way.
    absent.needs_tpu_compiler,
]
ROOT = Path(__file__).parents[2]

# One of each way that the programs differ in.
RUNS = {
    "default": ("configs/frozenlake.py", {}),
    "paper": ("configs/frozenlake.py:paper", {}),
    "mix": ("configs/sokoban.py:mix", {}),
    "a row for each turn": ("configs/frozenlake.py", {"rollout__history": "window"}),
    "adapters": ("configs/frozenlake.py", {"lora__rank": 8}),
    "weights of 8 bits": (
        "configs/frozenlake.py",
        {"rollout__decode_weights": "int8", "loss__sampler_correction": 2.0},
    ),
    "texts": ("configs/webshop.py", {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_lowered_for_a_tpu_without_anything_of_cudas(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    config, changes = RUNS[name]
    with absent.v5e().tracing():
        run = absent.prepare(absent.settings(config, **changes))
        assert run.model.dtype == "bfloat16"
        texts = [
            each.lowered.as_text()
            for each in compiling.lower(run, [ROLLOUT, UPDATE, compiling.SUMMARY])
        ]
    assert len(texts) == 3
    assert all("tpu_custom_call" in text for text in texts[:2])  # splash attention
    for text in texts:
        named = re.sub(r'backend_config = "[^"]*"', "", text)  # Kernels, in base64.
        assert not re.search("cudnn|cuda|triton|callback", named, re.IGNORECASE)


@pytest.mark.parametrize("name", absent.names(devices.Tpu))
def test_every_tpu_has_a_compiler_that_takes_attention(name):
    text = absent.compiled_attention(target.make_target(name, 4))
    kernels = re.findall(r"custom_call_target=\"tpu_custom_call\"", text)
    assert len(kernels) == 3  # forward, and backward for queries and for the rest
    assert "convolution(" in text  # As other products are called there.


SMOKE = str(ROOT / "configs" / "bandit.py:smoke")


def test_a_small_run_is_compiled_for_a_tpu_and_its_plan_is_written_out():
    made = Compiled(SMOKE, make=absent.v5e)
    compiled = {name: made.program(name) for name in (ROLLOUT, UPDATE)}
    assert all(each.temporary < 0.5 * 2**30 for each in compiled.values())
    plan = report.assemble(made.run, made.target, compiled, made.record)
    written = report.text(plan)
    assert "1 x TPU v5e on 1 host" in written and "This fits." in written
    assert "16,128.0" in written  # 15.75 GiB are available.
    assert "copies of a layer's cache in the rollout's loops: none" in written
    assert "fused attention in the update: splash attention" in written
    assert "estimate of one iteration" not in written


# Qwen2.5-0.5B's heads fill a TPU's 128 lanes, SmolLM2's do not.
@pytest.mark.parametrize(
    ("shape", "layout", "is_copied"),
    [
        ("qwen2.5-0.5b", "auto", False),
        ("qwen2.5-0.5b", "xla", True),
        ("smollm2", "auto", False),
    ],
)
def test_a_tpu_does_not_copy_a_cache_whose_heads_are_merged(
    shape, layout, is_copied, monkeypatch
):
    monkeypatch.chdir(ROOT)
    small = dataclasses.replace(presets.SHAPES[shape], layers=2, vocabulary=1024)
    monkeypatch.setitem(presets.SHAPES, "qwen2.5-0.5b", small)
    v5p = functools.partial(target.make_target, "v5p")
    made = Compiled(
        "configs/frozenlake.py:paper", make=v5p, rollout__decode_attention=layout
    )
    with made.target.tracing():
        least = memory_plan.layer_keys(made.run)
    copied = programs.copies_in_loops(made.tree(ROLLOUT), least)
    assert bool(copied) == is_copied


def test_a_slice_of_tpus_samples_without_collectives_and_learns_with_them():
    sizes = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}
    made = Compiled(SMOKE, devices=8, make=absent.v5e, **sizes)
    assert made.target.hosts == 2
    assert programs.collectives_in_loops(made.tree(ROLLOUT)) == []
    kinds = {c.kind for block in made.tree(UPDATE).inside() for c in block.collectives}
    assert {"all-reduce", "all-gather"} <= kinds
