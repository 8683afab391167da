"""Rewards beside the environment's own: hand-worked numbers and identities."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import updates
from helpers.records import episodes_of

from ragen_jax.errors import SettingsError
from ragen_jax.learning import rewards, shaping
from ragen_jax.learning.batch import OldScores
from ragen_jax.settings import RewardSettings

PLAIN = RewardSettings(
    format_penalty=-0.1,
    length_bonus=0.0,
    length_low=2,
    length_high=4,
    grounding=0.0,
    hook="",
    normalize="none",
    normalize_by="state",
)


def episodes():
    """Two groups of two; the last episode ended after one of its two turns."""
    made = episodes_of(
        [[1.0, 0.0], [0.0, 2.0], [0.5, 0.5], [0.0, 9.0]],
        is_valid=[[True, True], [False, True], [True, True], [True, True]],
        turns=[2, 2, 2, 1],
        group=[0, 0, 1, 1],
    )
    return made.replace(
        thought_tokens=jnp.array([[1, 2], [4, 5], [3, 0], [3, 3]]),
        grounded=jnp.array([[0.5, 0.0], [1.0, 0.25], [0.0, 0.0], [0.5, 1.0]]),
        environment=jnp.array([0, 1, 1, 1]),
    )


def turn_rewards(**changes):
    settings = dataclasses.replace(PLAIN, **changes)
    return np.asarray(shaping.turn_rewards(settings, episodes(), 2))


def test_with_nothing_asked_for_turns_earn_the_environments_reward_and_the_penalty():
    expected = [[1.0, 0.0], [-0.1, 2.0], [0.5, 0.5], [0.0, 0.0]]
    np.testing.assert_allclose(turn_rewards(), expected)
    np.testing.assert_allclose(turn_rewards(), rewards.played_rewards(episodes(), -0.1))


def test_a_thought_within_the_band_earns_the_bonus_and_a_turn_never_played_none():
    gain = turn_rewards(length_bonus=0.3) - turn_rewards()
    np.testing.assert_allclose(gain, [[0, 0.3], [0, 0], [0.3, 0], [0.3, 0]])
    band = shaping.length_band(episodes(), PLAIN.length_low, PLAIN.length_high)
    np.testing.assert_array_equal(band, [[0, 1], [1, 0], [1, 0], [1, 1]])


def test_a_thought_earns_by_the_share_of_places_that_it_names():
    gain = turn_rewards(grounding=2.0) - turn_rewards()
    np.testing.assert_allclose(gain, [[1, 0], [0, 0.5], [0, 0], [1, 0]], atol=1e-7)


def test_where_an_episodes_turns_share_that_reward_more_turns_do_not_earn_more():
    gain = turn_rewards(grounding=2.0, grounding_by="episode") - turn_rewards()
    np.testing.assert_allclose(gain, [[0.5, 0], [0, 0.25], [0, 0], [1, 0]], atol=1e-7)


def test_replies_without_an_answer_earn_nothing_by_their_length_or_what_they_name():
    made = episodes().replace(is_valid=jnp.zeros((4, 2), bool))
    chosen = dataclasses.replace(PLAIN, length_bonus=0.3, grounding=2.0)
    paid, unpaid = (shaping.turn_rewards(s, made, 2) for s in (chosen, PLAIN))
    np.testing.assert_allclose(paid, unpaid)


def test_returns_are_normalized_within_each_group():
    # Returns 1, 1.9 | 1, 0: means 1.45 and 0.5, sample stds 0.9 and 1 over sqrt(2).
    by_mean = turn_rewards(normalize="mean").sum(axis=1)
    np.testing.assert_allclose(by_mean, [-0.45, 0.45, 0.5, -0.5], atol=1e-6)
    by_std = turn_rewards(normalize="mean_std").sum(axis=1)
    root = 0.5**0.5
    np.testing.assert_allclose(by_std, [-root, root, root, -root], rtol=1e-5)


def test_only_the_last_turn_played_takes_what_is_left():
    change = turn_rewards(normalize="mean") - turn_rewards()
    np.testing.assert_allclose(
        change, [[0, -1.45], [0, -1.45], [0, -0.5], [-0.5, 0]], atol=1e-6
    )
    scaled = turn_rewards(normalize="mean_std")
    np.testing.assert_allclose(scaled[1, 0], -0.1 / (0.9 * 0.5**0.5), rtol=1e-5)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_spoils_its_own_episode_alone(wrong):
    settings = dataclasses.replace(PLAIN, normalize="mean_std", normalize_by="batch")
    made = episodes()
    without = jax.tree.map(lambda x: x[:3], made)
    spoiled = made.replace(reward=made.reward.at[3, 0].set(wrong))
    found = shaping.turn_rewards(settings, spoiled, 2)
    np.testing.assert_allclose(
        found[:3], shaping.turn_rewards(settings, without, 2), rtol=1e-6
    )
    assert np.isnan(found[3].sum())


@pytest.mark.parametrize(("by", "sets"), [("batch", [0] * 4), ("environment", None)])
def test_wider_sets_have_mean_zero_and_deviation_one(by, sets):
    made = turn_rewards(normalize="mean_std", normalize_by=by).sum(axis=1)
    sets = np.array(sets or [0, 1, 1, 1])
    many = made[sets == sets[-1]]
    np.testing.assert_allclose(many.mean(), 0, atol=1e-6)
    np.testing.assert_allclose(many.std(ddof=1), 1, rtol=1e-5)
    if by == "environment":  # Alone in its environment: equal to its mean.
        np.testing.assert_allclose(made[0], 0, atol=1e-6)


def test_the_asymmetric_clip_bounds_the_return():
    spread = episodes_of([[float(x)] for x in (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 100)])
    settings = dataclasses.replace(PLAIN, normalize="asym_clip")
    total = np.asarray(shaping.turn_rewards(settings, spread, 1)).sum(axis=1)
    plain = dataclasses.replace(PLAIN, normalize="mean_std")
    free = np.asarray(shaping.turn_rewards(plain, spread, 1)).sum(axis=1)
    assert free.max() > 3 > free.min()
    np.testing.assert_allclose(total, np.clip(free, -1, 3), rtol=1e-5)


@pytest.mark.parametrize(
    "rewards", [[[0.3, 0.4], [0.7, 0.0]], [[1000.1, -1000.0], [0.1, 0.0]]]
)
def test_groups_of_equal_returns_become_zero_and_their_turns_no_larger(rewards):
    """Also where the sums differ by the rounding of their terms, here by 2e-5."""
    settings = dataclasses.replace(PLAIN, normalize="mean_std")
    made = shaping.turn_rewards(settings, episodes_of(rewards), 1)
    expected = [[first, -first] for first, _ in rewards]
    np.testing.assert_allclose(made, expected, rtol=1e-6)


HOOK = """
import jax.numpy as jnp

