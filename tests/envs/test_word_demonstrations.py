"""Demonstrations and players of SearchQA and WebShop."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs import base
from ragen_jax.envs.search_qa import demonstrations as reader
from ragen_jax.envs.search_qa import env as search_qa
from ragen_jax.envs.webshop import demonstrations as buyer
from ragen_jax.envs.webshop import env as webshop

SHOP, BOOK = webshop.WebShop(products=50), search_qa.SearchQA(people=60, hops="both")
WORLDS = {
    "webshop": (webshop.make(SHOP), SHOP, buyer, 7),
    "search_qa": (search_qa.make(BOOK), BOOK, reader, 5),
}
EPISODES = 64


def demonstrated(name: str, random_plan: float, thinking: bool = True):
    """The replies' texts, turn by turn, and the success of each episode."""
    env, settings, module, turns = WORLDS[name]
    player = module.Demonstrator(random_plan)
    env = module.with_demonstrations(env, settings, player, thinking=thinking)
    keys = jax.random.split(jax.random.key(0), EPISODES)
    state = jax.vmap(lambda key: env.reset(key, base.TRAIN))(keys)
    write = jax.jit(jax.vmap(env.demonstrate))
    step = jax.jit(jax.vmap(lambda s, a: env.step(jax.random.key(0), s, a)))
    success, texts = np.zeros(EPISODES, bool), []
    for turn in range(turns):
        ids = np.asarray(write(jax.random.split(jax.random.key(turn), EPISODES), state))
        texts.append([base.text_of(env.reply_phrases, row) for row in ids])
        hosts = jax.device_get(state)
        actions = []
        for episode, text in enumerate(texts[-1]):
            one = jax.tree.map(lambda leaf, e=episode: leaf[e], hosts)
            opening = "<think>" if thinking else "<answer>"
            pattern = r"(?:<think>[^<]*</think>)?<answer>([^<]*)</answer>"
            answer = re.fullmatch(pattern, opening + text)[1].strip().lower().encode()
            actions.append(env.read_action_text(answer, one))
            assert one.done or actions[-1][0] != base.NO_ACTION, text
        state, outcome = step(state, jnp.array(actions, jnp.int32))
        success |= np.asarray(outcome.success)
    return texts, success


@pytest.mark.parametrize(
    ("name", "least"),
    [pytest.param("webshop", 0.75, marks=pytest.mark.slow), ("search_qa", 1.0)],
)
def test_careful_demonstrations_are_read_as_actions_that_succeed(name, least):
    _, success = demonstrated(name, 0.0)
    assert success.mean() >= least


@pytest.mark.parametrize("name", list(WORLDS))
def test_heedless_demonstrations_are_valid_and_hardly_ever_succeed(name):
    _, success = demonstrated(name, 1.0)
    assert success.mean() < 0.1


@pytest.mark.parametrize("name", list(WORLDS))
def test_without_thoughts_a_reply_is_the_answer_alone(name):
    texts, _ = demonstrated(name, 0.5, thinking=False)
    assert all("<" not in text.removesuffix("</answer>") for text in texts[0])


def followed(name: str) -> tuple[float, float]:
    """Success and return of the rule-based player on every test level drawn."""
    env, *_, turns = WORLDS[name]

    def one(key):
        def act(carry, _):
            state, earned, solved = carry
            state, outcome = env.step(key, state, env.rule(state))
            return (state, earned + outcome.reward, solved | outcome.success), None

        start = env.reset(key, base.TEST), jnp.float32(0), jnp.zeros((), bool)
        return jax.lax.scan(act, start, length=turns)[0]

    keys = jax.random.split(jax.random.key(1), 200)
    state, earned, solved = jax.jit(jax.vmap(one))(keys)
    assert np.asarray(state.done).all()
    return float(solved.mean()), float(earned.mean())


def test_a_rule_that_chooses_no_options_never_earns_the_full_score_in_the_shop():
    success, earned = followed("webshop")
    # Of type * (2 attributes + 2 options + price) / 5 it can have at most three fifths.
    assert success == 0 and 0.3 < earned < 0.6001


def test_a_rule_that_answers_by_the_first_passage_knows_what_takes_one_search():
    success, earned = followed("search_qa")
    one_hop = np.mean(search_qa.book_of(BOOK).path[:, 1] < 0)
    assert 0.2 * one_hop < success < one_hop + 0.15 and success <= earned
