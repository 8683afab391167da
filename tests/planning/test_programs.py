"""What a plan reads off compiled programs and multiplies, by hand."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import runs
from jax.experimental import topologies

from ragen_jax import cli
from ragen_jax.errors import UserError
from ragen_jax.models import parameters
from ragen_jax.parallel import backend
from ragen_jax.planning import compiling, devices, model, programs, target, work
from ragen_jax.planning.programs import Collective

# A loop of 3 rounds, in it a product, a copy, an exchange, and a loop of unknown length
# with a condition; before it a fusion that takes 2 rows of 100.
PROGRAM = """\
HloModule jit_f, is_scheduled=true

%fused (p.0: f32[100,8], p.1: s32[]) -> f32[2,8] {
  %p.0 = f32[100,8]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %take = f32[2,8]{1,0} dynamic-slice(%p.0, %p.1, %p.1), dynamic_slice_sizes={2,8}
}

%inner_body (b: (f32[4,8])) -> (f32[4,8]) {
  %b = (f32[4,8]{1,0}) parameter(0)
  %b.0 = f32[4,8]{1,0} get-tuple-element(%b), index=0
  %if = f32[4,8]{1,0} conditional(%b.0, %b.0, %b.0), true_computation=%yes, \
false_computation=%no
  ROOT %t = (f32[4,8]{1,0}) tuple(%if)
}

%yes (y: f32[4,8]) -> f32[4,8] {
  %y = f32[4,8]{1,0} parameter(0)
  ROOT %copy.1 = f32[4,8]{1,0} copy(%y)
}

%no (n: f32[4,8]) -> f32[4,8] {
  ROOT %n = f32[4,8]{1,0} parameter(0)
}

%test (c: (f32[4,8])) -> pred[] {
  %c = (f32[4,8]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

%body (a: (f32[4,8])) -> (f32[4,8]) {
  %a = (f32[4,8]{1,0}) parameter(0)
  %a.0 = f32[4,8]{1,0} get-tuple-element(%a), index=0
  %w = bf16[8,32]{1,0} constant({...})
  %x = bf16[4,8]{1,0} convert(%a.0)
  %dot = f32[4,32]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sum = f32[4,32]{1,0} all-reduce(%dot), REPLICAS, to_apply=%add
  %next = (f32[4,8]{1,0}) while(%a), condition=%test, body=%inner_body
  ROOT %same = (f32[4,8]{1,0}) tuple(%a.0)
}

ENTRY %main (e.0: f32[100,8], e.1: s32[], e.2: f32[4,8]) -> f32[2,8] {
  %e.0 = f32[100,8]{1,0} parameter(0)
  %e.1 = s32[] parameter(1)
  %e.2 = f32[4,8]{1,0} parameter(2)
  %rows = f32[2,8]{1,0} fusion(%e.0, %e.1), kind=kLoop, calls=%fused
  %start = (f32[4,8]{1,0}) tuple(%e.2)
  %while = (f32[4,8]{1,0}) while(%start), condition=%test, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %out = f32[2,8]{1,0} copy(%rows)
}
"""


def program(replicas: str = "replica_groups={{0,1}}") -> programs.Block:
    return programs.read(PROGRAM.replace("REPLICAS", replicas))


def test_a_program_is_read_as_a_tree_of_loops_and_conditions():
    tree = program()
    (loop,) = tree.loops
    assert loop.trips == 3
    (inner,) = loop.body.loops
    assert inner.trips is None
    (choice,) = inner.body.choices
    assert [len(branch.kernels) for branch in choice.branches] == [0, 1]  # false, true


def test_a_fusion_reads_only_the_rows_that_it_takes():
    fusion, copy = program().kernels
    assert (fusion.read, fusion.written) == (2 * 8 * 4 + 4, 2 * 8 * 4)
    assert (copy.read, copy.written) == (64, 64)


def test_a_product_counts_two_operations_for_each_pair():
    _, dot = program().loops[0].body.kernels
    assert dot.operations == 2 * 4 * 8 * 32 and not dot.is_wide
    assert dot.bytes == 2 * 4 * 8 + 2 * 8 * 32 + 4 * 4 * 32


PALLAS = """\
HloModule jit_h, is_scheduled=true

ENTRY %main (a: bf16[8,64]) -> bf16[8,64] {
  %a = bf16[8,64]{1,0} parameter(0)
  %mixed = bf16[8,64]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"metadata":{
"block_q": 128
}}, metadata={op_name="jit(h)/attention"}
  ROOT %copied = bf16[8,64]{1,0} copy(%mixed)
}
"""


def test_metadata_of_several_lines_does_not_end_a_computation():
    tree = programs.read(PALLAS)
    assert [kernel.kind for kernel in tree.kernels] == ["tpu_custom_call", "copy"]
    assert programs.fused_attention(tree) == "splash attention"
    assert programs.fused_attention(program()) is None


LIBRARY = """\
HloModule jit_g, is_scheduled=true

ENTRY %main (a: bf16[64,32], b: bf16[32,128]) -> bf16[64,128] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,128]{1,0} parameter(1)
  %call = (bf16[64,128]{1,0}, s8[33554432]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %out = bf16[64,128]{1,0} get-tuple-element(%call), index=0
}
"""


def test_an_asynchronous_copy_writes_its_target_and_not_its_source():
    plain = "%out = f32[2,8]{1,0} copy(%rows)"
    results = "(f32[2,8]{1,0}, f32[2,8]{1,0}, u32[]{:S(2)})"
    started = PROGRAM.replace(plain, f"%out = {results} copy-start(%rows)")
    *_, copy = programs.read(started).kernels
    assert copy.kind == "copy-start" and (copy.read, copy.written) == (64, 64)


def test_the_room_that_a_library_works_in_is_not_counted_as_written():
    (product,) = programs.read(LIBRARY).kernels
    assert product.read == 2 * (64 * 32 + 32 * 128)
    assert product.written == 2 * 64 * 128
    assert product.operations == 2 * 64 * 32 * 128


@pytest.mark.parametrize(
    ("written", "group"),
    [
        ("replica_groups={{0,1},{2,3}}", (0, 1)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", tuple(range(8))),
    ],
)
def test_the_devices_of_an_exchange_are_read_in_every_notation(written, group):
    (found,) = programs.collectives_in_loops(program(written))
    assert found.kind == "all-reduce" and found.dtypes == {"f32"}
    assert found.bytes == 4 * 4 * 32 and found.group == group


PERMUTATION = """\
HloModule jit_h, is_scheduled=true

