"""The shop's pages as texts: their phrases, and each page as phrase ids."""

import jax
import jax.numpy as jnp

from ragen_jax.envs import base, phrase_tables
from ragen_jax.envs.webshop import catalogue as catalogue_lib
from ragen_jax.envs.webshop.catalogue import (
    ATTRIBUTE_NAMES,
    ATTRIBUTES,
    BRANDS,
    NO_OPTION,
    OPTION_NAMES,
    TITLE_ATTRIBUTES,
    TYPES,
    VALUES,
    Catalogue,
)

SEARCH, RESULTS, ITEM, DESCRIPTION, FEATURES, BOUGHT = range(6)  # The pages.
SHOWN = 10  # products on a page of results
PAGES = 5  # of results: WebShop shows the best 50
FORMS = ("text", "rich")  # the setting `observation`: how buttons are written
# The buttons. In click[...] their names are in lower case.
BUTTONS = ("Search", "Back to Search", "< Prev", "Next >")
BUTTONS += ("Description", "Features", "Buy Now")
HOME, PREVIOUS, NEXT, DESCRIBE, FEATURE, BUY = range(1, 7)
_LINES = (
    "Instruction: I want",  # then attributes, type, options, highest price
    "WebShop\n",
    "No results.\n",
    "Thank you for shopping. Your score:",
    "First option:\n",
    "Second option:\n",
    "A",  # a description: attribute, type, "by" brand
    " by",
    "Features:",
)
(_WANT, _NAME, _NOTHING, _THANKS, _FIRST, _SECOND, _DESCRIBED, _BY, _FEATURES) = range(
    len(_LINES)
)


class Phrases:
    """The phrases of a shop, in tables by kind. Static."""

    def __init__(self, catalogue: Catalogue, form: str):
        highest = int(catalogue.goals.highest.max())
        rich = form == "rich"

        def button(text: str) -> str:
            return f"[button] {text} [button_]\n" if rich else f"{text} [SEP]\n"

        def chosen_option(text: str) -> str:
            mark = (
                "[clicked button] {} [clicked button_]\n" if rich else "{} (chosen)\n"
            )
            return mark.format(text)

        steps = range(0, highest + 1, catalogue_lib.PRICE_STEP)
        tables = {
            "line": _LINES,
            "button": tuple(button(text) for text in BUTTONS),
            "code": tuple(button(code) for code in catalogue.codes),
            "brand": BRANDS,
            "brand_end": tuple(f" {name}.\n" for name in BRANDS),
            "attribute": tuple(f" {name}" for name in ATTRIBUTE_NAMES),
            "attribute_end": tuple(f" {name}\n" for name in ATTRIBUTE_NAMES),
            "type": tuple(f" {name}" for name in TYPES),
            "type_end": tuple(f" {name}\n" for name in TYPES),
            "option": tuple(f", {name}" for name in OPTION_NAMES),
            "value": tuple(" " + button(name) for name in OPTION_NAMES),
            "chosen": tuple(" " + chosen_option(name) for name in OPTION_NAMES),
            "limit": tuple(f", at most {d} dollars.\n" for d in steps),
            "price": tuple(f"Price: ${d}\n" for d in range(150)),
            "total": tuple(
                f"Page {page + 1} (Total results: {total})\n"
                for page in range(PAGES)
                for total in range(SHOWN * PAGES + 1)
            ),
            "score": tuple(f" {s / 100:.2f}\n" for s in range(101)),
        }
        self.tables = tables
        self.texts = phrase_tables.texts(tables)
        self.at = phrase_tables.first_ids(tables)

    def of(self, kind: str, index) -> jax.Array:
        """Phrase ids from indices in a kind's table; NO_PHRASE for negative indices."""
        index = jnp.asarray(index, jnp.int32)
        return jnp.where(index >= 0, index + self.at[kind], base.NO_PHRASE)


# Instruction: line, attributes, type, two options, limit.
INSTRUCTION_PHRASES = 1 + ATTRIBUTES + 1 + 2 + 1
_PRODUCT = 1 + 1 + TITLE_ATTRIBUTES + 1 + 1  # code, title, price
_BODY = max(4 + SHOWN * _PRODUCT, 5 + 4 + 2 + 2 * VALUES + 2)
OBSERVATION_PHRASES = INSTRUCTION_PHRASES + _BODY


def observe(state, shop: Catalogue, phrases: Phrases) -> jax.Array:
    """int32[OBSERVATION_PHRASES], the instruction and the state's page."""
    pages = (_home, _results, _item, _described, _featured, _bought)
    bodies = [page(state, shop, phrases) for page in pages]
    bodies = [
        jnp.pad(b, (0, _BODY - b.shape[0]), constant_values=base.NO_PHRASE)
        for b in bodies
    ]
    body = jnp.stack(bodies)[state.page]
    ids = jnp.concatenate([_instruction(state, shop, phrases), body])
    return phrase_tables.close_gaps(ids)


