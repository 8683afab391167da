"""What a run is said to need is what it then takes."""

import dataclasses
import os
import platform
from pathlib import Path

import jax
import numpy as np
import pytest
import runs

from ragen_jax import ahead, loop, memory, weights


@pytest.fixture(scope="module")
def run():
    runs.share_compilations()
    return runs.prepare()


@pytest.fixture(scope="module")
def needs(run):
    return memory.plan(run)


def held(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_parameters_and_optimizers_are_counted_to_the_byte(run, needs):
    state = weights.new_state(run)
    assert needs.resident["actor"] == held(state.actor)
    assert needs.resident["actor's optimizer"] == held(state.actor_optimizer)
    assert needs.resident["critic"] == held(state.critic)
    assert needs.resident["reference of the KL term"] == held(state.actor)
    assert needs.rollout["sampler's copy of the weights"] == held(state.actor)


def test_the_episodes_and_the_cache_are_counted_to_the_byte(run, needs):
    plan, config = run.plan, run.config
    programs, state = loop.make_programs(run), weights.new_state(run)
    _, _, rollout = loop.iterate(run, programs, state)
    assert needs.resident["episodes"] == held(rollout)
    each = config.kv_heads * config.head_dim * 4
    assert needs.rollout["keys and values"] == (
        2 * config.layers * plan.slots * plan.context * each
    )
    assert needs.update["gradients and activations"] > held(state.actor)


def test_what_does_not_fit_is_told_with_a_way_out(run, needs):
    assert memory.advice(run, needs) == []
    assert memory.report(run, needs).endswith("This fits.")
    small = dataclasses.replace(needs, available=1000)
    told = memory.report(run, small)
    assert "This does not fit." in told
    assert "--config.lora.rank=64" in told and "--config.model.remat=True" in told
    unknown = dataclasses.replace(needs, available=None)
    assert memory.advice(run, unknown) == []


def test_adapters_need_little_besides_their_base():
    run = runs.prepare(lora__rank=2, loss__kl=0.1)
    sizes = memory.resident(run)
    base = sizes["base model under the adapters"]
    assert base == held(weights.load_parameters(run, value_head=False))
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
    ahead.return_free_memory()
    assert before - resident() > 0.9 * 4000 * last.nbytes