ENTRY %main (a: f32[25000000]) -> f32[25000000] {
  %a = f32[25000000]{0} parameter(0)
  %start = (f32[25000000]{0}, f32[25000000]{0}) collective-permute-start(%a), \
channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  ROOT %done = f32[25000000]{0} collective-permute-done(%start)
}
"""


def test_a_permutation_sends_the_whole_array_once():
    (found,) = programs.read(PERMUTATION).collectives
    assert (found.kind, found.bytes) == ("collective-permute", 100_000_000)
    assert found.group == (0, 1, 2, 3)
    figures = dataclasses.replace(
        devices.read("h100").figures, within_host=1e11, between_hosts=1e10
    )
    spent = work.Costs(figures, per_host=8).collective(found)
    assert spent.exchanged == 100_000_000
    assert spent.seconds == pytest.approx(1e-3 + work.COLLECTIVE_SECONDS)


def test_copies_and_exchanges_in_loops_are_found():
    tree = program()
    assert [k.name for k in programs.copies_in_loops(tree, 128)] == ["copy.1"]
    assert programs.copies_in_loops(tree, 129) == []
    (scoring,) = programs.vocabulary_loops(tree, 32)
    assert scoring.trips == 3 and programs.vocabulary_loops(tree, 33) == []
    assert len(programs.large_vocabulary_collectives(tree, 32, most=511)) == 1
    assert programs.large_vocabulary_collectives(tree, 32, most=512) == []


def test_operations_of_a_program_that_jax_compiled_are_counted():
    @jax.jit
    def f(x, w):
        return jax.lax.fori_loop(0, 5, lambda i, x: jnp.tanh(x @ w), x)

    x, w = jnp.ones((16, 64)), jnp.ones((64, 64))
    text = f.lower(x, w).compile().as_text()
    tree = programs.read(text)
    costs = work.Costs(devices.read("h100").figures, 8)
    found = costs.block(tree, lambda loop: 1, lambda choice: ())
    # The CPU's own library may do products under a name that is not known here.
    is_known = " dot(" in text
    assert found.operations == is_known * 5 * 2 * 16 * 64 * 64
    assert found.bytes > 5 * 4 * 64 * 64


def test_a_kernel_takes_as_long_as_its_bytes_or_its_operations():
    figures = devices.Figures(
        memory_bandwidth=1e12,
        matmul_bfloat16=1e15,
        matmul_float32=5e14,
        within_host=1e11,
        between_hosts=1e10,
    )
    costs = work.Costs(figures, per_host=4)
    _, dot = program().loops[0].body.kernels
    moving = dataclasses.replace(dot, read=8 * 10**11, written=0, operations=0.0)
    assert costs.kernel(moving).seconds == pytest.approx(1.0, rel=1e-3)
    busy = dataclasses.replace(moving, read=0, operations=1e15)
    assert costs.kernel(busy).seconds == pytest.approx(2.0, rel=1e-3)
    wide = dataclasses.replace(busy, is_wide=True)
    assert costs.kernel(wide).seconds == pytest.approx(4.0, rel=1e-3)


def test_an_exchange_between_hosts_is_as_fast_as_all_their_links_together():
    figures = dataclasses.replace(
        devices.read("h100").figures, within_host=1e11, between_hosts=1e10
    )
    costs = work.Costs(figures, per_host=4)

    def seconds(kind: str, group) -> float:
        exchange = Collective(kind, frozenset({"f32"}), 8 * 10**10, tuple(group), "")
        return costs.collective(exchange).seconds

    # A ring's all-reduce sends each byte twice, less what a device has itself.
    assert seconds("all-reduce", range(4)) == pytest.approx(2 * 0.75 * 0.8, rel=1e-3)
    assert seconds("all-gather", range(4)) == pytest.approx(0.75 * 0.8, rel=1e-3)
    assert seconds("all-gather", range(8)) == pytest.approx(0.875 * 2, rel=1e-3)
    assert seconds("all-gather", [0, 4]) == pytest.approx(0.5 * 8, rel=1e-3)
    assert seconds("all-gather", [0]) == 0


# Targets -----------------------------------------------------------------------------


def test_every_described_device_has_a_compiler_description_and_figures():
    gpus, tpus = ["a100", "b200", "h100", "h200"], ["v5e", "v5p", "v6e"]
    assert devices.names() == [*gpus, *tpus]
    for name in gpus:
        device = devices.read(name)
        assert isinstance(device, devices.Gpu)
        assert f"device_memory_size: {device.memory}" in device.target_config
        assert device.figures.matmul_bfloat16 > device.figures.matmul_float32
    titles = {name: devices.read(name).title for name in ("h100", "h200")}
    # As their drivers call them: a device that is there is found by it.
    assert titles == {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
    with pytest.raises(UserError, match="choose one of a100, b200, h100, h200, v5e,"):
        devices.read("h1000")
    for name in tpus:
        device = devices.read(name)
        assert isinstance(device, devices.Tpu)
        for count, shape in device.slices.items():
            assert math.prod(map(int, shape.split("x"))) == count


def test_a_slice_of_tpus_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(UserError, match="a slice of TPU v5p of 1, 4, 8, 16"):
        target.make_target("v5p", 3)
    with pytest.raises(UserError, match="4 in each host: .* or set it to 2"):
        target.make_target("v5e", 8, 1)


def test_what_cannot_be_planned_is_refused_with_a_remedy(monkeypatch):
    with pytest.raises(UserError, match="evenly over 3 hosts of usually 8: choose"):
        target.make_target("h100", 8, 3)
    with pytest.raises(UserError, match="choose one of qwen2.5-0.5b, .*, tiny"):
        model.find("tiny", "qwen")

    def missing(*_, **__):
        raise NotImplementedError("topology not implemented")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    for name, extra in (("h100", "plan-gpu"), ("v5e", "plan-tpu")):
        with pytest.raises(UserError, match=rf"pip install -e '\.\[{extra}\]'"):
            target.make_target(name)


@pytest.mark.parametrize("replies", ["abc", "-5", "nan", "50,inf", "0"])
def test_replies_that_are_no_number_of_tokens_are_refused_before_compiling(replies):
    flags = cli.PlanFlags(True, "h100", 1, 1, tuple(replies.split(",")), None)
    with pytest.raises(UserError, match=f"--target-replies={replies}: give numbers"):
        cli.plan_for_target(runs.settings(), flags)


def test_a_model_of_the_hub_whose_shape_is_known_needs_no_files():
    source = model.find("Qwen/Qwen2.5-0.5B-Instruct", None)
    assert source.read_config().vocabulary == 151936
    revision = model.find("Qwen/Qwen2.5-0.5B-Instruct@7ae557604adf67be50417f59", None)
    assert revision.read_config() == source.read_config()
    assert model.find("tiny", None).read_config().vocabulary == 1024
    with pytest.raises(UserError, match="has no weights"):
        source.open_parameters(source.read_config(), {})


@pytest.mark.parametrize(
    ("size", "count"),
    [
        # Of the models' safetensors files, as the hub counts them.
        ("0.5B", 494_032_768),
        ("1.5B", 1_543_714_304),
        ("3B", 3_085_938_688),
        ("7B", 7_615_616_512),
    ],
)
def test_a_shape_has_as_many_weights_as_the_model(size, count):
    config = model.find(f"Qwen/Qwen2.5-{size}-Instruct", None).read_config()
    declared = jax.tree.leaves(
        parameters.declare(config), is_leaf=lambda x: hasattr(x, "shape")
    )
    assert sum(math.prod(one.shape) for one in declared) == count


def test_jax_allocates_three_quarters_unless_told(monkeypatch):
    for variable in target._FRACTION_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert target.memory_fraction() == 0.75
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    assert target.memory_fraction() == 0.9
    # JAX refuses to start with both variables: the advice names the one that is set.
    assert target.fraction_variable() == "XLA_CLIENT_MEM_FRACTION"
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    assert target.fraction_variable() == "XLA_CLIENT_MEM_FRACTION"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert target.fraction_variable() == "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.mark.slow
def test_within_a_target_its_devices_answer_and_outside_those_that_are_here():
    there = [types.SimpleNamespace(id=i) for i in range(4)]
    absent = backend.Backend("gpu", tuple(there), tuple(there[:2]), (9, 0))
    with backend.targeting(absent):
        assert backend.name() == "gpu" and backend.device_count() == 4
        assert backend.devices() == there and backend.local_devices() == there[:2]
        assert backend.cuda_capability() == (9, 0)
    assert backend.name() == jax.default_backend()
    assert backend.devices() == jax.devices()
    assert backend.cuda_capability() is None
    assert np.shape(backend.local_devices()) == (jax.local_device_count(),)


def _compile(deterministic: bool, tried: list[dict]):
    """What a target makes of a program that compiles without Triton alone."""

    def compile(compiler_options):
        tried.append(dict(compiler_options))
        if compiler_options.get("xla_gpu_enable_triton_gemm", True):
            raise jax.errors.JaxRuntimeError("Couldn't find output tile sizes")
        return "the program"

    attempts = target.gpu_attempts(deterministic)
    chosen = target.Target(None, hosts=1, backend=None, attempts=attempts)
    return chosen.compile(types.SimpleNamespace(compile=compile))


def test_a_program_that_triton_has_no_kernel_for_is_compiled_without_it():
    tried: list[dict] = []
    assert _compile(deterministic=False, tried=tried) == "the program"
    assert tried[1] == tried[0] | {"xla_gpu_enable_triton_gemm": False}
    assert len(tried) == 2


def test_a_deterministic_program_is_compiled_without_triton_at_once():
    tried: list[dict] = []
    assert _compile(deterministic=True, tried=tried) == "the program"
    assert len(tried) == 1


def test_a_program_that_a_tpus_compiler_has_no_memory_for_is_one_sentence():
    device = devices.read("v5e")
    chosen = target.Target(device, hosts=1, backend=None, attempts=({},))

    def fails(message):
        def compile(compiler_options):
            raise jax.errors.JaxRuntimeError(message)

        return types.SimpleNamespace(compile=compile)

    traced = compiling.Lowered("update", fails("RESOURCE_EXHAUSTED: 18G of 15.75G"))
    with pytest.raises(
        UserError, match=r"for the update a TPU v5e has .*18G of .*fsdp"
    ):
        compiling.compile_program(chosen, traced)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a fault"):
        chosen.compile(fails("INTERNAL: a fault"))
