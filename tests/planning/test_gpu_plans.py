"""Programs compiled for H100s that are not there: memory, copies, collectives."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import absent
from helpers.absent import Compiled

from ragen_jax.models import precision
from ragen_jax.planning import devices, programs, report, roofline, target, work
from ragen_jax.planning.compiling import MERGE, ROLLOUT, UPDATE
from ragen_jax.training import memory_plan

# On two idle cores none takes two minutes; compiling is not interrupted half-way.
pytestmark = pytest.mark.timeout(1200)
slow = pytest.mark.slow
compiles = absent.needs_compiler
ROOT = Path(__file__).parents[2]
FROZENLAKE = str(ROOT / "configs" / "frozenlake.py")
GIB = 2**30


@pytest.fixture(scope="module")
def default() -> Compiled:
    return Compiled(FROZENLAKE)


@pytest.fixture(scope="module")
def paper() -> Compiled:
    # One bucket compiles in a third of the time.
    return Compiled(f"{FROZENLAKE}:paper", rollout__buckets=1)


@pytest.fixture(scope="module")
def paper_on_8() -> Compiled:
    return Compiled(f"{FROZENLAKE}:paper", devices=8)


@slow
@compiles
def test_the_default_run_needs_a_small_part_of_a_gpu(default):
    assert default.program(ROLLOUT).peak < 0.5 * GIB
    assert default.program(UPDATE).peak < 1 * GIB


@slow
@compiles
def test_decoding_copies_no_cache_and_moves_what_it_attends_to(default):
    tree, cache = default.tree(ROLLOUT), memory_plan.layer_keys(default.run)
    assert programs.copies_in_loops(tree, cache // 2) == []
    passes = programs.vocabulary_loops(tree, default.run.model.config.vocabulary)
    assert len(passes) == len(default.run.plan.buckets)
    assert {loop.trips for loop in passes} == {default.run.plan.decode_chunk}
    moved = [loop.body.bytes() for loop in passes]
    assert moved == sorted(moved)
    layers = default.run.model.config.layers
    assert all(len(loop.body.kernels) < 25 * layers for loop in passes)
    # What is valid is read once at least; nothing is read ten times.
    assert 2 * layers * cache < moved[-1] < 10 * 2 * layers * cache


@slow
@compiles
def test_the_update_attends_by_cudnn(default):
    assert programs.fused_attention(default.tree(UPDATE)) == "cuDNN"


@slow
@compiles
def test_a_plan_is_written_out_for_a_person(default):
    compiled = {name: default.program(name) for name in (ROLLOUT, UPDATE)}
    plan = report.assemble(default.run, default.target, compiled, default.record, [20])
    written = report.text(plan)
    assert "1 x NVIDIA H100" in written and "This fits." in written
    context = default.run.plan.context
    assert "loops: none" in written and f"decode, cache of {context}" in written
    # All that is counted is held at the peak, and nothing twice.
    assert plan.needs.total < 1.2 * max(each.peak for each in compiled.values())


@slow
@compiles
def test_the_paper_fits_into_half_of_an_h100(paper):
    update = paper.program(UPDATE)
    assert update.peak < 40 * GIB and update.temporary < 10 * GIB
    assert programs.fused_attention(paper.tree(UPDATE)) == "cuDNN"


@slow
@compiles
def test_the_papers_rollout_holds_its_cache_once(paper):
    rollout, plan, model = (
        paper.program(ROLLOUT),
        paper.run.plan,
        paper.run.model.config,
    )
    layer = memory_plan.layer_keys(paper.run)
    assert rollout.temporary < 2 * (2 * model.layers * layer)
    assert programs.copies_in_loops(paper.tree(ROLLOUT), layer // 2) == []
    assert plan.context > 2000


@slow
@compiles
def test_a_longer_reply_takes_longer_and_the_paper_takes_seconds(paper):
    device = paper.target.device
    costs = work.Costs(device.figures, 1, device.l2_cache)
    parts = roofline.read_rollout(paper.run, paper.tree(ROLLOUT), costs)
    found = [
        roofline.estimate(paper.run, parts, paper.tree(UPDATE), costs, reply)
        for reply in (50, 150, 400)
    ]
    seconds = [each.seconds for each in found]
    assert seconds == sorted(seconds) and 0.5 < seconds[0] and seconds[-1] < 10
    assert seconds[1] < 3.5
    optimizer = dataclasses.replace(paper.run.settings.optimizer, reuse=3)
    settings = dataclasses.replace(paper.run.settings, optimizer=optimizer)
    model = dataclasses.replace(paper.run.model, settings=settings)
    reused = dataclasses.replace(paper.run, model=model)
    again = roofline.estimate(reused, parts, paper.tree(UPDATE), costs, 50)
    assert again.update.operations == 3 * found[0].update.operations
    assert again.rollout.operations == found[0].rollout.operations
    decode = roofline.decode_at(parts, 0, filled=0.2)
    assert decode.kernels <= 330 and decode.bytes < 3.0e9
    assert decode.bytes - decode.cached < 2.55e9
    # Two operations a weight and token forward, four backward, at the least.
    weights = 494e6
    assert found[1].update.operations > 6 * weights * found[1].rows * 500


@compiles
def test_a_weight_in_8_bits_is_read_as_bytes_and_never_written_out():
    """The vocabulary of Qwen2.5-0.5B, by 128 slots."""
    slots, width, vocabulary = 128, 896, 151936
    machine = absent.h100()
    mesh = jax.sharding.Mesh(np.array(machine.backend.devices), "x")
    whole = jax.NamedSharding(mesh, jax.P())

    def shape(dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=whole)

    weight = precision.Quantized(
        shape(jnp.int8, width, vocabulary), shape(jnp.float32, vocabulary)
    )
    score = functools.partial(precision.project, "sd,dv->sv", out_dtype=jnp.float32)
    with machine.tracing():
        traced = jax.jit(score).lower(shape(jnp.bfloat16, slots, width), weight)
        found = programs.read(machine.compile(traced).as_text())
    once = width * vocabulary + 4 * slots * vocabulary
    assert once <= found.bytes() < 1.05 * once


@slow
@compiles
def test_adapters_are_compiled_and_merged():
    lora = Compiled(FROZENLAKE, lora__rank=8, optimizer__microbatch=32)
    assert lora.program(UPDATE).peak < 2 * GIB
    assert programs.fused_attention(lora.tree(UPDATE)) == "cuDNN"
    assert lora.program(MERGE).temporary < GIB


@slow
@compiles
def test_a_rollout_on_8_gpus_exchanges_nothing_in_its_loops():
    shared = Compiled(FROZENLAKE, devices=8, mesh__fsdp=4, rollout__buckets=1)
    tree = shared.tree(ROLLOUT)
    assert programs.collectives_in_loops(tree) == []
    assert any(each.kind == "all-gather" for each in tree.collectives)


@slow
@compiles
def test_gradients_are_summed_over_8_gpus_in_float32(paper_on_8):
    assert paper_on_8.program(UPDATE).peak < 40 * GIB
    found = programs.collectives_in_loops(paper_on_8.tree(UPDATE))
    large = [each for each in found if each.bytes > 2**20]
    assert large and all(each.dtypes == {"f32"} for each in large)


@slow
@compiles
def test_shared_weights_cross_gpus_in_bfloat16_and_their_gradients_in_float32():
    # Without a critic, whose program would be as long as the actor's.
    changes = dict(mesh__data=1, mesh__fsdp=8, estimator="grpo")
    shared = Compiled(FROZENLAKE, devices=8, **changes)
    config = shared.run.model.config
    found = programs.collectives_in_loops(shared.tree(UPDATE))
    gathers = [each for each in found if each.kind == "all-gather"]
    sums = [each for each in found if each.kind == "reduce-scatter"]
    # What is small travels along in its own dtype: norms, tokens.
    assert gathers and all("bf16" in each.dtypes for each in gathers)
    assert sums and all(each.dtypes == {"f32"} for each in sums)
    # The embedding is gathered to score the vocabulary, and not to look tokens up.
    embedding = config.vocabulary * config.width
    assert max(each.bytes for each in gathers) < 4 * embedding
    assert any(each.kind == "all-to-all" for each in found)


@slow
@compiles
def test_no_chunk_of_the_vocabulary_is_exchanged_between_gpus(paper_on_8):
    """Each adds up its own rows' gradient, 519 MiB, and they are summed after it."""
    tree, vocabulary = paper_on_8.tree(UPDATE), paper_on_8.run.model.config.vocabulary
    # Scores and their gradients, at each length of rows.
    assert len(programs.vocabulary_loops(tree, vocabulary)) >= 2
    assert programs.large_vocabulary_collectives(tree, vocabulary) == []


