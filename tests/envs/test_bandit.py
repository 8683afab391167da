"""Bandit and BanditRev: what arms pay, what they are called and how that is read."""

import collections
import functools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import ROOT

from ragen_jax import cli
from ragen_jax import settings as settings_lib
from ragen_jax.envs import base
from ragen_jax.envs.bandit import demonstrations
from ragen_jax.envs.bandit import env as bandit
from ragen_jax.envs.bandit.demonstrations import Demonstrator
from ragen_jax.envs.bandit.env import NAMES, PAIRS, Bandit, State
from ragen_jax.errors import UserError
from ragen_jax.text.reference_parser import parse_free_form

LEVELS = 2000  # of each split, for `_levels`
RISKY = {risky for pairs in PAIRS.values() for _, risky in pairs}
read_many = jax.jit(jax.vmap(bandit.read_action))


@functools.cache
def _levels(reverse):
    """Fresh states, leaves [3 * LEVELS, ...], as NumPy."""
    reset = functools.partial(bandit.reset, settings=Bandit(reverse=reverse))
    keys = jax.random.split(jax.random.key(2), 3 * LEVELS)
    splits = jnp.repeat(jnp.arange(3, dtype=jnp.int32), LEVELS)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(reset))(keys, splits))


def _one(states, index):
    return jax.tree.map(lambda leaf: leaf[index], states)


# Names and levels.


def test_there_are_as_many_pairs_as_in_the_paper_and_no_name_comes_twice():
    sizes = {split: len(pairs) for split, pairs in PAIRS.items()}
    assert sizes == {base.TRAIN: 12, base.VALIDATION: 4, base.TEST: 8}
    assert len({name.lower() for name in NAMES}) == len(NAMES) == 48
    for name in NAMES:
        assert re.fullmatch("[A-Z][a-z]{1,13}", name), name


@pytest.mark.parametrize("reverse", [False, True])
def test_every_pair_of_the_split_comes_up_in_both_orders_about_equally_often(reverse):
    levels = _levels(reverse)
    assert not levels.done.any()
    for split, pairs in PAIRS.items():
        arms = levels.arms[split * LEVELS : (split + 1) * LEVELS]
        seen = collections.Counter((NAMES[a], NAMES[b]) for a, b in arms)
        expected = [order for pair in pairs for order in (pair, pair[::-1])]
        assert set(seen) == set(expected)
        mean = LEVELS / len(expected)
        for order in expected:
            assert abs(seen[order] - mean) < 5 * mean**0.5, order


@pytest.mark.parametrize("reverse", [False, True])
def test_the_high_risk_arm_has_the_risky_name_unless_reversed(reverse):
    levels = _levels(reverse)
    for arms, high in zip(levels.arms, levels.high, strict=True):
        assert (NAMES[arms[high]] in RISKY) != reverse
        assert (NAMES[arms[1 - high]] in RISKY) == reverse


# Rules.


@pytest.mark.parametrize("reverse", [False, True])
def test_the_low_risk_arm_always_pays_and_the_high_risk_arm_pays_a_quarter_of_the_time(
    reverse,
):
    levels = _levels(reverse)
    actions = np.random.default_rng(0).integers(0, 2, 3 * LEVELS).astype(np.int32)
    keys = jax.random.split(jax.random.key(3), 3 * LEVELS)
    step = functools.partial(bandit.step, settings=Bandit(reverse=reverse))
    after, outcome = jax.jit(jax.vmap(step))(keys, levels, actions)
    reward, success = np.asarray(outcome.reward), np.asarray(outcome.success)
    np.testing.assert_array_equal(success, actions == levels.high)
    assert np.asarray(outcome.done).all() and np.asarray(after.done).all()
    assert (reward[~success] == np.float32(0.15)).all()
    assert set(reward[success].tolist()) == {0.0, 1.0}
    deviation = (0.25 * 0.75 / success.sum()) ** 0.5
    assert abs(reward[success].mean() - 0.25) < 4 * deviation


def test_what_the_arms_pay_is_what_the_settings_say():
    settings = Bandit(low_reward=0.5, high_probability=1.0)
    state = State(arms=jnp.array([1, 0]), high=jnp.int32(0), done=jnp.zeros((), bool))
    for action, reward in ((0, 1.0), (1, 0.5), (base.NO_ACTION, 0.0)):
        after, outcome = bandit.step(
            jax.random.key(0), state, jnp.int32(action), settings
        )
        assert float(outcome.reward) == reward
        assert bool(outcome.success) == (action == 0)
        assert bool(after.done) == (action != base.NO_ACTION)
        over = after.replace(done=jnp.ones((), bool))
        _, later = bandit.step(jax.random.key(0), over, 0, settings)
        assert float(later.reward) == 0 and bool(later.done) and not later.success


