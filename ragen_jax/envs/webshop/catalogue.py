"""The shop's products and shopping goals, made on the host from a seed by a grammar."""

import dataclasses

import numpy as np

from ragen_jax.envs import base, split_lists
from ragen_jax.envs import text_search as search

ATTRIBUTES = 4  # of a product
TITLE_ATTRIBUTES = 2  # of these, the first ones, which are part of its title
VALUES = 4  # of each of a product's two options, at most
NO_OPTION = -1
GOALS_PER_PRODUCT = 6  # drawn; equal ones are merged
LEAST_GOALS = 8  # of a split
PRICE_STEP = 10  # dollars; a goal's highest price is a multiple of this

_COLOURS = (
    "black white blue red green grey brown purple orange yellow navy beige".split()
)
_FLAVOURS = "vanilla chocolate lemon mint honey salted cinnamon berry".split()
_CLOTHES_SIZES = ("small", "medium", "large", "x-large")
_SHOE_SIZES = ("size 7", "size 8", "size 9", "size 10", "size 11")
_PACKS = ("single", "pack of 2", "pack of 4", "pack of 6")
_LENGTHS = ("3 feet", "6 feet", "10 feet", "15 feet")
_BEDS = ("twin", "full", "queen", "king")

# Group -> types, attributes, values of the first and of the second option.
_GROUPS = {
    "clothing": (
        ("shirt", "dress shirt", "jacket", "rain jacket", "sweater", "jeans"),
        "cotton wool linen waterproof washable slim loose stretchy soft lined",
        _COLOURS,
        _CLOTHES_SIZES,
    ),
    "shoes": (
        ("running shoes", "dress shoes", "sandals", "winter boots", "rain boots"),
        "leather suede canvas cushioned light rubber warm wide durable vegan",
        _COLOURS,
        _SHOE_SIZES,
    ),
    "food": (
        ("tea", "green tea", "snack bar", "cookies", "dried fruit"),
        "organic kosher natural crunchy sugarfree glutenfree fresh rich mild",
        _FLAVOURS,
        _PACKS,
    ),
    "electronics": (
        ("phone cable", "phone case", "headphones", "desk lamp", "speaker"),
        "wireless fast portable slimline shockproof dimmable loud compact",
        _COLOURS,
        _LENGTHS,
    ),
    "bedding": (
        ("pillow", "blanket", "bed sheet", "wool blanket", "mattress cover"),
        "cooling heavy hypoallergenic breathable quilted plush woven silky",
        _COLOURS,
        _BEDS,
    ),
}
BRANDS = tuple(
    "Alvera Bramwick Calder Dunmore Elstow Fernhill Garrow Hollins Istria Jorvik"
    " Kelmscot Lindale Marlow Norvane Ostrava Penrith Quillon Rosmar Selby"
    " Tarrant".split()
)
TYPES = tuple(t for types, *_ in _GROUPS.values() for t in types)
GROUP_OF_TYPE = np.array(
    [g for g, (types, *_) in enumerate(_GROUPS.values()) for _ in types], np.int32
)
ATTRIBUTE_NAMES = tuple(
    dict.fromkeys(a for _, words, *_ in _GROUPS.values() for a in words.split())
)
OPTION_NAMES = tuple(
    dict.fromkeys(v for *_, one, two in _GROUPS.values() for v in (*one, *two))
)


@dataclasses.dataclass(frozen=True, eq=False)
class Catalogue:
    """D products and G goals, as NumPy arrays, and the index of the products' texts."""

    type: np.ndarray  # int32[D], index in TYPES
    brand: np.ndarray  # int32[D], index in BRANDS
    attributes: np.ndarray  # int32[D, 4], indices in ATTRIBUTE_NAMES, all different
    options: np.ndarray  # int32[D, 2, VALUES], indices in OPTION_NAMES; NO_OPTION pads
    price: np.ndarray  # int32[D], dollars
    codes: tuple[str, ...]  # D, the names by which products are clicked
    goals: "Goals"
    index: search.Index

    @property
    def products(self) -> int:
        """D."""
        return len(self.price)


@dataclasses.dataclass(frozen=True, eq=False)
class Goals:
    """What buyers want. Each goal was made from a product, which satisfies it."""

    product: np.ndarray  # int32[G], the product that the goal was made from
    attributes: np.ndarray  # int32[G, 4], padded with NO_OPTION
    options: np.ndarray  # int32[G, 2], NO_OPTION where none is asked for
    highest: np.ndarray  # int32[G], dollars, the highest price that satisfies the goal
    words: np.ndarray  # int32[G, W], the instruction as a query
    of_split: tuple[np.ndarray, ...]  # int32[g] goals of train, validation and test


