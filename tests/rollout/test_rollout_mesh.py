"""A rollout shared by eight devices gives the record of one, and needs no exchange."""

import jax
import numpy as np
import pytest
from helpers import compiled_text, models

from ragen_jax.parallel import mesh as meshes

# Axes data, fsdp, tensor; the layout of the weights; shards of the batch.
SPLITS = {
    "data": [(8, 1, 1), "replicated", 8],
    "data and fsdp": [(2, 4, 1), "replicated", 8],
    "data and tensor": [(4, 1, 2), "tensor", 4],
}

# Neighbours share the weights of the last, as XLA writes it of jax 0.10 and 0.12.
PAIRS = (
    "replica_groups={{0,1},{2,3},{4,5},{6,7}}",
    "replica_groups=mesh['data'=4,'fsdp'=1,'tensor'=2] {'tensor'}",
)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_eight_devices_sample_what_one_device_samples(split):
    sizes, layout, shards = SPLITS[split]
    task = models.usual_task()
    plan = task.plan(shards=shards)
    assert (plan.episodes, plan.env_shards[0].groups) == (16 // shards, 1)
    mesh = meshes.make_mesh(*sizes)
    program = models.compile_rollout(task, plan, mesh, layout)
    record = program(task.parameters, (task.tokens,), models.call())
    rows = [shard.data.shape[0] for shard in record.rows.tokens.addressable_shards]
    assert rows == [16 // shards] * 8
    models.check_same_record(jax.device_get(record), models.sample_usual())
    assert record.passes.decode_passes.shape == (shards,)
    # Shards do not wait for each other: each has its own number of passes.
    assert len(np.unique(record.passes.decode_passes)) > 1
    # Nor is there a collective in a loop, but the sums of tensor parallelism.
    collectives = compiled_text.collectives_in_loops(program.as_text())
    if layout == "replicated":
        assert collectives == []
    else:
        assert len(collectives) >= 2 * task.config.layers
        for line in collectives:
            assert " all-reduce" in line
            assert any(pairs in line for pairs in PAIRS), line
