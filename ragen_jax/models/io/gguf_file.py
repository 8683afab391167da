"""GGUF files: metadata and tensors of llama.cpp's format, checked while being read.

The header is parsed here: the `gguf` package takes half a minute over a vocabulary.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ragen_jax.errors import UserError
from ragen_jax.utils import json_files

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Numbers of the format -> little-endian dtypes; 8 is a text, 9 an array.
_NUMBERS = dict(
    zip(
        (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12),
        ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "<u8", "<i8", "<f8"),
        strict=True,
    )
)
_TEXT, _ARRAY = 8, 9
# Kinds of tensors whose numbers `gguf.dequantize` gives back.
KINDS = tuple(
    "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL"
    " IQ4_XS".split()
)
_DAMAGED = "copy or download it again"
# Elements of a list: ten times the largest published vocabulary. A file with a hole can
# be long, and hold any number of empty texts, without taking room on the disk.
_MOST_ELEMENTS = 2**22


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file, not read yet."""

    name: str
    shape: tuple[int, ...]  # of the array: rows come first, unlike in the file
    kind: str  # such as "Q4_1"
    offset: int  # bytes from the start of the file
    row_bytes: int  # of one row, which is stored in whole blocks


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """What stands in front of the numbers."""

    path: Path
    metadata: Mapping[str, Any]  # numbers, texts, and lists or arrays of them
    tensors: Mapping[str, Tensor]


def open_file(path: Path) -> GgufFile:
    """Reads the header, and checks that all tensors lie within the file.

    Raises:
      UserError: if the `gguf` package or the file is missing, or the file is not a GGUF
        file, or is of another version or damaged.
    """
    package = _package()
    try:
        json_files.check_regular(path)
        with open(path, "rb") as file:
            start = file.read(8)
            if start[:4] != _MAGIC:
                raise UserError(
                    f"{path} is not a GGUF file: it does not begin with 'GGUF'; give a"
                    " .gguf file or a model folder"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data, package)
    except OSError as error:
        raise UserError(
            f"model.path: {path} cannot be read ({error.strerror}); give a .gguf file"
            " that can be"
        ) from None
    except (struct.error, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path} is damaged ({error}); {_DAMAGED}") from None


def read_rows(
    file: GgufFile, name: str, first: int = 0, stop: int | None = None
) -> np.ndarray:
    """A tensor as float32 of its shape, or its rows `first` to `stop` alone.

    Raises:
      UserError: if they cannot be read.
    """
    package, tensor = _package(), file.tensors[name]
    rows = math.prod(tensor.shape[:-1])
    stop = rows if stop is None else stop
    try:
        stored = np.fromfile(
            file.path,
            np.uint8,
            (stop - first) * tensor.row_bytes,
            offset=tensor.offset + first * tensor.row_bytes,
        ).reshape(stop - first, tensor.row_bytes)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file.path}: tensor {name} cannot be read ({error}); {_DAMAGED}"
        ) from None
    kind = package.GGMLQuantizationType[tensor.kind]
    numbers = package.dequantize(stored, kind).astype(np.float32, copy=False)
    is_whole = (first, stop) == (0, rows)
    return numbers.reshape(tensor.shape if is_whole else (stop - first, -1))


def _package() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise UserError(
            "GGUF files need the package 'gguf', which is not installed: pip install"
            " gguf"
        ) from None
    return gguf


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 4

    def number(self, form: str) -> Any:
        """One number of a NumPy dtype."""
        return self.numbers(form, 1)[0].item()

    def numbers(self, form: str, count: int) -> np.ndarray:
        """A copy, so that the file can be closed."""
        values = np.frombuffer(self.data, form, count, self.at).copy()
        self.at += values.nbytes
        return values

    def text(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self.at)
        start = self.at + 8
        if length > len(self.data) - start:
            raise ValueError(f"a text of {length} bytes exceeds the file")
        self.at = start + length
        return self.data[start : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(_number_form(kind))
        inner, count = self.number("<u4"), self.number("<u8")
        # Each takes a byte or more; a text 8, which tell its length.
        room = (len(self.data) - self.at) // (8 if inner == _TEXT else 1)
        if count > min(room, _MOST_ELEMENTS):
            raise ValueError(f"a list of {count} elements exceeds the file, or any use")
        if inner == _TEXT:
            return [self.text() for _ in range(count)]
        return self.numbers(_number_form(inner), count)


def _number_form(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"unknown type {kind} of a value")
    return _NUMBERS[kind]


def _parse(path: Path, data: mmap.mmap, package: ModuleType) -> GgufFile:
    cursor = _Cursor(data)
    version = cursor.number("<u4")
    if version not in _VERSIONS:
        raise UserError(
            f"{path}: GGUF version {version} is not supported; take a little-endian"
            f" file of version {' or '.join(map(str, _VERSIONS))}"
        )
    tensor_count, pair_count = cursor.number("<u8"), cursor.number("<u8")
    metadata = {}
    for _ in range(pair_count):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"the key {key!r:.40} stands there twice")
        metadata[key] = cursor.value(cursor.number("<u4"))
    listed = [_read_tensor(cursor, package) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment not in (2**n for n in range(17)):
        raise ValueError(f"general.alignment = {alignment!r:.40}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for tensor in listed:
        placed = dataclasses.replace(tensor, offset=start + tensor.offset)
        end = placed.offset + math.prod(placed.shape[:-1]) * placed.row_bytes
        if end > len(data):
            raise ValueError(
                f"it ends at byte {len(data)}, tensor {tensor.name} at byte {end}"
            )
        tensors[tensor.name] = placed
    if len(tensors) != len(listed):
        raise ValueError("two tensors have one name")
    return GgufFile(path, metadata, tensors)


def _read_tensor(cursor: _Cursor, package: ModuleType) -> Tensor:
    """One entry of the list of tensors; its offset counts from where they begin."""
    name = cursor.text()
    dimensions = cursor.number("<u4")
    if not 1 <= dimensions <= 4:
        raise ValueError(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(cursor.numbers("<u8", dimensions)[::-1].tolist())
    kind = package.GGMLQuantizationType(cursor.number("<u4"))
    block, block_bytes = package.GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(f"rows of {shape[-1]} of {name} are not whole blocks")
    row_bytes = shape[-1] // block * block_bytes
    return Tensor(name, shape, kind.name, cursor.number("<u8"), row_bytes)