def make_catalogue(products: int, seed: int, goal_attributes: int) -> Catalogue:
    """Generates a catalogue and its goals.

    Args:
      products: D.
      seed: decides all of it.
      goal_attributes: how many attributes a goal names.

    Raises:
      ValueError: if a split would have too few goals.
    """
    generator = np.random.default_rng(seed)
    kind = generator.integers(0, len(TYPES), products)
    brand = generator.integers(0, len(BRANDS), products)
    attributes = np.zeros((products, ATTRIBUTES), np.int32)
    options = np.full((products, 2, VALUES), NO_OPTION, np.int32)
    groups = list(_GROUPS.values())
    for product, group in enumerate(GROUP_OF_TYPE[kind]):
        _, words, *values = groups[group]
        names = words.split()
        places = generator.choice(len(names), ATTRIBUTES, replace=False)
        attributes[product] = [ATTRIBUTE_NAMES.index(names[i]) for i in places]
        for option, texts in enumerate(values):
            count = generator.integers(2, VALUES + 1)
            places = np.sort(generator.choice(len(texts), count, replace=False))
            ids = [OPTION_NAMES.index(texts[i]) for i in places]
            options[product, option, :count] = ids
    price = generator.integers(5, 150, products)
    texts = [
        document(*row) for row in zip(kind, brand, attributes, options, strict=True)
    ]
    index = search.build_index(texts)
    goals = _make_goals(
        generator, kind, attributes, options, price, goal_attributes, index
    )
    return Catalogue(
        type=kind.astype(np.int32),
        brand=brand.astype(np.int32),
        attributes=attributes,
        options=options,
        price=price.astype(np.int32),
        codes=tuple(f"b{1 + product:05d}" for product in range(products)),
        goals=goals,
        index=index,
    )


def document(kind: int, brand: int, attributes, options) -> str:
    """The text by which a product is found: brand, attributes, type and options."""
    words = [BRANDS[brand], *(ATTRIBUTE_NAMES[a] for a in attributes), TYPES[kind]]
    values = [OPTION_NAMES[v] for v in options.reshape(-1) if v != NO_OPTION]
    return " ".join([*words, *values])


def goal_text(goals: Goals, goal: int, kind: int) -> str:
    """The words of a goal's instruction without its price, as a query."""
    words = [ATTRIBUTE_NAMES[a] for a in goals.attributes[goal] if a != NO_OPTION]
    values = [OPTION_NAMES[v] for v in goals.options[goal] if v != NO_OPTION]
    return " ".join([*words, TYPES[kind], *values])


def _make_goals(
    generator, kind, attributes, options, price, goal_attributes: int, index
) -> Goals:
    """Goals, all different, and the split of each."""
    rows: dict[tuple[int, ...], int] = {}
    for product in np.repeat(np.arange(len(kind)), GOALS_PER_PRODUCT):
        places = generator.choice(ATTRIBUTES, goal_attributes, replace=False)
        goal_attribute_ids = np.full(ATTRIBUTES, NO_OPTION)
        goal_attribute_ids[:goal_attributes] = np.sort(attributes[product][places])
        values = [generator.choice(row[row != NO_OPTION]) for row in options[product]]
        steps = price[product] // PRICE_STEP + generator.integers(1, 4)
        content = (kind[product], *goal_attribute_ids, *values, steps * PRICE_STEP)
        rows.setdefault(tuple(int(part) for part in content), int(product))
    contents = np.array(list(rows), np.int32)
    of_split = split_lists.by_content(contents)
    for name, indices in zip(base.SPLITS, of_split, strict=True):
        if len(indices) < LEAST_GOALS:
            raise ValueError(
                f"webshop.products = {len(kind)} gives {len(indices)} goals of the"
                f" split {name}, fewer than {LEAST_GOALS}: choose more products"
            )
    goals = Goals(
        product=np.array(list(rows.values()), np.int32),
        attributes=contents[:, 1:5],
        options=contents[:, 5:7],
        highest=contents[:, 7],
        words=np.zeros((len(contents), search.QUERY_WORDS), np.int32),
        of_split=of_split,
    )
    words = [
        search.read_query_text(index, goal_text(goals, goal, row[0]).encode())
        for goal, row in enumerate(contents)
    ]
    return dataclasses.replace(goals, words=np.array(words, np.int32))


def title_words() -> tuple[np.ndarray, np.ndarray]:
    """int32[T, T], words that the names of two types share; int32[T], words of each."""
    sets = [set(name.split()) for name in TYPES]
    shared = np.array([[len(a & b) for b in sets] for a in sets], np.int32)
    return shared, np.array([len(a) for a in sets], np.int32)


def matches(catalogue: Catalogue, goal: int, product: int) -> bool:
    """Whether the product, with the right options chosen, has the full score."""
    goals = catalogue.goals
    goal_attributes = [a for a in goals.attributes[goal] if a != NO_OPTION]
    return bool(
        catalogue.type[product] == catalogue.type[goals.product[goal]]
        and set(goal_attributes) <= set(catalogue.attributes[product].tolist())
        and all(
            value in catalogue.options[product, option]
            for option, value in enumerate(goals.options[goal])
        )
        and catalogue.price[product] <= goals.highest[goal]
    )
