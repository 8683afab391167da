"""Small pictures for reports: boards of coloured cells, and pages of text."""

import textwrap
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ragen_jax.envs import base

_GRID = (110, 110, 110)  # colour of the lines between cells


def board(
    colours: np.ndarray, texts: Sequence[Sequence[str]], cell: int = 24
) -> np.ndarray:
    """Draws a board.

    Args:
      colours: uint8[R, C, 3], RGB of each cell.
      texts: R rows of C short texts, in ASCII; "" is none.
      cell: pixels of a cell's side.

    Returns:
      uint8[R * cell, C * cell, 3], RGB.
    """
    pixels = np.kron(np.asarray(colours, np.uint8), np.ones((cell, cell, 1), np.uint8))
    pixels[::cell] = _GRID
    pixels[:, ::cell] = _GRID
    image = Image.fromarray(pixels)
    draw = ImageDraw.Draw(image)
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            middle = ((column + 0.5) * cell, (row + 0.5) * cell)
            is_light = pixels[row * cell + 2, column * cell + 2].mean() > 110
            ink = (0, 0, 0) if is_light else (255, 255, 255)
            size = cell * min(0.6, 1.4 / max(1, len(text)))
            font = ImageFont.load_default(size=size)
            draw.text(middle, text, fill=ink, font=font, anchor="mm")
    return np.asarray(image)


def page(text: str, lines: int = 48, columns: int = 96) -> np.ndarray:
    """uint8[16 * lines, 8 * columns, 3], a text in black on white, long lines wrapped.

    The size does not depend on the text: lines that do not fit are left out at the end.
    """
    broken = [
        part
        for line in text.splitlines()
        for part in (textwrap.wrap(line, columns - 2) or [""])
    ]
    image = Image.new("RGB", (8 * columns, 16 * lines), "white")
    drawing = ImageDraw.Draw(image)
    for number, line in enumerate(broken[:lines]):
        drawing.text((8, 16 * number), line, fill="black")
    return np.asarray(image)


def text_view(phrases: tuple[str, ...], observe: Callable) -> Callable:
    """The `picture` of an environment of text: the observation that the agent reads."""
    return lambda state: page(base.text_of(phrases, np.asarray(observe(state))))