def _instruction(state, shop: Catalogue, phrases: Phrases) -> jax.Array:
    goals, of = shop.goals, phrases.of
    goal = state.goal
    kind = jnp.asarray(shop.type[goals.product])[goal]
    parts = [
        of("line", jnp.array([_WANT])),
        of("attribute", jnp.asarray(goals.attributes)[goal]),
        of("type", kind[None]),
        of("option", jnp.asarray(goals.options)[goal]),
        of(
            "limit",
            (jnp.asarray(goals.highest)[goal] // catalogue_lib.PRICE_STEP)[None],
        ),
    ]
    return jnp.concatenate(parts)


def _home(state, shop: Catalogue, phrases: Phrases) -> jax.Array:
    line, button = phrases.of("line", _NAME), phrases.of("button", 0)
    return jnp.stack([line, button])


def _title(product, shop: Catalogue, phrases: Phrases) -> jax.Array:
    """int32[..., 4], brand, attributes and type; NO_PHRASE for a negative product."""
    is_one = product >= 0
    at = jnp.maximum(product, 0)
    parts = [
        phrases.of("brand", jnp.asarray(shop.brand)[at])[..., None],
        phrases.of("attribute", jnp.asarray(shop.attributes)[at, :TITLE_ATTRIBUTES]),
        phrases.of("type_end", jnp.asarray(shop.type)[at])[..., None],
    ]
    return jnp.where(is_one[..., None], jnp.concatenate(parts, -1), base.NO_PHRASE)


def _results(state, shop: Catalogue, phrases: Phrases) -> jax.Array:
    of, products = phrases.of, state.results
    has_next = (state.number + 1) * SHOWN < state.total
    head = jnp.stack(
        [
            of("button", HOME),
            of("total", state.number * (SHOWN * PAGES + 1) + state.total),
            of("button", jnp.where(state.number > 0, PREVIOUS, -1)),
            of("button", jnp.where(has_next, NEXT, -1)),
        ]
    )
    price = jnp.asarray(shop.price)[jnp.maximum(products, 0)]
    rows = [
        of("code", products)[:, None],
        _title(products, shop, phrases),
        of("price", jnp.where(products >= 0, price, -1))[:, None],
    ]
    rows = jnp.concatenate(rows, axis=1)
    nothing = of("line", jnp.where(state.total == 0, _NOTHING, -1))
    rows = rows.at[0, 0].set(jnp.where(state.total == 0, nothing, rows[0, 0]))
    return jnp.concatenate([head, rows.reshape(-1)])


def _item(state, shop: Catalogue, phrases: Phrases) -> jax.Array:
    of, product = phrases.of, state.product
    values = jnp.asarray(shop.options)[jnp.maximum(product, 0)]  # int32[2, VALUES]
    is_chosen = (values == state.chosen[:, None]) & (values != NO_OPTION)
    value_phrases = jnp.where(is_chosen, of("chosen", values), of("value", values))
    labels = of("line", jnp.array([_FIRST, _SECOND]))[:, None]
    parts = [
        of("button", jnp.array([HOME, PREVIOUS])),
        _title(product, shop, phrases),
        of("price", jnp.asarray(shop.price)[jnp.maximum(product, 0)])[None],
        jnp.concatenate([labels, value_phrases], axis=1).reshape(-1),
        of("button", jnp.array([DESCRIBE, FEATURE, BUY])),
    ]
    return jnp.concatenate(parts)


def _described(state, shop: Catalogue, phrases: Phrases) -> jax.Array:
    of, product = phrases.of, jnp.maximum(state.product, 0)
    parts = [
        of("button", jnp.array([HOME, PREVIOUS])),
        of("line", jnp.array([_DESCRIBED])),
        of("attribute", jnp.asarray(shop.attributes)[product, :1]),
        of("type", jnp.asarray(shop.type)[product])[None],
        of("line", jnp.array([_BY])),
        of("brand_end", jnp.asarray(shop.brand)[product])[None],
    ]
    return jnp.concatenate(parts)


def _featured(state, shop: Catalogue, phrases: Phrases) -> jax.Array:
    of = phrases.of
    attributes = jnp.asarray(shop.attributes)[jnp.maximum(state.product, 0)]
    parts = [
        of("button", jnp.array([HOME, PREVIOUS])),
        of("line", jnp.array([_FEATURES])),
        of("attribute", attributes[:-1]),
        of("attribute_end", attributes[-1:]),
    ]
    return jnp.concatenate(parts)


def _bought(state, shop: Catalogue, phrases: Phrases) -> jax.Array:
    hundredths = jnp.round(state.score * 100).astype(jnp.int32)
    return jnp.stack([phrases.of("line", _THANKS), phrases.of("score", hundredths)])


def longest_observation(lengths, phrases: Phrases) -> int:
    """Most tokens in an observation; `lengths` is int[phrases], the tokens of each."""
    most = phrase_tables.most_tokens(phrases.tables, lengths)
    lines = lengths[phrases.at["line"] :][: len(_LINES)].tolist()
    buttons = lengths[phrases.at["button"] :][: len(BUTTONS)]
    head = lines[_WANT] + ATTRIBUTES * most["attribute"] + most["type"]
    head += 2 * most["option"] + most["limit"]
    title = most["brand"] + TITLE_ATTRIBUTES * most["attribute"] + most["type_end"]
    row = most["code"] + title + most["price"]
    home = lines[_NAME] + int(buttons[0])
    results = int(buttons[[HOME, PREVIOUS, NEXT]].sum()) + most["total"]
    results += max(SHOWN * row, lines[_NOTHING])
    option = VALUES * max(most["value"], most["chosen"])
    item = int(buttons[[HOME, PREVIOUS, DESCRIBE, FEATURE, BUY]].sum()) + title
    item += most["price"] + lines[_FIRST] + lines[_SECOND] + 2 * option
    back = int(buttons[[HOME, PREVIOUS]].sum())
    described = back + lines[_DESCRIBED] + most["attribute"] + most["type"]
    described += lines[_BY] + most["brand_end"]
    featured = back + lines[_FEATURES] + (ATTRIBUTES - 1) * most["attribute"]
    featured += most["attribute_end"]
    bought = lines[_THANKS] + most["score"]
    return head + max(home, results, item, described, featured, bought)
