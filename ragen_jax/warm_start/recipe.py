"""The demonstrations: kinds of dialogue, their proportions, texts for the tokenizer.

A stage's `kinds` is a key of KINDS; `make_variant` builds the environment of each Kind.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from ragen_jax import envs
from ragen_jax.envs import base
from ragen_jax.envs.bandit import demonstrations as bandit_demonstrations
from ragen_jax.envs.bandit.env import NAMES
from ragen_jax.envs.frozen_lake import demonstrations as lake_demonstrations
from ragen_jax.envs.search_qa import demonstrations as search_demonstrations
from ragen_jax.envs.sokoban import demonstrations as sokoban_demonstrations
from ragen_jax.envs.sokoban import frames
from ragen_jax.envs.webshop import demonstrations as shop_demonstrations
from ragen_jax.errors import UserError
from ragen_jax.text import prompts as prompts_lib
from ragen_jax.warm_start import symbol_sets
from ragen_jax.warm_start.symbol_sets import SymbolSet

_DEMONSTRATIONS = {
    "frozen_lake": lake_demonstrations,
    "sokoban": sokoban_demonstrations,
    "bandit": bandit_demonstrations,
    "search_qa": search_demonstrations,
    "webshop": shop_demonstrations,
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of dialogue, and how often it is drawn."""

    weight: int  # relative to a stage's other kinds
    env: str
    changes: dict[str, Any]  # to the environment's settings in the config
    thinking: bool = True
    # How many sets of symbols rows use, drawn at random; 0: the environment's own.
    symbol_sets: int = 0
    section: str = ""  # of the config, in place of the environment's name
    # (rows, columns) of the drawings that Sokoban's rooms lie in; (): the rooms' own.
    shapes: tuple[tuple[int, int], ...] = ()

    @property
    def settings(self) -> str:
        """The section of the config."""
        return self.section or self.env


LAKES = (
    Kind(4, "frozen_lake", {}),
    Kind(1, "frozen_lake", {}, thinking=False),
    Kind(1, "frozen_lake", {"success_probability": 1.0}),
    Kind(1, "frozen_lake", {"observation": "coordinates"}),
    Kind(1, "frozen_lake", {"observation": "both"}),
)
_BARE_SOKOBAN = Kind(1, "sokoban", {}, thinking=False)


def _rooms(weight: int, size: int, boxes: int, *shapes: tuple[int, int]) -> Kind:
    """Rooms of the config's `sokoban_large`, as they are or in drawings of `shapes`."""
    changes = {"size": size, "boxes": boxes}
    return Kind(weight, "sokoban", changes, section="sokoban_large", shapes=shapes)


def _rooms_in_frames(longest: int, one: int = 2, two: int = 3) -> tuple[Kind, ...]:
    """Such rooms within larger drawings of walls, so that cells must be counted.

    Of 9 rows with two boxes, too.

    No drawing is 8 x 8.

    Args:
      longest: most rows, and most columns, of a drawing.
      one, two: weights of rooms with one box and with two.
    """

    def shapes(size: int) -> list[tuple[int, int]]:
        sides = range(size, longest + 1)
        return [(r, c) for r in sides for c in sides if (r, c) != (8, 8)]

    return (
        Kind(3, "sokoban", {}),
        *(_rooms(one, size, 1, *shapes(size)) for size in (6, 7, 9)),
        *(_rooms(two, size, 2, *shapes(size)) for size in (6, 7, 9)),
    )


