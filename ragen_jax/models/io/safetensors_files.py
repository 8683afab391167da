"""Safetensors files, read and written one tensor at a time, bfloat16 among them.

A file is eight bytes, the header's length; the header, JSON; and the tensors' bytes,
one after the other without gaps, little-endian. Source: the safetensors format.
"""

import dataclasses
import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ragen_jax.errors import UserError
from ragen_jax.utils import json_files

_LONGEST_HEADER = 100_000_000  # bytes, the format's own limit
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The format's names of the types that weights are read from and written as.
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where one tensor lies in a file."""

    dtype: str  # the format's name of it
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    end: int

    def mapped(self, path: Path) -> np.ndarray:
        """The tensor in its own type, one of `DTYPES`; what is not looked at stays
        unread."""
        dtype = DTYPES[self.dtype]
        return np.memmap(path, dtype, "r", offset=self.start, shape=self.shape)


def read_header(path: Path) -> dict[str, Stored]:
    """Every tensor of a file by name; reads none of them.

    Raises:
      UserError: if the file is unreadable, cut short or not in the format.
    """
    try:
        json_files.check_regular(path)
        with path.open("rb") as file:
            whole = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            first = 8 + length
            if whole < first:
                raise ValueError("it ends within its header")
            if length > _LONGEST_HEADER:
                raise ValueError(f"its header has {length} bytes")
            header = json_files.parse_object(file.read(length))
        header.pop("__metadata__", None)
        tensors = {name: _stored(entry, first) for name, entry in header.items()}
        reached = first
        by_place = sorted(tensors.items(), key=lambda x: (x[1].start, x[1].end))
        for name, stored in by_place:
            _check_place(name, stored, reached)
            reached = stored.end
        if reached != whole:
            raise ValueError(f"its tensors take {reached} bytes, it has {whole}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path} is damaged or unreadable ({reason}); copy or download it again"
        ) from None
    return tensors


def _stored(entry: dict[str, Any], first: int) -> Stored:
    start, end = map(operator.index, entry["data_offsets"])
    shape = tuple(map(operator.index, entry["shape"]))
    return Stored(entry["dtype"], shape, first + start, first + end)


def _check_place(name: str, stored: Stored, reached: int) -> None:
    if stored.start != reached or stored.end < reached:
        raise ValueError(f"tensor {name} does not begin where the one before it ends")
    if stored.dtype in DTYPES:
        size = math.prod(stored.shape) * DTYPES[stored.dtype].itemsize
        if stored.end - stored.start != size:
            raise ValueError(
                f"tensor {name} of shape {stored.shape} needs {size} bytes"
            )


def weight_files(folder: Path) -> list[Path]:
    """The files with a folder's weights, in the order in which transformers looks.

    That is one whole file; else those of the index; else, where somebody has lost the
    index, every safetensors file there is.

    Raises:
      UserError: if there is none, or the index is unreadable or names others.
    """
    if (folder / WHOLE).exists():
        return [folder / WHOLE]
    if not (index := folder / INDEX).exists():
        if files := sorted(folder.glob("*.safetensors")):
            return files
        raise UserError(_without_weights(folder))
    try:
        names = sorted(set(json_files.read_object(index)["weight_map"].values()))
        # A plain name each, so that nothing outside the folder is opened.
        if not names or any(Path(name).name != name for name in names):
            raise ValueError("weight_map names no files of the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index} cannot be read ({error}); copy or download it again"
        ) from None
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise UserError(
            f"{index} names {missing[0]} ({len(missing)} of {len(names)} files in all),"
            " which is not there; copy or download the whole folder"
        )
    return [folder / name for name in names]


def _without_weights(folder: Path) -> str:
    """What is wrong with a folder of no safetensors file, and how to fix it."""
    if any(folder.glob("*.bin")):
        return (
            f"{folder} holds no .safetensors file; pickled .bin weights are never"
            " opened: convert them with transformers' save_pretrained first"
        )
    return (
        f"{folder} holds no .safetensors file; copy or download the model's weights"
        " into it"
    )


def write_files(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    make: Callable[[str], np.ndarray],
    dtype: np.dtype,
    most_bytes: int,
) -> None:
    """Writes tensors as one file, or as several with an index, named as the hub's are.

    Args:
      folder: exists.
      shapes: of all tensors by name, in the order of the files.
      make: gives one of them; called once each, so that only one need exist.
      dtype: one of `DTYPES`, to which each is cast.
      most_bytes: of tensors a file; one that is larger has a file to itself.
    """
    kinds = {dtype: name for name, dtype in DTYPES.items()}
    sizes = {name: math.prod(x) * dtype.itemsize for name, x in shapes.items()}
    shards = _shards(sizes, most_bytes)
    files = [
        f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
    ]
    if len(shards) == 1:
        files = [WHOLE]
    for file, names in zip(files, shards, strict=True):
        part = {name: shapes[name] for name in names}
        _write_file(folder / file, part, make, dtype, kinds[dtype])
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {
                name: file
                for file, names in zip(files, shards, strict=True)
                for name in names
            },
        }
        (folder / INDEX).write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )


def _shards(sizes: dict[str, int], most_bytes: int) -> list[list[str]]:
    """Names in their order, a new list wherever the next would not fit."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = most_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _write_file(path: Path, shapes, make, dtype: np.dtype, kind: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = dict(dtype=kind, shape=shape, data_offsets=(start, end))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # The format aligns the tensors to eight bytes.
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            tensor = np.ascontiguousarray(make(name), dtype)
            file.write(tensor.reshape(-1).view(np.uint8).data)
