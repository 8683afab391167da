"""2048: slide the tiles together until one of them reaches the target.

Rules of the original game (Gabriele Cirulli, 2014), with actions in the order of
Jumanji's Game2048. A smaller target than 2048 makes games as short as an agent's
episodes. Every function handles one board: `vmap` to batch.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base, grid_text, rendering

SIDE = 4  # rows and columns
ACTION_NAMES = ("Up", "Right", "Down", "Left")
UP, RIGHT, DOWN, LEFT = range(4)
_TARGETS = tuple(2**exponent for exponent in range(3, 17))
# float[4, 4], the weight of each cell in `solve`'s value of a position: it falls from
# one corner on, row by row in alternating directions (a "snake").
_SNAKE = 0.5 ** np.arange(SIDE * SIDE).reshape(SIDE, SIDE)
_SNAKE[1::2] = _SNAKE[1::2, ::-1]


def _first_boards() -> np.ndarray:
    """int32[480, 4, 4], every board of two tiles, each a 2 or a 4, as exponents."""
    boards = []
    for cells in itertools.combinations(range(SIDE * SIDE), 2):
        for exponents in itertools.product((1, 2), repeat=2):
            board = np.zeros(SIDE * SIDE, np.int32)
            board[list(cells)] = exponents
            boards.append(board.reshape(SIDE, SIDE))
    return np.stack(boards)


FIRST_BOARDS = _first_boards()


@dataclasses.dataclass(frozen=True)
class Game2048:
    """Settings of one kind of board."""

    target: int = 32  # a power of two; making it ends the episode, with success
    four_probability: float = 0.1  # of a new tile being a 4; else a 2
    # For merged tiles that sum to `target`: on the way to it, merging earns about as
    # much as `success_reward`.
    merge_reward: float = 0.2
    success_reward: float = 1.0  # for reaching the target


@struct.dataclass
class State:
    """One board."""

    tiles: jax.Array  # int32[4, 4], exponents of two, 0 where empty
    done: jax.Array  # bool[], True once the target is reached or no move is left


def make(settings: Game2048) -> base.Environment:
    """Binds the settings into an environment. ValueError if they cannot be used."""
    check(settings)
    return base.Environment(
        name="2048",
        action_names=ACTION_NAMES,
        phrases=phrases(settings),
        observation_phrases=1 + SIDE * SIDE,
        instruction=instruction(settings),
        reset=functools.partial(reset, settings=settings),
        step=functools.partial(step, settings=settings),
        observe=functools.partial(observe, settings=settings),
        example_actions=("Left", "Down"),
        longest_observation=functools.partial(grid_text.longest_grid, side=SIDE),
        picture=picture,
        solve=solve,
    )


def check(settings: Game2048) -> None:
    """Raises ValueError, in one sentence, for settings that cannot be used."""
    if settings.target not in _TARGETS:
        raise ValueError(
            f"2048.target = {settings.target} is not a tile that can be made: choose a"
            f" power of two from {_TARGETS[0]} to {_TARGETS[-1]}"
        )
    # With one kind of tile nearly alone, too few first boards occur for three splits.
    if not 0.05 <= settings.four_probability <= 0.95:
        raise ValueError(
            f"2048.four_probability = {settings.four_probability} makes first boards"
            " too much alike: choose 0.05 to 0.95"
        )
    for name in ("merge_reward", "success_reward"):
        if not abs(value := getattr(settings, name)) <= 10:
            raise ValueError(
                f"2048.{name} = {value} is beyond the rewards that a message can show:"
                " choose -10 to 10"
            )


def reset(key: jax.Array, split: jax.Array, settings: Game2048) -> State:
    """Draws a board of two tiles that belongs to the split.

    Args:
      key: decides the board.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: the probability of a 4.
    """
    boards = jnp.asarray(FIRST_BOARDS)
    splits = base.split_of(jax.vmap(base.content_hash)(boards))
    fours = (boards == 2).sum(axis=(1, 2))
    four = settings.four_probability
    weights = four**fours * (1 - four) ** (2 - fours)
    # A draw by weight, from the cumulative sum.
    cumulative = jnp.cumsum(jnp.where(splits == split, weights, 0))
    index = (cumulative <= jax.random.uniform(key) * cumulative[-1]).sum()
    return State(tiles=boards[index], done=jnp.zeros((), bool))


def step(
    key: jax.Array, state: State, action: jax.Array, settings: Game2048
) -> tuple[State, base.Outcome]:
    """Slides all tiles, and adds a new one if any moved.

    Args:
      key: decides the new tile and its cell.
      state: one board; once `done`, it does not change.
      action: int32[], index in ACTION_NAMES, or base.NO_ACTION.
      settings: target and rewards.

    Returns:
      The next state and what happened. The reward is `merge_reward` times the sum of
      the merged tiles divided by `target`, plus `success_reward` on reaching it. The
      episode ends there, or on a full board without equal neighbours.
    """
    acts = ~state.done & (action != base.NO_ACTION)
    slid, merged = slide(state.tiles, action)
    moves = acts & jnp.any(slid != state.tiles)
    grown = add_tile(key, slid, settings.four_probability)
    tiles = jnp.where(moves, grown, state.tiles)
    success = moves & (tiles.max() >= _exponent(settings.target))
    share = jnp.where(moves, merged, 0).astype(jnp.float32) / settings.target
    reward = settings.merge_reward * share
    reward += settings.success_reward * success.astype(jnp.float32)
    done = state.done | success | ~can_move(tiles)
    outcome = base.Outcome(reward=reward, success=success, done=done)
    return state.replace(tiles=tiles, done=done), outcome


def slide(tiles: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Slides all tiles as far as they go. Equal ones that meet merge, each only once.

    Tiles nearer to the border that they slide to merge first.

    Args:
      tiles: int32[4, 4], exponents of two.
      action: int32[], index in ACTION_NAMES; any other number slides to the left.

    Returns:
      int32[4, 4], the board before a new tile is added; int32[], the sum of the merged
      tiles, as in the score of 2048.
    """
    is_vertical = (action == UP) | (action == DOWN)
    is_reversed = (action == RIGHT) | (action == DOWN)
    # The board turned so that all tiles slide to the left.
    turned = jnp.where(is_vertical, tiles.T, tiles)
    turned = jnp.where(is_reversed, turned[:, ::-1], turned)
    columns = _close_gaps(list(turned.T))
    score = jnp.zeros((SIDE,), jnp.int32)
    for near in range(SIDE - 1):
        first, second = columns[near], columns[near + 1]
        merges = (first == second) & (first > 0)
        columns[near] = first + merges
        columns[near + 1] = jnp.where(merges, 0, second)
        score += jnp.where(merges, jnp.left_shift(1, first + 1), 0)
    turned = jnp.stack(_close_gaps(columns), axis=1)
    slid = jnp.where(is_reversed, turned[:, ::-1], turned)
    return jnp.where(is_vertical, slid.T, slid), score.sum()


