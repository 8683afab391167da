"""K-quants against llama.cpp's own loops, written out in Python.

Each function below follows dequantize_row_q*_K of ggml/src/ggml-quants.c and the struct
block_q*_K of ggml/src/ggml-common.h: one block of 256 numbers, as its bytes stand in a
file.
"""

import numpy as np
import pytest
from helpers.gguf_files import package

from ragen_jax.models.io import gguf_file

ROWS, BLOCKS = 4, 3


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block, np.float16, 1, at)[0])


def scale_and_min(index: int, packed: bytes) -> tuple[int, int]:
    """get_scale_min_k4."""
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    low, high = packed[index + 4], (packed[index - 4] >> 6, packed[index] >> 6)
    return (low & 15) | high[0] << 4, (low >> 4) | high[1] << 4


def q2_k(block: bytes) -> list[float]:
    """scales[16], qs[64], d, dmin."""
    scales, d, least, numbers = block[:16], half(block, 80), half(block, 82), []
    group = 0
    for start in (16, 48):
        for shift in (0, 2, 4, 6):
            for first in (0, 16):
                scale = scales[group]
                group += 1
                for at in range(start + first, start + first + 16):
                    number = block[at] >> shift & 3
                    numbers.append(d * (scale & 15) * number - least * (scale >> 4))
    return numbers


def q3_k(block: bytes) -> list[float]:
    """hmask[32], qs[64], scales[12], d."""
    mask, packed, d, numbers = block[:32], block[96:108], half(block, 108), []
    scales = []
    for group in range(16):  # Six bits: four of one byte, two of another.
        low = packed[group % 8] >> (4 if group >= 8 else 0) & 15
        scales.append(low | (packed[8 + group % 4] >> 2 * (group // 4) & 3) << 4)
    group = 0
    for start in (32, 64):
        for shift in (0, 2, 4, 6):
            bit = 1 << group // 2
            for first in (0, 16):
                scale = d * (scales[group] - 32)
                group += 1
                for at in range(first, first + 16):
                    number = block[start + at] >> shift & 3
                    numbers.append(scale * (number - (0 if mask[at] & bit else 4)))
    return numbers


def q4_k(block: bytes) -> list[float]:
    """d, dmin, scales[12], qs[128]."""
    return _nibbles(block, block[16:], bytes(32))


def q5_k(block: bytes) -> list[float]:
    """d, dmin, scales[12], qh[32], qs[128]."""
    return _nibbles(block, block[48:], block[16:48])


def _nibbles(block: bytes, low: bytes, fifth_bits: bytes) -> list[float]:
    d, least, numbers = half(block, 0), half(block, 2), []
    for group in range(8):
        scale, minimum = scale_and_min(group, block[4:16])
        for at in range(32):
            number = low[group // 2 * 32 + at] >> (4 if group % 2 else 0) & 15
            number += 16 if fifth_bits[at] >> group & 1 else 0
            numbers.append(d * scale * number - least * minimum)
    return numbers


def q6_k(block: bytes) -> list[float]:
    """ql[128], qh[64], scales[16] signed, d."""
    scales, d = np.frombuffer(block, np.int8, 16, 192), half(block, 208)
    numbers = np.zeros(256)
    for half_of in (0, 1):
        low = block[64 * half_of : 64 * half_of + 64]
        high = block[128 + 32 * half_of : 160 + 32 * half_of]
        for quarter in range(4):
            for at in range(32):
                byte = low[at + 32 * (quarter % 2)]
                number = byte >> 4 if quarter >= 2 else byte & 15
                number |= (high[at] >> 2 * quarter & 3) << 4
                scale = scales[8 * half_of + 2 * quarter + at // 16]
                place = 128 * half_of + 32 * quarter + at
                numbers[place] = d * int(scale) * (number - 32)
    return numbers.tolist()


# How a block is read, and where its float16 numbers stand.
KINDS = {
    "Q2_K": (q2_k, (80, 82)),
    "Q3_K": (q3_k, (108,)),
    "Q4_K": (q4_k, (0, 2)),
    "Q5_K": (q5_k, (0, 2)),
    "Q6_K": (q6_k, (208,)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_random_blocks_are_the_numbers_that_llama_cpp_computes(tmp_path, kind):
    read, places = KINDS[kind]
    number = package.GGMLQuantizationType[kind]
    _, size = package.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(size)
    stored = rng.integers(0, 256, (ROWS, BLOCKS, size), np.uint8)
    for place in places:  # Any bytes are a block, but for what is no number.
        scales = rng.uniform(-2, 2, (ROWS, BLOCKS, 1)).astype(np.float16)
        stored[:, :, place : place + 2] = scales.view(np.uint8)
    writer = package.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", stored.reshape(ROWS, -1), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wanted = [[x for block in row for x in read(block.tobytes())] for row in stored]
    file = gguf_file.open_file(tmp_path / "m.gguf")
    found = gguf_file.read_rows(file, "x")
    assert found.shape == (ROWS, 256 * BLOCKS) and found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-4)
    np.testing.assert_array_equal(gguf_file.read_rows(file, "x", 1, 3), found[1:3])
    assert np.abs(found).mean() > 1
