"""The memory that a run is said to need against what its programs then take."""

import dataclasses
import os
import platform
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import runs

from ragen_jax import starpo
from ragen_jax.errors import UserError
from ragen_jax.parallel import backend
from ragen_jax.training import memory_plan, weights
from ragen_jax.training import programs as programs_lib


@pytest.fixture(scope="module")
def run():
    runs.share_compilations()
    return runs.prepare()


@pytest.fixture(scope="module")
def needs(run):
    return memory_plan.plan(run)


def test_the_module_can_be_imported_where_the_system_counts_no_resources(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)  # As on Windows.
    runpy.run_path(memory_plan.__file__)


def held(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
def test_parameters_and_optimizers_are_counted_to_the_byte(run, needs):
    state = weights.new_state(run)
    assert needs.resident["actor"] == held(state.actor)
    assert needs.resident["actor's optimizer"] == held(state.actor_optimizer)
    assert needs.resident["critic"] == held(state.critic)
    assert needs.resident["reference of the KL term"] == held(state.actor)
    assert needs.rollout["sampler's copy of the weights"] == held(state.actor)


@pytest.mark.slow
def test_the_episodes_and_the_cache_are_counted_to_the_byte(run, needs):
    plan, config = run.plan, run.model.config
    programs, state = programs_lib.make_programs(run), weights.new_state(run)
    _, _, rollout = starpo.iterate(run, programs, state)
    assert needs.resident["episodes"] == held(rollout)
    each = config.kv_heads * config.head_dim * 4
    assert needs.rollout["keys and values"] == (
        2 * config.layers * plan.slots * plan.context * each
    )
    assert needs.update["gradients and activations"] > held(state.actor)


@pytest.mark.slow
def test_a_tpus_cache_is_counted_with_its_padding_to_whole_lanes(run):
    features = run.model.config.kv_heads * run.model.config.head_dim
    positions = run.plan.slots * run.plan.context
    tpu = backend.Backend("tpu", tuple(jax.devices()), tuple(jax.devices()), None)
    with backend.targeting(tpu):
        assert memory_plan.layer_keys(run) == positions * 128 * 4
    assert memory_plan.layer_keys(run) == positions * features * 4


@pytest.mark.slow
def test_what_evaluation_needs_is_asked_of_the_compiler_too(needs):
    # One program: validation and test of the small run play as many episodes.
    ((name, size),) = needs.evaluation.items()
    assert name.startswith("validation ") and size > 0


@pytest.mark.slow
def test_what_does_not_fit_is_reported_with_a_way_out(run, needs):
    assert memory_plan.advice(run, needs) == []
    assert memory_plan.report(run, needs).endswith("This fits.")
    small = dataclasses.replace(needs, available=1000)
    report = memory_plan.report(run, small)
    assert "This does not fit." in report
    assert "--config.lora.rank=64" in report and "--config.model.remat=True" in report
    unknown = dataclasses.replace(needs, available=None)
    assert memory_plan.advice(run, unknown) == []


@pytest.mark.parametrize(
    ("changes", "largest", "told"),
    [
        (  # No tensor axis; GRPO has no critic that warms up; a window needs its room.
            dict(
                estimator="ppo",
                optimizer__critic_warmup=1,
                rollout__history="single",
                rollout__slots=6,
            ),
            "rollout",
            ["lora.rank=64", "rollout.slots=3"],
        ),
        (  # Half of 9 rows does not divide them.
            dict(
                estimator="grpo",
                model__remat=True,
                rollout__prompts=3,
                rollout__reply_tokens=3,
                optimizer__minibatch=9,
                optimizer__microbatch=9,
            ),
            "update",
            ["lora.rank=64", "optimizer.microbatch=3", "rollout.reply_tokens=1"],
        ),
        (  # The test plays more episodes than the validation.
            dict(
                estimator="grpo",
                evaluation__prompts=2,
                evaluation__test_prompts=3,
                evaluation__test_rollouts=4,
                evaluation__slots=0,
                rollout__history="single",
            ),
            "evaluation",
            ["lora.rank=64", "evaluation.slots=6"],
        ),
    ],
)
def test_what_is_advised_where_memory_is_short_would_be_accepted(
    changes, largest, told
):
    run = runs.prepare(**changes)
    needs = memory_plan.Needs({"actor": 9}, {}, {}, available=10)
    needs = dataclasses.replace(needs, **{largest: {"all": 9}})
    overrides = [text for text, _ in memory_plan.advice(run, needs)]
    assert overrides == [f"--config.{text}" for text in told]


def test_the_peak_is_what_stays_and_the_largest_of_what_comes_on_top():
    passing = {"r": 2, "s": 2}, {"u": 5}
    assert memory_plan.Needs({"a": 1}, *passing, None, {"e": 3, "f": 4}).total == 6
    assert memory_plan.Needs({"a": 1}, *passing, None, {"e": 3, "f": 9}).total == 10
    assert memory_plan.Needs({"a": 1, "b": 1}, *passing, None).total == 7


@pytest.mark.parametrize(("system", "largest"), [("linux", 2**20), ("darwin", 2**30)])
def test_the_peak_memory_of_a_process_is_told_in_gib(monkeypatch, system, largest):
    """Linux tells KiB, macOS bytes."""
    used = SimpleNamespace(ru_maxrss=largest)
    monkeypatch.setattr("resource.getrusage", lambda who: used)
    monkeypatch.setattr(memory_plan.sys, "platform", system)
    assert memory_plan.peak_memory() == 1.0


def test_sharing_the_state_is_advised_only_where_that_shares_any_of_it():
    needs = memory_plan.Needs({"actor": 9}, {}, {"all": 9}, available=10)
    shared = "--config.mesh.data=1 --config.mesh.fsdp=-1"
    for devices, is_advised in ((2, True), (3, False)):  # The width is 128.
        run = runs.prepare_on(devices, 1, 1)
        overrides = [text for text, _ in memory_plan.advice(run, needs)]
        assert (shared in overrides) == is_advised


def test_adapters_need_little_besides_their_base():
    run = runs.prepare(lora__rank=2, loss__kl=0.1)
    sizes = memory_plan.resident(run)
    base = sizes["base model under the adapters"]
    assert base == held(weights.load_parameters(run.model))
    assert sizes["actor's optimizer"] < base / 2
    assert "reference of the KL term" not in sizes


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_what_the_compiler_freed_goes_back_to_the_system():
    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    # Blocks too small for maps of their own, and below one that stays.
    blocks = [np.ones(8000) for _ in range(4000)]
    last = blocks[-1]
    blocks.clear()
    before = resident()
    programs_lib.return_free_memory()
    assert before - resident() > 0.9 * 4000 * last.nbytes


def test_a_run_that_cannot_fit_is_refused_before_anything_is_compiled():
    run = runs.prepare()
    memory_plan.check_least(run)
    with pytest.raises(UserError, match="needs at least .*--plan shows every part"):
        memory_plan.check_least(run, limit=100_000)
    record = run.plan.rows * run.plan.context * 16
    on_top = memory_plan._sampler_copy(run) + memory_plan._cache(run) + record
    least = sum(memory_plan.resident(run).values()) + on_top
    memory_plan.check_least(run, limit=least)
    with pytest.raises(UserError, match="needs at least"):
        memory_plan.check_least(run, limit=least - 1)
