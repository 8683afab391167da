"""What is timed of decode attention: layers, and no copy of their cache."""

import jax.numpy as jnp
import pytest

from ragen_jax.benchmarks import attention, suite_sizes
from ragen_jax.planning import programs
from ragen_jax.rollout import cache_attention

SLOTS, CONTEXT, HEADS, GROUPS, FEATURES = 4, 32, 4, 2, 8


def test_a_timed_call_copies_no_cache():
    kernel = cache_attention.XLA
    entry = kernel.to_entry(jnp.zeros((SLOTS, CONTEXT, GROUPS, FEATURES)))
    query = jnp.ones((SLOTS, 1, HEADS, FEATURES))
    caches = [entry] * attention._CACHES
    run = attention.layers(kernel, jnp.arange(1, SLOTS + 1), CONTEXT, GROUPS)
    compiled = run.lower(caches, caches, query).compile()
    held = 2 * len(caches) * entry.nbytes
    assert compiled.memory_analysis().alias_size_in_bytes >= held
    once = programs.read(compiled.as_text()).kernels
    assert all(kernel.written < entry.nbytes for kernel in once)


@pytest.fixture(scope="module")
def compared():
    """(figures by kernel, the keys and values given to the first timed call)."""
    held = []
    layers = attention.layers

    def seen(*given):
        run = layers(*given)
        return lambda *state: held.append(state[:2]) or run(*state)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention, "layers", seen)
        found = dict(attention.compare(SLOTS, CONTEXT, (HEADS, GROUPS, FEATURES)))
    return found, held[0]


def test_a_timed_call_reads_more_than_a_gpus_second_level_cache_holds(compared):
    """Else a kernel that reads the filled part alone would look too good."""
    different = {id(entry) for entries in compared[1] for entry in entries}
    full, itemsize = suite_sizes.FULL, 2
    _, heads, features = full.heads
    positions = attention._FILLED * full.slots * full.context
    entry = positions * heads * features * itemsize
    assert len(different) * entry > 126e6  # bytes of a B200's; an H200's has 50 MB


def test_every_kernel_gives_the_same_when_its_caches_were_written_in_place(compared):
    found, _ = compared
    assert len(found) >= 2
    for figures in found.values():
        assert figures["a layer, us"] > 0
        assert figures["largest difference to the first"] < 1e-4
