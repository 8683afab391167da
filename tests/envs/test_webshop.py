"""The shop: against a plain-Python shop of the same rules, its score, its players."""

import dataclasses
import functools
import math
import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax import envs
from ragen_jax.envs import base
from ragen_jax.envs import text_search as search
from ragen_jax.envs.webshop import actions, catalogue, env, pages
from ragen_jax.envs.webshop.catalogue import (
    ATTRIBUTE_NAMES,
    BRANDS,
    GROUP_OF_TYPE,
    OPTION_NAMES,
    TYPES,
)
from ragen_jax.envs.webshop.env import WebShop

SETTINGS = WebShop(products=120, seed=3)


@pytest.fixture(scope="module")
def shop():
    return env._catalogue(SETTINGS.products, SETTINGS.seed, SETTINGS.goal_attributes)


@pytest.fixture(scope="module")
def environment():
    return env.make(SETTINGS)


@functools.cache
def _compiled(observe):
    return jax.jit(observe)


def _observe(environment, state):
    return _compiled(environment.observe)(state)


@pytest.fixture(scope="module")
def step(environment):
    return jax.jit(environment.step)


class PlainShop:
    """WebShop's rules over lists of texts, without any array."""

    def __init__(self, shop):
        self.products = [
            dict(
                code=shop.codes[p],
                type=TYPES[shop.type[p]],
                group=int(GROUP_OF_TYPE[shop.type[p]]),
                brand=BRANDS[shop.brand[p]],
                attributes=[ATTRIBUTE_NAMES[a] for a in shop.attributes[p]],
                options=[
                    [OPTION_NAMES[v] for v in o if v >= 0] for o in shop.options[p]
                ],
                price=int(shop.price[p]),
            )
            for p in range(shop.products)
        ]
        self.documents = [
            Counter(
                search.words_of(
                    " ".join(
                        [
                            p["brand"],
                            p["type"],
                            *p["attributes"],
                            *sum(p["options"], []),
                        ]
                    )
                )
            )
            for p in self.products
        ]
        self.mean = sum(map(Counter.total, self.documents)) / len(self.documents)
        # Weights are rounded to 32,767ths of the largest.
        words = set().union(*self.documents)
        self.step = max(self.bm25(w, d) for w in words for d in self.documents) / 32767

    def bm25(self, word, document):
        held_by = sum(word in d for d in self.documents)
        rarity = math.log(1 + (len(self.documents) - held_by + 0.5) / (held_by + 0.5))
        norm = search.K1 * (1 - search.B + search.B * document.total() / self.mean)
        return rarity * document[word] / (document[word] + norm)

    def begin(self, goal):
        self.goal, self.page, self.found, self.number = goal, "search", [], 0
        self.item, self.chosen, self.score = None, [None, None], None

    def rank(self, query):
        known = set().union(*self.documents)
        words = [w for w in search.words_of(query) if w in known][: search.QUERY_WORDS]
        score = [
            sum(round(self.bm25(w, d) / self.step) for w in words)
            for d in self.documents
        ]
        order = sorted(range(len(score)), key=lambda p: (-score[p], p))
        return [p for p in order if score[p] > 0][:50]

    def shown(self):
        return self.found[10 * self.number : 10 * self.number + 10]

    def offers(self):
        """The texts that can be clicked."""
        if self.page in ("search", "bought"):
            return []
        texts = ["back to search"]
        if self.page == "results":
            texts += ["< prev"] * (self.number > 0)
            texts += ["next >"] * (10 * self.number + 10 < len(self.found))
            return texts + [self.products[p]["code"] for p in self.shown()]
        texts.append("< prev")
        if self.page == "item":
            texts += ["description", "features", "buy now"]
            texts += sum(self.item["options"], [])
        return texts

    def act(self, text):
        """Returns the reward, or None for an action that the page does not have."""
        kind, _, rest = text.partition("[")
        name = rest[:-1]
        if kind == "search":
            if self.page != "search":
                return None
            self.found, self.number, self.page = self.rank(name.encode()), 0, "results"
        elif name not in self.offers():
            return None
        elif name == "back to search":
            self.page = "search"
        elif name == "< prev":
            if self.page == "results":
                self.number -= 1
            self.page = "results" if self.page in ("item", "results") else "item"
        elif name == "next >":
            self.number += 1
        elif name in ("description", "features"):
            self.page = name
        elif name == "buy now":
            self.page = "bought"
            self.score = self.value()
            return self.score
        elif self.page == "results":
            self.item = next(p for p in self.products if p["code"] == name)
            self.page, self.chosen = "item", [None, None]
        else:
            which = 0 if name in self.item["options"][0] else 1
            self.chosen[which] = name
        return 0.0

    def value(self):
        goal, item = self.goal, self.item
        nouns = {goal["brand"], *goal["type"].split()}
        score = len(nouns & {item["brand"], *item["type"].split()}) / len(nouns)
        same = goal["type"] == item["type"] or goal["group"] == item["group"]
        factor = 1.0 if same or score > 0.2 else 0.5
        if score < 0.1:
            factor = 0.1
        if score == 0:
            factor = 0.0
        matched = sum(a in item["attributes"] for a in goal["asked"])
        matched += sum(
            a == b for a, b in zip(goal["options"], self.chosen, strict=True)
        )
        matched += item["price"] <= goal["highest"]
        return factor * matched / (len(goal["asked"]) + 2 + 1)


