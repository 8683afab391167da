"""The numbers that are logged, from records and updates made by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from helpers import updates
from helpers.records import episodes_of, rows_of

from ragen_jax.learning import summary, train_state
from ragen_jax.learning.aggregation import Mean
from ragen_jax.learning.batch import Batch
from ragen_jax.learning.filters import Selection
from ragen_jax.learning.optimize import Steps
from ragen_jax.learning.summary import Times, UpdateMetrics
from ragen_jax.learning.token_sums import TokenSums, no_sums
from ragen_jax.learning.train_state import UpdateCounts
from ragen_jax.trajectory import END_OF_TURN, REPLY_BUDGET

ROWS = rows_of("orrR", "oR..", episode=[0, 1])
EPISODES = episodes_of(reward=[[1.0], [0.0]], group=[0, 1])
REWARD = updates.settings(reward__format_penalty=-0.1).reward


def learned(real: int) -> UpdateMetrics:
    """What one use of the episodes reports that made so many updates."""
    zero, nothing = jnp.zeros(()), Mean.zero()
    sums = TokenSums(*(nothing,) * 8, logprob_gap_max=zero, ratio_max=zero)
    counts = UpdateCounts(jnp.int32(real), jnp.int32(real), jnp.int32(0))
    return UpdateMetrics(sums, *(zero,) * 5, counts=counts)


def metrics(state, real: int, **changes) -> dict[str, float]:
    """Those of an iteration that ended in `state`, after so many real updates."""
    chosen = updates.settings(**changes)
    seen = summary.summarize(ROWS, EPISODES, REWARD)
    counts, rate = summary.counts_so_far(state), jnp.float32(chosen.optimizer.actor_lr)
    values = summary.iteration_values(
        chosen, counts, [learned(real)], seen, jnp.int32(8), rate
    )
    return summary.iteration_metrics(
        values, summary.Summaries(seen, {}, ()), [], Times(1.0, 1.0)
    )


def test_a_policy_that_was_not_updated_lags_behind_none():
    state = updates.new_state(updates.settings()).replace(iteration=jnp.int32(1))
    for real, lag, what in ((0, 0, "epochs"), (1, 0, "reuse"), (3, 2, "reuse")):
        found = metrics(state, real, **{f"optimizer__{what}": 2})
        assert found["update/policy_lag"] == lag


def test_an_iteration_without_an_update_has_no_gradient_norm_and_no_loss_to_report():
    """A zero would be one more value of the series, which the alarm compares with."""
    state = updates.new_state(updates.settings())
    none, some = (metrics(state, real) for real in (0, 1))
    means = {"policy_loss", "value_loss", "entropy", "clip_fraction"}
    means |= {"approx_kl", "explained_variance", "logprob_gap", "logprob_gap_max"}
    means |= {"actor_grad_norm", "critic_grad_norm"}
    unknown = {name for name, value in none.items() if math.isnan(value)}
    assert unknown == {f"update/{name}" for name in means}
    assert not any(math.isnan(value) for value in some.values())
    assert none["update/count"] == none["update/skipped_empty"] == 0


def test_a_policy_lags_behind_none_while_the_critic_alone_learns():
    state = updates.new_state(updates.settings())
    for iteration, lag in ((1, 0), (2, 0), (3, 2)):
        found = metrics(
            state.replace(iteration=jnp.int32(iteration)),
            3,
            iterations=5,
            optimizer__epochs=2,
            optimizer__critic_warmup=2,
        )
        assert found["update/policy_lag"] == lag


@pytest.mark.slow
def test_the_rate_that_is_reported_is_that_of_the_actors_last_step():
    """Three updates, of which the critic alone made the first two."""
    chosen = dict(
        optimizer__schedule="linear", iterations=5, optimizer__critic_warmup=2
    )
    settings = updates.settings(**chosen)
    state = updates.new_state(settings).replace(updates=jnp.int32(3))
    assert metrics(state, 1, **chosen)["update/actor_lr"] == 0
    optimizer = train_state.actor_optimizer(settings)
    gradients = jax.tree.map(jnp.ones_like, state.actor)
    _, moved = optimizer.update(gradients, state.actor_optimizer, state.actor)
    state = state.replace(actor_optimizer=moved)
    rate = settings.optimizer.actor_lr
    assert metrics(state, 1, **chosen)["update/actor_lr"] == pytest.approx(rate)


def test_a_reply_counts_once_in_its_environments_means_however_long_its_episode_is():
    """As in the means over all environments, and in those of an evaluation."""
    episodes = episodes_of(
        reward=[[1.0, 0, 0], [0.0, 0, 0], [2.0, 0, 0]],
        is_valid=[[True, True, True], [False] * 3, [True, False, False]],
        turns=[3, 1, 1],
    ).replace(
        environment=jnp.array([0, 0, 1]),
        reply_tokens=jnp.array([[2, 2, 2], [6, 0, 0], [5, 0, 0]]),
    )
    by_task = summary.summarize_tasks(episodes, 2)
    assert by_task["valid_reply_rate"].tolist() == [0.75, 1.0]
    assert by_task["reply_tokens"].tolist() == [3.0, 5.0]
    assert by_task["turns"].tolist() == [2.0, 1.0]
    assert by_task["return"].tolist() == [0.5, 2.0]
    own = jax.tree.map(lambda x: x[:2], episodes)
    whole = summary.summarize(ROWS, own, REWARD)
    for name, values in by_task.items():
        assert values[0] == whole[name]


def test_the_numbers_of_a_batch_are_worked_out_by_hand():
    """Two episodes of two turns and one; what stands in the fourth is not counted."""
    episodes = episodes_of(
        reward=[[1.0, 0.5], [0.25, 9.0]],
        is_valid=[[True, False], [False, True]],
        turns=[2, 1],
    ).replace(
        success=jnp.array([True, False]),
        actions=jnp.array([[2, 1], [4, 0]]),
        reply_tokens=jnp.array([[3, 2], [4, 0]]),
        reply_end=jnp.array([[END_OF_TURN, REPLY_BUDGET], [REPLY_BUDGET] * 2]),
        thought_tokens=jnp.array([[2, 0], [1, 9]]),
        grounded=jnp.array([[0.5, 1.0], [0.0, 9.0]]),
    )
    found = summary.summarize(ROWS, episodes, REWARD)
    expected = {
        "success": 0.5,
        "return": 1.75 / 2,
        "return_with_penalty": 1.75 / 2 - 0.1,
        "return_shaped": 1.75 / 2 - 0.1,
        "turns": 1.5,
        "actions": 3.5,
        "reply_tokens": 3.0,
        "thought_tokens": 1.0,
        "grounded": 0.5,
        "valid_reply_rate": 1 / 3,
        "cut_replies": 2 / 3,
        "sampled_tokens": 9.0,
        "episode_tokens": (4 + 2) / 2,
        # Tokens 2, 3, 4 and 6 are replies.
        "entropy": (2 + 3 + 4 + 6) / 7 / 4,
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value), name
    chosen, counts = (
        updates.settings(),
        summary.counts_so_far(updates.new_state(updates.settings())),
    )
    values = summary.iteration_values(
        chosen, counts, [learned(1)], found, jnp.int32(12), jnp.float32(1.0)
    )
    assert values["rollout/utilization"] == 0.75
    # The first turn of the first episode is valid and names half of the places.
    shaped = dataclasses.replace(REWARD, grounding=2.0)
    found = summary.summarize(ROWS, episodes, shaped)
    assert float(found["return_shaped"]) == pytest.approx(1.75 / 2 - 0.1 + 1 / 2)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("update/kl", {"loss__kl": 0.01}),
        ("update/kl", {"loss__kl": 0.01, "loss__kl_in": "reward"}),
        ("train/return_shaped", {"reward__length_bonus": 0.1}),
        ("update/value_loss", {}),
    ],
)
def test_what_is_not_measured_is_left_out(name, changes):
    """A zero would read as a measurement."""
    state = updates.new_state(updates.settings())
    without = {} if changes else {"estimator": "grpo"}
    assert name in metrics(state, 1, **changes)
    assert name not in metrics(state, 1, **without)


def test_an_update_reports_the_returns_spread_and_what_the_critic_explains():
    """Of a critic that learns at two tokens: variances 1 of returns and 1/4 of errors.

    The second row is padding.
    """
    shape = (2, 4)
    everywhere = dict.fromkeys(Batch.__dataclass_fields__, jnp.zeros(shape))
    batch = Batch(**everywhere).replace(
        is_reply=jnp.ones(shape, bool),
        is_target=jnp.zeros(shape, bool).at[:, :2].set(True),
        returns=jnp.array([[1.0, 3.0, 9.0, 7.0], [5.0, 0.0, 0.0, 0.0]]),
        old_values=jnp.array([[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]),
        weight=jnp.array([1.0, 0.0]),
    )
    chosen = Selection(
        keep=jnp.ones(4, bool),
        kept_fraction=jnp.float32(0.5),
        std=jnp.array([1.0, 3.0]),
        kept_groups=jnp.ones(2, bool),
    )
    counts = UpdateCounts(jnp.int32(3), jnp.int32(2), jnp.int32(1))
    steps = Steps(no_sums(), (jnp.float32(6.0), jnp.float32(1.5)), counts)
    found = summary.update_metrics(chosen, batch, steps)
    assert found.explained_variance == 0.75
    assert (found.reward_std, found.kept_fraction) == (2.0, 0.5)
    assert (found.actor_grad_norm, found.critic_grad_norm) == (2.0, 0.5)


def test_the_uses_of_a_batch_are_reported_as_one():
    """Means over them, but sums of counts, maxima, and the first use's gap alone."""

    def use(real, norm, loss, gap, gap_max, ratio_max):
        one = learned(real)
        sums = one.sums.replace(
            policy_loss=Mean(*map(jnp.float32, loss)),
            logprob_gap=Mean(*map(jnp.float32, gap)),
            logprob_gap_max=jnp.float32(gap_max),
            ratio_max=jnp.float32(ratio_max),
        )
        return one.replace(sums=sums, actor_grad_norm=jnp.float32(norm))

    found = summary.over_uses(
        [use(2, 1.0, (2, 1), (1, 4), 0.5, 1.5), use(1, 3.0, (4, 3), (5, 4), 9.0, 1.25)]
    )
    assert found.counts.real == found.counts.attempted == 3
    assert found.actor_grad_norm == 2.0
    assert found.sums.policy_loss.value() == 1.5
    assert found.sums.logprob_gap.value() == 0.25
    assert (found.sums.logprob_gap_max, found.sums.ratio_max) == (0.5, 1.5)


