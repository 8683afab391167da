"""The 2 x 2 x 2 Rubik's cube: turn faces until each shows a single colour.

Stickers are in the order of Jumanji's RubiksCube. The orientation is random, so that
few turns make many levels. Every function handles one cube: `vmap` to batch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base, rendering
from ragen_jax.envs.rubik import cube, solver

_COLOURS = ("W", "G", "R", "B", "O", "Y")  # of the solved cube's faces, held upright
_WORDS = ("white", "green", "red", "blue", "orange", "yellow")
_RGB = np.array(
    [
        [250, 250, 250],
        [30, 160, 70],
        [200, 40, 40],
        [40, 80, 200],
        [240, 140, 30],
        [240, 220, 50],
    ],
    np.uint8,
)
# The setting `faces`, whose turns are the actions. Opposite faces are 3 apart.
FACES = ("URF", "URFDLB")
# Number of clockwise quarter turns -> the ending of the action's name.
_AMOUNTS = {1: "", 3: "'", 2: "2"}


@dataclasses.dataclass(frozen=True)
class Rubik:
    """Settings of one kind of cube."""

    depth: int = 2  # random turns away from a solved cube
    faces: str = "URFDLB"  # "URFDLB" or "URF"; three faces reach every position
    half_turns: bool = False  # whether half turns, such as U2, are actions too
    step_reward: float = 0.0  # for each turn that does not solve the cube


@struct.dataclass
class State:
    """One cube."""

    stickers: jax.Array  # int32[24], colours 0..5, four for each face of cube.SIDES
    done: jax.Array  # bool[], True once it is solved


def make(settings: Rubik) -> base.Environment:
    """Binds the settings into an environment. ValueError if they cannot be used."""
    check(settings)
    names = action_names(settings)
    return base.Environment(
        name="rubik",
        action_names=names,
        phrases=phrases(),
        observation_phrases=1 + len(cube.SIDES) * 5,
        instruction=instruction(settings),
        reset=functools.partial(reset, settings=settings),
        step=functools.partial(step, settings=settings),
        observe=observe,
        example_actions=(names[0], names[-1]),
        longest_observation=_longest_observation,
        picture=picture,
        solve=functools.partial(solve, settings=settings),
    )


def check(settings: Rubik) -> None:
    """Raises ValueError, in one sentence, for settings that cannot be used."""
    if settings.depth not in range(1, 21):
        raise ValueError(
            f"rubik.depth = {settings.depth} is not possible, and no cube needs more"
            " than 14 turns: choose a whole number from 1 to 20"
        )
    if settings.faces not in FACES:
        raise ValueError(
            f"rubik.faces = {settings.faces!r} is unknown: choose one of"
            f" {', '.join(FACES)}"
        )
    if not abs(settings.step_reward) <= 1:
        raise ValueError(
            f"rubik.step_reward = {settings.step_reward} is more than the solution's 1:"
            " choose -1 to 1, such as -0.1"
        )


def reset(key: jax.Array, split: jax.Array, settings: Rubik) -> State:
    """Draws a scrambled cube that is not solved and belongs to the split.

    Args:
      key: decides the orientation and the turns.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: depth and faces.
    """

    def draw_cube(key):
        stickers = scramble(key, settings)
        is_of_split = base.split_of(base.content_hash(stickers)) == split
        return stickers, is_of_split & ~is_solved(stickers)

    # It ends: even one turn makes 144 different cubes, and each split has some.
    stickers = base.draw_until_fit(draw_cube, key)
    return State(stickers=stickers, done=jnp.zeros((), bool))


def scramble(key: jax.Array, settings: Rubik) -> jax.Array:
    """int32[24], a solved cube in any orientation after `depth` random turns.

    No turn is of the same axis as the one before, which it could undo.
    """
    depth, sides = settings.depth, len(settings.faces) // 3
    amounts = len(_amounts(settings))
    # Integers from so wide a range that their remainders are nearly uniform.
    numbers = jax.random.randint(key, (2 + 3 * depth,), 0, 2**30)
    held, first = jnp.asarray(cube.HELD)[numbers[0] % len(cube.HELD)], numbers[1]
    further, side, amount = numbers[2:].reshape(3, depth)
    # Each axis is 1 or 2 further than the one before; a face is 3 * side + axis.
    axes = (first % 3 + jnp.cumsum(1 + further % 2)) % 3
    side, amount = side % sides, amount % amounts
    actions = (3 * side + axes) * amounts + amount
    table = jnp.asarray(turns(settings))

    def one_turn(stickers, action):
        return stickers[table[action]], None

    return jax.lax.scan(one_turn, held, actions)[0]


def step(
    key: jax.Array, state: State, action: jax.Array, settings: Rubik
) -> tuple[State, base.Outcome]:
    """Turns a face.

    Args:
      key: not used; nothing is random.
      state: one cube; once `done`, it does not change.
      action: int32[], index in `action_names`, or base.NO_ACTION.
      settings: the actions and the reward of a step.

    Returns:
      The next state and what happened: reward 1 on the turn that solves the cube, else
      `step_reward`. A cube is solved if each face has one colour, in any orientation.
    """
    del key
    acts = ~state.done & (action != base.NO_ACTION)
    turned = state.stickers[jnp.asarray(turns(settings))[action]]
    stickers = jnp.where(acts, turned, state.stickers)
    success = acts & is_solved(stickers)
    reward = jnp.where(acts, jnp.where(success, 1, settings.step_reward), 0)
    done = state.done | success
    outcome = base.Outcome(
        reward=reward.astype(jnp.float32), success=success, done=done
    )
    return state.replace(stickers=stickers, done=done), outcome


def is_solved(stickers: jax.Array) -> jax.Array:
    """bool[], whether each face has one colour."""
    faces = stickers.reshape(6, 4)
    return jnp.all(faces == faces[:, :1])


def action_names(settings: Rubik) -> tuple[str, ...]:
    """In Singmaster's notation: U turns a quarter clockwise, U' back, U2 a half."""
    return tuple(
        face + _AMOUNTS[amount]
        for face in settings.faces
        for amount in _amounts(settings)
    )


def turns(settings: Rubik) -> np.ndarray:
    """int32[actions, 24]: action a gives sticker i the colour of turns[a, i]."""
    return np.stack(
        [
            cube.power(cube.QUARTER_TURNS[cube.FACE_OF[face]], amount)
            for face in settings.faces
            for amount in _amounts(settings)
        ]
    )


def observe(state: State) -> jax.Array:
    """int32[31], the six faces as indices into `phrases()`, each after its name."""
    ends_row = jnp.array([0, len(_COLOURS)] * 2)
    cells = 1 + len(cube.SIDES) + state.stickers.reshape(6, 4) + ends_row[None, :]
    names = jnp.arange(1, 1 + len(cube.SIDES))[:, None]
    faces = jnp.concatenate([names, cells], axis=1).reshape(-1)
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), faces]).astype(jnp.int32)


def phrases() -> tuple[str, ...]:
    """Title, names of faces, stickers, and stickers that end a row."""
    names = tuple(f"{name}:\n" for name, *_ in cube.SIDES)
    inner = tuple(f" {letter}" for letter in _COLOURS)
    return ("State:\n", *names, *inner, *(f"{cell}\n" for cell in inner))


def instruction(settings: Rubik) -> str:
    """The rules for the system prompt; short, since small models read it too."""
    colours = zip(_COLOURS, _WORDS, strict=True)
    half = ", with 2 by a half turn" if settings.half_turns else ""
    return (
        "You solve a 2 x 2 x 2 Rubik's cube: make each of its six faces show a single"
        " colour. Each face is shown as seen from outside: Up with Back above it, Down"
        " with Front above it, the others with Up above them. Colours:"
        f" {', '.join(f'{letter} {word}' for letter, word in colours)}. An action names"
        " a face by its first letter and turns it clockwise by a quarter, with '"
        f" counterclockwise{half}. Actions: {', '.join(action_names(settings))}."
    )


def picture(state: State) -> np.ndarray:
    """uint8[h, w, 3], the cube unfolded: Up, then Left Front Right Back, then Down."""
    places = {"U": (0, 2), "L": (2, 0), "F": (2, 2), "R": (2, 4), "B": (2, 6)}
    places["D"] = (4, 2)
    colours = np.full((6, 8, 3), 110, np.uint8)
    texts = np.full((6, 8), "", object)
    faces = np.asarray(state.stickers).reshape(6, 2, 2)
    for letter, (row, column) in places.items():
        face = faces[cube.FACE_OF[letter]]
        colours[row : row + 2, column : column + 2] = _RGB[face]
        texts[row : row + 2, column : column + 2] = np.array(_COLOURS)[face]
    return rendering.board(colours, texts)


def solve(state: State, settings: Rubik) -> tuple[int, ...]:
    """A shortest solution; empty if the cube is solved.

    Turns of Up, Right and Front suffice: turning the opposite face instead gives the
    same cube in another orientation.
    """
    moves = turns(dataclasses.replace(settings, faces=FACES[0]))
    return solver.shortest_solution(state.stickers, moves, _amounts(settings))


def _amounts(settings: Rubik) -> tuple[int, ...]:
    """The clockwise quarter turns of a face's actions, in their order."""
    return tuple(_AMOUNTS) if settings.half_turns else tuple(_AMOUNTS)[:2]


def _longest_observation(lengths) -> int:
    """Most tokens in an observation; `lengths` is int[phrases], the tokens of each."""
    names = 1 + len(cube.SIDES)
    inner, ending = lengths[names:].reshape(2, -1).max(axis=1)
    return int(lengths[:names].sum() + cube.STICKERS // 2 * (inner + ending))