def _plain_goal(shop, plain, goal):
    goals = shop.goals
    best = plain.products[goals.product[goal]]
    return dict(
        type=best["type"],
        group=best["group"],
        brand=best["brand"],
        asked=[ATTRIBUTE_NAMES[a] for a in goals.attributes[goal] if a >= 0],
        options=[OPTION_NAMES[v] for v in goals.options[goal]],
        highest=int(goals.highest[goal]),
    )


@pytest.mark.slow
def test_random_shopping_goes_as_in_a_plain_python_shop(shop, environment, step):
    chance, plain = random.Random(5), PlainShop(shop)
    names = ["search", "results", "item", "description", "features", "bought"]
    seen, scores = Counter(), []
    for _ in range(60):
        goal = chance.randrange(len(shop.goals.product))
        state = jax.device_get(env.start(jnp.int32(goal)))
        plain.begin(_plain_goal(shop, plain, goal))
        for _ in range(14):
            text = "search[" + " ".join(chance.choices(shop.index.words, k=2)) + "]"
            if plain.page != "search" and chance.random() < 0.95:
                best = plain.products[shop.goals.product[goal]]["code"]
                wanted = {*plain.goal["options"], best, "buy now"}
                wanted = [t for t in plain.offers() if t in wanted]
                name = chance.choice(plain.offers())
                name = (
                    chance.choice(wanted) if wanted and chance.random() < 0.5 else name
                )
                text = f"click[{name}]"
            elif chance.random() < 0.5:
                kind = shop.type[shop.goals.product[goal]]
                text = f"search[{catalogue.goal_text(shop.goals, goal, kind)}]"
            action = environment.read_action_text(text.encode().lower(), state)
            reward = plain.act(text)
            assert (action[0] == base.NO_ACTION) == (reward is None), text
            state, outcome = jax.device_get(
                step(jax.random.key(0), state, jnp.array(action, jnp.int32))
            )
            assert names[int(state.page)] == plain.page
            seen[plain.page] += 1
            assert sorted(actions.clickable(state, shop).values()) == sorted(
                plain.offers()
            )
            if plain.page == "results":
                shown = [p for p in state.results.tolist() if p >= 0]
                assert shown == plain.shown() and state.total == len(plain.found)
            if plain.page == "bought":
                np.testing.assert_allclose(outcome.reward, reward, rtol=1e-6)
                assert outcome.success == (reward == 1) and outcome.done
                scores.append(reward)
                break
            assert outcome.reward == 0 and not outcome.done
    assert min(seen[name] for name in names) >= 5 and len(set(scores)) > 4


def test_the_score_of_a_purchase_by_hand(shop):
    """One of two attributes, one of two options, the price: (1 + 1 + 1) / 5."""
    goals = shop.goals
    for goal in range(len(goals.product)):
        product = int(goals.product[goal])
        chosen = goals.options[goal].copy()
        full, is_full = env.purchase_score(goal, product, jnp.array(chosen), shop)
        assert full == 1 and is_full
        chosen[1] = catalogue.NO_OPTION
        less, is_full = env.purchase_score(goal, product, jnp.array(chosen), shop)
        np.testing.assert_allclose(less, 4 / 5, rtol=1e-6)
        assert not is_full
        if goal > 3:
            break
    # A product of another group, of another brand, without a common noun: nothing.
    other = [
        p
        for p in range(shop.products)
        if shop.brand[p] != shop.brand[product]
        and not set(TYPES[shop.type[p]].split())
        & set(TYPES[shop.type[product]].split())
    ]
    score, _ = env.purchase_score(goal, other[0], jnp.array(chosen), shop)
    assert score == 0


