"""A buyer's actions, as numbers and as texts: `search[words]` and `click[name]`."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs import base
from ragen_jax.envs import text_search as search
from ragen_jax.envs.webshop import catalogue as catalogue_lib
from ragen_jax.envs.webshop import pages
from ragen_jax.envs.webshop.catalogue import NO_OPTION, OPTION_NAMES, VALUES, Catalogue
from ragen_jax.envs.webshop.pages import PAGES, SHOWN

# The kinds of action. Kinds 1 to 6 click the button of that index in `pages.BUTTONS`.
ACTION_NAMES = ("search", "back to search", "previous", "next", "description")
ACTION_NAMES += ("features", "buy now", "product", "option")
SEARCH, HOME, PREVIOUS, NEXT, DESCRIBE, FEATURE, BUY, PRODUCT, OPTION = range(9)
ACTION_SIZE = 2 + search.QUERY_WORDS  # kind; place in the list; words
ANSWER_BYTES = 96
_NAME_BYTES = 16  # of the longest name that can be clicked


def is_offered(state: Any, kind: jax.Array, place: jax.Array, shop: Catalogue):
    """bool[], whether the state's page offers an action."""
    page, product = state.page, jnp.maximum(state.product, 0)
    is_results, is_item = page == pages.RESULTS, page == pages.ITEM
    is_detail = (page == pages.DESCRIPTION) | (page == pages.FEATURES)
    values = jnp.asarray(shop.options)[product].reshape(-1)
    offered = jnp.stack(
        [
            page == pages.SEARCH,
            is_results | is_item | is_detail,
            (is_results & (state.number > 0)) | is_item | is_detail,
            is_results & ((state.number + 1) * SHOWN < state.total),
            *[is_item] * 3,
            is_results & (state.results[jnp.clip(place, 0, SHOWN - 1)] >= 0),
            is_item & (values[jnp.clip(place, 0, 2 * VALUES - 1)] != NO_OPTION),
        ]
    )
    is_known = (kind >= 0) & (kind < len(ACTION_NAMES))
    return is_known & offered[jnp.clip(kind, 0, OPTION)] & ~state.done


def read_action(
    text: jax.Array, length: jax.Array, state: Any, shop: Catalogue
) -> jax.Array:
    """int32[ACTION_SIZE], what `read_action_text` returns.

    Args:
      text: uint8[ANSWER_BYTES], padded with 0.
      length: int32[], its bytes.
      state: the buyer, whose page says what can be clicked.
      shop: the catalogue.
    """
    none = jnp.full((ACTION_SIZE,), base.NO_ACTION, jnp.int32)
    searches, query, count = search.enclosed(text, length, b"search[")
    words = search.read_query(shop.index, query, count)
    wanted = jnp.concatenate([jnp.array([SEARCH, 0], jnp.int32), words])
    searches &= is_offered(state, jnp.int32(SEARCH), jnp.int32(0), shop)

    clicks, name, count = search.enclosed(text, length, b"click[")
    at = jnp.arange(_NAME_BYTES)
    name = jnp.where(at < count, name[:_NAME_BYTES], 0)
    clicks &= (count > 0) & (count <= _NAME_BYTES)
    # A name with a zero byte must not be taken for a shorter one that is padded.
    clicks &= ((name != 0) | (at >= count)).all()
    buttons, codes, options = _name_tables(shop)
    values = jnp.asarray(shop.options)[jnp.maximum(state.product, 0)].reshape(-1)
    names = jnp.concatenate(
        [
            jnp.asarray(buttons),
            jnp.asarray(codes)[jnp.maximum(state.results, 0)],
            jnp.asarray(options)[jnp.maximum(values, 0)],
        ]
    )
    kinds, places = (jnp.asarray(table) for table in _CLICKS)
    offered = jax.vmap(lambda kind, place: is_offered(state, kind, place, shop))
    is_named = (names == name[None]).all(axis=1) & offered(kinds, places)
    first = jnp.argmax(is_named)
    clicked = none.at[0].set(kinds[first]).at[1].set(places[first])
    clicked = jnp.where(clicks & is_named.any(), clicked, none)
    return jnp.where(searches, wanted, clicked)


# The kind and place of everything that can be clicked, buttons first.
_CLICKS = (
    np.array([*range(HOME, PRODUCT), *[PRODUCT] * SHOWN, *[OPTION] * 2 * VALUES]),
    np.array([*[0] * (PRODUCT - HOME), *range(SHOWN), *range(2 * VALUES)]),
)
_CLICKS = tuple(table.astype(np.int32) for table in _CLICKS)


@functools.cache
def _name_tables(shop: Catalogue) -> tuple[np.ndarray, ...]:
    """uint8[n, _NAME_BYTES] of buttons, products and options, in lower case."""
    lists = (pages.BUTTONS[1:], shop.codes, OPTION_NAMES)
    return tuple(
        np.stack(
            [
                np.frombuffer(name.lower().encode().ljust(_NAME_BYTES, b"\0"), np.uint8)
                for name in names
            ]
        )
        for names in lists
    )


