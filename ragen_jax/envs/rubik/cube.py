"""The geometry of the 2 x 2 x 2 cube: faces, stickers, and what turns do to them."""

import itertools

import numpy as np

# For each face: its name, and unit vectors that point out of the cube and, as seen from
# outside, to the face's right and down. For the player, x points to the right, y up and
# z to the front. The stickers of a face are in reading order, as in Jumanji's
# rubiks_cube/utils.py.
SIDES = (
    ("Up", (0, 1, 0), (1, 0, 0), (0, 0, 1)),
    ("Front", (0, 0, 1), (1, 0, 0), (0, -1, 0)),
    ("Right", (1, 0, 0), (0, 0, -1), (0, -1, 0)),
    ("Back", (0, 0, -1), (-1, 0, 0), (0, -1, 0)),
    ("Left", (-1, 0, 0), (0, 0, 1), (0, -1, 0)),
    ("Down", (0, -1, 0), (1, 0, 0), (0, 0, -1)),
)
STICKERS = 24
FACE_OF = {name[0]: index for index, (name, *_) in enumerate(SIDES)}


def power(permutation: np.ndarray, times: int) -> np.ndarray:
    """int32[24], the permutation applied so many times."""
    result = np.arange(STICKERS, dtype=np.int32)
    for _ in range(times):
        result = result[permutation]
    return result


def _rotation(face: int, *, whole: bool) -> np.ndarray:
    """int32[24], for each sticker the one whose colour it takes in a quarter turn.

    Args:
      face: the face whose layer turns, clockwise as seen from outside.
      whole: whether the whole cube turns instead of the layer.
    """
    places = [
        (out + (2 * column - 1) * right + (2 * row - 1) * down, out)
        for _, *ways in SIDES
        for out, right, down in [np.array(ways)]
        for row, column in itertools.product(range(2), repeat=2)
    ]
    axis = np.array(SIDES[face][1])

    def turned(way):  # Rodrigues' formula for -90 degrees.
        return np.cross(way, axis) + axis * (axis @ way)

    index = {(*corner, *out): i for i, (corner, out) in enumerate(places)}
    source = np.arange(STICKERS, dtype=np.int32)
    for i, (corner, out) in enumerate(places):
        if whole or corner @ axis == 1:
            source[index[(*turned(corner), *turned(out))]] = i
    return source


def _ways_to_hold() -> np.ndarray:
    """int32[24, 24], the colours of the solved cube in each of its 24 orientations."""
    ways = [tuple(np.arange(6, dtype=np.int32).repeat(4).tolist())]
    rotations = [_rotation(face, whole=True) for face in range(len(SIDES))]
    for held in ways:  # Grows while it is read.
        for rotation in rotations:
            if (further := tuple([held[i] for i in rotation])) not in ways:
                ways.append(further)
    return np.array(ways, np.int32)


QUARTER_TURNS = [_rotation(face, whole=False) for face in range(len(SIDES))]
HELD = _ways_to_hold()  # int32[24, 24], solved cubes