def add_tile(key: jax.Array, tiles: jax.Array, four_probability: float) -> jax.Array:
    """int32[4, 4], `tiles` with a 2 or a 4 in an empty cell; a full board unchanged.

    Args:
      key: decides the cell, each equally likely, and the tile.
      tiles: int32[4, 4], exponents of two.
      four_probability: of a 4.
    """
    uniforms = jax.random.uniform(key, (2,))
    is_empty = tiles.reshape(-1) == 0
    nth = (uniforms[0] * is_empty.sum()).astype(jnp.int32)
    is_chosen = is_empty & (jnp.cumsum(is_empty) == nth + 1)
    exponent = jnp.where(uniforms[1] < four_probability, 2, 1)
    return jnp.where(is_chosen.reshape(SIDE, SIDE), exponent, tiles)


def can_move(tiles: jax.Array) -> jax.Array:
    """bool[], whether some action changes the board: a gap or two equal neighbours."""
    across = jnp.any(tiles[:, 1:] == tiles[:, :-1])
    down = jnp.any(tiles[1:] == tiles[:-1])
    return jnp.any(tiles == 0) | across | down


def observe(state: State, settings: Game2048) -> jax.Array:
    """int32[17], the board as indices into `phrases(settings)`."""
    return grid_text.grid_ids(state.tiles, len(_cells(settings)))


