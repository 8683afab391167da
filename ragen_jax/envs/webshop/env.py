"""The shop's rules: search, look at products, choose options, buy.

Pages, actions and score are those of WebShop (Yao et al., arXiv:2207.01206, sections 3
and 4.1), over a catalogue generated from a seed. Every function handles one episode:
`vmap` to batch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.envs import base, rendering, split_lists
from ragen_jax.envs import text_search as search
from ragen_jax.envs.webshop import actions, pages
from ragen_jax.envs.webshop import catalogue as catalogue_lib
from ragen_jax.envs.webshop.actions import (
    ACTION_NAMES,
    ACTION_SIZE,
    BUY,
    NEXT,
    OPTION,
    PREVIOUS,
    PRODUCT,
    SEARCH,
    is_offered,
)
from ragen_jax.envs.webshop.catalogue import NO_OPTION, VALUES, Catalogue
from ragen_jax.envs.webshop.pages import PAGES, SHOWN

REWARDS = ("score", "success")


@dataclasses.dataclass(frozen=True)
class WebShop:
    """Settings of one shop."""

    products: int = 1000  # D, products in the shop
    seed: int = 0  # decides the catalogue and the goals
    goal_attributes: int = 2  # attributes that an instruction names
    observation: str = "text"  # "text" or "rich"
    # "score": WebShop's; "success": 1 for the full score only, as in RAGEN.
    reward: str = "score"


@struct.dataclass
class State:
    """One buyer in the shop."""

    goal: jax.Array  # int32[], index in the catalogue's goals
    page: jax.Array  # int32[], pages.SEARCH, ..., pages.BOUGHT
    words: jax.Array  # int32[W], the last query
    number: jax.Array  # int32[], the page of its results, from 0
    total: jax.Array  # int32[], results of the query, at most SHOWN * PAGES
    results: jax.Array  # int32[SHOWN], products on this page of results; NOTHING pads
    # By page of results: score and product of the last result before it.
    mark_score: jax.Array  # int32[PAGES]
    mark_product: jax.Array  # int32[PAGES]
    product: jax.Array  # int32[], the last that was clicked; -1 before that
    chosen: jax.Array  # int32[2], its chosen options, or NO_OPTION
    score: jax.Array  # float32[], of the purchase; 0 before it
    done: jax.Array  # bool[], True once something was bought


def make(settings: WebShop) -> base.Environment:
    """Binds the settings into an environment. ValueError if they cannot be used."""
    check(settings)
    shop = shop_of(settings)
    phrases = pages.Phrases(shop, settings.observation)
    return base.Environment(
        name="webshop",
        action_names=ACTION_NAMES,
        phrases=phrases.texts,
        observation_phrases=pages.OBSERVATION_PHRASES,
        instruction=instruction(),
        reset=functools.partial(reset, shop=shop),
        step=functools.partial(step, shop=shop, settings=settings),
        observe=functools.partial(pages.observe, shop=shop, phrases=phrases),
        example_actions=("search[red cotton shirt]", "click[buy now]"),
        longest_observation=functools.partial(
            pages.longest_observation, phrases=phrases
        ),
        answer_bytes=actions.ANSWER_BYTES,
        most_actions=1,
        read_action=functools.partial(actions.read_action, shop=shop),
        read_action_text=functools.partial(actions.read_action_text, shop=shop),
        action_size=ACTION_SIZE,
        sample_action=functools.partial(actions.sample_action, shop=shop),
        action_text=functools.partial(actions.action_text, shop=shop),
        picture=rendering.text_view(
            phrases.texts, functools.partial(pages.observe, shop=shop, phrases=phrases)
        ),
        solve=functools.partial(actions.solve, shop=shop),
        rule=functools.partial(actions.follow_rule, shop=shop),
    )


def shop_of(settings: WebShop) -> Catalogue:
    """The catalogue of these settings, made once per process."""
    return _catalogue(settings.products, settings.seed, settings.goal_attributes)


_catalogue = functools.cache(catalogue_lib.make_catalogue)


def check(settings: WebShop) -> None:
    """Raises ValueError, in one sentence, for settings that cannot be used."""
    if settings.products not in range(20, search.MAX_DOCUMENTS + 1):
        raise ValueError(
            f"webshop.products = {settings.products} is not possible: choose a whole"
            f" number from 20 to {search.MAX_DOCUMENTS}"
        )
    if settings.seed not in range(2**32):
        raise ValueError(
            f"webshop.seed = {settings.seed} is not possible: choose a whole number"
            " from 0 to 4294967295"
        )
    if settings.goal_attributes not in range(1, catalogue_lib.ATTRIBUTES + 1):
        raise ValueError(
            f"webshop.goal_attributes = {settings.goal_attributes} is not possible:"
            f" choose a whole number from 1 to {catalogue_lib.ATTRIBUTES}"
        )
    for key, possible in (("observation", pages.FORMS), ("reward", REWARDS)):
        value = getattr(settings, key)
        if value not in possible:
            raise ValueError(
                f"webshop.{key} = {value!r} is unknown: choose one of"
                f" {', '.join(possible)}"
            )


def reset(key: jax.Array, split: jax.Array, shop: Catalogue) -> State:
    """A buyer with one of the split's goals, each equally likely."""
    return start(split_lists.draw(key, split, shop.goals.of_split))