def test_the_solution_is_the_high_risk_arm_until_one_is_pulled():
    for index in range(0, 3 * LEVELS, 500):
        state = _one(_levels(True), index)
        (action,) = bandit.solve(state)
        assert NAMES[state.arms[action]] not in RISKY
        assert bandit.solve(state.replace(done=np.True_)) == ()


# Words.


def test_the_observation_names_the_two_arms_and_nothing_else():
    env = bandit.make(Bandit())
    ids = np.asarray(jax.jit(jax.vmap(env.observe))(_levels(False)))
    for row, (first, second) in zip(ids, _levels(False).arms, strict=True):
        expected = f"Arms: {NAMES[first]}, {NAMES[second]}\n"
        assert base.text_of(env.phrases, row) == expected


def test_the_instruction_does_not_give_away_which_names_are_better():
    plain, reverse = (bandit.make(Bandit(reverse=r)) for r in (False, True))
    assert plain.instruction == reverse.instruction
    assert len(plain.instruction) <= 320
    for word in [*NAMES, "risk", "steady", "safe", "bold", "reverse"]:
        assert word.lower() not in plain.instruction.lower()


def test_names_are_read_without_case_and_only_those_shown():
    state = State(arms=np.array([3, 2]), high=np.int32(0), done=np.False_)
    assert [NAMES[arm] for arm in state.arms] == ["Gambler", "Baker"]
    env = bandit.make(Bandit())
    for text, action in {
        "Gambler": 0,
        "BAKER": 1,
        " baker\n": 1,
        "Librarian": base.NO_ACTION,
        "first arm": base.NO_ACTION,
        "Bake": base.NO_ACTION,
        "the baker": base.NO_ACTION,
    }.items():
        reply = f"hm</think><answer>{text}</answer>".encode()
        read = parse_free_form(
            b"<think>",
            reply,
            lambda segment: env.read_action_text(segment, state),
            env.answer_bytes,
            max_actions=1,
        )
        assert read.actions == ((action,) if action >= 0 else ())


def test_reading_on_device_equals_plain_python_on_any_bytes():
    rng = random.Random(4)
    count, levels = 24_000, _levels(False)
    states = jax.tree.map(lambda leaf: leaf[np.arange(count) % len(leaf)], levels)
    segments = [_segment(rng, _one(states, index)) for index in range(count)]
    texts = np.zeros((count, bandit.ANSWER_BYTES), np.uint8)
    for row, segment in zip(texts, segments, strict=True):
        row[: len(segment)] = np.frombuffer(segment, np.uint8)
    lengths = np.array([len(segment) for segment in segments], np.int32)
    ours = np.asarray(read_many(texts, lengths, states))
    meant = [
        bandit.read_action_text(segment, _one(states, index))
        for index, segment in enumerate(segments)
    ]
    np.testing.assert_array_equal(ours, meant)
    counts = collections.Counter(meant)
    assert min(counts[action] for action in (base.NO_ACTION, 0, 1)) > 2000, counts


def _segment(rng, state):
    """At least one byte: mostly a name, often of the two, often with a small fault."""
    if rng.random() < 0.2:
        return rng.randbytes(rng.randint(1, bandit.ANSWER_BYTES))
    shown = [NAMES[arm] for arm in state.arms]
    name = rng.choice(shown if rng.random() < 0.8 else NAMES)
    text = bytearray(name.lower().encode())
    for _ in range(rng.choice([0, 0, 1, 2])):
        place = rng.randrange(len(text) + 1)
        added = rng.choice([b"", b"\0", b" ", bytes([rng.randrange(256)])])
        text[place : place + rng.randint(0, 1)] = added
    return bytes(text[: bandit.ANSWER_BYTES]) or b"\0"


def test_the_picture_shows_both_arms():
    states = [_one(_levels(False), index) for index in (0, LEVELS, 2 * LEVELS)]
    images = [bandit.picture(state) for state in states]
    assert all(i.shape == (96, 192, 3) and i.dtype == np.uint8 for i in images)
    for image in images:
        inked = (image[30:66] != image[10, 10]).any(axis=2)
        assert inked[:, 4:92].any() and inked[:, 100:188].any()
    assert (images[0] != images[1]).any()


# Settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"high_probability": 1.5}, "bandit.high_probability = 1.5 .* 0 to 1"),
        ({"high_probability": float("nan")}, "bandit.high_probability = nan"),
        (
            {"low_reward": 0.25},
            "bandit.low_reward = 0.25 .*bandit.high_probability = 0.25",
        ),
        ({"low_reward": -0.1}, "bandit.low_reward = -0.1 .* at least 0"),
        ({"low_reward": float("nan")}, "bandit.low_reward = nan"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence_with_the_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        bandit.make(Bandit(**changes))


@pytest.mark.parametrize("variant", ["", "rev", "smoke", "paper"])
def test_the_config_asks_for_one_pull_in_one_turn(variant):
    path = f"{ROOT}/configs/bandit.py:{variant}"
    made = settings_lib.from_dict(cli.load_config(path).to_dict())
    chosen = settings_lib.env_settings(made.env.options, Bandit)
    assert made.env.name == bandit.make(chosen).name
    assert chosen == Bandit(reverse=variant == "rev")
    limits = made.rollout
    assert (limits.turns, limits.actions_per_turn, limits.actions) == (1, 1, 1)
    assert made.iterations == {"smoke": 2, "paper": 200}.get(variant, 60)


def test_an_unknown_variant_of_the_config_is_refused():
    with pytest.raises(UserError, match="'big': choose one of 'rev'"):
        cli.load_config(f"{ROOT}/configs/bandit.py:big")


# Demonstrations.


def _replies(player, *, reverse=False, thinking=True):
    settings = Bandit(reverse=reverse)
    env = demonstrations.with_demonstrations(
        bandit.make(settings), settings, player, thinking=thinking
    )
    states = _levels(reverse)
    keys = jax.random.split(jax.random.key(5), 3 * LEVELS)
    ids = np.asarray(jax.jit(jax.vmap(env.demonstrate))(keys, states))
    return [base.text_of(env.reply_phrases, row) for row in ids]


@pytest.mark.parametrize("thinking", [False, True])
def test_every_reply_is_valid_and_names_the_high_risk_arm_half_of_the_time(thinking):
    states, prefix = _levels(False), b"<think>" if thinking else b"<answer>"
    picked = []
    for index, reply in enumerate(_replies(Demonstrator(), thinking=thinking)):
        state = _one(states, index)
        read = parse_free_form(
            prefix,
            reply.encode(),
            functools.partial(bandit.read_action_text, state=state),
            bandit.ANSWER_BYTES,
            max_actions=1,
            thinking=thinking,
        )
        assert read.is_valid, reply
        picked.append(read.actions[0] == state.high)
    # Binomial(6000, 1/2): standard deviation 38.7.
    assert abs(sum(picked) - 3 * LEVELS / 2) < 4 * 38.7


@pytest.mark.parametrize("reverse", [False, True])
def test_the_thought_weighs_both_names_by_their_sound_whatever_they_pay(reverse):
    form = re.compile(
        r" (\w+): (\w+), (\w+): (\w+)\. (Steady pays for sure|Bold may pay much)\."
        r"</think><answer>(\w+)</answer>"
    )
    sounds = {False: ("steady", "safe", "careful"), True: ("bold", "risky", "daring")}
    words = collections.Counter()
    replies = _replies(Demonstrator(risky=1.0), reverse=reverse)
    for reply, arms in zip(replies, _levels(reverse).arms, strict=True):
        one, sound, other, other_sound, reason, chosen = form.fullmatch(reply).groups()
        assert [one, other] == [NAMES[arm] for arm in arms]
        assert sound in sounds[one in RISKY] and other_sound in sounds[other in RISKY]
        # The high-risk arm, which reversed is the one that sounds steady.
        assert (chosen in RISKY) != reverse and chosen in (one, other)
        assert reason.startswith("Bold" if chosen in RISKY else "Steady")
        words.update([sound, other_sound])
    # Binomial(6000, 1/3): standard deviation 36.5.
    assert all(abs(words[w] - LEVELS) < 4 * 36.5 for w in sum(sounds.values(), ()))


def test_demonstrations_pair_any_names_in_either_order():
    env = demonstrations.with_demonstrations(
        bandit.make(Bandit()), Bandit(), Demonstrator(), thinking=True
    )
    keys = jax.random.split(jax.random.key(6), 3 * LEVELS)
    states = jax.jit(jax.vmap(lambda key: env.reset(key, base.TRAIN)))(keys)
    arms, high = np.asarray(states.arms), np.asarray(states.high)
    assert (arms % 2 == np.stack([1 - high, high], axis=1)).all()
    # Binomial(6000, 1/2): standard deviation 38.7.
    assert abs(high.sum() - 3 * LEVELS / 2) < 4 * 38.7
    pairs = {frozenset(pair) for pair in arms.tolist()}
    assert len(pairs) > 0.99 * (len(NAMES) // 2) ** 2


def test_an_actions_text_is_what_a_reply_has_to_say_for_it():
    env, levels = bandit.make(Bandit()), _levels(False)
    for index in range(20):
        state = _one(levels, index)
        for place in (0, 1):
            text = base.text_of_action(place, env, state)
            assert env.read_action_text(text.lower().encode(), state) == place