def test_the_solver_earns_the_full_score_on_every_kind_of_goal(shop, environment, step):
    for goal in range(0, len(shop.goals.product), 29):
        state = jax.device_get(env.start(jnp.int32(goal)))
        plan = environment.solve(state)
        assert 5 <= len(plan) <= 9
        for action in plan:
            text = environment.action_text(action, state)
            assert environment.read_action_text(text.encode(), state) == tuple(action)
            state, outcome = jax.device_get(
                step(jax.random.key(0), state, jnp.array(action, jnp.int32))
            )
        assert outcome.success and outcome.reward == 1
        assert "Your score: 1.00" in base.text_of(
            environment.phrases, _observe(environment, state)
        )


def test_the_solver_searches_for_no_more_than_a_reply_can_say(shop, monkeypatch):
    monkeypatch.setattr(actions, "ANSWER_BYTES", 60)
    queries = 0
    for goal in range(0, len(shop.goals.product), 29):
        state = jax.device_get(env.start(jnp.int32(goal)))
        for action in actions.solve(state, shop)[:1]:
            text = actions.action_text(action, state, shop)
            assert text.startswith("search[") and len(text) <= 60
            queries += 1
    assert queries


def test_where_success_alone_is_paid_a_purchase_that_nearly_fits_earns_nothing(shop):
    goals, paid = shop.goals, dataclasses.replace(SETTINGS, reward="success")
    buy = jnp.array([actions.BUY] + [0] * (actions.ACTION_SIZE - 1))

    @jax.jit
    def rewards(chosen):
        state = env.start(jnp.int32(0)).replace(
            page=jnp.int32(pages.ITEM),
            product=jnp.int32(goals.product[0]),
            chosen=chosen,
        )
        return [
            env.step(jax.random.key(0), state, buy, shop, settings)[1].reward
            for settings in (paid, SETTINGS)
        ]

    np.testing.assert_allclose(rewards(goals.options[0]), [1, 1])
    chosen = goals.options[0].copy()
    chosen[1] = catalogue.NO_OPTION
    np.testing.assert_allclose(rewards(chosen), [0, 4 / 5], rtol=1e-6)


SHOPS = [(120, 3, 1), (120, 3, 4), (50, 0, 2)]


@pytest.mark.parametrize("made", SHOPS)
def test_every_goal_of_every_split_has_a_product_that_can_be_bought(made):
    """No price, option or attribute makes a goal impossible: all score 1."""
    shop = catalogue.make_catalogue(*made)
    goals = shop.goals
    every = np.concatenate(goals.of_split)
    assert sorted(every.tolist()) == list(range(len(goals.product)))
    score = jax.jit(jax.vmap(functools.partial(env.purchase_score, shop=shop)))
    scores, is_full = score(every, goals.product[every], goals.options[every])
    assert np.asarray(is_full).all() and (np.asarray(scores) == 1).all()
    assert all(catalogue.matches(shop, g, goals.product[g]) for g in every)


