"""Sudoku: place numbers until every row, column and box holds each of them once.

Rules are those of RAGEN's Sudoku (ragen/env/sudoku/env.py), except that a number which
the player placed can be replaced (it is no conflict for its own cell), and that steps
can earn rewards. Every function handles one puzzle: `vmap` to batch.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base, grid_text, rendering
from ragen_jax.envs.sudoku import generator
from ragen_jax.utils.scatter import put_where

_SIZES = {4: 4, 9: 17}  # n -> the fewest clues of any puzzle with only one solution
_ANSWER_BYTES = 256  # ten placements, each in 22 bytes and a separator
_TEXTS = (b"place V at row R col C", b"R C V")  # the forms of an action; V its number
_SPACE = b" ,\t\n\r\v\f"  # Bytes between words; a comma counts as a space.
# RGB by shade of the box (two alternate), for given cells and for others.
_COLOURS = np.array(
    [[[214, 214, 206], [255, 255, 255]], [[188, 200, 210], [228, 238, 246]]], np.uint8
)


@dataclasses.dataclass(frozen=True)
class Sudoku:
    """Settings of one kind of Sudoku."""

    size: int = 4  # n, rows and columns, in boxes of b x b with b * b = n
    clues: int = 8  # fewest numbers given; on 9 x 9, digging reaches about 24
    correct_reward: float = 0.1  # for a cell made right; taken back if it is undone
    wrong_reward: float = -0.1  # for a placement that is refused


@struct.dataclass
class State:
    """One puzzle, partly filled in."""

    cells: jax.Array  # int32[n, n], 1..n, 0 where empty
    solution: jax.Array  # int32[n, n], 1..n; there is only one
    given: jax.Array  # bool[n, n], cells that cannot be changed
    done: jax.Array  # bool[], True once all cells are right


def make(settings: Sudoku) -> base.Environment:
    """Binds the settings into an environment. ValueError if they cannot be used."""
    check(settings)
    size = settings.size
    names = action_names(size)
    return base.Environment(
        name="sudoku",
        action_names=names,
        phrases=phrases(size),
        observation_phrases=1 + size * size,
        instruction=instruction(size),
        reset=functools.partial(reset, settings=settings),
        step=functools.partial(step, settings=settings),
        observe=functools.partial(observe, size=size),
        example_actions=(names[size + 2], names[-size]),
        longest_observation=functools.partial(grid_text.longest_grid, side=size),
        answer_bytes=_ANSWER_BYTES,
        most_actions=10,
        read_action=functools.partial(read_action, size=size),
        read_action_text=functools.partial(read_action_text, size=size),
        picture=picture,
        solve=solve,
    )


def check(settings: Sudoku) -> None:
    """Raises ValueError, in one sentence, for settings that cannot be used."""
    size = settings.size
    if size not in _SIZES:
        raise ValueError(
            f"sudoku.size = {size} is not possible, for boxes are square and numbers"
            " have one digit: choose 4 or 9"
        )
    fewest, most = _SIZES[size], size * size - 1
    if settings.clues not in range(fewest, most + 1):
        raise ValueError(
            f"sudoku.clues = {settings.clues} with sudoku.size = {size} leaves no"
            f" puzzle with one solution to find: choose a whole number from {fewest} to"
            f" {most}"
        )
    for name in ("correct_reward", "wrong_reward"):
        if not abs(value := getattr(settings, name)) <= 10:
            raise ValueError(
                f"sudoku.{name} = {value} is out of proportion to the solution's 1:"
                " choose -10 to 10"
            )


def reset(key: jax.Array, split: jax.Array, settings: Sudoku) -> State:
    """Draws a puzzle with one solution that belongs to the split.

    Args:
      key: decides the puzzle.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: size and clues.
    """
    puzzle = generator.draw(key, split, settings.size, settings.clues)
    return State(
        cells=generator.shown(puzzle),
        solution=puzzle.solution,
        given=puzzle.given,
        done=jnp.zeros((), bool),
    )


def step(
    key: jax.Array, state: State, action: jax.Array, settings: Sudoku
) -> tuple[State, base.Outcome]:
    """Places a number, unless the cell is given or the number conflicts with another.

    A number is refused if another cell of its row, column or box holds it. Any other is
    placed, right or wrong. Wrong numbers can block the right ones, so that none of them
    can be placed any more; the episode goes on all the same.

    Args:
      key: not used; nothing is random.
      state: one puzzle; once `done`, it does not change.
      action: int32[], (row * n + column) * n + number - 1, or base.NO_ACTION.
      settings: the rewards.

    Returns:
      The next state and what happened. The reward is `wrong_reward` if the number is
      refused, else `correct_reward` times the change in the number of right cells, plus
      1 for the solution, which ends the episode.
    """
    del key
    size = state.cells.shape[0]
    acts = ~state.done & (action != base.NO_ACTION)
    cell, number = action // size, action % size + 1
    is_cell = jnp.arange(size * size).reshape(size, size) == cell
    is_given = jnp.any(is_cell & state.given)
    conflicts = jnp.any(_related(cell, size) & ~is_cell & (state.cells == number))
    is_refused = acts & (is_given | conflicts)
    cells = jnp.where(acts & ~is_refused & is_cell, number, state.cells)
    gained = (cells == state.solution).sum() - (state.cells == state.solution).sum()
    success = acts & jnp.all(cells == state.solution)
    reward = (
        settings.correct_reward * gained.astype(jnp.float32)
        + settings.wrong_reward * is_refused.astype(jnp.float32)
        + success.astype(jnp.float32)
    )
    done = state.done | success
    outcome = base.Outcome(reward=reward, success=success, done=done)
    return state.replace(cells=cells, done=done), outcome


def observe(state: State, size: int) -> jax.Array:
    """int32[1 + n * n], the grid as indices into `phrases(n)`; n = size is static."""
    return grid_text.grid_ids(state.cells, size + 1)


def phrases(size: int) -> tuple[str, ...]:
    """Title, cells from the empty one to n, and cells that end a row."""
    return grid_text.grid_phrases((".", *map(str, range(1, size + 1))))


def action_names(size: int) -> tuple[str, ...]:
    """The names of the n * n * n actions, in their order."""
    sides = range(1, size + 1)
    return tuple(
        f"place {number} at row {row} col {column}"
        for row in sides
        for column in sides
        for number in sides
    )


def instruction(size: int) -> str:
    """The rules for the system prompt; short, since small models read it too."""
    box = round(size**0.5)
    return (
        f"You solve a Sudoku of {size} x {size} cells in boxes of {box} x {box}. Fill"
        " the empty cells, shown as ., so that each row, column and box holds every"
        f" number from 1 to {size} once. Rows count from 1 at the top, columns from 1"
        " at the left. Actions: place NUMBER at row ROW col COLUMN, or in short"
        " ROW,COLUMN,NUMBER. A number that its row, column or box already holds is"
        " refused, so is a change of a number given at the start; your own numbers you"
        " may replace."
    )


def read_action(
    text: jax.Array, length: jax.Array, state: State, size: int
) -> jax.Array:
    """int32[], the action that a text names. Equals `read_action_text`.

    Args:
      text: uint8[bytes], a segment of the answer in lower case, padded with 0.
      length: int32[], its bytes.
      state: not used.
      size: n; static.
    """
    del state
    is_space = jnp.isin(text, np.frombuffer(_SPACE, np.uint8))
    is_space |= jnp.arange(text.shape[0]) >= length
    # Of each run of spaces only the first stays, and none before the first word.
    stays = ~is_space | jnp.pad(~is_space[:-1], (1, 0))
    spaced = jnp.where(is_space, ord(" "), text).astype(jnp.uint8)
    blank = jnp.full(text.shape, ord(" "), jnp.uint8)
    tidy = put_where(blank, jnp.cumsum(stays) - 1, spaced, stays)
    action = jnp.int32(base.NO_ACTION)
    for pattern in _TEXTS:
        places = {letter: pattern.index(letter) for letter in b"RCV"}
        numbers = {letter: tidy[at] - ord("0") for letter, at in places.items()}
        expected = np.full(text.shape, ord(" "), np.uint8)
        expected[: len(pattern)] = np.frombuffer(pattern, np.uint8)
        is_free = np.isin(np.arange(len(expected)), list(places.values()))
        fits = jnp.all((tidy == expected) | is_free)
        for number in numbers.values():  # uint8: bytes below "0" wrap far above n.
            fits &= (number >= 1) & (number <= size)
        row, column, value = (numbers[letter].astype(jnp.int32) for letter in b"RCV")
        named = ((row - 1) * size + column - 1) * size + value - 1
        action = jnp.where(fits, named, action)
    return action


def read_action_text(text: bytes, state: State, size: int) -> int:
    """The action that a text names: `place 5 at row 2 col 3` or `2,3,5` (row, column,
    number), with white space or commas between words; else base.NO_ACTION."""
    del state
    digit = b"([1-%d])" % size
    words = b" ".join(text.replace(b",", b" ").split())
    for pattern in _TEXTS:
        order = [letter for letter in pattern if letter in b"RCV"]
        form = re.sub(b"[RCV]", lambda _: digit, pattern)
        if match := re.fullmatch(form, words):
            numbers = dict(zip(order, map(int, match.groups()), strict=True))
            row, column, value = (numbers[letter] - 1 for letter in b"RCV")
            return (row * size + column) * size + value
    return base.NO_ACTION


def picture(state: State) -> np.ndarray:
    """uint8[h, w, 3], the grid; given cells are darker, boxes have two shades."""
    size = len(state.cells)
    box = round(size**0.5)
    band = np.arange(size) // box
    shade = (band[:, None] + band[None, :]) % 2
    texts = np.where(state.cells == 0, "", state.cells.astype(str))
    return rendering.board(_COLOURS[shade, 1 - state.given], texts)


def solve(state: State) -> tuple[int, ...]:
    """Placements of right numbers up to the solution; empty if they are blocked.

    A wrong number that blocks them could be replaced by another wrong one; this is not
    tried.
    """
    cells, solution = np.array(state.cells), np.asarray(state.solution)
    size, placed = len(cells), []
    while not (cells == solution).all():
        for row, column in np.argwhere(cells != solution).tolist():
            number = solution[row, column]
            related = _related(row * size + column, size)
            if not (related & (cells == number)).any():
                break
        else:
            return ()
        cells[row, column] = number
        placed.append((row * size + column) * size + int(number) - 1)
    return tuple(placed)


def _related(cell, size: int):
    """bool[n, n], the row, column and box of a cell.

    Args:
      cell: int or int32[], row * n + column.
      size: n; static.
    """
    index, box = np.arange(size), round(size**0.5)
    row, column = cell // size, cell % size
    in_band = (index // box == row // box)[:, None]
    in_stack = (index // box == column // box)[None, :]
    in_row, in_column = (index == row)[:, None], (index == column)[None, :]
    return in_row | in_column | (in_band & in_stack)