# No room of 8 x 8 cells: these are kept for tests.
_ROOMS = (
    Kind(4, "sokoban", {}),
    *(_rooms(2, 7, 1), _rooms(3, 9, 1), _rooms(2, 6, 2), _rooms(3, 7, 2)),
)
_BANDITS = (Kind(6, "bandit", {}), Kind(1, "bandit", {}, thinking=False))
# The values of a stage's `kinds`. Later stages keep the lakes, not to forget them.
KINDS = {
    "lake": LAKES[:1],
    "lakes": LAKES,
    "sokoban": (Kind(1, "sokoban", {}),),
    "sokoban_in_any_symbols": (Kind(1, "sokoban", {}, symbol_sets=4096),),
    "rooms": _ROOMS,
    "rooms_in_frames": _rooms_in_frames(10),
    # For whole dialogues, whose instruction names the shape, in equally many tokens.
    "rooms_in_named_frames": _rooms_in_frames(9),
    # Mostly with two boxes.
    "two_boxes_in_frames": _rooms_in_frames(10, 1, 5),
    "two_boxes_in_named_frames": _rooms_in_frames(9, 1, 5),
    "sokoban_and_lake": (Kind(3, "sokoban", {}), Kind(1, "frozen_lake", {})),
    "lakes_and_sokoban": (*LAKES, Kind(7, "sokoban", {}), _BARE_SOKOBAN),
    "mostly_sokoban": (*LAKES, Kind(17, "sokoban", {}), _BARE_SOKOBAN),
    "bandit_and_others": (
        *_BANDITS,
        Kind(1, "sokoban", {}),
        Kind(1, "frozen_lake", {}),
    ),
    "all": (*LAKES, Kind(8, "sokoban", {}), _BARE_SOKOBAN, *_BANDITS),
    "search": (Kind(1, "search_qa", {}),),
    "shop_and_search": (Kind(3, "webshop", {}), Kind(1, "search_qa", {})),
    "search_and_shop": (Kind(1, "search_qa", {}), Kind(1, "webshop", {})),
}
# By model, names that are copied: each is one token wherever it stands.
WORDS = {"tiny": NAMES, "tiny_symbols": NAMES, "tiny_rooms": NAMES, "tiny_words": ()}
# By model, symbols that are one token each, together with a space before them.
SYMBOLS = {
    "tiny": "",
    "tiny_symbols": symbol_sets.SYMBOLS,
    "tiny_rooms": "",
    "tiny_words": "",
}
# How many of a grown model's new layers come after the old ones, not before them: an
# action can only be chosen behind the layers that read walls.
LAST_LAYERS = {"tiny": 0, "tiny_words": 0, "tiny_symbols": 0, "tiny_rooms": 4}
# Texts whose tokens the start model never met (rows and columns of larger rooms); their
# embeddings are drawn anew when it grows.
UNMET = {
    "tiny": (),
    "tiny_words": (),
    "tiny_symbols": (),
    "tiny_rooms": tuple(f" ({n}" for n in range(5, 10))
    + tuple(f", {n})" for n in range(5, 10)),
}
# By model, what stands on every line of a page: one token each, within words too.
MARKS = {
    "tiny": (),
    "tiny_symbols": (),
    "tiny_rooms": (),
    "tiny_words": (" [SEP]\n", "Price: $", " (chosen)\n", "b000"),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A Kind, built: its environment with demonstrations, and the sizes of its rows."""

    weight: int
    env: base.Environment
    limits: prompts_lib.TurnLimits
    thinking: bool
    context: int  # most tokens of a dialogue
    short_context: int  # the same without the system prompt
    rows: int  # for each one of a stage's `rows`
    # (): the environment's own symbols alone. With `shapes`, one for each of them.
    symbol_sets: tuple[SymbolSet, ...] = ()
    shapes: tuple[tuple[int, int], ...] = ()


def make_variant(config, kind: Kind, **player_changes: float) -> Variant:
    """Builds a kind of dialogue.

    Args:
      config: with the sections of environments.
      kind: what to build.
      player_changes: to the demonstrator; a key that it does not have is ignored.
    """
    module, section = _DEMONSTRATIONS[kind.env], config[kind.settings]
    settings_type, make = envs.lookup(kind.env)
    settings = _from_section(
        settings_type, {**section.env.to_dict(), **kind.changes}, f"{kind.settings}.env"
    )
    player = section.demonstrator.to_dict()
    player |= {k: v for k, v in player_changes.items() if k in player}
    env = make(settings)
    if kind.shapes:
        env, settings = frames.in_frames(env, settings, kind.shapes)
    env = module.with_demonstrations(
        env,
        settings,
        _from_section(module.Demonstrator, player, f"{kind.settings}.demonstrator"),
        thinking=kind.thinking,
    )
    limits = _from_section(
        prompts_lib.TurnLimits, section.limits.to_dict(), f"{kind.settings}.limits"
    )
    context = section.context, section.short_context
    rows = section.get("rows_for_one", 1)
    sets = tuple(
        SymbolSet(frames.with_named_shape(env, kind.shapes[0], shape), "")
        for shape in kind.shapes
    )
    if kind.symbol_sets:
        sets = symbol_sets.draw(settings, kind.symbol_sets, config.seed)
    return Variant(
        *(kind.weight, env, limits, kind.thinking, *context, rows, sets),
        shapes=kind.shapes,
    )


def _from_section(kind: type, values: dict[str, Any], section: str) -> Any:
    """A `kind` from a section's values. Raises UserError for an unknown key."""
    keys = [field.name for field in dataclasses.fields(kind)]
    for key in values:
        if key not in keys:
            raise UserError(
                f"{section}.{key} is not a key of that section: choose one of"
                f" {', '.join(keys)}"
            )
    return kind(**values)


def words_corpus(variants: list[Variant]) -> list[str]:
    """Texts for the tokenizer of tiny_words: prompts, and all phrases."""
    texts = []
    for variant in variants:
        env = variant.env
        texts += [*env.phrases, *env.reply_phrases, *env.reply_phrases]
        texts += [prompts_lib.system_prompt(env, variant.limits, variant.thinking)] * 40
        texts += _frame(variant.limits, most_tenths=11)
    return texts


def corpus(variants: list[Variant], limits: prompts_lib.TurnLimits) -> list[str]:
    """Texts for the tokenizer, as often as they will be met."""
    texts = []
    for variant in variants:
        env, thinking = variant.env, variant.thinking
        keys = jax.random.split(jax.random.key(1), 200)
        states = jax.vmap(lambda k, env=env: env.reset(k, base.TRAIN))(keys)
        observations = np.asarray(jax.vmap(env.observe)(states))
        replies = np.asarray(jax.vmap(env.demonstrate)(keys, states))
        for observation, reply in zip(observations, replies, strict=True):
            texts.append(base.text_of(env.phrases, observation))
            texts.append(base.text_of(env.reply_phrases, reply))
        texts += [prompts_lib.system_prompt(env, limits, thinking)] * 40
    return texts + _frame(limits, most_tenths=130)


def _frame(limits: prompts_lib.TurnLimits, most_tenths: int) -> list[str]:
    """The texts around observations, with rewards below `most_tenths` / 10."""
    texts = []
    for turn in range(1, limits.turns + 1):
        for left in range(limits.actions + 1):
            texts.append(f"Turn {turn} of {limits.turns}. Actions left: {left}.")
    lowest = -30 if most_tenths > 30 else 0
    texts += [f"Reward: {t / 10:.1f}\n" for t in range(lowest, most_tenths)]
    texts += [
        "Reward: 0.0\n",
        "Reward: 1.0\n",
        "system\n",
        "user\n",
        "assistant\n",
    ] * 50
    texts += ["Your last reply had no valid answer or an unknown action.\n"] * 20
    return texts
