"""Rounds of the update's loops, by hand."""

import dataclasses
import types

import numpy as np
import pytest
from helpers import models

from ragen_jax.planning import kernels, programs, roofline, work
from ragen_jax.planning.devices import Figures
from ragen_jax.planning.programs import Block, Choice, Loop

VOCABULARY = 32
CONFIG = dataclasses.replace(models.small_config(VOCABULARY), width=8)


COSTS = work.Costs(Figures(1e12, 1e12, 1e12, 1e12, 1e12), 8)


def kernel(operations: float = 0.0, *sizes: int) -> kernels.Kernel:
    return kernels.Kernel(
        name="k",
        kind="gemm",
        read=0,
        written=0,
        operations=operations,
        is_wide=False,
        place="",
        has_product_of=frozenset(sizes),
    )


def block(*launched: kernels.Kernel, loops=(), choices=()) -> Block:
    return Block("b", launched, (), tuple(loops), tuple(choices))


def scoring(tokens: int, *, layers: int = 3) -> Block:
    """A microbatch: layers of one kernel each, and a loop that scores `tokens`."""
    product = kernel(2.0 * tokens * VOCABULARY * 8, tokens, VOCABULARY, 8)
    # The chunk's other kernels, of which one is a smaller product.
    small = kernel(2.0 * tokens * 8 * 8, tokens, 8)
    chunks = Loop(block(product, small), None, "")
    return block(loops=[Loop(block(kernel()), layers, ""), chunks])


def test_a_chunk_is_as_many_tokens_as_its_largest_product_scores():
    program = block(loops=[Loop(scoring(4), None, "")])
    scored = roofline.ScoredTokens(CONFIG, program, [9, 4, 0])
    layers, chunks = program.loops[0].body.loops
    assert scored.chunk(chunks) == 4
    # Three rounds, one and none, in the mean of three microbatches.
    assert scored.trips(chunks, others=7) == 4 / 3
    assert scored.trips(layers, others=7) == 7


def test_each_length_of_rows_has_its_own_loop_over_the_vocabulary():
    """A condition on rows' length, of whose branches one has chunks of 4, one of 2."""
    choice = Choice((scoring(4, layers=1), scoring(2, layers=1)), "")
    program = block(loops=[Loop(block(choices=[choice]), None, "")])
    scored = roofline.ScoredTokens(CONFIG, program, [9, 3])
    found = COSTS.block(
        program.loops[0].body,
        lambda each: scored.trips(each, 1),
        lambda _: (0.25, 0.75),
    )
    # Rounds: 3 and 1, a mean of 2; 5 and 2, a mean of 3.5; two kernels each, and a
    # layer's one.
    assert found.kernels == 0.25 * (1 + 2 * 2) + 0.75 * (1 + 3.5 * 2)
    assert programs.vocabulary_loops(program, VOCABULARY) == [
        branch.loops[1] for branch in choice.branches
    ]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("lengths", [(64,), (32, 64)])
def test_every_loop_over_rows_goes_round_as_often_as_there_are_rows(
    monkeypatch, epochs, lengths
):
    """40 rows of 4 replied tokens; at most 16 in a minibatch, 4 in a microbatch.

    A reference scores ten microbatches, and then epochs of three minibatches learn, of
    13, 13 and 14 rows: four microbatches each, the last of 1, 1 and 2 rows. Of one
    compiled length there is no condition around a microbatch.
    """
    monkeypatch.setattr(roofline.programs_lib, "update_lengths", lambda _: lengths)
    monkeypatch.setattr(roofline.meshes, "row_shards", lambda _: 1)
    optimizer = types.SimpleNamespace(minibatch=16, microbatch=4, epochs=epochs)
    run = types.SimpleNamespace(
        settings=types.SimpleNamespace(optimizer=optimizer),
        model=types.SimpleNamespace(config=CONFIG, mesh=None),
    )

    def microbatch() -> Block:
        each = [scoring(4, layers=1) for _ in lengths]
        return each[0] if len(each) == 1 else block(choices=[Choice(tuple(each), "")])

    learning = Loop(block(loops=[Loop(microbatch(), None, "")]), None, "")
    if epochs > 1:
        learning = Loop(block(loops=[learning]), epochs, "")
    program = block(loops=[Loop(microbatch(), None, ""), learning])
    found = roofline._update(run, program, COSTS, np.full(40, 60), np.full(40, 4))
    # A microbatch: a layer's kernel, and in the mean 40 / 12 chunks of two.
    chunks = (9 * 4 + 1 + 1 + 2) / 12
    assert found.kernels == pytest.approx((10 + 12 * epochs) * (1 + chunks * 2))


def test_attention_that_knows_lengths_reads_as_much_of_the_cache_as_is_filled():
    attention = dataclasses.replace(
        kernel(600.0), kind="__cudnn$fmhaSoftmax", read=1000, written=10
    )
    product = dataclasses.replace(kernel(400.0), read=90, written=10)
    body = block(attention, product)
    parts = roofline.RolloutParts(
        decode=(COSTS.block(body, lambda _: 1, lambda _: ()),),
        decode_empty=(
            COSTS.block(roofline._without_cache(body), lambda _: 1, lambda _: ()),
        ),
        chunk=work.NOTHING,
        extend=work.NOTHING,
        start=work.NOTHING,
    )
    full, part = (roofline.decode_at(parts, 3, filled) for filled in (1.0, 0.2))
    assert (full.bytes, full.operations, full.kernels) == (1110, 1000, 2)
    # Of the attention's 1,000 bytes its query's 10 and a fifth of the other 990.
    assert part.bytes == pytest.approx(100 + 20 + 0.2 * 990)
    assert part.operations == pytest.approx(400 + 0.2 * 600)
    assert part.kernels == pytest.approx(2)
