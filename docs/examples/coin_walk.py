"""Coin walk: pick up all coins of a corridor. An environment of one's own, in one file.

docs/environments.md shows how to check it and how to train on it. Every function is on
one corridor: `vmap` batches it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base, rendering

ACTION_NAMES = ("Left", "Right")
STEPS = 5  # the most of one demonstrated reply
FLOOR, COIN, PLAYER = 0, 1, 2  # What a cell shows.
COLOURS = np.array([[235, 235, 225], [250, 205, 80], [120, 170, 230]], np.uint8)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Read from the config's `env` section: int, float, bool, str, tuple[str, ...]."""

    length: int = 8  # L, cells of the corridor
    coins: int = 3
    step_cost: float = 0.1  # cost of each action


@struct.dataclass
class State:
    """One corridor. Arrays of fixed shape and type; nothing else."""

    coins: jax.Array  # bool[L], cells in which a coin still lies
    player: jax.Array  # int32[], the player's cell
    done: jax.Array  # bool[], True once no coin is left


def make(settings: Settings) -> base.Environment:
    """Binds the settings into an environment. Raises ValueError, in one sentence."""
    length, coins = settings.length, settings.coins
    if length not in range(8, 21):
        raise ValueError(f"coin_walk.length = {length}: choose a number from 8 to 20")
    # Two coins make 168 corridors and more: enough for each split to have some.
    if coins not in range(2, 6):
        raise ValueError(f"coin_walk.coins = {coins}: choose a number from 2 to 5")
    cells = (" _", " o", " P")
    return base.Environment(
        name="coin_walk",
        action_names=ACTION_NAMES,
        phrases=("State:\n", *cells, *(f"{cell}\n" for cell in cells)),
        observation_phrases=1 + length,
        instruction=(
            f"You walk in a corridor of {length} cells. P you, _ floor, o coin. Pick up"
            f" all {coins} coins in few steps. Actions: {', '.join(ACTION_NAMES)}."
        ),
        reset=functools.partial(reset, settings=settings),
        step=functools.partial(step, settings=settings),
        observe=observe,
        example_actions=ACTION_NAMES,
        picture=picture,  # This and what follows may be left out.
        solve=solve,
        demonstrate=demonstrate,
        reply_phrases=tuple(
            f" A coin {steps} to the {name.lower()}.</think>"
            f"<answer>{' || '.join([name] * steps)}</answer>"
            for name in ACTION_NAMES
            for steps in range(1, 1 + STEPS)
        ),
    )


def reset(key: jax.Array, split: jax.Array, settings: Settings) -> State:
    """Draws corridors until one belongs to the split, by its content."""

    def draw(key):
        order = jax.random.permutation(key, settings.length)
        player = order[0].astype(jnp.int32)
        is_coin = jnp.isin(jnp.arange(settings.length), order[1 : 1 + settings.coins])
        content = base.content_hash(is_coin, player)
        state = State(coins=is_coin, player=player, done=jnp.zeros((), bool))
        return state, base.split_of(content) == split

    return base.draw_until_fit(draw, key)


def step(
    key: jax.Array, state: State, action: jax.Array, settings: Settings
) -> tuple[State, base.Outcome]:
    """One cell to a side; a wall, base.NO_ACTION or the end leaves all as it is.

    `key` is for randomness, of which there is none here.
    """
    moves = ~state.done & (action != base.NO_ACTION)
    target = jnp.clip(state.player + 2 * action - 1, 0, settings.length - 1)
    player = jnp.where(moves, target, state.player)
    gain = state.coins[player].astype(jnp.float32) - settings.step_cost
    here = jnp.arange(settings.length) == player
    coins = state.coins & ~(here & moves)
    success = moves & ~coins.any()
    done = state.done | success
    outcome = base.Outcome(reward=jnp.where(moves, gain, 0), success=success, done=done)
    return State(coins=coins, player=player, done=done), outcome


def observe(state: State) -> jax.Array:
    """int32[1 + L], indices into the phrases: the title, then the cells."""
    cells = jnp.arange(state.coins.shape[0])
    shown = jnp.where(cells == state.player, PLAYER, state.coins.astype(jnp.int32))
    shown += jnp.where(cells == cells[-1], 3, 0)  # The last one ends the line.
    return jnp.concatenate([jnp.zeros(1, jnp.int32), 1 + shown])


def picture(state: State) -> np.ndarray:
    """uint8[h, w, 3], for reports. On the host: arrays are NumPy's."""
    shown = state.coins.astype(int)
    shown[state.player] = PLAYER
    return rendering.board(COLOURS[shown][None], [["_oP"[cell] for cell in shown]])


def solve(state: State) -> tuple[int, ...]:
    """A shortest way: to the nearer end of the coins first, then to the other."""
    (coins,) = np.nonzero(state.coins)
    if not len(coins):
        return ()
    to_left = max(0, int(state.player - coins[0]))
    to_right = max(0, int(coins[-1] - state.player))
    left, right = (0,) * to_left, (1,) * to_right
    if to_left <= to_right:
        return left + (1,) * to_left + right if right else left
    return right + (0,) * to_right + left if left else right


def demonstrate(key: jax.Array, state: State) -> jax.Array:
    """int32[1], the reply that walks towards the nearest coin, as a `reply_phrases` id.

    `key` is for replies that are drawn at random, of which there are none here.
    """
    ways = jnp.arange(state.coins.shape[0]) - state.player
    way = ways[jnp.argmin(jnp.where(state.coins, jnp.abs(ways), ways.size))]
    steps = jnp.clip(jnp.abs(way), 1, STEPS)
    return jnp.where(way > 0, STEPS, 0)[None] + steps - 1
