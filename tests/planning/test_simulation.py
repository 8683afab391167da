"""The simulated passes of a rollout, by hand and beside the engine itself."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import models

from ragen_jax.planning import simulation
from ragen_jax.planning.simulation import Script

SIZES = simulation.Sizes(
    episodes=3,
    slots=2,
    extend_width=1,
    extend_share=0,
    decode_chunk=4,
    buckets=(20, 60),
    context=60,
    turns=2,
    first=10,
    message=6,
    reply_tokens=8,
)


def test_full_replies_take_the_passes_that_the_engine_takes():
    found = simulation.simulate(SIZES, reply=8, ends=0.0)
    # Two chunks a reply. Slot 0 is answered first, slot 1 a round later, and the third
    # episode follows in slot 0: rows of 10 + 8 + 6 + 8 tokens each.
    assert found.rows.tolist() == [32, 32, 32]
    assert found.replies.tolist() == [16, 16, 16] and found.tokens == 48
    assert found.extends == 6
    assert found.decodes == 4 * found.rounds and found.by_bucket[0] > 0


def test_the_cache_holds_what_the_slots_that_decode_hold():
    sizes = dataclasses.replace(SIZES, episodes=2, turns=1, extend_width=2)
    script = Script(replies=np.array([[4], [8]]), turns=np.ones(2, int))
    # Two rounds, which begin with 10 + 10 tokens and, slot 0 being done, 14.
    assert simulation.play(sizes, script).filled == (20 + 14) / (2 * 2 * 60)


def test_shorter_replies_take_fewer_passes_and_never_outgrow_the_budget():
    sizes = dataclasses.replace(SIZES, episodes=64, slots=64, reply_tokens=40)
    sizes = dataclasses.replace(sizes, buckets=(50, 100), context=100, extend_width=16)
    short, full = (simulation.simulate(sizes, reply, 0.2) for reply in (10, 40))
    assert short.decodes < full.decodes and short.tokens < full.tokens
    assert full.rows.max() <= sizes.context
    mean = simulation.simulate(sizes, 10, 0.0).replies.mean() / sizes.turns
    assert 8 < mean < 12


def test_the_slowest_of_more_shards_takes_more_passes_and_full_replies_always_as_many():
    sizes = dataclasses.replace(SIZES, episodes=16, slots=16, reply_tokens=80)
    sizes = dataclasses.replace(sizes, buckets=(180,), context=180, extend_width=4)
    (one, own), (eight, shards) = (
        simulation.expect(sizes, 10, 0.2, count) for count in (1, 8)
    )
    drawn = [simulation.simulate(sizes, 10, 0.2, seed) for seed in range(64)]
    assert one.decodes == round(np.mean([each.decodes for each in drawn]))
    assert min(each.filled for each in drawn) < one.filled
    assert one.filled < max(each.filled for each in drawn)
    slowest = np.array([each.decodes for each in drawn]).reshape(8, 8).max(axis=1)
    assert eight.decodes == round(slowest.mean()) > one.decodes
    assert len(own) == 1 and len(shards) == 8
    full, _ = simulation.expect(sizes, 80, 0.0, 8)
    assert full.decodes == simulation.simulate(sizes, 80, 0.0).decodes


# Four slots, four episodes. Turn 1 is over after 1, 2, 2 and 3 rounds.
SCRIPT = Script(
    replies=np.array([[4, 4], [8, 4], [8, 4], [12, 8]]), turns=np.full(4, 2)
)


def test_environments_step_when_w_slots_wait():
    sizes = dataclasses.replace(SIZES, episodes=4, slots=4, extend_width=4)
    found = simulation.play(sizes, SCRIPT)
    # All wait for the slowest: after round 3, and again after two more.
    assert (found.rounds, found.extends) == (5, 2)


def test_environments_step_when_a_share_of_the_busy_slots_waits():
    sizes = dataclasses.replace(SIZES, episodes=4, slots=4, extend_width=4)
    found = simulation.play(dataclasses.replace(sizes, extend_share=2), SCRIPT)
    # Half of four: after round 2 for slots 0 to 2. All are done after round 3: three
    # episodes end, and slot 3 has two rounds to go, half of one being itself.
    assert (found.rounds, found.extends) == (5, 3)


@pytest.mark.slow
@pytest.mark.parametrize("extend_share", [0, 3])
def test_the_engine_takes_the_passes_that_are_simulated_for_its_replies(extend_share):
    task = models.usual_task()
    plan = task.plan(slots=5, decode_chunk=3)
    plan = dataclasses.replace(plan, extend_share=extend_share)
    program = models.compile_rollout(task, plan)
    sizes = simulation.Sizes(
        episodes=plan.episodes,
        slots=plan.slots,
        extend_width=plan.extend_width,
        extend_share=plan.extend_share,
        decode_chunk=plan.decode_chunk,
        buckets=plan.buckets,
        context=plan.context,
        turns=plan.turns,
        first=task.tokens.first_capacity,
        message=task.tokens.next_capacity,
        reply_tokens=plan.reply_tokens,
    )
    for seed in range(4):
        made = program(task.parameters, (task.tokens,), models.call(seed))
        record = jax.device_get(made)
        episodes = record.episodes
        script = Script(episodes.reply_tokens, episodes.turns)
        found = simulation.play(sizes, script)
        assert found.tokens == record.rows.is_reply.sum()
        assert found.decodes == record.passes.decode_passes.sum()
        assert found.extends == record.passes.extend_passes.sum()