def test_each_number_of_an_iteration_is_reported_under_its_own_name():
    chosen = updates.settings(reward__grounding=0.5)
    names = ["success", "return", "return_with_penalty", "return_shaped", "grounded"]
    of_rollout = ["entropy", "reply_tokens", "thought_tokens", "valid_reply_rate"]
    of_rollout += ["cut_replies", "turns", "actions", "episode_tokens"]
    names += [*of_rollout, "sampled_tokens"]
    means = {name: jnp.float32(value) for value, name in enumerate(names, 1)}
    norms = dict(actor_grad_norm=2.0, critic_grad_norm=0.5, reward_std=0.25)
    others = dict(kept_fraction=0.75, explained_variance=0.125)
    use = dataclasses.replace(learned(1), **norms, **others)
    counts = summary.counts_so_far(updates.new_state(chosen))
    values = summary.iteration_values(
        chosen, counts, [use], means, jnp.int32(26), jnp.float32(1e-3)
    )
    seen, times = summary.Summaries(means, {}, ()), Times(rollout=2.0, update=5.0)
    found = summary.iteration_metrics(values, seen, [], times)
    wanted = {f"train/{name}": i for i, name in enumerate(names[:4], 1)}
    wanted |= {f"rollout/{name}": float(means[name]) for name in of_rollout}
    wanted |= {"rollout/grounded": 5.0, "rollout/utilization": 14 / 26}
    wanted |= {"update/actor_grad_norm": 2.0, "update/critic_grad_norm": 0.5}
    wanted |= {"filter/reward_std": 0.25, "filter/kept_fraction": 0.75}
    wanted |= {"update/explained_variance": 0.125}
    wanted |= {"time/rollout_seconds": 2.0, "time/update_seconds": 5.0}
    wanted |= {"rollout/tokens_per_second": 14 / 2}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