def start(goal: jax.Array) -> State:
    """The State at the beginning, for a given goal."""
    zero = jnp.zeros((), jnp.int32)
    return State(
        goal=jnp.asarray(goal, jnp.int32),
        page=zero + pages.SEARCH,
        words=jnp.full((search.QUERY_WORDS,), search.NO_WORD, jnp.int32),
        number=zero,
        total=zero,
        results=jnp.full((SHOWN,), search.NOTHING, jnp.int32),
        mark_score=jnp.full((PAGES,), search.FIRST[0], jnp.int32),
        mark_product=jnp.full((PAGES,), search.FIRST[1], jnp.int32),
        product=zero - 1,
        chosen=jnp.full((2,), NO_OPTION, jnp.int32),
        score=jnp.zeros((), jnp.float32),
        done=jnp.zeros((), bool),
    )


# The page that each kind of action leads to; PREVIOUS may lead to pages.ITEM instead.
_NEXT_PAGE = (pages.RESULTS, pages.SEARCH, pages.RESULTS, pages.RESULTS)
_NEXT_PAGE += (pages.DESCRIPTION, pages.FEATURES, pages.BOUGHT, pages.ITEM, pages.ITEM)


def step(
    key: jax.Array, state: State, action: jax.Array, shop: Catalogue, settings: WebShop
) -> tuple[State, base.Outcome]:
    """Carries out the action if the page offers it; otherwise nothing changes.

    Args:
      key: not used; nothing is random.
      state: one buyer; once `done`, it does not change.
      action: int32[ACTION_SIZE]: the kind; for a product or an option, its place on the
        page; for a search, the ids of its words.
      shop: the catalogue.
      settings: decides the reward.
    """
    del key
    kind, place, words = action[0], jnp.maximum(action[1], 0), action[2:]
    is_possible = is_offered(state, kind, place, shop)
    act = jnp.where(is_possible, kind, base.NO_ACTION)
    is_detail = (state.page == pages.DESCRIPTION) | (state.page == pages.FEATURES)
    after_search = _search(state, act, words, shop)

    picks = act == PRODUCT
    product = jnp.where(
        picks, state.results[jnp.minimum(place, SHOWN - 1)], state.product
    )
    place = jnp.minimum(place, 2 * VALUES - 1)
    options = jnp.asarray(shop.options)[jnp.maximum(product, 0)].reshape(-1)
    is_chosen = (act == OPTION) & (jnp.arange(2) == place // VALUES)
    chosen = jnp.where(is_chosen, options[place], state.chosen)
    chosen = jnp.where(picks, NO_OPTION, chosen)

    buys = act == BUY
    score, is_full = purchase_score(state.goal, product, chosen, shop)
    next_page = jnp.array(_NEXT_PAGE, jnp.int32)
    page = jnp.where((act == PREVIOUS) & is_detail, pages.ITEM, next_page[act])
    page = jnp.where(is_possible, page, state.page)
    success = buys & is_full
    paid = success.astype(jnp.float32) if settings.reward == "success" else score
    outcome = base.Outcome(
        reward=jnp.where(buys, paid, 0.0).astype(jnp.float32),
        success=success,
        done=state.done | buys,
    )
    after = after_search.replace(
        page=page,
        product=product,
        chosen=chosen,
        score=jnp.where(buys, score, state.score),
        done=state.done | buys,
    )
    return after, outcome


def _search(state: State, act: jax.Array, words: jax.Array, shop: Catalogue) -> State:
    """The state with the results of a new search, or with another page of results."""
    searches = act == SEARCH
    turns = (act == NEXT) | ((act == PREVIOUS) & (state.page == pages.RESULTS))
    words = jnp.clip(words, search.NO_WORD, len(shop.index.words) - 1)
    words = jnp.where(searches, words, state.words)
    number = state.number + jnp.where(act == NEXT, 1, -1)
    number = jnp.clip(jnp.where(searches, 0, number), 0, PAGES - 1)
    mark = state.mark_score[number], state.mark_product[number]
    scores = search.scores(shop.index, words)
    results, values = search.top(scores, SHOWN, mark)
    is_following = jnp.arange(PAGES) == number + 1
    total = jnp.minimum((scores > 0).sum(), SHOWN * PAGES).astype(jnp.int32)
    changes = searches | turns

    def new(value, old):
        return jnp.where(changes, value, old).astype(jnp.int32)

    return state.replace(
        words=words,
        number=new(number, state.number),
        total=new(total, state.total),
        results=new(results, state.results),
        mark_score=new(
            jnp.where(is_following, values[-1], state.mark_score), state.mark_score
        ),
        mark_product=new(
            jnp.where(is_following, results[-1], state.mark_product),
            state.mark_product,
        ),
    )


def purchase_score(
    goal: jax.Array, product: jax.Array, chosen: jax.Array, shop: Catalogue
) -> tuple[jax.Array, jax.Array]:
    """WebShop's score of a purchase, float32[], and bool[], whether it is the full 1.

    type * (attributes + options + price) / (asked attributes + asked options + 1):
    Yao et al., equation 1, where attributes, options and price count what fits. The
    factor for the type is that of their appendix A.3, by the share of the nouns in the
    goal's title that the product's title has: 0 for none, 0.1 for less than a tenth,
    else 1 if the share is above a fifth, or the types or their groups (the upper levels
    of WebShop's categories) are the same, and 0.5 otherwise.
    """
    goals, product = shop.goals, jnp.maximum(product, 0)
    best = jnp.asarray(goals.product)[goal]
    goal_attributes = jnp.asarray(goals.attributes)[goal]
    has = jnp.asarray(shop.attributes)[product]
    matched = (
        (goal_attributes[:, None] == has[None]) & (goal_attributes[:, None] >= 0)
    ).sum()
    goal_options = jnp.asarray(goals.options)[goal]
    matched += ((goal_options == chosen) & (goal_options != NO_OPTION)).sum()
    matched += jnp.asarray(shop.price)[product] <= jnp.asarray(goals.highest)[goal]
    most = (goal_attributes >= 0).sum() + (goal_options != NO_OPTION).sum() + 1
    shared, words = catalogue_lib.title_words()
    kind, theirs = jnp.asarray(shop.type)[best], jnp.asarray(shop.type)[product]
    brand = jnp.asarray(shop.brand)
    common = jnp.asarray(shared)[kind, theirs] + (brand[best] == brand[product])
    nouns = jnp.asarray(words)[kind] + 1
    group = jnp.asarray(catalogue_lib.GROUP_OF_TYPE)
    is_near = (kind == theirs) | (group[kind] == group[theirs]) | (5 * common > nouns)
    factor = jnp.where(is_near, 1.0, 0.5)
    factor = jnp.where(10 * common < nouns, 0.1, factor)
    factor = jnp.where(common == 0, 0.0, factor)
    is_full = (factor == 1) & (matched == most)
    return (factor * matched / most).astype(jnp.float32), is_full


def instruction() -> str:
    """The rules for the system prompt."""
    return (
        "You shop for the product that the instruction describes: type, features,"
        " options and price must fit. On the first page write search[words]; on every"
        " other page click one of the texts it offers, as in click[b00001], click[next"
        " >], click[back to search] or click[buy now]. Open a product, choose its"
        " options by clicking them, then buy. The purchase ends the task and is scored"
        " from 0 to 1."
    )