def turn_rewards(episodes):
    return 0.5 * (episodes.reply_tokens > 3)
"""


def write_hook(folder, text: str) -> str:
    path = folder / "my_rewards.py"
    path.write_text(text)
    return str(path)


def test_a_policy_that_is_the_reference_pays_no_kl_whatever_its_sampler_rounded():
    """As where a sampler of int8 weights is corrected for."""
    chosen = updates.settings(
        estimator="reinforce_pp", loss__kl=0.5, loss__sampler_correction=2.0
    )
    assert chosen.loss.kl_in == "reward"
    rows, played = updates.record()
    own = rows.logprobs
    scores = OldScores(jnp.zeros(own.shape), own, own, sampler_logprobs=own - 0.2)
    earned = shaping.turn_rewards(chosen.reward, played, chosen.rollout.prompts)
    sampled = rows.replace(logprobs=scores.sampler_logprobs)
    paid = shaping.token_rewards(chosen, sampled, earned, scores, jnp.int32(0))
    np.testing.assert_allclose(paid, rewards.at_turn_ends(rows, earned), atol=1e-6)


def test_a_kl_penalty_in_the_reward_has_the_coefficient_of_its_iteration():
    chosen = updates.settings(
        estimator="reinforce_pp", iterations=5, loss__kl=0.5, loss__kl_end=0.1
    )
    assert (chosen.loss.kl_in, chosen.loss.kl_kind) == ("reward", "k1")
    rows, _ = updates.record()
    own, nothing = rows.logprobs, jnp.zeros((16, updates.TURNS))
    scores = OldScores(jnp.zeros(own.shape), own - 2.0, own)
    for iteration, penalty in ((0, 1.0), (3, 0.4), (4, 0.2)):
        paid = shaping.token_rewards(
            chosen, rows, nothing, scores, jnp.int32(iteration)
        )
        expected = np.where(rows.is_reply, -penalty, 0.0)
        np.testing.assert_allclose(paid, expected, rtol=1e-5)
    in_loss = updates.settings(estimator="grpo", loss__kl=0.5, loss__kl_in="loss")
    assert not shaping.token_rewards(in_loss, rows, nothing, scores, jnp.int32(0)).any()


def test_a_hook_of_ones_own_adds_to_the_turns_that_were_played(tmp_path):
    text = HOOK.replace("reply_tokens > 3", "thought_tokens > 2")
    hook = write_hook(tmp_path, text)
    shaping.check_hook(hook, 4, 2)
    gain = turn_rewards(hook=hook) - turn_rewards()
    np.testing.assert_allclose(gain, [[0, 0], [0.5, 0.5], [0.5, 0], [0.5, 0]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rewards = 1", "defines no turn_rewards: add a function"),
        ("def turn_rewards(x):\n  return x.luck", "fails: line 2: AttributeError"),
        (
            "def turn_rewards(x):\n  return x.reward.sum(1)",
            r"gives float32\[4\]: let it give float32\[4, 2\]",
        ),
        ("def turn_rewards(x):\n  return 3", r"gives .*: let it give float32\[4, 2\]"),
        (
            "import jax\n\n\ndef turn_rewards(x):\n"
            "  return jax.random.split(jax.random.key(0), x.reward.shape)",
            r"gives key<fry>\[4, 2\]: let it give float32",
        ),
        (
            "LAST = 0.0\n\n\ndef turn_rewards(x):\n  global LAST\n"
            "  LAST = 0.9 * LAST + 0.1 * x.reward.mean()\n  return x.reward - LAST",
            "depends on earlier calls, through a variable outside it such as a running"
            " mean: compute it from the episodes alone",
        ),
        ("import nothing_at_all", "cannot be imported: line 1: ModuleNotFoundError"),
    ],
)
def test_a_hook_that_cannot_serve_is_refused_in_one_sentence(tmp_path, text, message):
    hook = write_hook(tmp_path, text)
    with pytest.raises(SettingsError, match=message) as caught:
        shaping.check_hook(hook, 4, 2)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"reward.hook = {hook!r}")


def test_a_hook_that_is_not_there_is_refused():
    with pytest.raises(SettingsError, match=r"reward.hook = 'no.py': there is no such"):
        shaping.check_hook("no.py", 4, 2)