@pytest.mark.slow
@pytest.mark.parametrize("made", [*SHOPS, (20, 0, 3), (1000, 1, 2)])
def test_the_solver_buys_for_every_goal_within_an_episode(made):
    products, seed, asked = made
    settings = WebShop(products=products, seed=seed, goal_attributes=asked)
    shop, environment = env.shop_of(settings), env.make(settings)
    every = np.concatenate(shop.goals.of_split)
    every = every[:: 1 + len(every) // 1500]
    turns, plans = 9, []
    for goal in every:
        plan = environment.solve(jax.device_get(env.start(jnp.int32(goal))))
        # Of 50 products none stands on a later page than the second.
        assert 5 <= len(plan) <= (6 if products <= 50 else turns)
        idle = [(base.NO_ACTION,) * actions.ACTION_SIZE] * (turns - len(plan))
        plans.append([*plan, *idle])

    def play(goal, plan):
        def one(state, action):
            state, outcome = environment.step(jax.random.key(0), state, action)
            return state, (outcome.reward, outcome.success)

        state, (rewards, successes) = jax.lax.scan(one, env.start(goal), plan)
        return rewards.sum(), successes.any(), state.done

    paid, solved, done = jax.jit(jax.vmap(play))(every, np.array(plans, np.int32))
    assert np.asarray(solved).all() and np.asarray(done).all()
    assert (np.asarray(paid) == 1).all()


def test_shops_of_the_least_size_are_made_or_refused_in_one_sentence():
    """Whichever the seed: small shops may leave a split without enough goals."""
    made = []
    for seed in range(5, 11):
        try:
            shop = catalogue.make_catalogue(20, seed, 2)
        except ValueError as error:
            assert "choose more products" in str(error) and "\n" not in str(error)
            made.append(False)
        else:
            sizes = [len(own) for own in shop.goals.of_split]
            made.append(min(sizes) >= catalogue.LEAST_GOALS)
            assert made[-1]
    assert True in made and False in made


@pytest.mark.parametrize("query", [b"zzz", b"\xff\x00\xfe", b"", b"the of", b"]["])
def test_a_search_for_nothing_gives_a_page_without_results(environment, step, query):
    state = jax.device_get(env.start(jnp.int32(0)))
    action = environment.read_action_text(b"search[" + query + b"]", state)
    assert action[0] == actions.SEARCH
    state, outcome = jax.device_get(
        step(jax.random.key(0), state, jnp.array(action, jnp.int32))
    )
    assert "No results." in base.text_of(
        environment.phrases, _observe(environment, state)
    )
    assert outcome.reward == 0 and not outcome.done


@pytest.mark.parametrize(
    ("name", "is_button"), [(b"buy now", True), (b"buy now\0", False), (b"\0", False)]
)
def test_a_name_that_a_byte_0_follows_cannot_be_clicked(environment, name, is_button):
    state = jax.device_get(env.start(jnp.int32(0)))
    state = state.replace(page=np.int32(pages.ITEM), product=np.int32(0))
    text = b"click[" + name + b"]"
    padded = np.zeros(environment.answer_bytes, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    read = jax.jit(environment.read_action)(padded, jnp.int32(len(text)), state)
    assert tuple(read.tolist()) == environment.read_action_text(text, state)
    assert (read[0] == actions.BUY) == is_button


def test_both_forms_show_the_same_page():
    for form, button in (
        ("text", "Back to Search [SEP]"),
        ("rich", "[button] Back to Search [button_]"),
    ):
        environment = envs.make("webshop", dict(products=120, observation=form).items())
        state = jax.device_get(env.start(jnp.int32(0))).replace(
            page=np.int32(pages.ITEM), product=np.int32(0)
        )
        text = base.text_of(environment.phrases, _observe(environment, state))
        assert button in text and "Price: $" in text and "Buy Now" in text


def test_description_and_features_read_as_the_product_says(shop, environment):
    names = [ATTRIBUTE_NAMES[a] for a in shop.attributes[5]]
    brand, kind = catalogue.BRANDS[shop.brand[5]], catalogue.TYPES[shop.type[5]]
    for page, text in (
        (pages.DESCRIPTION, f"A {names[0]} {kind} by {brand}.\n"),
        (pages.FEATURES, f"Features: {' '.join(names)}\n"),
    ):
        state = jax.device_get(env.start(jnp.int32(0))).replace(
            page=np.int32(page), product=np.int32(5)
        )
        shown = base.text_of(environment.phrases, _observe(environment, state))
        _, _, rest = shown.partition("dollars.\n")
        assert rest == f"Back to Search [SEP]\n< Prev [SEP]\n{text}"


def test_goals_of_the_splits_differ_and_the_seed_decides_all(shop):
    goals = shop.goals
    contents = np.column_stack(
        [shop.type[goals.product], goals.attributes, goals.options, goals.highest]
    ).astype(np.int32)
    train, validation, test = (set(map(tuple, contents[own])) for own in goals.of_split)
    assert (
        sum(map(len, goals.of_split)) == len(contents) == len(train | validation | test)
    )
    assert len(train) > 4 * len(test)
    # By content alone: a goal is in the same split of every shop that has it.
    for own, split in zip(goals.of_split, range(3), strict=True):
        hashes = jax.vmap(base.content_hash)(jnp.asarray(contents[own]))
        assert (jax.vmap(base.split_of)(hashes) == split).all()
    again = catalogue.make_catalogue(120, 3, 2)
    other = catalogue.make_catalogue(120, 4, 2)
    assert (again.price == shop.price).all() and (other.price != shop.price).any()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(products=19), "products = 19 is not possible"),
        (dict(products=20_001), "from 20 to 20000"),
        (dict(goal_attributes=5), "goal_attributes = 5"),
        (dict(observation="html"), "choose one of text, rich"),
        (dict(reward="sparse"), "choose one of score, success"),
        (dict(products=20, seed=7), "choose more products"),
    ],
)
def test_shops_that_cannot_be_are_refused_in_one_sentence(options, sentence):
    with pytest.raises(envs.registry.SettingsError, match=sentence):
        envs.make("webshop", options.items())
