"""GGUF files: weights and shapes against those that were converted, and refusals."""

import dataclasses
import os
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import models
from helpers.gguf_files import converted, package, refusal, write

from ragen_jax.errors import UserError
from ragen_jax.models import parameters
from ragen_jax.models.config import RopeScaling
from ragen_jax.models.io import gguf, gguf_file

QWEN2 = models.small_config(40)
LLAMA = models.small_config(40, family="llama", qkv_bias=False)
BIASED = models.small_config(40, family="llama")
QWEN3 = models.small_config(
    40, family="qwen3", qkv_bias=False, qk_norm=True, head_dim=12
)
TIED = dataclasses.replace(LLAMA, tied=True)
CONFIGS = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "llama": LLAMA,
    "biased llama": BIASED,
    "tied": TIED,
}
QUANTIZED = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def make(folder: Path, config, **metadata) -> tuple[Path, dict]:
    """A file of random weights, and those weights."""
    weights = jax.device_get(models.random_parameters(config))
    tensors = converted(folder / "hf", config, weights)
    return write(folder / "m.gguf", config, tensors, **metadata), weights


@pytest.mark.parametrize("name", CONFIGS)
def test_shape_and_weights_are_those_that_were_converted(tmp_path, name):
    path, weights = make(tmp_path, CONFIGS[name])
    found, config = models.read_model(path)
    assert config == CONFIGS[name]
    assert jax.tree.structure(found) == jax.tree.structure(weights)
    jax.tree.map(np.testing.assert_array_equal, found, weights)
    assert {x.dtype for x in jax.tree.leaves(found)} == {np.dtype(np.float32)}


def test_biases_that_no_family_has_are_refused(tmp_path):
    """No folder could hold the model: Qwen3's biases come with one of the output."""
    path, _ = make(tmp_path, dataclasses.replace(QWEN3, qkv_bias=True))
    message = refusal(models.read_model, path)
    assert "not used ['blk.0.attn_k.bias'" in message


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_are_near_those_that_were_converted(tmp_path, kind):
    path, weights = make(tmp_path, LLAMA, kind=kind)
    found, _ = models.read_model(path)
    steps = {"F16": 2**-10, "BF16": 2**-8, "Q8_0": 2 / 127}
    step = steps.get(kind, 2 / 15 if kind.startswith("Q4") else 2 / 31)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(weights), strict=True
    ):
        assert np.abs(one - other).max() <= step * np.abs(other).max()
    assert np.abs(found["embedding"] - weights["embedding"]).max() > 0