@compiles
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", absent.names(devices.Gpu))
def test_every_gpu_has_a_compiler_that_takes_cudnns_attention(name, deterministic):
    device = target.make_target(name, 2, deterministic=deterministic)
    text = absent.compiled_attention(device)
    assert programs.fused_attention(programs.read(text)) == "cuDNN"


@compiles
def test_a_plan_for_8_gpus_on_2_hosts_lays_data_across_them():
    device = absent.h100(8, 2)
    with device.tracing():
        run = absent.prepare(absent.settings(FROZENLAKE, mesh__fsdp=4))
    hosts = [[d.process_index for d in row.flat] for row in run.model.mesh.devices]
    assert hosts == [[0] * 4, [1] * 4]


@compiles
def test_gpus_fill_hosts_of_eight_unless_hosts_are_given():
    plans = [(1,), (8,), (16,), (16, 1)]
    assert [target.make_target("h100", *plan).hosts for plan in plans] == [1, 1, 2, 1]


def launched(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "launch/train.py", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--target=h100"], "add --plan"),
        (["--plan", "--target=h1"], "choose one of a100, b200, h100, h200"),
    ],
)
def test_a_target_that_cannot_be_planned_ends_in_one_sentence(arguments, remedy):
    ended = launched("--config=configs/frozenlake.py", *arguments)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.startswith("error: ") and remedy in ended.stderr
