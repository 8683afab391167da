"""2048: slide the tiles together until one of them reaches the target.

Rules of the original game (Gabriele Cirulli, 2014), in the order of actions of
Jumanji's Game2048; a smaller target makes games as short as an agent's episodes. Every
function is on one board: `vmap` to batch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base, pictures

SIDE = 4  # rows and columns
ACTION_NAMES = ("Up", "Right", "Down", "Left")
UP, RIGHT, DOWN, LEFT = range(4)
_TARGETS = tuple(2**exponent for exponent in range(3, 17))
_CELLS = np.arange(SIDE * SIDE).reshape(SIDE, SIDE)
# int32[4, 16], the board's cells in the order in which each action makes Left of it.
_TURNED = np.stack([_CELLS.T, _CELLS[:, ::-1], _CELLS.T[:, ::-1], _CELLS])
_TURNED = _TURNED.reshape(4, SIDE * SIDE).astype(np.int32)
_TURNED_BACK = np.argsort(_TURNED, axis=1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Game2048:
    """Settings of one kind of game."""

    target: int = 32  # a power of two; a tile of it ends the game with success
    four_probability: float = 0.1  # of a new tile being a 4; else a 2
    # For new tiles by merging that sum to `target`: on the way there merging earns
    # about as much as the end.
    merge_reward: float = 0.2
    success_reward: float = 1.0  # for reaching the target


@struct.dataclass
class State:
    """One board."""

    tiles: jax.Array  # int32[4, 4], exponents of two, 0 where empty
    done: jax.Array  # bool[], True once the target is reached or no move is left


def world(settings: Game2048) -> base.World:
    """Binds the settings into a world. Raises ValueError if they make no game."""
    check(settings)
    return base.World(
        name="2048",
        action_names=ACTION_NAMES,
        phrases=phrases(settings),
        observation_phrases=1 + SIDE * SIDE,
        instruction=instruction(settings),
        reset=functools.partial(reset, settings=settings),
        step=functools.partial(step, settings=settings),
        observe=functools.partial(observe, settings=settings),
        example_actions=("Left", "Down"),
        longest_observation=_longest_observation,
        picture=picture,
    )


def check(settings: Game2048) -> None:
    """Raises ValueError, in one sentence, unless games can be made and shown."""
    if settings.target not in _TARGETS:
        raise ValueError(
            f"2048.target = {settings.target} is no tile that can be made: choose a"
            f" power of two from {_TARGETS[0]} to {_TARGETS[-1]}"
        )
    # Without both kinds of tiles too few boards are left for three splits.
    if not 0.05 <= settings.four_probability <= 0.95:
        raise ValueError(
            f"2048.four_probability = {settings.four_probability} makes first boards"
            " too much alike: choose 0.05 to 0.95"
        )
    for name in ("merge_reward", "success_reward"):
        if not abs(value := getattr(settings, name)) <= 10:
            raise ValueError(
                f"2048.{name} = {value} is beyond the rewards that a turn can tell:"
                " choose -10 to 10"
            )


def reset(key: jax.Array, split: jax.Array, settings: Game2048) -> State:
    """Draws a board of two tiles that belongs to the split.

    Args:
      key: decides the board.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: the chance of a 4.
    """

    def redraw(carry):
        key, _, _ = carry
        key, first_key, second_key = jax.random.split(key, 3)
        tiles = jnp.zeros((SIDE, SIDE), jnp.int32)
        for draw_key in (first_key, second_key):
            tiles = add_tile(draw_key, tiles, settings.four_probability)
        is_fit = base.split_of(base.content_hash(tiles)) == split
        return key, tiles, is_fit

    # Ends: of the 480 boards of two tiles, each split has a fair share.
    start = (key, jnp.zeros((SIDE, SIDE), jnp.int32), jnp.zeros((), bool))
    tiles = jax.lax.while_loop(lambda carry: ~carry[2], redraw, start)[1]
    return State(tiles=tiles, done=jnp.zeros((), bool))


def step(
    key: jax.Array, state: State, action: jax.Array, settings: Game2048
) -> tuple[State, base.Outcome]:
    """Slides all tiles; then a new one comes, if any moved.

    Args:
      key: decides where the new tile comes, and which.
      state: one board; a finished one does not change.
      action: int32[], index in ACTION_NAMES, or base.NO_ACTION.
      settings: target and rewards.

    Returns:
      The next state and what happened: the sum of the tiles that merging made, over
      `target` and times `merge_reward`, and `success_reward` for the target. Reaching
      it, or a full board without equal neighbours, ends the game.
    """
    acts = ~state.done & (action != base.NO_ACTION)
    slid, merged = slide(state.tiles, action)
    moves = acts & jnp.any(slid != state.tiles)
    grown = add_tile(key, slid, settings.four_probability)
    tiles = jnp.where(moves, grown, state.tiles)
    success = moves & (jnp.exp2(tiles.max()) >= settings.target)
    share = jnp.where(moves, merged, 0).astype(jnp.float32) / settings.target
    reward = settings.merge_reward * share
    reward += settings.success_reward * success.astype(jnp.float32)
    done = state.done | success | ~can_move(tiles)
    outcome = base.Outcome(reward=reward, success=success, done=done)
    return state.replace(tiles=tiles, done=done), outcome


def slide(tiles: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Slides all tiles as far as they go; equal ones that meet merge, each once.

    The two nearest to the border that is slid to merge first.

    Args:
      tiles: int32[4, 4], exponents of two.
      action: int32[], index in ACTION_NAMES; base.NO_ACTION reads as the last.

    Returns:
      int32[4, 4], the board before a new tile comes; int32[], sum of the tiles that
      merging made, as in the game's score.
    """
    turned = tiles.reshape(-1)[jnp.asarray(_TURNED)[action]].reshape(SIDE, SIDE)
    columns = _close_gaps(list(turned.T))
    score = jnp.zeros((SIDE,), jnp.int32)
    for near in range(SIDE - 1):
        first, second = columns[near], columns[near + 1]
        merges = (first == second) & (first > 0)
        columns[near] = first + merges
        columns[near + 1] = jnp.where(merges, 0, second)
        score += jnp.where(merges, jnp.left_shift(1, first + 1), 0)
    turned = jnp.stack(_close_gaps(columns), axis=1)
    back = turned.reshape(-1)[jnp.asarray(_TURNED_BACK)[action]]
    return back.reshape(SIDE, SIDE), score.sum()


