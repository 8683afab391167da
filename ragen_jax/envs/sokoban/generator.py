"""Sokoban levels, made on device: a walk digs the room, reverse play places the boxes.

After gym-sokoban 0.0.6 (room_utils.py), which follows arXiv:1707.06203, appendix.
Every function is on one level: `vmap` to batch.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import base, grid_text
from ragen_jax.envs.sokoban.types import Sokoban, State

FLOOR, WALL, TARGET = 0, 1, 2  # Tiles.
# (row, column) change of each action: up, down, left, right.
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]], np.int32)
# Probability that the digging walk draws a new direction, as in gym-sokoban.
_TURN = 0.35
_PULL = 0.8  # Probability that a move away from a box pulls it along.
# What the walk digs around each place, gym-sokoban's masks; the place itself is in all.
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
    """A level that can be solved and whose room belongs to the split.

    The room, walls and targets as they lie, decides the split: no room of the test
    split ever comes up in training as it is, but most do turned or mirrored, as
    `turn_to_fit` says.

    Args:
      key: decides the level.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: size, boxes and how hard levels are.
    """
    size, boxes = settings.size, settings.boxes
    moves = settings.search_depth * boxes

    def redraw(carry):
        key, _, _ = carry
        key, dig_key, target_key, play_key, turn_key = jax.random.split(key, 5)
        tiles, is_room = place_targets(target_key, dig(dig_key, size), boxes)
        level, is_level = play_backward(play_key, tiles, boxes, moves)
        level, is_fit = turn_to_fit(turn_key, level, split)
        return key, level, is_room & is_level & is_fit

    nothing = State(
        tiles=jnp.zeros((size, size), jnp.int32),
        boxes=jnp.zeros((size, size), bool),
        player=jnp.zeros((2,), jnp.int32),
        done=jnp.zeros((), bool),
    )
    # Ends: of settings that `types.check` lets pass, 1 draw in 60 or more is fit.
    start = (key, nothing, jnp.zeros((), bool))
    return jax.lax.while_loop(lambda carry: ~carry[2], redraw, start)[1]


def dig(key: jax.Array, size: int) -> jax.Array:
    """bool[S, S], the floor of a connected room within a border of wall.

    Args:
      key: consumed.
      size: S, rows and columns.
    """
    steps = int(1.7 * (size + size))  # gym-sokoban's default
    # One draw for all, since each call of a random function takes long to compile.
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
    # Row r of the room as bits, one for each column: the dug cells of that row.
    bits = jnp.where(index[None] == dug[:, :1], 1 << dug[:, 1:], 0)
    rows = jnp.bitwise_or.reduce(bits, axis=0)
    is_dug = (rows[:, None] >> index[None]) % 2 == 1
    is_inner = (index > 0) & (index < size - 1)
    return is_dug & is_inner[:, None] & is_inner[None]


def place_targets(
    key: jax.Array, floor: jax.Array, boxes: int
) -> tuple[jax.Array, jax.Array]:
    """Puts targets on floor cells from which a box alone could be pulled.

    Args:
      key: consumed.
      floor: bool[S, S].
      boxes: how many targets; cells that will do are equally likely.

    Returns:
      int32[S, S], tiles, and bool[], whether there were cells enough.
    """
    will_do = floor & _can_pull(floor).any(axis=0)
    order = jnp.where(will_do, jax.random.uniform(key, floor.shape), -1.0).reshape(-1)
    cells = jnp.arange(order.size)
    for _ in range(boxes):  # Far cheaper than to sort all cells.
        is_room = order.max() >= 0
        order = jnp.where(cells == jnp.argmax(order), -2.0, order)
    is_target = (order == -2.0).reshape(floor.shape)
    tiles = jnp.where(floor, jnp.where(is_target, TARGET, FLOOR), WALL)
    return tiles.astype(jnp.int32), is_room


def play_backward(
    key: jax.Array, tiles: jax.Array, boxes: int, moves: int
) -> tuple[State, jax.Array]:
    """Plays from the solved room: a player at random walks and pulls boxes.

    What was pulled can be pushed back, so every place that it comes to is a level that
    can be solved. Kept is the one with the boxes farthest from their own targets, each
    off every target, and the last of equally good ones: the player has strolled on.

    Args:
      key: consumed.
      tiles: int32[S, S], a room.
      boxes: its number of targets.
      moves: how many are tried, some of them against walls; the first is a pull.

    Returns:
      The level, and bool[], whether there is one. With one box there is, if a box on
      the target can be pulled.
    """
    size = tiles.shape[0]
    start_key, move_key = jax.random.split(key)
    is_target = (tiles == TARGET).reshape(-1)
    is_open = (tiles != WALL).reshape(-1)
    (home,) = jnp.nonzero(is_target, size=boxes, fill_value=0)
    # The first pull: any that no wall and no other box prevents.
    can_pull = (_can_pull(tiles == FLOOR) & (tiles == TARGET)[None]).reshape(-1)
    order = jnp.where(can_pull, jax.random.uniform(start_key, can_pull.shape), -1.0)
    first, box = jnp.divmod(jnp.argmax(order), size * size)
    # Places are row * S + column. No move leaves the room, for its border is wall.
    steps = jnp.asarray(MOVES @ [size, 1], jnp.int32)
    uniforms = jax.random.uniform(move_key, (2, moves))
    directions, pulls = _below(len(MOVES), uniforms[0]), uniforms[1] < _PULL
    inputs = steps[directions.at[0].set(first)], pulls.at[0].set(True)

    def move(carry, inputs):
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
    """The level turned and mirrored at random, so that its room is of the split.

    Each of the eight ways to look at a room has a hash of its own, so that far fewer
    rooms must be dug than if their first looks decided. The price: a room has looks in
    several splits. Of 256 test rooms (6 x 6) none is among those of 20,000 training
    levels as it is, but 246 are when turned or mirrored; 198 among 1,600. To a policy
    that reads the room, another look is another text and asks for other moves.

    Args:
      key: consumed.
      level: any level.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.

    Returns:
      The level, each way to look at it that fits being equally likely, and bool[],
      whether one does.
    """
    size = level.tiles.shape[0]
    is_player = grid_text.is_at(level.player, size)
    drawn = jnp.stack([level.tiles, level.boxes, is_player]).astype(jnp.int32)
    looks = jnp.stack(
        [
            jnp.rot90(look, turns, (1, 2))
            for look in (drawn, drawn.swapaxes(1, 2))
            for turns in range(4)
        ]
    )
    hashes = jax.vmap(base.content_hash)(looks[:, 0])
    is_fit = base.split_of(hashes) == split
    order = jnp.where(is_fit, jax.random.uniform(key, is_fit.shape), -1.0)
    tiles, boxes, player = looks[jnp.argmax(order)]
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
    # Shifted around the border, which is never free: no cell sees the other side.
    near = [jnp.roll(is_free, (-r, -c), (0, 1)) for r, c in MOVES]
    far = [jnp.roll(is_free, (-2 * r, -2 * c), (0, 1)) for r, c in MOVES]
    return jnp.stack(near) & jnp.stack(far)


def _below(count: int, uniforms: jax.Array) -> jax.Array:
    """int32, of the shape of `uniforms`, floats in [0, 1): whole numbers from 0."""
    return (uniforms * count).astype(jnp.int32)