def test_blocks_hold_the_numbers_that_llama_cpp_defines(tmp_path):
    """Worked out from the structs of ggml-common.h."""
    half = lambda x: np.float16(x).tobytes()
    nibbles = bytes([0x31] * 16)  # 16 times 1 below, 3 above
    whole = bytes(range(256))[:32]  # 0 .. 31 as int8
    blocks = {
        "Q8_0": (half(0.5) + whole, 0.5 * np.arange(32)),
        "Q4_0": (half(0.5) + nibbles, np.repeat([-3.5, -2.5], 16)),
        "Q4_1": (half(0.5) + half(-1) + nibbles, np.repeat([-0.5, 0.5], 16)),
        # Fifth bits of numbers 0 and 16 are set: 17 and 19, less 16.
        "Q5_0": (
            half(2) + struct.pack("<I", 1 | 1 << 16) + nibbles,
            [2, *[-30] * 15, 6, *[-26] * 15],
        ),
        # Scales of 2, minima of 0; each 64 numbers have 32 below and 32 above.
        "Q4_K": (
            half(0.5) + half(1) + bytes([2] * 4 + [0] * 4 + [2] * 4) + nibbles * 8,
            np.tile(np.repeat([1.0, 3.0], 32), 4),
        ),
    }
    writer = package.GGUFWriter(tmp_path / "m.gguf", "llama")
    for kind, (block, _) in blocks.items():
        stored = np.frombuffer(block * 6, np.uint8).reshape(3, -1)  # [3, two blocks]
        writer.add_tensor(kind, stored, raw_dtype=package.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = gguf_file.open_file(tmp_path / "m.gguf")
    for kind, (_, wanted) in blocks.items():
        wanted = np.tile(wanted, (3, 2))
        assert file.tensors[kind].shape == wanted.shape
        np.testing.assert_array_equal(gguf_file.read_rows(file, kind), wanted)
        part = gguf_file.read_rows(file, kind, 1, 2)
        np.testing.assert_array_equal(part, wanted[1:2])


@pytest.mark.parametrize("better", ["token_embd.weight", "output.weight"])
def test_of_an_embedding_stored_twice_the_better_copy_is_read(tmp_path, better):
    config = dataclasses.replace(QWEN2, tied=True)
    weights = jax.device_get(models.random_parameters(config))
    tensors = converted(tmp_path / "hf", config, weights)
    tensors["output.weight"] = tensors["token_embd.weight"]
    path = tmp_path / "m.gguf"
    found, again = models.read_model(
        write(path, config, tensors, kind="Q4_0", kinds={better: "F16"})
    )
    assert again == config and "head" not in found
    error = np.abs(found["embedding"] - weights["embedding"]).max()
    assert error <= 2**-10 * np.abs(weights["embedding"]).max()


# Of tensors that are stored alike rounding explains no difference.
@pytest.mark.parametrize(
    ("kinds", "scale"),
    [(("F16", "F16"), 0.03), (("F32", "BF16"), 0.03)]
    + [((kind, kind), 0.004) for kind in ("F32", "F16", "BF16")],
)
def test_a_head_that_was_trained_apart_from_the_embedding_is_one_of_its_own(
    tmp_path, kinds, scale
):
    """Some tools untie a model, and train the head that was a copy."""
    weights = jax.device_get(models.random_parameters(QWEN2))
    tensors = converted(tmp_path / "hf", QWEN2, weights)
    embedding = tensors["token_embd.weight"]
    drift = np.random.default_rng(0).normal(scale=scale, size=embedding.shape)
    head = (embedding * (1 + drift)).astype(np.float32)
    tensors["output.weight"] = head
    of_each = dict(zip(("token_embd.weight", "output.weight"), kinds, strict=True))
    path = write(tmp_path / "m.gguf", QWEN2, tensors, kinds=of_each)
    found, config = models.read_model(path)
    assert config == QWEN2
    np.testing.assert_allclose(found["head"], head.T, rtol=2**-8)
    tensors["output.weight"] = embedding
    path = write(tmp_path / "copy.gguf", QWEN2, tensors, kinds=of_each)
    assert models.read_model(path)[1] == dataclasses.replace(QWEN2, tied=True)


def test_without_a_number_of_key_heads_there_are_as_many_as_query_heads(tmp_path):
    config = dataclasses.replace(LLAMA, kv_heads=LLAMA.heads)
    path, _ = make(tmp_path, config, **{"llama.attention.head_count_kv": None})
    assert gguf.read_config(path) == config


def test_a_factor_means_nothing_where_positions_are_not_scaled(tmp_path):
    keys = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    path, _ = make(tmp_path, LLAMA, **keys)
    assert gguf.read_config(path) == LLAMA


@pytest.mark.parametrize("padding", [0, 64, 128, 192])
def test_tensors_begin_where_the_files_own_alignment_says(tmp_path, padding):
    """Wherever between two multiples of the alignment the header ends."""
    wanted = {n: np.arange(k, dtype=np.float32)[None] for n, k in (("a", 5), ("b", 7))}
    writer = package.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_string("padding", "x" * (padding + 1))
    for name, tensor in wanted.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = gguf_file.open_file(tmp_path / "m.gguf")
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(gguf_file.read_rows(file, name), tensor)


FAULTS = {
    "general.architecture": ("mamba", "architecture mamba is not supported; choose"),
    "llama.rope.scaling.type": ("yarn", "llama.rope.scaling.type = 'yarn' is not"),
    "llama.rope.scaling.factor": (4.0, "llama.rope.scaling.factor = 4.0 is not"),
    "llama.attention.sliding_window": (512, "attention.sliding_window = 512 is not"),
    "llama.attention.causal": (False, "attention.causal = False is not supported"),
    "llama.expert_count": (8, "llama.expert_count = 8 is not supported"),
    "llama.rope.dimension_count": (4, "rope.dimension_count = 4 cannot be used"),
    "llama.attention.head_count_kv": (3, "head_count_kv = 3 cannot be used"),
    "llama.context_length": (64.0, "llama.context_length = 64.0 cannot be used"),
    "llama.attention.head_count": ([4, 2], "head_count = [4 2] cannot be used"),
    "llama.embedding_length": (None, "lacks the key 'llama.embedding_length'"),
    "llama.block_count": (10**9, "llama.block_count = 1000000000 cannot be used"),
    "llama.feed_forward_length": (0, "feed_forward_length = 0 cannot be used"),
}


@pytest.mark.parametrize("value", [[1.0, 2.0], ["none", "none"]])
def test_a_list_of_kinds_of_scaling_is_refused_by_name(tmp_path, value):
    key = "llama.rope.scaling.type"
    message = refusal(
        gguf.read_config, write(tmp_path / "m", LLAMA, {}, **{key: value})
    )
    assert f"{key} = " in message and "choose a model where it is 'none'" in message


@pytest.mark.parametrize("key", FAULTS)
def test_metadata_that_cannot_be_used_are_refused_by_name(tmp_path, key):
    value, message = FAULTS[key]
    if key == "general.architecture":
        path = write(tmp_path / "m.gguf", models.small_config(4, family=value), {})
    else:
        embedding = {"token_embd.weight": np.ones((40, 32), np.float32)}
        embedding["output_norm.weight"] = np.ones(32, np.float32)
        path = write(tmp_path / "m.gguf", LLAMA, embedding, **{key: value})
    assert message in refusal(gguf.read_config, path)


def test_an_empty_text_for_a_number_is_refused_by_name(tmp_path):
    # The package that writes these files leaves out empty texts; others write them.
    file = SimpleNamespace(path=tmp_path / "m.gguf", metadata={"llama.width": ""})
    said = refusal(gguf._number, file, "llama.width")
    assert "m.gguf: llama.width = '' cannot be used; " in said


def _llama_factors(config, factor: float) -> np.ndarray:
    """LlamaModel.generate_extra_tensors in convert_hf_to_gguf.py, at 1, 4 and 8192."""
    factors = []
    for pair in range(config.head_dim // 2):
        wave = 2 * np.pi * config.rope_base ** (2 * pair / config.head_dim)
        share = (8192 / wave - 1) / 3
        between = 1 / ((1 - share) / factor + share)
        factors.append(1 if wave < 8192 / 4 else factor if wave > 8192 else between)
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaled_positions_of_llama_3_are_recognized(tmp_path, factor):
    scaling = RopeScaling(factor, 1.0, 4.0, 8192)
    config = dataclasses.replace(LLAMA, rope_base=5e5, rope_scaling=scaling)
    factors = _llama_factors(config, factor)
    assert factors[0] == 1 and 1 < factors[2] < factor and factors[3] == factor
    weights = jax.device_get(models.random_parameters(config))
    tensors = converted(tmp_path / "hf", config, weights)
    tensors["rope_freqs.weight"] = factors
    found, again = models.read_model(write(tmp_path / "m.gguf", config, tensors))
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, found, weights)


def test_positions_scaled_in_another_way_are_refused(tmp_path):
    tensors = {"rope_freqs.weight": np.full(4, 2, np.float32)}
    tensors["token_embd.weight"] = np.ones((40, 32), np.float32)
    path = write(tmp_path / "m.gguf", LLAMA, tensors, **{"llama.block_count": 1})
    assert "the tensor rope_freqs.weight in another" in refusal(gguf.read_config, path)


KEY = "blk.1.attn_k.weight"
WRONG_TENSORS = {
    "missing": ({KEY: None}, f"missing ['{KEY}'] (1 in all), not used [] (0 in all)"),
    "left over": ({"blk.0.extra": np.ones(3, "f4")}, "not used ['blk.0.extra'] (1"),
    "turned": ({KEY: np.ones((32, 16), "f4")}, "the metadata imply (16, 32)"),
    "too flat": ({KEY: np.ones(512, "f4")}, f"{KEY} has shape (512,)"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_tensors_that_do_not_fit_the_metadata_are_named(tmp_path, case):
    changes, message = WRONG_TENSORS[case]
    weights = jax.device_get(models.random_parameters(LLAMA))
    tensors = converted(tmp_path / "hf", LLAMA, weights) | changes
    tensors = {name: x for name, x in tensors.items() if x is not None}
    path = write(tmp_path / "m.gguf", LLAMA, tensors)
    declared = parameters.declare(gguf.read_config(path))
    assert message in refusal(gguf.open_parameters, path, LLAMA, declared)


def test_a_kind_of_tensor_that_is_not_known_is_named(tmp_path):
    weights = jax.device_get(models.random_parameters(LLAMA))
    tensors = converted(tmp_path / "hf", LLAMA, weights)
    path = write(tmp_path / "m.gguf", LLAMA, tensors, kinds={KEY: "Q8_0"})
    whole = bytearray(path.read_bytes())
    at = whole.index(KEY.encode()) + len(KEY) + 4 + 16  # after the shape
    assert struct.unpack_from("<I", whole, at) == (8,)
    struct.pack_into("<I", whole, at, package.GGMLQuantizationType.I8)
    path.write_bytes(whole)
    message = refusal(gguf.open_parameters, path, LLAMA, parameters.declare(LLAMA))
    assert f"tensor {KEY} is stored as I8, which is not supported; take" in message


def test_a_file_cut_anywhere_is_one_sentence(tmp_path):
    path, _ = make(tmp_path, LLAMA, **{"tokenizer.ggml.tokens": ["a", "bc"]})
    whole = path.read_bytes()
    for length in (*range(4, 900, 7), len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        message = refusal(gguf.read_config, path)
        assert message.startswith(f"{path} is damaged (") and "again" in message


@pytest.mark.parametrize("kind", [0, 8])
def test_a_long_hole_in_a_file_is_not_read_as_a_list_of_elements(tmp_path, kind):
    """2^33 bytes that take no room on the disk: 2^28 empty texts, or numbers."""
    start = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a"
    (tmp_path / "m").write_bytes(start + struct.pack("<IIQ", 9, kind, 2**28))
    os.truncate(tmp_path / "m", 2**33)
    message = refusal(gguf.read_config, tmp_path / "m")
    assert "is damaged (a list of 268435456 elements exceeds the file, or" in message


def test_a_long_hole_in_a_file_is_not_read_as_pairs_of_empty_keys(tmp_path):
    (tmp_path / "m").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2**28))
    os.truncate(tmp_path / "m", 2**33)
    message = refusal(gguf.read_config, tmp_path / "m")
    assert "is damaged (the key '' stands there twice)" in message


def test_a_file_with_any_byte_of_its_header_changed_is_read_or_refused(tmp_path):
    path, _ = make(tmp_path, LLAMA, **{"tokenizer.ggml.tokens": ["a", "bc"]})
    whole, refused = path.read_bytes(), 0
    for at in range(4, 1500, 5):
        path.write_bytes(whole[:at] + b"\xf7" + whole[at + 1 :])
        try:
            models.read_model(path)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and str(path) in str(error)
    assert refused > 100


@pytest.mark.parametrize("what", ["missing", "folder", "empty", "other", "version"])
def test_what_is_no_gguf_file_is_refused(tmp_path, what):
    path = tmp_path / "m.gguf"
    if what == "folder":
        path.mkdir()
    elif what != "missing":
        start = {"empty": b"", "other": b"PK" * 40, "version": b"GGUF\0\0\0\3" * 5}
        path.write_bytes(start[what])
    message = {
        "missing": "cannot be read (No such file or directory); give a .gguf file",
        "folder": "cannot be read (Is a directory); give a .gguf file",
        "version": "GGUF version 50331648 is not supported; take a little-endian",
    }.get(what, "is not a GGUF file: it does not begin with 'GGUF'; give")
    assert message in refusal(gguf.read_config, path)


def test_without_the_package_the_line_that_installs_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)  # As if it were not installed.
    message = refusal(gguf.read_config, tmp_path / "m.gguf")
    assert message.endswith("which is not installed: pip install gguf")