def phrases(settings: Game2048) -> tuple[str, ...]:
    """Title, cells, and cells that end a row."""
    return grid_text.grid_phrases(_cells(settings))


def instruction(settings: Game2048) -> str:
    """The rules for the system prompt; short, since small models read it too."""
    return (
        f"You play 2048 on a board of {SIDE} x {SIDE} cells; . is an empty cell. An"
        " action slides all tiles as far as they go that way. Two equal tiles that meet"
        " merge into one of twice the number. After each action that changes the board"
        " a new tile, 2 or 4, comes into an empty cell. Goal: make a tile of"
        f" {settings.target}. The game is lost when no action changes the board."
        " Merging earns rewards."
        f" Actions: {', '.join(ACTION_NAMES)}."
    )


def picture(state: State) -> np.ndarray:
    """uint8[h, w, 3], the board; the higher a tile, the redder."""
    tiles = np.asarray(state.tiles)
    heat = np.minimum(tiles / 11, 1)[..., None]
    light, dark = np.array([250, 240, 220]), np.array([200, 50, 20])
    colours = np.where(tiles[..., None] == 0, 205, light + heat * (dark - light))
    texts = [["" if e == 0 else str(2**e) for e in row] for row in tiles.tolist()]
    return rendering.board(colours.astype(np.uint8), texts)


def solve(state: State) -> tuple[int, ...]:
    """One good action, by looking two moves ahead; empty after the end."""
    boards = {} if state.done else following(np.asarray(state.tiles))
    if not boards:
        return ()

    def expected_value(action):
        """The mean, over cells for a new 2, of the best position after another move."""
        total, gaps = 0.0, np.argwhere(boards[action] == 0)
        for gap in gaps:
            board = boards[action].copy()
            board[tuple(gap)] = 1
            later = following(board).values()
            total += max(((np.exp2(b) * _SNAKE).sum() for b in later), default=0)
        return total / len(gaps)

    return (max(boards, key=expected_value),)


def following(tiles: np.ndarray) -> dict[int, np.ndarray]:
    """By action that changes `tiles`: the board after it, before a new tile is added.

    `slide` in plain Python. Boards are int[4, 4], exponents of two.
    """
    boards = {}
    for action in range(len(ACTION_NAMES)):
        turned = tiles.T if action in (UP, DOWN) else tiles
        turned = turned[:, ::-1] if action in (RIGHT, DOWN) else turned
        slid = np.zeros_like(tiles)
        for line, row in zip(turned.tolist(), slid, strict=True):
            line = [tile for tile in line if tile]
            for place, tile in enumerate(line):
                if line[place + 1 : place + 2] == [tile]:
                    line[place : place + 2] = [tile + 1]
            row[: len(line)] = line
        slid = slid[:, ::-1] if action in (RIGHT, DOWN) else slid
        slid = slid.T if action in (UP, DOWN) else slid
        if (slid != tiles).any():
            boards[action] = slid
    return boards


def _cells(settings: Game2048) -> tuple[str, ...]:
    """The symbols of the exponents, from the empty cell to the target."""
    highest = _exponent(settings.target)
    return (".", *(str(2**exponent) for exponent in range(1, highest + 1)))


def _exponent(tile: int) -> int:
    """The exponent of a tile, a power of two."""
    return tile.bit_length() - 1


def _close_gaps(columns: list[jax.Array]) -> list[jax.Array]:
    """Four columns, int32[4] each, with each row's empty cells moved to its end."""
    for last in range(SIDE - 1, 0, -1):
        for near in range(last):
            first, second = columns[near], columns[near + 1]
            is_gap = first == 0
            columns[near] = jnp.where(is_gap, second, first)
            columns[near + 1] = jnp.where(is_gap, 0, second)
    return columns
