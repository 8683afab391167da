"""Imperfect demonstrations for WebShop, for the supervised start of small models.

A careful buyer searches for all that the instruction names, opens the first product,
chooses the options that it asks for and then buys. A careless one searches for the type
alone, opens any product, clicks any option or buys at once. A buyer is drawn anew for
each reply, so that RL has to find out what pays.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ragen_jax.envs.base import NO_PHRASE, Environment
from ragen_jax.envs.webshop import env as webshop
from ragen_jax.envs.webshop import pages
from ragen_jax.envs.webshop.catalogue import (
    ATTRIBUTE_NAMES,
    NO_OPTION,
    OPTION_NAMES,
    TYPES,
    Catalogue,
)

_FIXED = ("</think><answer>search[", "</think><answer>click[", "]</answer>")
_FIXED += (" All of it.", " Its kind.", " The first.", " Any.", " I choose.")
_FIXED += (" Some option.", " I buy.", " Back.")
_SEARCH, _CLICK, _END, _ALL, _KIND, _FIRST, _ANY, _CHOOSE, _SOME, _BUY, _BACK = range(
    len(_FIXED)
)
_BUTTONS = tuple(button.lower() for button in pages.BUTTONS)
# The ids of the first phrase of each kind, in the order of `reply_phrases`.
_BUTTON = len(_FIXED)
_ATTRIBUTE = _BUTTON + len(_BUTTONS)
_TYPE = _ATTRIBUTE + len(ATTRIBUTE_NAMES)
_OPTION = _TYPE + len(TYPES)
_CODE = _OPTION + len(OPTION_NAMES)


@dataclasses.dataclass(frozen=True)
class Demonstrator:
    """How imperfect the demonstrations are."""

    random_plan: float = 0.5  # share of careless replies, where there is a choice


def with_demonstrations(
    env: Environment,
    settings: webshop.WebShop,
    player: Demonstrator,
    *,
    thinking: bool,
) -> Environment:
    """`env` with `reply_phrases` and `demonstrate` filled in.

    Args:
      env: made from `settings`.
      settings: of the shop.
      player: how it chooses.
      thinking: whether replies begin within `<think>`, else within `<answer>`.
    """
    shop = webshop.shop_of(settings)
    fixed = _FIXED
    if not thinking:
        fixed = tuple(text.removeprefix("</think><answer>") for text in fixed)
    return dataclasses.replace(
        env,
        reply_phrases=(
            *fixed,
            *_BUTTONS,
            *(f" {name}" for name in (*ATTRIBUTE_NAMES, *TYPES)),
            *OPTION_NAMES,
            *shop.codes,
        ),
        demonstrate=functools.partial(
            _demonstrate, player=player, shop=shop, thinking=thinking
        ),
    )


def _demonstrate(
    key: jax.Array,
    state: webshop.State,
    player: Demonstrator,
    shop: Catalogue,
    thinking: bool,
) -> jax.Array:
    """int32[8], one reply as phrase ids, without the end-of-turn token."""
    plan_key, pick_key = jax.random.split(key)
    random_plan = jax.random.bernoulli(plan_key, player.random_plan)
    chances = jax.random.uniform(pick_key, (1 + pages.SHOWN + 2 * pages.VALUES,))
    thought, words = _search(state, random_plan, shop)
    for page, reply in (
        (pages.RESULTS, _open(state, random_plan, chances[1 : 1 + pages.SHOWN])),
        (pages.ITEM, _choose(state, random_plan, chances, shop)),
        (pages.DESCRIPTION, (_BACK, _BUTTON + pages.PREVIOUS)),
        (pages.FEATURES, (_BACK, _BUTTON + pages.PREVIOUS)),
    ):
        clicked = jnp.full_like(words, NO_PHRASE).at[0].set(reply[1])
        is_here = state.page == page
        thought = jnp.where(is_here, reply[0], thought)
        words = jnp.where(is_here, clicked, words)
    opening = jnp.where(state.page == pages.SEARCH, _SEARCH, _CLICK)
    thought = jnp.where(thinking, thought, NO_PHRASE)
    ends = jnp.stack([thought, opening]), jnp.array([_END])
    return jnp.concatenate([ends[0], words, ends[1]]).astype(jnp.int32)


def _search(state, random_plan, shop: Catalogue) -> tuple[jax.Array, jax.Array]:
    """A thought, int32[], and the words to search for, int32[5]."""
    goals = shop.goals
    attributes = jnp.asarray(goals.attributes)[state.goal]
    kind = jnp.asarray(shop.type[goals.product])[state.goal]
    attributes = jnp.where(
        (attributes >= 0) & ~random_plan, _ATTRIBUTE + attributes, NO_PHRASE
    )
    thought = jnp.where(random_plan, _KIND, _ALL)
    return thought, jnp.concatenate([attributes, (_TYPE + kind)[None]])


def _open(state, random_plan, chances) -> tuple[jax.Array, jax.Array]:
    """A thought and the product to open, or the way back if there are no results."""
    any_one = jnp.argmax(jnp.where(state.results >= 0, chances, -1.0))
    product = state.results[jnp.where(random_plan, any_one, 0)]
    thought = jnp.where(random_plan, _ANY, _FIRST)
    is_empty = state.results[0] < 0
    clicked = jnp.where(is_empty, _BUTTON + pages.HOME, _CODE + product)
    return jnp.where(is_empty, _BACK, thought), clicked


def _choose(state, random_plan, chances, shop: Catalogue):
    """A thought and what to click on a product's page."""
    values = jnp.asarray(shop.options)[jnp.maximum(state.product, 0)]
    goal_options = jnp.asarray(shop.goals.options)[state.goal]
    is_there = (values == goal_options[:, None]).any(axis=1) & (
        goal_options != NO_OPTION
    )
    lacks = is_there & (state.chosen != goal_options)
    offered = values.reshape(-1)
    random_place = jnp.argmax(
        jnp.where(offered != NO_OPTION, chances[1 + pages.SHOWN :], -1.0)
    )
    roams = random_plan & (chances[0] < 0.5)
    buys = (random_plan & ~roams) | (~random_plan & ~lacks.any())
    option = jnp.where(roams, offered[random_place], goal_options[jnp.argmax(lacks)])
    thought = jnp.where(roams, _SOME, jnp.where(buys, _BUY, _CHOOSE))
    return thought, jnp.where(buys, _BUTTON + pages.BUY, _OPTION + option)
