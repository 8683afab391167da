"""The numbers that are logged, from records and updates made by hand."""

import math

import jax
import jax.numpy as jnp
import pytest
from helpers import updates
from helpers.records import episodes_of, rows_of

from ragen_jax.learning import summary, train_state
from ragen_jax.learning.aggregation import Mean
from ragen_jax.learning.summary import Times, UpdateMetrics
from ragen_jax.learning.token_sums import TokenSums
from ragen_jax.learning.train_state import UpdateCounts

ROWS = rows_of("orrR", "oR..", episode=[0, 1])
EPISODES = episodes_of(reward=[[1.0], [0.0]], group=[0, 1])


def learned(real: int) -> UpdateMetrics:
    """What one use of the episodes reports that made so many updates."""
    zero, nothing = jnp.zeros(()), Mean.zero()
    sums = TokenSums(*(nothing,) * 8, logprob_gap_max=zero, ratio_max=zero)
    made = UpdateCounts(jnp.int32(real), jnp.int32(real), jnp.int32(0))
    return UpdateMetrics(sums, *(zero,) * 5, made=made)


def metrics(state, real: int, **changes) -> dict[str, float]:
    """Those of an iteration that ended in `state`, after so many real updates."""
    chosen = updates.settings(**changes)
    seen = summary.summarize(ROWS, EPISODES, -0.1)
    counts, rate = summary.counts_so_far(state), jnp.float32(chosen.optimizer.actor_lr)
    values = summary.iteration_values(
        chosen, counts, [learned(real)], seen, jnp.int32(8), rate
    )
    return summary.iteration_metrics(values, (seen, {}), [], Times(1.0, 1.0))


def test_a_policy_that_was_not_updated_lags_behind_none():
    state = updates.new_state(updates.settings()).replace(iteration=jnp.int32(1))
    for real, lag in ((0, 0), (1, 0), (3, 2)):
        found = metrics(state, real, optimizer__epochs=2)
        assert found["update/policy_lag"] == lag


def test_an_iteration_without_an_update_has_no_gradient_norm_and_no_loss_to_report():
    """A zero would be one more value of the series, which the alarm compares with."""
    state = updates.new_state(updates.settings())
    none, some = (metrics(state, real) for real in (0, 1))
    means = {"policy_loss", "value_loss", "kl", "entropy", "clip_fraction"}
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
    whole = summary.summarize(ROWS, own, 0.0)
    for name, values in by_task.items():
        assert values[0] == whole[name]
