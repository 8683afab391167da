"""Weights and scales of advantages, coefficients that move, and a filter's scores."""

import dataclasses
import functools
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import updates
from helpers.records import episodes_of, rows_of

from ragen_jax.learning import batch as batches
from ragen_jax.learning import filters, rescale, rewards, schedules, strategies
from ragen_jax.learning.advantages import Estimate
from ragen_jax.learning.batch import KeptRows
from ragen_jax.learning.filters import Selection
from ragen_jax.learning.groups import Grouping, group_statistics
from ragen_jax.settings import update_counts
from ragen_jax.trajectory import ANSWER_CLOSED, END_OF_TURN, REPLY_BUDGET

# Rows of episodes 0 and 1 of two groups: 3 reply tokens and 1, and a row of padding.
ROWS = rows_of("orrR", "oR..", "....", episode=[0, 1, 0])
EPISODES = episodes_of(reward=[[1.0], [0.0]], group=[0, 1])
KEPT = KeptRows(rows=ROWS, weight=jnp.array([1.0, 1.0, 0.0]))
CHOSEN = Selection(
    keep=jnp.array([True, True]),
    kept_fraction=jnp.float32(0.25),
    std=jnp.array([1.0, 4.0]),
    kept_groups=jnp.array([True, True]),
)
GAINS = jnp.where(ROWS.is_reply, jnp.array([[2.0], [-1.0], [5.0]]), 0.0)


def rescaled(**changes):
    changes |= dict(rollout__prompts=2, advantage__whiten=False)
    chosen = updates.settings(estimator="grpo", **changes)
    estimate = Estimate(advantages=GAINS, returns=jnp.zeros_like(GAINS))
    found = rescale.rescale(chosen, estimate, KEPT, EPISODES, CHOSEN)
    return [float(found[0, 1]), float(found[1, 1])]


def test_with_nothing_asked_for_advantages_stay():
    assert rescaled() == [2.0, -1.0]


@pytest.mark.parametrize(("kind", "factor"), [("linear", 0.25), ("sqrt", 0.5)])
def test_advantages_are_scaled_by_the_kept_share(kind, factor):
    assert rescaled(filter__loss_scale=kind) == [2.0 * factor, -factor]