def add_tile(key: jax.Array, tiles: jax.Array, four_probability: float) -> jax.Array:
    """int32[4, 4], `tiles` with a 2 or a 4 in an empty cell; a full board as it is.

    Args:
      key: decides which cell, all equally likely, and which tile.
      tiles: int32[4, 4], exponents of two.
      four_probability: of a 4.
    """
    chance = jax.random.uniform(key, (2,))
    is_empty = tiles.reshape(-1) == 0
    count = is_empty.sum()
    # Rounding can make the product `count` itself.
    nth = jnp.minimum((chance[0] * count).astype(jnp.int32), count - 1)
    is_chosen = is_empty & (jnp.cumsum(is_empty) == nth + 1)
    exponent = jnp.where(chance[1] < four_probability, 2, 1)
    return jnp.where(is_chosen.reshape(SIDE, SIDE), exponent, tiles)


def can_move(tiles: jax.Array) -> jax.Array:
    """bool[], whether some action changes the board: a gap or two equal neighbours."""
    across = jnp.any(tiles[:, 1:] == tiles[:, :-1])
    down = jnp.any(tiles[1:] == tiles[:-1])
    return jnp.any(tiles == 0) | across | down


def observe(state: State, settings: Game2048) -> jax.Array:
    """int32[17], the board as indices into `phrases(settings)`."""
    ends_row = jnp.where(jnp.arange(SIDE) == SIDE - 1, len(_cells(settings)), 0)
    cells = 1 + state.tiles + ends_row[None, :]
    title = jnp.zeros((1,), jnp.int32)
    return jnp.concatenate([title, cells.reshape(-1)]).astype(jnp.int32)


def phrases(settings: Game2048) -> tuple[str, ...]:
    """Title, cells, and cells that end a row."""
    inner = _cells(settings)
    return ("State:\n", *inner, *(f"{cell}\n" for cell in inner))


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
    return pictures.board(colours.astype(np.uint8), texts)


def _cells(settings: Game2048) -> tuple[str, ...]:
    """What the exponents read like, from the empty cell to the target."""
    highest = settings.target.bit_length() - 1
    return (" .", *(f" {2**exponent}" for exponent in range(1, highest + 1)))


def _close_gaps(columns: list[jax.Array]) -> list[jax.Array]:
    """Four columns (int32[4] each) with each row's empty cells moved to its end."""
    for last in range(SIDE - 1, 0, -1):
        for near in range(last):
            first, second = columns[near], columns[near + 1]
            is_gap = first == 0
            columns[near] = jnp.where(is_gap, second, first)
            columns[near + 1] = jnp.where(is_gap, 0, second)
    return columns


def _longest_observation(lengths) -> int:
    """Most tokens in an observation; `lengths` is int[phrases], the tokens of each."""
    inner, ending = lengths[1:].reshape(2, -1).max(axis=1)
    return int(lengths[0] + SIDE * (SIDE - 1) * inner + SIDE * ending)