def read_action_text(text: bytes, state: Any, shop: Catalogue) -> tuple[int, ...]:
    """The action of `search[words]` or `click[name]`; NO_ACTION if the page lacks it.

    Args:
      text: stripped and lower-cased.
      state: NumPy arrays.
      shop: the catalogue.
    """
    rest = [base.NO_ACTION] * (ACTION_SIZE - 2)
    none = (base.NO_ACTION, base.NO_ACTION, *rest)
    match = re.fullmatch(rb"(search|click)\[(.*)\]", text, re.DOTALL)
    if match is None:
        return none
    if match[1] == b"search":
        if int(state.page) != pages.SEARCH or bool(state.done):
            return none
        return (SEARCH, 0, *search.read_query_text(shop.index, match[2]))
    for (kind, place), name in clickable(state, shop).items():
        if name.encode() == match[2]:
            return (kind, place, *rest)
    return none


def clickable(state: Any, shop: Catalogue) -> dict[tuple[int, int], str]:
    """What the page offers to click: (kind, place) -> name. Host side."""
    page, number = int(state.page), int(state.number)
    if page in (pages.SEARCH, pages.BOUGHT) or bool(state.done):
        return {}
    kinds = [HOME]
    if page != pages.RESULTS or number > 0:
        kinds.append(PREVIOUS)
    if page == pages.RESULTS and (number + 1) * SHOWN < int(state.total):
        kinds.append(NEXT)
    if page == pages.ITEM:
        kinds += [DESCRIBE, FEATURE, BUY]
    names = {(kind, 0): pages.BUTTONS[kind].lower() for kind in kinds}
    if page == pages.RESULTS:
        products = enumerate(np.asarray(state.results).tolist())
        names |= {
            (PRODUCT, at): shop.codes[product]
            for at, product in products
            if product >= 0
        }
    if page == pages.ITEM:
        values = enumerate(shop.options[int(state.product)].reshape(-1).tolist())
        names |= {
            (OPTION, at): OPTION_NAMES[value]
            for at, value in values
            if value != NO_OPTION
        }
    return names


def action_text(action: Any, state: Any, shop: Catalogue) -> str:
    """The text of an action; "nothing" for one that the page does not offer."""
    kind, place, *words = (int(part) for part in np.asarray(action))
    if kind == SEARCH:
        return f"search[{search.words_text(shop.index, words)}]"
    if kind < PRODUCT:
        place = 0
    elif kind == OPTION:  # As `step` takes it.
        place = min(place, 2 * VALUES - 1)
    name = clickable(state, shop).get((kind, place))
    return f"click[{name}]" if name else "nothing"


def sample_action(key: jax.Array, shop: Catalogue) -> jax.Array:
    """int32[ACTION_SIZE], a kind, a place and three words, each equally likely.

    There are fewer options than places: those beyond the last one mean the last.
    """
    kind_key, place_key, word_key = jax.random.split(key, 3)
    words = search.random_query(word_key, shop.index)
    kind = jax.random.randint(kind_key, (1,), 0, len(ACTION_NAMES))
    place = jax.random.randint(place_key, (1,), 0, SHOWN)
    return jnp.concatenate([kind, place, words]).astype(jnp.int32)


def follow_rule(state: Any, shop: Catalogue) -> jax.Array:
    """int32[ACTION_SIZE]: searches for the instruction and buys the first result.

    The rule-based baseline of Yao et al., section 5: no options are chosen.
    """
    kinds = [SEARCH, PRODUCT, BUY, PREVIOUS, PREVIOUS, base.NO_ACTION]  # by page
    kind = jnp.array(kinds, jnp.int32)[state.page]
    words = jnp.asarray(shop.goals.words)[state.goal]
    words = jnp.where(kind == SEARCH, words, base.NO_ACTION)
    return jnp.concatenate([jnp.stack([kind, jnp.zeros_like(kind)]), words])


def solve(state: Any, shop: Catalogue) -> tuple[tuple[int, ...], ...]:
    """Actions that buy a product with the full score, from knowledge of the catalogue.

    Of three queries (the instruction, the product's title, its whole text), takes the
    one that ranks such a product highest, of those that fit into a reply.
    """
    goal = int(state.goal)
    goals, rest = shop.goals, [base.NO_ACTION] * search.QUERY_WORDS
    if bool(state.done):
        return ()
    product = int(goals.product[goal])
    whole = catalogue_lib.document(
        shop.type[product],
        shop.brand[product],
        shop.attributes[product],
        shop.options[product],
    )
    title = " ".join([*whole.split()[:3], catalogue_lib.TYPES[shop.type[product]]])
    queries = [tuple(goals.words[goal].tolist())]
    queries += [
        search.read_query_text(shop.index, text.encode()) for text in (title, whole)
    ]
    plans = []
    for query in queries:
        ranking = search.rank_text(shop.index, query)[: SHOWN * PAGES]
        fit = [
            at for at, p in enumerate(ranking) if catalogue_lib.matches(shop, goal, p)
        ]
        text = action_text((SEARCH, 0, *query), state, shop)
        if fit and len(text) <= ANSWER_BYTES:
            plans.append((fit[0], query, ranking[fit[0]]))
    if not plans:
        return ()
    rank, query, product = min(plans)
    values = shop.options[product].reshape(-1).tolist()
    places = [
        values.index(int(value), VALUES * option)
        for option, value in enumerate(goals.options[goal])
    ]
    steps = [] if int(state.page) == pages.SEARCH else [(HOME, 0, *rest)]
    steps += [(SEARCH, 0, *query), *[(NEXT, 0, *rest)] * (rank // SHOWN)]
    steps += [(PRODUCT, rank % SHOWN, *rest)]
    steps += [(OPTION, place, *rest) for place in places]
    return (*steps, (BUY, 0, *rest))