def test_a_turn_whose_tokens_share_an_advantage_counts_once_in_the_whitening():
    changes = dict(rollout__prompts=2, advantage__whiten=True)
    chosen = updates.settings(estimator="grpo", **changes)
    target = jnp.zeros(ROWS.is_reply.shape, bool).at[jnp.arange(2), 1].set(True)
    estimate = Estimate(GAINS, jnp.zeros_like(GAINS), is_target=target)
    found = rescale.rescale(chosen, estimate, KEPT, EPISODES, CHOSEN)
    expected = np.where(ROWS.is_reply, [[1.0], [-1.0], [0.0]], 0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_groups_are_weighted_by_their_spread_over_the_largest():
    np.testing.assert_allclose(rescaled(filter__reweight=True), [0.5, -1.0], rtol=1e-6)


def test_a_group_that_is_dropped_does_not_set_the_largest_spread():
    kept, sets = jnp.array([True, False]), jnp.zeros(2, jnp.int32)
    weight = rescale.spread_weight(CHOSEN.std, kept, sets)
    np.testing.assert_allclose(weight, [1.0, 0.0], rtol=1e-5)


@pytest.mark.parametrize(
    ("scope", "expected"),
    [("environment", [1.0, 0.5, 1.0, 0.75]), ("batch", [1.0, 0.5, 0.1, 0.075])],
)
def test_the_largest_spread_is_that_of_the_groups_that_are_ranked_together(
    scope, expected
):
    chosen = two_environments(updates.settings(filter__scope=scope))
    episodes = episodes_of([[0.0]] * 4, group=[0, 1, 2, 3])
    sets = filters.sets_of_groups(
        chosen, episodes.replace(environment=jnp.array([0, 0, 1, 1]))
    )
    spread, kept = jnp.array([4.0, 2.0, 0.4, 0.3]), jnp.ones(4, bool)
    weight = rescale.spread_weight(spread, kept, sets)
    np.testing.assert_allclose(weight, expected, rtol=1e-5)


def test_long_rows_count_for_less_by_their_length_over_the_mean():
    # 3 and 1 tokens, 2 in the mean: 2 / 1.5 and -1 / 0.5.
    np.testing.assert_allclose(
        rescaled(advantage__length_weight=True), [4 / 3, -2.0], rtol=1e-6
    )


def test_a_control_run_has_no_advantage_at_all():
    assert rescaled(advantage__zero_task=True) == [0.0, 0.0]


# Coefficients that move ---------------------------------------------------------------


def test_a_coefficient_moves_linearly_from_the_first_iteration_to_the_last():
    chosen = updates.settings(iterations=5)
    found = [
        float(schedules.over_the_run(chosen, 0.2, 0.6, jnp.int32(i))) for i in range(7)
    ]
    np.testing.assert_allclose(found, [0.2, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6], rtol=1e-6)
    assert schedules.over_the_run(chosen, 0.2, -1.0, jnp.int32(3)) == 0.2


def test_a_coefficient_ends_at_the_very_value_that_was_asked_for():
    chosen = updates.settings(iterations=60)
    for first, end in itertools.product(np.arange(0.05, 1.01, 0.05), (0.25, 0.5, 0.7)):
        found = schedules.over_the_run(chosen, float(first), end, jnp.int32(59))
        assert found == np.float32(end), (first, end)


@pytest.mark.parametrize(("first", "end"), [(0.9, 0.5), (0.1, 0.7)])
def test_a_fraction_that_moves_means_as_many_groups_as_its_exact_value(first, end):
    chosen = updates.settings(
        iterations=41,
        filter__fraction=first,
        filter__fraction_end=end,
        filter__rounding="down",
    )
    exact = [Fraction(str(first)), Fraction(str(end))]
    for iteration in range(41):
        wanted = (exact[0] + (exact[1] - exact[0]) * Fraction(iteration, 40)) * 10
        now = schedules.over_the_run(chosen, first, end, jnp.int32(iteration))
        kept = strategies.keep_groups(jnp.arange(1.0, 11.0), chosen.filter, now)
        assert kept.sum() == math.floor(wanted), iteration


def test_the_critic_can_have_a_schedule_of_its_own():
    chosen = updates.settings(
        optimizer__schedule="constant", optimizer__critic_schedule="linear"
    )
    same = updates.settings(optimizer__schedule="constant")
    last = update_counts.updates_expected(chosen)
    assert schedules.learning_rate(chosen, 1.0)(last) == 1.0
    assert schedules.learning_rate(chosen, 1.0, of_critic=True)(last) == 0.0
    assert schedules.learning_rate(same, 1.0, of_critic=True)(last) == 1.0


def test_a_rate_rises_while_it_warms_up_and_then_falls_for_as_long_as_was_asked_for():
    warmed = dict(optimizer__warmup=4, optimizer__schedule_updates=12)
    rises, falls = [0.25, 0.5, 0.75, 1.0], np.arange(9) / 8
    for kind, fallen in (
        ("linear", 1 - falls),
        ("cosine", 0.5 + 0.5 * np.cos(np.pi * falls)),
    ):
        chosen = updates.settings(**warmed, optimizer__schedule=kind)
        rate = schedules.learning_rate(chosen, 1.0)
        found = [float(rate(update)) for update in range(13)]
        np.testing.assert_allclose(found, [*rises, *fallen], atol=1e-6)


def test_the_actors_schedule_ends_with_the_run_though_the_critic_warms_up_first():
    chosen = updates.settings(
        iterations=20, optimizer__critic_warmup=10, optimizer__schedule="linear"
    )
    last = update_counts.updates_expected(chosen)
    assert schedules.learning_rate(chosen, 1.0)(last // 4) == 0.5
    assert schedules.learning_rate(chosen, 1.0)(last // 2) == 0.0
    assert schedules.learning_rate(chosen, 1.0, of_critic=True)(last // 2) == 0.5


def test_the_actor_has_the_share_of_a_schedule_that_its_iterations_have():
    chosen = updates.settings(
        iterations=100,
        optimizer__critic_warmup=60,
        optimizer__schedule_updates=50,
        optimizer__schedule="linear",
    )
    assert update_counts.actor_share(chosen, 50) == 20
    rate = schedules.learning_rate(chosen, 1.0)
    of_critic = schedules.learning_rate(chosen, 1.0, of_critic=True)
    found = [rate(10), rate(19), rate(20)]
    np.testing.assert_allclose(found, [0.5, 0.05, 0.0], rtol=1e-5)
    np.testing.assert_allclose([of_critic(25), of_critic(50)], [0.5, 0.0])


def test_updates_are_counted_for_each_use_of_the_episodes():
    once = update_counts.updates_expected(updates.settings())
    assert (
        update_counts.updates_expected(updates.settings(optimizer__reuse=3)) == 3 * once
    )


@pytest.mark.parametrize(
    ("prompts", "changes", "episodes"),
    [
        # A half is rounded up: 3 of 10 groups, of 2 episodes each.
        (10, dict(filter__fraction=0.25), 6),
        (7, dict(filter__fraction=0.25, filter__rounding="down"), 2),
        (4, dict(filter__strategy="top_count", filter__count=3), 6),
        (10, dict(filter__strategy="percentile_range", filter__high=0.25), 4),
        (
            10,
            dict(
                filter__strategy="percentile_range", filter__low=0.25, filter__high=0.5
            ),
            6,
        ),
        # At least 2 members of each group.
        (5, dict(filter__strategy="within_group", filter__fraction=0.75), 10),
        (10, dict(filter__strategy="none"), 20),
    ],
)
def test_a_schedule_ends_with_the_run_whatever_the_filter_rounds(
    prompts, changes, episodes
):
    chosen = updates.settings(
        rollout__prompts=prompts,
        rollout__group_size=2,
        optimizer__minibatch=2,
        optimizer__microbatch=2,
        iterations=3,
        **dict(filter__strategy="top_fraction", filter__low=0.0) | changes,
    )
    assert update_counts.updates_expected(chosen) == 3 * episodes // 2


@pytest.mark.parametrize(
    ("fractions", "warmup", "rounding"),
    [
        ((0.25, 0.75), 0, "nearest"),
        ((0.25, 1.0), 20, "nearest"),
        ((0.9, 0.5), 0, "down"),
        ((1.0, 0.25), 7, "nearest"),
    ],
)
def test_a_schedule_ends_with_the_run_whose_fraction_of_kept_groups_moves(
    fractions, warmup, rounding
):
    first, end = fractions
    chosen = updates.settings(
        rollout__prompts=8,
        optimizer__minibatch=16,  # four groups
        optimizer__schedule="linear",
        optimizer__critic_warmup=warmup,
        iterations=60,
        filter__strategy="top_fraction",
        filter__fraction=first,
        filter__fraction_end=end,
        filter__rounding=rounding,
    )
    made, score = [], jnp.arange(1.0, 9.0)
    for iteration in range(60):
        fraction = schedules.over_the_run(chosen, first, end, jnp.int32(iteration))
        kept = int(strategies.keep_groups(score, chosen.filter, fraction).sum())
        made.append(-(-kept * updates.GROUP_SIZE // 16))
    assert update_counts.updates_expected(chosen) == sum(made)
    rate, learned = schedules.learning_rate(chosen, 1.0), sum(made[warmup:])
    assert rate(learned - 1) > 0.0
    assert rate(learned) == 0.0


def test_a_schedule_ends_with_the_run_where_each_environment_keeps_groups_of_its_own():
    member = dict(name="frozen_lake", prompts=2)
    chosen = updates.settings(
        env=dict(name="mix", thinking=True, mix=dict(one=member, other=member)),
        filter__strategy="top_fraction",
        filter__fraction=0.25,
        optimizer__minibatch=4,
        optimizer__microbatch=4,
        iterations=3,
    )
    assert update_counts.room_for_episodes(chosen) == 8
    assert update_counts.updates_expected(chosen) == 3 * 2
    whole = dataclasses.replace(
        chosen, filter=dataclasses.replace(chosen.filter, scope="batch")
    )
    assert update_counts.updates_expected(whole) == 3


LAKES = dict.fromkeys("abcd", dict(name="frozen_lake", prompts=2))
MIX = dict(env=dict(name="mix", thinking=True, mix=LAKES))


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        (dict(filter__strategy="top_p", filter__fraction=0.3), 3),
        (dict(filter__strategy="top_p", filter__fraction=0.7, rollout__prompts=10), 7),
        (dict(filter__strategy="top_p", filter__fraction=0.3, **MIX), 4),
        (dict(filter__strategy="top_p", filter__fraction=0.6, **MIX), 8),
        (
            dict(
                filter__strategy="top_p",
                filter__fraction=0.5,
                filter__prefer="smallest",
            ),
            8,
        ),
        (dict(filter__strategy="top_p_softmax", filter__fraction=0.9), 8),
        (
            dict(
                filter__strategy="top_p_softmax",
                filter__fraction=0.6,
                filter__prefer="smallest",
            ),
            5,
        ),
        # Of five groups whose score is not 0, ranks 1 to 4; of six, 2 to 4.
        (
            dict(
                filter__strategy="percentile_range",
                filter__low=0.25,
                filter__high=0.75,
                rollout__prompts=6,
            ),
            3,
        ),
    ],
)
def test_a_schedule_counts_the_most_groups_that_scores_can_make_a_filter_keep(
    changes, groups
):
    usual = dict(rollout__prompts=8, optimizer__minibatch=4, optimizer__microbatch=4)
    chosen = updates.settings(iterations=1, **usual | changes)
    assert update_counts.updates_expected(chosen) == groups  # of four episodes each


@pytest.mark.parametrize("prefer", ["largest", "smallest"])
@pytest.mark.parametrize("strategy", ["top_p", "top_p_softmax", "percentile_range"])
def test_no_scores_make_a_filter_keep_more_groups_than_a_schedule_counts(
    strategy, prefer
):
    rng = np.random.default_rng(0)
    # From groups that are nearly equal to groups that one outweighs, some of score 0.
    score = 10.0 ** rng.uniform(-1, 1, (400, 7)) ** rng.integers(0, 3, (400, 1))
    score = jnp.asarray(score * (rng.random((400, 7)) < 0.8), jnp.float32)
    for fraction in (0.2, 0.5, 0.7, 0.95):
        share = dict(fraction=fraction, low=fraction / 2, high=(1 + fraction) / 2)
        chosen = updates.settings(
            rollout__prompts=7,
            optimizer__minibatch=4,
            optimizer__microbatch=4,
            iterations=1,
            filter__strategy=strategy,
            filter__prefer=prefer,
            **{f"filter__{name}": value for name, value in share.items()},
        )
        keep = jax.vmap(
            lambda x, c=chosen.filter: strategies.keep_groups(x, c, c.fraction)
        )
        most = int(keep(score).sum(axis=1).max())
        assert 1 <= most <= update_counts.updates_expected(chosen)


def test_a_schedule_counts_the_turns_that_each_environment_of_a_mix_has_in_windows():
    lake = dict(name="frozen_lake", prompts=2)
    chosen = updates.settings(
        env=dict(
            name="mix",
            thinking=True,
            mix=dict(short=dict(lake, turns=1), long=dict(lake, turns=4)),
        ),
        rollout__history="single",
        filter__strategy="none",
        optimizer__minibatch=4,
        optimizer__microbatch=4,
        iterations=3,
    )
    # Two groups of four episodes of one turn, two of four turns.
    assert update_counts.updates_expected(chosen) == 3 * (8 * 1 + 8 * 4) // 4


# What a filter scores -----------------------------------------------------------------


def scores(metric: str, **changes):
    rows, episodes = updates.record()
    rng = np.random.default_rng(0)
    rows = rows.replace(entropy=jnp.asarray(rng.random(rows.tokens.shape), jnp.float32))
    chosen = updates.settings(filter__metric=metric, **changes)
    measure, statistic = filters.METRICS[metric]
    values = np.asarray(measure(chosen, rows, episodes))
    grouping = Grouping(episodes.group, updates.PROMPTS)
    statistics = group_statistics(jnp.asarray(values), grouping)
    return rows, episodes, values, np.asarray(statistic(statistics))


@pytest.mark.parametrize("metric", sorted(filters.METRICS))
def test_each_metric_is_a_loop_over_episodes_and_groups(metric):
    rows, episodes, _, found = scores(metric)
    each = []
    for b in range(len(episodes.turns)):
        played = int(episodes.turns[b])
        if metric.startswith("return"):
            each.append(float(episodes.reward[b, :played].sum()))
        elif metric == "length":
            each.append(float(episodes.reply_tokens[b].sum()))
        else:
            each.append(float(rows.entropy[b][rows.is_reply[b]].mean()))
    each = np.array(each).reshape(updates.PROMPTS, updates.GROUP_SIZE)
    statistic = {
        "std": lambda x: x.std(ddof=1),
        "variance": lambda x: x.var(ddof=1),
        "sum": np.sum,
    }.get(metric.split("_")[-1], np.mean)
    expected = [statistic(x) for x in each]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_metric_sees_the_penalty_only_where_asked():
    _, episodes, values, _ = scores("return_mean", filter__with_penalty=True)
    np.testing.assert_allclose(values, rewards.returns(episodes, -0.1), rtol=1e-6)
    assert np.abs(values - np.asarray(rewards.returns(episodes))).max() > 0.05


def test_the_filter_keeps_the_fraction_of_its_iteration():
    rows, episodes = updates.record()
    chosen = updates.settings(
        iterations=5,
        filter__fraction=0.25,
        filter__fraction_end=0.75,
    )
    for iteration, kept in ((0, 1), (2, 2), (4, 3)):
        found = filters.uncertainty_filter(
            chosen,
            rows,
            episodes,
            jnp.int32(iteration),
            rewards.played_rewards(episodes, 0.0),
        )
        assert found.kept_groups.sum() == kept


@pytest.mark.parametrize("strategy", ["top_fraction", "none"])
@pytest.mark.parametrize("metric", ["return_std", "length"])
@pytest.mark.parametrize(("with_penalty", "penalty"), [(False, 0.0), (True, -0.1)])
def test_the_spread_is_that_of_the_returns_that_are_asked_for(
    with_penalty, penalty, metric, strategy
):
    rows, episodes = updates.record()
    chosen = updates.settings(
        filter__strategy=strategy,
        filter__metric=metric,
        filter__with_penalty=with_penalty,
    )
    found = filters.uncertainty_filter(
        chosen, rows, episodes, jnp.int32(0), rewards.played_rewards(episodes, 0.0)
    )
    played = np.arange(updates.TURNS) < np.asarray(episodes.turns)[:, None]
    earned = np.asarray(episodes.reward) + penalty * ~np.asarray(episodes.is_valid)
    returns = np.where(played, earned, 0).sum(axis=1).reshape(4, 4)
    np.testing.assert_allclose(found.std, returns.std(axis=1, ddof=1), rtol=1e-5)


def earned_with(value: float, *places):
    """Turn rewards of the record, with `value` in these (episode, turn)."""
    _, episodes = updates.record()
    earned = np.array(rewards.played_rewards(episodes, -0.1))
    for place in places:
        earned[place] = value
    return jnp.asarray(earned)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("strategy", "kept"),
    [("none", [0, 1, 2]), ("top_fraction", [0, 1]), ("within_group", [0, 1])],
)
def test_a_group_with_a_return_that_is_not_finite_makes_room_for_the_next(
    strategy, kept, value
):
    rows, episodes = updates.record()
    chosen = updates.settings(filter__strategy=strategy)
    # Scores fall in the order of groups 3, 0, 1; group 2 has none.
    choose = functools.partial(filters.uncertainty_filter, chosen, rows, episodes)
    sound = choose(jnp.int32(0), earned_with(0.0))
    found = choose(jnp.int32(0), earned_with(value, (13, 0)))
    assert sound.kept_groups[3] and np.isfinite(sound.std).all()
    assert np.flatnonzero(found.kept_groups).tolist() == kept
    assert not found.keep[episodes.group == 3].any()
    np.testing.assert_array_equal(np.isnan(found.std), [False, False, False, True])
    np.testing.assert_array_equal(found.std[:3], sound.std[:3])


@pytest.mark.parametrize("strategy", [*strategies.STRATEGIES, "within_group"])
@pytest.mark.parametrize("is_the_environments", [False, True])
def test_if_no_group_is_sound_the_update_shows_it_by_its_gradients(
    strategy, is_the_environments
):
    rows, episodes = updates.record()
    chosen = updates.settings(filter__strategy=strategy)
    spoilt = earned_with(np.nan, (0, 0), (4, 0), (8, 0), (12, 0))
    if is_the_environments:  # Whose returns the score is of, too.
        episodes = episodes.replace(
            reward=jnp.where(jnp.isnan(spoilt), jnp.nan, episodes.reward)
        )
    found = filters.uncertainty_filter(chosen, rows, episodes, jnp.int32(0), spoilt)
    assert found.keep.any() and np.isnan(found.std).all()
    assert found.keep.sum() <= update_counts.room_for_episodes(chosen)


def test_groups_are_ranked_among_those_of_their_environment():
    """The second environment's returns are ten times as spread."""
    rows, episodes = updates.record()
    environment = (episodes.group >= 2).astype(jnp.int32)
    reward = jnp.tile(jnp.array([[0.0], [1.0], [0.0], [2.0]]), (4, updates.TURNS))
    reward *= (jnp.array([1.0, 2.0, 30.0, 10.0])[episodes.group])[:, None]
    turns = jnp.full_like(episodes.turns, updates.TURNS)
    episodes = episodes.replace(environment=environment, reward=reward, turns=turns)
    kept = {}
    for scope in ("batch", "environment"):
        chosen = two_environments(
            updates.settings(filter__scope=scope, filter__fraction=0.5)
        )
        selection = filters.uncertainty_filter(
            chosen, rows, episodes, jnp.int32(0), rewards.played_rewards(episodes, 0.0)
        )
        kept[scope] = selection.kept_groups.tolist()
        assert selection.kept_fraction == 0.5
        assert update_counts.room_for_episodes(chosen) == 2 * updates.GROUP_SIZE
    assert kept["batch"] == [False, False, True, True]
    assert kept["environment"] == [False, True, True, False]


def two_environments(chosen):
    """The settings with two tasks of two prompts each."""
    task = chosen.tasks()[0]
    mix = tuple(
        dataclasses.replace(task, label=label, prompts=2) for label in ("one", "two")
    )
    env = dataclasses.replace(chosen.env, name="mix", mix=mix)
    return dataclasses.replace(chosen, env=env)


def test_within_group_keeps_members_of_every_group_that_is_not_equal():
    rows, episodes = updates.record()
    chosen = updates.settings(filter__strategy="within_group", filter__fraction=0.5)
    selection = filters.uncertainty_filter(
        chosen, rows, episodes, jnp.int32(0), rewards.played_rewards(episodes, 0.0)
    )
    keep = np.asarray(selection.keep).reshape(updates.PROMPTS, -1)
    np.testing.assert_array_equal(keep.sum(axis=1), [2, 2, 0, 2])
    np.testing.assert_allclose(selection.kept_fraction, 6 / 16)
    assert update_counts.room_for_episodes(chosen) == 8


def test_within_group_asks_whether_members_differ_whatever_it_measures():
    rows, episodes = updates.record()
    # Group 0 has a mean of 0 and differs; group 1's members are all the same.
    earned = [[-1, 1, -1, 1], [2, 2, 2, 2], [0, 3, 0, 0], [1, 2, 3, 4]]
    reward = jnp.zeros_like(episodes.reward).at[:, 0].set(jnp.array(earned).ravel())
    episodes = episodes.replace(reward=reward)
    chosen = updates.settings(
        filter__strategy="within_group",
        filter__fraction=0.5,
        filter__metric="return_mean",
    )
    selection = filters.uncertainty_filter(
        chosen, rows, episodes, jnp.int32(0), rewards.played_rewards(episodes, 0.0)
    )
    assert selection.kept_groups.tolist() == [True, False, True, True]


# Which tokens have an entropy bonus ---------------------------------------------------


def test_thoughts_are_the_first_tokens_of_each_reply_and_answers_the_rest():
    rows = rows_of("orrrRorR", episode=[0])
    episodes = episodes_of(reward=[[0.0, 0.0]])
    episodes = episodes.replace(thought_tokens=jnp.array([[3, 1]]))

    def bonus(where: str):
        chosen = updates.settings(loss__entropy_on=where)
        return np.asarray(batches.bonus_tokens(chosen, rows, episodes))[0]

    thought = [False, True, True, True, False, False, True, False]
    answer = [False, False, False, False, True, False, False, True]
    np.testing.assert_array_equal(bonus("thought"), thought)
    np.testing.assert_array_equal(bonus("answer"), answer)


# Which tokens have a loss of the policy -----------------------------------------------


def test_the_tokens_of_cut_replies_have_no_loss_and_those_of_other_turns_keep_theirs():
    rows = rows_of("orrRorR.", "orRorR..", episode=[1, 0])
    ends = [[END_OF_TURN, REPLY_BUDGET], [REPLY_BUDGET, ANSWER_CLOSED]]
    episodes = episodes_of(reward=[[0.0, 0.0], [0.0, 0.0]])
    episodes = episodes.replace(reply_end=jnp.array(ends))
    kept = [[0, 0, 0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(batches.uncut_tokens(rows, episodes), kept)
