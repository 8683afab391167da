"""Bandit: two arms named by professions; pull one, once, by its name.

As in RAGEN (arXiv:2504.20073, section 3), the low-risk arm always pays a little; the
high-risk arm pays much or nothing, and more on average. The names hint at which is
which; with `reverse` the hint is wrong (BanditRev). Every function handles one pair of
arms: `vmap` to batch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base, rendering

# By split: pairs of a profession that sounds steady and one that sounds risky. No name
# is in two pairs. The numbers of pairs and (Librarian, Investor) are the paper's.
PAIRS = {
    base.TRAIN: (
        ("Librarian", "Investor"),
        ("Baker", "Gambler"),
        ("Dentist", "Stuntman"),
        ("Tailor", "Prospector"),
        ("Notary", "Speculator"),
        ("Optician", "Racer"),
        ("Judge", "Smuggler"),
        ("Beekeeper", "Adventurer"),
        ("Shepherd", "Mountaineer"),
        ("Auditor", "Inventor"),
        ("Plumber", "Astronaut"),
        ("Farmer", "Pirate"),
    ),
    base.VALIDATION: (
        ("Carpenter", "Acrobat"),
        ("Watchmaker", "Wildcatter"),
        ("Translator", "Raider"),
        ("Janitor", "Rockstar"),
    ),
    base.TEST: (
        ("Proofreader", "Privateer"),
        ("Bricklayer", "Skydiver"),
        ("Statistician", "Daredevil"),
        ("Florist", "Stormchaser"),
        ("Tutor", "Spy"),
        ("Weaver", "Swindler"),
        ("Miller", "Buccaneer"),
        ("Registrar", "Paratrooper"),
    ),
}
# In the order of the pairs: names at even indices sound steady, at odd ones risky.
NAMES = tuple(name for split in PAIRS for pair in PAIRS[split] for name in pair)
ACTION_NAMES = ("first arm", "second arm")  # Action a pulls the arm shown at place a.
ANSWER_BYTES = 32
_COUNTS = tuple(len(PAIRS[split]) for split in PAIRS)  # pairs by split
# First ids of phrases: the title, names before a comma; names that end a line follow.
_TITLE, _NAME = 0, 1
_COLOUR = (236, 224, 190)  # of both arms, since neither's kind is shown


@dataclasses.dataclass(frozen=True)
class Bandit:
    """Settings of the two arms."""

    low_reward: float = 0.15  # what the low-risk arm pays
    high_probability: float = 0.25  # that the high-risk arm pays 1; else it pays 0
    reverse: bool = False  # whether the name that sounds steady is the high-risk arm


@struct.dataclass
class State:
    """Two arms, before or after the one pull."""

    arms: jax.Array  # int32[2], indices into NAMES, in the order shown
    high: jax.Array  # int32[], 0 or 1, the place of the high-risk arm
    done: jax.Array  # bool[], True once an arm has been pulled


def make(settings: Bandit) -> base.Environment:
    """Binds the settings into an environment. ValueError if they cannot be used."""
    check(settings)
    return base.Environment(
        name="bandit",
        action_names=ACTION_NAMES,
        phrases=phrases(),
        observation_phrases=3,
        instruction=INSTRUCTION,
        reset=functools.partial(reset, settings=settings),
        step=functools.partial(step, settings=settings),
        observe=observe,
        example_actions=("name of an arm",),
        longest_observation=_longest_observation,
        answer_bytes=ANSWER_BYTES,
        read_action=read_action,
        read_action_text=read_action_text,
        action_text=action_text,
        picture=picture,
        solve=solve,
    )


# The same for both directions: it does not say what the names are worth.
INSTRUCTION = (
    "Choose one of two slot machines, called arms, by its name. Each arm pays a reward"
    " drawn from its own distribution. Think about what the names suggest, and pull the"
    " arm that pays more on average. Action: the name of one of the two arms."
)


def check(settings: Bandit) -> None:
    """Raises ValueError, in one sentence, unless the high-risk arm is the better."""
    if not 0 <= settings.high_probability <= 1:
        raise ValueError(
            f"bandit.high_probability = {settings.high_probability} is not a"
            " probability: choose 0 to 1"
        )
    if not 0 <= settings.low_reward < settings.high_probability:
        raise ValueError(
            f"bandit.low_reward = {settings.low_reward} must be less than the high-risk"
            f" arm pays on average, which counts as success: choose at least 0 and less"
            f" than bandit.high_probability = {settings.high_probability}"
        )


def reset(key: jax.Array, split: jax.Array, settings: Bandit) -> State:
    """Draws one of the split's pairs, and which of the two is named first.

    Each split lists its own pairs instead of being decided by a hash, so that no name
    occurs in two splits.

    Args:
      key: decides the pair and its order.
      split: int32[], base.TRAIN, base.VALIDATION or base.TEST.
      settings: which kind of name is the high-risk arm.
    """
    pair_key, order_key = jax.random.split(key)
    counts = np.array(_COUNTS, np.int32)
    first_pair = jnp.asarray(np.cumsum(counts, dtype=np.int32) - counts)[split]
    pair = jax.random.randint(pair_key, (), 0, jnp.asarray(counts)[split])
    first = jax.random.bernoulli(order_key).astype(jnp.int32)
    sounds_risky = jnp.stack([first, 1 - first])  # of the arms in the order shown
    is_high = sounds_risky != settings.reverse
    return State(
        arms=2 * (first_pair + pair) + sounds_risky,
        high=is_high[1].astype(jnp.int32),
        done=jnp.zeros((), bool),
    )


def step(
    key: jax.Array, state: State, action: jax.Array, settings: Bandit
) -> tuple[State, base.Outcome]:
    """Pulls an arm, which ends the episode. Success: it was the high-risk arm.

    Args:
      key: decides whether the high-risk arm pays.
      state: two arms; after the end nothing changes.
      action: int32[], the place of an arm, 0 or 1, or base.NO_ACTION.
      settings: what the arms pay.
    """
    pulls = ~state.done & (action != base.NO_ACTION)
    success = pulls & (action == state.high)
    pays = jax.random.bernoulli(key, settings.high_probability).astype(jnp.float32)
    reward = jnp.where(success, pays, jnp.where(pulls, settings.low_reward, 0.0))
    done = state.done | pulls
    outcome = base.Outcome(
        reward=reward.astype(jnp.float32), success=success, done=done
    )
    return state.replace(done=done), outcome


def observe(state: State) -> jax.Array:
    """int32[3], the two names as indices into `phrases()`."""
    first, second = _NAME + state.arms[0], _NAME + len(NAMES) + state.arms[1]
    return jnp.stack([jnp.full((), _TITLE), first, second]).astype(jnp.int32)


def phrases() -> tuple[str, ...]:
    """The texts that the ids of `observe` stand for."""
    listed = tuple(f" {name}," for name in NAMES)
    return ("Arms:", *listed, *(f" {name}\n" for name in NAMES))


def read_action(text: jax.Array, length: jax.Array, state: State) -> jax.Array:
    """int32[], the place of the arm that a text names, or base.NO_ACTION.

    Args:
      text: uint8[ANSWER_BYTES], in lower case, padded with 0.
      length: int32[], its bytes.
      state: the two arms.
    """
    lowered = [name.lower().encode() for name in NAMES]
    table = np.array([list(n.ljust(ANSWER_BYTES, b"\0")) for n in lowered], np.uint8)
    lengths = np.array([len(n) for n in lowered], np.int32)
    # Lengths are compared too, since a text may itself end in zero bytes.
    is_text = (jnp.asarray(table)[state.arms] == text[None]).all(axis=1)
    is_named = is_text & (jnp.asarray(lengths)[state.arms] == length)
    place = jnp.argmax(is_named).astype(jnp.int32)
    return jnp.where(is_named.any(), place, base.NO_ACTION)


def read_action_text(text: bytes, state: State) -> int:
    """The definition of `read_action`, from a lower-case text and a host State."""
    for place, arm in enumerate(state.arms):
        if text == NAMES[arm].lower().encode():
            return place
    return base.NO_ACTION


def action_text(action: int, state: State) -> str:
    """The name of the arm that an action pulls."""
    return NAMES[int(state.arms[int(action)])]


def picture(state: State) -> np.ndarray:
    """uint8[96, 192, 3], RGB: a cell for each arm, with its name."""
    names = [NAMES[arm] for arm in state.arms]
    return rendering.board(np.array([[_COLOUR, _COLOUR]], np.uint8), [names], cell=96)


def solve(state: State) -> tuple[int, ...]:
    """The place of the high-risk arm, or nothing once an arm has been pulled."""
    return () if state.done else (int(state.high),)


def _longest_observation(lengths) -> int:
    """Most tokens in an observation; `lengths` is int[phrases], the tokens of each."""
    listed, ending = lengths[_NAME:].reshape(2, len(NAMES)).max(axis=1)
    return int(lengths[_TITLE] + listed + ending)
