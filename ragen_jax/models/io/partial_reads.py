"""Reading the part of a parameter that a device holds, and no more, from model files.

Hugging Face folders and GGUF files lay tensors out alike: one for each layer, matrices
as [out, in], heads not split off from the other axis. So a device's part of a stacked
leaf is a block of rows and columns of each of its layers' tensors.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ragen_jax.errors import UserError
from ragen_jax.models.parameters import AXES_IN, Leaf, Parameters

Path = tuple[str, ...]  # of a leaf in the tree of parameters
Index = tuple[slice, ...]  # the part of a leaf that is wanted, of whole heads
# (leaf's path, layer or None, rows, columns or none of a vector) -> that block of the
# file's tensor, of any type of numbers.
ReadBlock = Callable[[Path, int | None, tuple[slice, ...]], np.ndarray]
# (leaf's path, index) -> float32, that part of the leaf.
ReadPart = Callable[[Path, Index], np.ndarray]

MATRICES = ("head", *AXES_IN)


def to_file(path: Path, tensor: np.ndarray) -> np.ndarray:
    """One of our tensors, of one layer, as files lay it out. A view."""
    if path[-1] == "output":  # [heads, head_dim, out]: heads go in
        return tensor.reshape(-1, tensor.shape[-1]).T
    if path[-1] in MATRICES:  # [in, heads, head_dim] or [in, out]
        return tensor.reshape(tensor.shape[0], -1).T
    if path[-1].endswith("_bias"):
        return tensor.reshape(-1)
    return tensor


def part_reader(read: ReadBlock, declared: Parameters) -> ReadPart:
    """Reads parts of leaves by reading blocks of tensors.

    Besides a part, one block is in memory at a time.

    Args:
      read: of the tensors of a file, or of several.
      declared: the tree of leaves.
    """

    def read_part(path: Path, index: Index) -> np.ndarray:
        leaf = find_leaf(declared, path)
        part = np.empty([len(range(*span)) for span in _spans(leaf, index)], np.float32)
        for layer, block, place in blocks(path, leaf, index, part):
            place[...] = read(path, layer, block)
        return part

    return read_part


def blocks(
    path: Path, leaf: Leaf, index: Index, part: np.ndarray
) -> Iterator[tuple[int | None, tuple[slice, ...], np.ndarray]]:
    """The blocks of tensors that make up a part of a leaf.

    Args:
      path, leaf: the leaf.
      index: of the part.
      part: float32, the part itself.

    Yields:
      (layer or None, where the block stands in the file's tensor, the same numbers of
      `part` laid out as that block: a view, to be written to).
    """
    starts, stops, _ = zip(*_spans(leaf, index), strict=True)
    if path[0] != "layers":
        yield None, _block(path, leaf.shape, starts, part), to_file(path, part)
        return
    block = _block(path, leaf.shape[1:], starts[1:], part[0])
    for layer, place in zip(range(starts[0], stops[0]), part, strict=True):
        yield layer, block, to_file(path, place)


def _spans(leaf: Leaf, index: Index) -> list[tuple[int, int, int]]:
    """(start, stop, step) of a part on each of its leaf's axes."""
    return [s.indices(size) for s, size in zip(index, leaf.shape, strict=True)]


def finite_reader(read: ReadPart, name: str) -> ReadPart:
    """The same, but refuses numbers that are not finite.

    Args:
      read: from `part_reader`.
      name: of the model, for the message.
    """

    def read_finite(path: Path, index: Index) -> np.ndarray:
        part = read(path, index)
        # A NaN is the least and the greatest of what it is among.
        if not (np.isfinite(part.min()) and np.isfinite(part.max())):
            raise UserError(
                f"{name}: weights of {'.'.join(path)} are not finite; copy or download"
                " the model again, or take another"
            )
        return part

    return read_finite


def read_tree(read: ReadPart, declared: Parameters) -> Parameters:
    """All of every leaf, as float32 NumPy arrays."""

    def visit(tree: Parameters, path: Path) -> Parameters:
        return {
            name: visit(leaf, (*path, name))
            if isinstance(leaf, dict)
            else read((*path, name), (slice(None),) * len(leaf.shape))
            for name, leaf in tree.items()
        }

    return visit(declared, ())


def find_leaf(tree: Parameters, path: Path) -> Any:
    """The leaf that a path leads to, of a tree of whatever leaves."""
    for name in path:
        tree = tree[name]
    return tree


def shape_in_file(path: Path, leaf: Leaf) -> tuple[int, ...]:
    """Of each of the leaf's tensors; one layer's where layers are stacked."""
    shape = leaf.shape[1:] if path[0] == "layers" else leaf.shape
    return to_file(path, np.broadcast_to(np.float32(0), shape)).shape


def _block(path: Path, whole, starts, part: np.ndarray) -> tuple[slice, ...]:
    """Where a part of one layer's leaf stands in the file's tensor.

    Args:
      whole: the leaf's shape. starts: where the part begins on its axes.
      part: of the part's shape; its numbers do not matter.
    """
    first: tuple[int, ...]
    sizes = to_file(path, part).shape
    if path[-1] == "output":
        first = (starts[2], starts[0] * whole[1])
    elif path[-1] in MATRICES:
        first = (starts[1] * int(np.prod(whole[2:])), starts[0])
    elif path[-1].endswith("_bias"):
        first = (starts[0] * whole[1],)
    else:
        first = starts
    return tuple(slice(at, at + n) for at, n in zip(first, sizes, strict=True))
