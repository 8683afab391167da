"""Devices get their own parts of the files' tensors, and little else is held."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models
from helpers.paths import ROOT

from ragen_jax.errors import UserError
from ragen_jax.models import parameters
from ragen_jax.models.io import hugging_face, partial_reads
from ragen_jax.models.io.sources import Source
from ragen_jax.parallel import mesh as meshes
from ragen_jax.training import placement

SMALL = models.small_config(40, heads=4, kv_heads=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices") / "model"
    write(folder, SMALL, models.random_parameters(SMALL, seed=1))
    return folder


def write(folder: Path, config, tree, **options) -> None:
    tokenizer = models.make_tokenizer()
    hugging_face.write_folder(
        folder, config, jax.device_get(tree), tokenizer, **options
    )


@pytest.mark.parametrize("axes", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)])
def test_every_device_holds_its_part_of_every_leaf(folder, axes):
    mesh, source = meshes.make_mesh(*axes), Source(folder, is_gguf=False)
    wanted = jax.device_get(models.random_parameters(SMALL, seed=1))
    loaded = placement.read_parameters(source, SMALL, mesh)
    jax.tree.map(np.testing.assert_array_equal, loaded, wanted)
    shares = loaded["layers"]["query"].addressable_shards
    assert len(shares) == 8
    for leaf, whole in zip(
        jax.tree.leaves(loaded), jax.tree.leaves(wanted), strict=True
    ):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])
    critic = placement.read_parameters(source, SMALL, mesh, value_head=True)
    assert not critic["value_head"].any() and "head" not in critic
    jax.tree.map(np.testing.assert_array_equal, critic["layers"], wanted["layers"])


def test_of_a_tensor_no_more_is_asked_for_than_the_part_takes():
    """Of each kind of leaf a middle part, of heads of 8: rows and columns by hand."""
    declared = parameters.declare(SMALL)
    every, middle = slice(None), slice(1, 3)
    asked = []

    def read(path, layer, block):
        asked.append((layer, *block))
        return np.zeros([part.stop - part.start for part in block])

    part = partial_reads.part_reader(read, declared)
    heads = slice(8, 24)
    for name, index, wanted in (
        ("query", (every, slice(4, 20), middle, every), (heads, slice(4, 20))),
        ("output", (every, middle, every, slice(4, 20)), (slice(4, 20), heads)),
        ("query_bias", (every, middle, every), (heads,)),
        ("up", (every, slice(4, 20), slice(5, 9)), (slice(5, 9), slice(4, 20))),
        ("mlp_norm", (every, slice(4, 20)), (slice(4, 20),)),
    ):
        asked.clear()
        found = part(("layers", name), index)
        leaf = declared["layers"][name]
        assert found.shape == np.empty(leaf.shape)[index].shape
        assert asked == [(0, *wanted), (1, *wanted)]
    asked.clear()
    part(("embedding",), (slice(10, 30), slice(4, 20)))
    assert asked == [(None, slice(10, 30), slice(4, 20))]
    part(("layers", "up"), (slice(1, 2), every, every))
    assert asked[1][0] == 1 and len(asked) == 2


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_single_number_that_is_not_finite_is_refused(wrong):
    numbers = np.array([0.0, wrong, 1.0])
    read = partial_reads.finite_reader(lambda *_: numbers, "a model")
    with pytest.raises(UserError, match="weights of head are not finite"):
        read(("head",), (slice(None),))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_one_part_of_a_leaf_and_one_tensor_beside_the_model(tmp_path):
    """A model of 170 MB in bfloat16 files, onto four devices that share every leaf."""
    config = dataclasses.replace(
        SMALL, vocabulary=8192, width=512, layers=6, mlp_width=3072, head_dim=128
    )
    declared = parameters.declare(config)
    tree = jax.tree.map(
        lambda leaf: np.broadcast_to(np.float32(1), leaf.shape),
        declared,
        is_leaf=parameters.is_leaf,
    )
    write(
        tmp_path / "model", config, tree, dtype=jnp.bfloat16, max_shard_bytes=2 * 10**7
    )
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 3
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests" / "helpers" / "loading.py"),
            files[0].parent,
        ],
        # Else the allocator keeps what was freed: 15 MB, whatever the model's size.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    leaf = declared["layers"]["gate"]  # The largest, of which a device holds a quarter.
    part = 4 * parameters.count(leaf) // 4
    tensor = 2 * config.vocabulary * config.width
    assert measured["parameters"] == 4 * parameters.count(declared)
    assert measured["peak"] < measured["parameters"] + part + tensor
