"""The groups of devices of several processes, connected before programs need them."""

import pytest
from helpers import runs

pytestmark = pytest.mark.slow  # Several processes, one of which is late.

# The last of four processes comes late to the first program of the mesh.
LATE = """
import sys
import time

from ragen_jax import cli
from ragen_jax.parallel import distributed, gloo_groups
from ragen_jax.parallel import mesh as meshes

place, index = sys.argv[1], int(sys.argv[2])
del sys.argv[1:]


def main():
    distributed.start(place, 4, index)
    import jax
    from jax.sharding import PartitionSpec as P

    mesh = meshes.make_mesh(2, 2, 1)
    gloo_groups.connect(mesh)
    if index == 3:
        time.sleep(33)
    every = P(("data", "fsdp"))
    specs = dict(in_specs=every, out_specs=P("data"))
    add = jax.shard_map(lambda x: jax.lax.psum(x, "fsdp"), mesh=mesh, **specs)
    shared = jax.NamedSharding(mesh, every)
    whole = jax.jit(lambda: jax.numpy.ones(4), out_shardings=shared)()
    added = jax.jit(add)(whole)
    print([float(part.data[0]) for part in added.addressable_shards])


cli.run(main)
"""


def test_a_process_may_be_half_a_minute_late_for_a_meshes_first_program(tmp_path):
    """Gloo waits 30 s for the processes of a group that it has not connected."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    place = f"127.0.0.1:{runs.free_port()}"
    started = [runs.start([place, str(index)], script) for index in range(4)]
    for code, output, errors in [runs.finish(process) for process in started]:
        assert code == 0, errors
        assert output.endswith("[2.0]\n")
