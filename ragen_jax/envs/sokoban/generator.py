"""Sokoban levels, made on device: a walk digs the room, reverse play places the boxes.

After gym-sokoban 0.0.6 (room_utils.py), which follows arXiv:1707.06203, appendix.
Every function handles one level: `vmap` to batch.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import base, grid_text
from ragen_jax.envs.sokoban.types import FLOOR, MOVES, TARGET, WALL, Sokoban, State

# Probability that the digging walk draws a new direction, as in gym-sokoban.
_TURN = 0.35
_PULL = 0.8  # Probability that a move away from a box pulls it along.
# gym-sokoban's masks: (row, column) offsets of the cells that are dug at each place of
# the walk. Each mask contains the place itself, repeated up to four entries.
_MASKS = np.array(
    [
        [[0, 0], [0, -1], [0, 1], [0, 0]],
        [[0, 0], [-1, 0], [1, 0], [0, 0]],
        [[0, 0], [0, -1], [1, 0], [0, 0]],
        [[0, 0], [0, -1], [1, -1], [1, 0]],
        [[0, 0], [0, 1], [1, 0], [0, 0]],
    ],
    np.int32,
)


def draw(key: jax.Array, split: jax.Array, settings: Sokoban) -> State:
    """A solvable level whose room belongs to the split.

    The tiles (walls and targets, in their orientation) decide the split. No room of the
    test split occurs in training in the same orientation, but most do rotated or
    mirrored: see `turn_to_fit`.

    Args:
      key: decides the level.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: size, boxes and how hard levels are.
    """
    size, boxes = settings.size, settings.boxes
    moves = settings.search_depth * boxes

    def draw_room(dig_key, target_key, play_key, turn_key):
        tiles, is_room = place_targets(target_key, dig(dig_key, size), boxes)
        level, is_level = play_backward(play_key, tiles, boxes, moves)
        level, is_fit = turn_to_fit(turn_key, level, split)
        return level, is_room & is_level & is_fit

    # It ends: with any settings that `check` accepts, at least 1 draw in 60 fits.
    return base.draw_until_fit(draw_room, key, keys=4)


def dig(key: jax.Array, size: int) -> jax.Array:
    """bool[S, S], the floor of a connected room within a border of wall.

    Args:
      key: consumed.
      size: S, rows and columns.
    """
    steps = int(1.7 * (size + size))  # gym-sokoban's default
    # One draw for everything, as each call of a random function takes long to compile.
    uniforms = jax.random.uniform(key, (steps + 1, 3))
    start, (turns, drawn, mask) = uniforms[0, :2], uniforms[1:].T
    drawn = jnp.asarray(MOVES)[_below(len(MOVES), drawn)]

    def walk(carry, inputs):
        place, move = carry
        turns, drawn = inputs
        move = jnp.where(turns, drawn, move)
        place = jnp.clip(place + move, 1, size - 2)
        return (place, move), place

    start = (1 + _below(size - 2, start), drawn[0])
    _, places = jax.lax.scan(walk, start, (turns < _TURN, drawn))
    masks = jnp.asarray(_MASKS)[_below(len(_MASKS), mask)]
    dug = (places[:, None] + masks).reshape(-1, 2)
    index = jnp.arange(size)
    # int32[S], the dug cells of each row as a bit set: bit c stands for column c.
    bits = jnp.where(index[None] == dug[:, :1], 1 << dug[:, 1:], 0)
    rows = jnp.bitwise_or.reduce(bits, axis=0)
    is_dug = (rows[:, None] >> index[None]) % 2 == 1
    is_inner = (index > 0) & (index < size - 1)
    return is_dug & is_inner[:, None] & is_inner[None]


def place_targets(
    key: jax.Array, floor: jax.Array, boxes: int
) -> tuple[jax.Array, jax.Array]:
    """Puts targets on random floor cells from which a box alone could be pulled.

    Args:
      key: consumed.
      floor: bool[S, S].
      boxes: the number of targets; suitable cells are equally likely.

    Returns:
      int32[S, S], tiles, and bool[], whether there were enough suitable cells.
    """
    is_fit = floor & _can_pull(floor).any(axis=0)
    order = jnp.where(is_fit, jax.random.uniform(key, floor.shape), -1.0).reshape(-1)
    cells = jnp.arange(order.size)
    # Marks the next largest with -2, `boxes` times: far cheaper than sorting all cells.
    for _ in range(boxes):
        is_room = order.max() >= 0
        order = jnp.where(cells == jnp.argmax(order), -2.0, order)
    is_target = (order == -2.0).reshape(floor.shape)
    tiles = jnp.where(floor, jnp.where(is_target, TARGET, FLOOR), WALL)
    return tiles.astype(jnp.int32), is_room


def play_backward(
    key: jax.Array, tiles: jax.Array, boxes: int, moves: int
) -> tuple[State, jax.Array]:
    """Plays in reverse from the solved room: a random player walks and pulls boxes.

    Every pull can be undone by a push, so every state on the way is a solvable level.
    The one that is kept has the largest sum of distances (Manhattan) between the boxes
    and their own targets, and no box on any target; among equals it is the last, in
    which the player has walked on from the boxes.

    Args:
      key: consumed.
      tiles: int32[S, S], a room.
      boxes: its number of targets.
      moves: how many are tried, some of them against walls; the first is a pull.

    Returns:
      The level, and bool[], whether one was found. With one box it always is, if the
      box can be pulled off its target.
    """
    size = tiles.shape[0]
    start_key, move_key = jax.random.split(key)
    is_target = (tiles == TARGET).reshape(-1)
    is_open = (tiles != WALL).reshape(-1)
    (home,) = jnp.nonzero(is_target, size=boxes, fill_value=0)
    # The first pull, drawn from all that neither a wall nor another box prevents.
    can_pull = (_can_pull(tiles == FLOOR) & (tiles == TARGET)[None]).reshape(-1)
    order = jnp.where(can_pull, jax.random.uniform(start_key, can_pull.shape), -1.0)
    first, box = jnp.divmod(jnp.argmax(order), size * size)
    # Places are row * S + column. No move leaves the room, as its border is wall.
    steps = jnp.asarray(MOVES @ [size, 1], jnp.int32)
    uniforms = jax.random.uniform(move_key, (2, moves))
    directions, pulls = _below(len(MOVES), uniforms[0]), uniforms[1] < _PULL
    inputs = steps[directions.at[0].set(first)], pulls.at[0].set(True)

    def move(carry, inputs):
        # int32[] player; int32[boxes] at, the boxes; best: (score, player, at) so far.
        player, at, best = carry
        step, pulls = inputs
        ahead = player + step
        can_move = is_open[ahead] & ~(at == ahead).any()
        is_pulled = (at == player - step) & pulls & can_move
        at = jnp.where(is_pulled, player, at)
        player = jnp.where(can_move, ahead, player)
        away = jnp.abs(at // size - home // size) + jnp.abs(at % size - home % size)
        score = jnp.where(is_target[at].any(), 0, away.sum())
        is_better = score >= best[0]
        found = (score, player, at)
        keep = lambda new, old: jnp.where(is_better, new, old)
        return (player, at, jax.tree.map(keep, found, best)), None

    home = home.astype(jnp.int32)
    player = (box + steps[first]).astype(jnp.int32)
    start = (player, home, (jnp.zeros((), jnp.int32), player, home))
    (_, _, (score, player, at)), _ = jax.lax.scan(move, start, inputs)
    cells = jnp.arange(size * size)
    level = State(
        tiles=tiles,
        boxes=(cells[None] == at[:, None]).any(axis=0).reshape(size, size),
        player=jnp.stack(jnp.divmod(player, size)),
        done=jnp.zeros((), bool),
    )
    return level, (score > 0) & can_pull.any()


def turn_to_fit(
    key: jax.Array, level: State, split: jax.Array
) -> tuple[State, jax.Array]:
    """Rotates and mirrors the level at random, so that its room is of the split.

    Each of a room's eight orientations has a hash of its own, so that far fewer rooms
    must be dug than if only the first orientation could fit. The price is that a room
    has orientations in several splits. Of 256 test rooms (6 x 6), none is among those
    of 20,000 training levels in the same orientation, but 246 are rotated or mirrored
    (198 among 1,600). To a policy that reads the room, another orientation is another
    text and needs other moves.

    Args:
      key: consumed.
      level: any level.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.

    Returns:
      The level, in an orientation drawn from those that fit, and bool[], whether one
      fits.
    """
    size = level.tiles.shape[0]
    is_player = grid_text.is_at(level.player, size)
    layers = jnp.stack([level.tiles, level.boxes, is_player]).astype(jnp.int32)
    orientations = jnp.stack(
        [
            jnp.rot90(image, turns, (1, 2))
            for image in (layers, layers.swapaxes(1, 2))
            for turns in range(4)
        ]
    )  # int32[8, 3, S, S]
    hashes = jax.vmap(base.content_hash)(orientations[:, 0])
    is_fit = base.split_of(hashes) == split
    order = jnp.where(is_fit, jax.random.uniform(key, is_fit.shape), -1.0)
    tiles, boxes, player = orientations[jnp.argmax(order)]
    place = jnp.divmod(jnp.argmax(player.reshape(-1)), size)
    level = level.replace(
        tiles=tiles, boxes=boxes == 1, player=jnp.stack(place).astype(jnp.int32)
    )
    return level, is_fit.any()


def _can_pull(is_free: jax.Array) -> jax.Array:
    """bool[4, S, S], whether a box in a cell could be pulled in each direction.

    Args:
      is_free: bool[S, S], where player and box may go; False on the border.
    """
    # Rolling wraps around, but only behind a border cell, which is never free.
    near = [jnp.roll(is_free, (-r, -c), (0, 1)) for r, c in MOVES]
    far = [jnp.roll(is_free, (-2 * r, -2 * c), (0, 1)) for r, c in MOVES]
    return jnp.stack(near) & jnp.stack(far)


def _below(count: int, uniforms: jax.Array) -> jax.Array:
    """Integers in [0, count), int32, from `uniforms`, floats in [0, 1) of any shape."""
    return (uniforms * count).astype(jnp.int32)
