"""How much kernels read, by hand."""

import types

import pytest

from ragen_jax.planning import hlo, kernels, reads

# Partial sums of a product, [4, 16, 12], of which columns 8 to 11 are wanted, in two
# halves that swap their places; beside them 3 rows of a table, and a bias.
FUSED = """\
HloModule jit_f, is_scheduled=true

%fused (p.0: f32[4,16,12], p.1: f32[100,4], p.2: s32[3,1], p.3: f32[4]) -> f32[16,4] {
  %p.0 = f32[4,16,12]{2,1,0} parameter(0)
  %zero = f32[] constant(0)
  %sum = f32[16,12]{1,0} reduce(%p.0, %zero), dimensions={0}, to_apply=%add
  %part = f32[16,4]{1,0} slice(%sum), slice={[0:16], [8:12]}
  %left = f32[16,2]{1,0} slice(%part), slice={[0:16], [0:2]}
  %right = f32[16,2]{1,0} slice(%part), slice={[0:16], [2:4]}
  %turned = f32[16,4]{1,0} concatenate(%right, %left), dimensions={1}
  %p.1 = f32[100,4]{1,0} parameter(1)
  %p.2 = s32[3,1]{1,0} parameter(2)
  %rows = f32[3,4]{1,0} gather(%p.1, %p.2), slice_sizes={1,4}
  %padded = f32[16,4]{1,0} pad(%rows, %zero), padding=0_13x0_0
  %p.3 = f32[4]{0} parameter(3)
  %bias = f32[16,4]{1,0} broadcast(%p.3), dimensions={1}
  %with = f32[16,4]{1,0} add(%turned, %padded)
  ROOT %all = f32[16,4]{1,0} add(%with, %bias)
}

ENTRY %main (a: f32[4,16,12], b: f32[100,4], c: s32[3,1], d: f32[4]) -> f32[16,4] {
  %a = f32[4,16,12]{2,1,0} parameter(0)
  %b = f32[100,4]{1,0} parameter(1)
  %c = s32[3,1]{1,0} parameter(2)
  %d = f32[4]{0} parameter(3)
  ROOT %fusion = f32[16,4]{1,0} fusion(%a, %b, %c, %d), kind=kLoop, calls=%fused
}
"""


def test_a_fusion_reads_of_each_argument_what_its_result_needs():
    module = hlo.parse(FUSED)
    main = module.computations["main"]
    kernel = kernels.measure(module, main, main["fusion"])
    # 4 summands of 16 x 4 numbers; 3 rows of 4; 3 indices; 4 biases.
    assert kernel.sources == (
        ("a", 4 * 4 * 16 * 4),
        ("b", 4 * 3 * 4),
        ("c", 4 * 3),
        ("d", 4 * 4),
    )
    assert kernel.read == sum(size for _, size in kernel.sources)
    assert kernel.written == 4 * 16 * 4


def kernel_of(name: str, written: int, **sources: int):
    read = sum(sources.values())
    return types.SimpleNamespace(
        name=name, written=written, sources=tuple(sources.items()), bytes=read + written
    )


@pytest.mark.parametrize(
    ("capacity", "hits"),
    [
        # y is read right behind its writing; x again once 80 bytes were moved since,
        # then z, once 110 were.
        (20, [0, 20, 0, 0]),
        (89, [0, 20, 0, 0]),
        (90, [0, 20, 10, 0]),
        (139, [0, 20, 10, 0]),
        (140, [0, 20, 10, 30]),
        (0, [0, 0, 0, 0]),
    ],
)
def test_a_read_is_a_hit_where_little_was_moved_since_its_value_was_touched(
    capacity, hits
):
    program = (
        kernel_of("y", 20, x=10),
        kernel_of("z", 30, y=20, w=30),
        kernel_of("u", 100, x=10),
        kernel_of("v", 5, z=30),
    )
    assert reads.from_cache(program, capacity) == hits
