"""The update against one written out plainly, and what must not change it."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import plain_update, updates

from ragen_jax.learning import minibatches
from ragen_jax.learning.batch import Batch
from ragen_jax.settings import update_counts
from ragen_jax.trajectory import PADDING

CASES = {
    "ppo, starpo_s": dict(estimator="ppo", algorithm="starpo_s"),
    "grpo, starpo_s": dict(estimator="grpo", algorithm="starpo_s"),
    "ppo, starpo": dict(
        estimator="ppo", algorithm="starpo", loss__kl=0.1, optimizer__minibatch=16
    ),
    "grpo, starpo": dict(
        estimator="grpo", algorithm="starpo", loss__kl=0.1, optimizer__minibatch=16
    ),
}
# With the penalty in the reward instead of the loss.
CASES["grpo, starpo, paid"] = CASES["grpo, starpo"] | dict(
    loss__kl_in="reward", loss__kl_kind="k1"
)
KEPT = [0, 3]  # groups that starpo_s keeps of the record
KEPT_ROWS = [0, 1, 2, 3, 12, 13, 14, 15]
# 12 rows kept, and minibatches of 8 rows and of 4 with 4 rows of padding.
SEVERAL = dict(
    filter__fraction=0.75,
    optimizer__epochs=2,
    optimizer__critic_warmup=1,
    advantage__whiten=False,  # Or a NaN in one row would spread to all.
)


def program(name: str):
    """The compiled update of one of CASES."""
    return updates.compiled(updates.settings(**CASES[name], **updates.TWICE))


@pytest.fixture(scope="module")
def usual():
    """What the usual program makes of the record: (state, UpdateMetrics)."""
    return program("ppo, starpo_s")(*updates.record())


def check_only_counters_differ(state, start) -> None:
    """Parameters and optimizers are those of `start`, bit for bit."""
    for name in ("actor", "critic", "actor_optimizer", "critic_optimizer"):
        chex.assert_trees_all_equal(getattr(state, name), getattr(start, name))


# The whole update --------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        "ppo, starpo_s",  # The program that other quick tests compile as well.
        pytest.param("ppo, starpo", marks=pytest.mark.slow),
        pytest.param("grpo, starpo_s", marks=pytest.mark.slow),
        pytest.param("grpo, starpo", marks=pytest.mark.slow),
        pytest.param("grpo, starpo, paid", marks=pytest.mark.slow),
    ],
)
def test_an_update_is_what_it_is_when_written_out(case):
    chosen = updates.settings(**CASES[case], **updates.TWICE)
    state, learned = program(case)(*updates.record())
    plain = plain_update.learn(chosen, *updates.record())
    found = updates.fields(learned)
    assert found.keys() == plain.figures.keys()
    for name, value in found.items():
        np.testing.assert_allclose(
            value, plain.figures[name], rtol=1e-4, atol=1e-5, err_msg=name
        )
    _check_adam(state.actor, state.actor_optimizer, plain.actor)
    if chosen.has_critic:
        _check_adam(state.critic, state.critic_optimizer, plain.critic)
    else:
        assert state.critic == {} and found["critic_grad_norm"] == 0


def _check_adam(parameters, optimizer, plain):
    """Parameters and moments; the moments are the gradients, unscaled by Adam."""
    chex.assert_trees_all_close(parameters, plain.parameters, rtol=0, atol=2e-6)
    moments = optax.tree_utils.tree_get(optimizer, "mu")
    chex.assert_trees_all_close(moments, plain.first, rtol=1e-3, atol=1e-6)
    moments = optax.tree_utils.tree_get(optimizer, "nu")
    chex.assert_trees_all_close(moments, plain.second, rtol=2e-3, atol=1e-9)


def test_the_record_puts_every_part_of_the_loss_to_work(usual):
    """Else the comparison above would show less than it seems to."""
    figures = updates.fields(usual[1])
    assert 0.02 < figures["clip_fraction"] < 0.5
    assert figures["approx_kl"] > 0.02 and figures["logprob_gap"] > 0.1
    assert figures["actor_grad_norm"] > 0.5  # the optimizer's clip
    assert figures["kept_fraction"] == 0.5 and figures["explained_variance"] != 0
    start = updates.new_state(updates.settings())
    moved = jax.tree.map(
        lambda new, old: np.abs(new - old).max() > 1e-4,
        (usual[0].actor["layers"], usual[0].critic["layers"]),
        (start.actor["layers"], start.critic["layers"]),
    )
    assert all(jax.tree.leaves(moved))


# What must not change it -------------------------------------------------------------


@pytest.mark.slow
def test_how_the_rows_are_cut_up_does_not_change_the_update(usual):
    """Microbatches of 2, several lengths and a shared beginning; test_update_mesh.py
    has microbatches of 4, and of 16 with half of the rows padding."""
    chosen = updates.settings(
        **CASES["ppo, starpo_s"], **updates.TWICE, optimizer__microbatch=2
    )
    lengths = (8, 14, updates.LENGTH)
    is_reply = np.asarray(updates.record()[0].is_reply)[KEPT_ROWS]
    ends = (is_reply * np.arange(1, updates.LENGTH + 1)).max(axis=1)
    longest_of_pairs = np.sort(ends)[1::2]
    assert set(np.searchsorted(lengths, longest_of_pairs)) == {0, 1, 2}
    run = updates.compiled(chosen, lengths, updates.OPENING)
    updates.check_same(run(*updates.record()), usual)


def test_the_order_of_groups_and_of_episodes_does_not_change_the_update(usual):
    order = np.array([13, 12, 15, 14, 8, 9, 10, 11, 2, 1, 3, 0, 6, 4, 7, 5])
    found = program("ppo, starpo_s")(*updates.reorder(*updates.record(), order))
    updates.check_same(found, usual)


def test_nothing_behind_the_last_reply_or_in_rows_not_kept_is_read(usual):
    rows, episodes = jax.device_get(updates.record())
    rng = np.random.default_rng(8)
    garbage = rows.episode == PADDING
    assert garbage.any(axis=1).sum() > 10
    garbage |= ~np.isin(episodes.group, KEPT)[:, None]
    last = updates.CONFIG.vocabulary - 1
    tokens = rng.choice([1, last - 1, last], rows.tokens.shape).astype(np.int32)
    noise = np.where(garbage & ~rows.is_reply, np.nan, -5.0)
    spoilt = rows.replace(
        tokens=np.where(garbage, tokens, rows.tokens),
        logprobs=np.where(garbage, noise, rows.logprobs).astype(np.float32),
    )
    state, learned = program("ppo, starpo_s")(spoilt, episodes)
    check_only_counters_differ(state, usual[0])
    assert updates.fields(learned) == updates.fields(usual[1])


def test_an_update_takes_the_actors_rate_that_it_is_called_with(usual):
    """Which a rollback has lowered; the settings have the one from before."""
    chosen = updates.settings(**CASES["ppo, starpo_s"], **updates.TWICE)
    still = updates.first_use(chosen).replace(actor_lr=np.float32(0))
    state, _ = program("ppo, starpo_s")(*updates.record(), update_args=still)
    chex.assert_trees_all_equal(state.actor, updates.new_state(chosen).actor)
    chex.assert_trees_all_equal(state.critic, usual[0].critic)


# Updates that are not made -----------------------------------------------------------


def _with_nan(what: str):
    """(rows, episodes, state) with one NaN."""
    rows, episodes = updates.record()
    state = updates.new_state(updates.settings(**CASES["ppo, starpo"]))
    if what == "a reward":
        episodes = episodes.replace(reward=_spoil(episodes.reward, (5, 0)))
    if what == "a log-probability":
        first = int(np.argmax(rows.is_reply[5]))
        rows = rows.replace(logprobs=_spoil(rows.logprobs, (5, first)))
    if what == "the actor":
        norm = _spoil(state.actor["final_norm"], 3)
        state = state.replace(actor={**state.actor, "final_norm": norm})
    if what == "the critic":
        head = _spoil(state.critic["value_head"], 3)
        state = state.replace(critic={**state.critic, "value_head": head})
    return rows, episodes, state


def _spoil(x, index) -> np.ndarray:
    """A copy of `x` with a NaN at `index`."""
    spoilt = np.array(x)
    spoilt[index] = np.nan
    return spoilt


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a log-probability", "the actor", "the critic"])
def test_a_nan_leaves_both_models_and_both_optimizers_as_they_were(what):
    rows, episodes, start = _with_nan(what)
    run = program("ppo, starpo")
    state, learned = run(rows, episodes, start)
    check_only_counters_differ(state, start)
    counted = dict(iteration=1, updates=0, bad_in_row=1, skipped_bad=2)
    none_empty = dict(empty_in_row=0, skipped_empty=0)
    assert updates.counters(state) == counted | none_empty
    assert learned.counts.real == 0
    state, _ = run(rows, episodes, state)
    counted = dict(iteration=2, updates=0, bad_in_row=2, skipped_bad=4)
    assert updates.counters(state) == counted | none_empty


def test_a_reward_that_is_not_a_number_leaves_out_its_group_alone():
    """Without a filter too: plain StarPO whitens advantages over the batch."""
    state, learned = program("ppo, starpo")(*_with_nan("a reward"))
    assert updates.fields(learned)["kept_fraction"] == 0.75
    assert learned.counts.bad == 0 and learned.counts.real == 2
    chex.assert_tree_all_finite((state.actor, state.critic))


def test_a_good_iteration_after_a_nan_resets_the_count_and_moves_both_models():
    rows, episodes, start = _with_nan("a log-probability")
    run = program("ppo, starpo")
    state, _ = run(rows, episodes, start)
    state, learned = run(*updates.record(), state)
    assert updates.counters(state) == dict(
        iteration=2,
        updates=2,
        bad_in_row=0,
        skipped_bad=2,
        empty_in_row=0,
        skipped_empty=0,
    )
    assert learned.counts.real == 2
    # As if nothing but the count of iterations, which rows are shuffled by, had moved.
    later = _with_nan("nothing")[2].replace(iteration=np.int32(1))
    check_only_counters_differ(state, run(*updates.record(), later)[0])


def test_where_no_group_is_kept_nothing_changes_but_the_counts():
    rows, episodes = updates.record()
    played = jnp.arange(updates.TURNS)[None] < episodes.turns[:, None]
    equal = jnp.where(played, 6.0 / episodes.turns[:, None], 7.0)
    run = program("ppo, starpo_s")
    start = updates.new_state(updates.settings(**updates.TWICE))
    state = None
    for count in (1, 2):
        state, learned = run(rows, episodes.replace(reward=equal), state)
        check_only_counters_differ(state, start)
        assert updates.counters(state) == dict(
            iteration=count,
            updates=0,
            bad_in_row=0,
            empty_in_row=count,
            skipped_bad=0,
            skipped_empty=count,
        )
    assert set(updates.fields(learned).values()) == {0.0}
    state, learned = run(rows, episodes, state)
    assert (state.empty_in_row, state.skipped_empty, learned.counts.real) == (0, 2, 2)


# Windows -----------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_of_one_turn_each_teach_what_rows_of_whole_episodes_teach():
    """Where windows hold all turns, each reply has the same tokens before it."""
    case = CASES["ppo, starpo"] | updates.TWICE
    windows = dict(rollout__history="window", optimizer__minibatch=48)
    chosen = updates.settings(**case | windows)
    learn = updates.compiled(chosen, sampled=updates.record_of_turns)
    found = learn(*updates.record_of_turns())
    updates.check_same(found, program("ppo, starpo")(*updates.record()))


def test_minibatches_of_turns_differ_by_one_row_at_most():
    """13 rows of weight 1 among 24, at most 5 in a minibatch: 4, 4 and 5."""
    rng = np.random.default_rng(0)
    real = np.sort(rng.permutation(24)[:13])
    weight = np.isin(np.arange(24), real).astype(np.float32)
    lengths = rng.integers(1, 6, 24) * (weight > 0)
    is_reply = jnp.arange(6)[None] < lengths[:, None]
    names = [field.name for field in dataclasses.fields(Batch)]
    batch = Batch(**dict.fromkeys(names, jnp.arange(24.0)))
    batch = batch.replace(weight=jnp.asarray(weight), is_reply=is_reply)
    order = jnp.asarray(np.concatenate([rng.permutation(real), np.arange(11)]))
    shares = []
    for index in range(3):
        share = minibatches.even_minibatch(batch, order, jnp.int32(index), 3, 13, 5)
        rows = share.tokens[share.weight > 0].astype(int).tolist()
        assert share.tokens.shape == (5,)
        own = share.is_reply.sum(axis=1).tolist()
        assert own == sorted(own, reverse=True) and own[len(rows) :] == [0] * (
            5 - len(rows)
        )
        assert own[: len(rows)] == lengths[rows].tolist()
        shares.append(rows)
    assert [len(rows) for rows in shares] == [4, 4, 5]
    assert sorted(sum(shares, [])) == real.tolist()


def test_rows_are_shuffled_by_the_key_and_those_of_no_weight_come_last():
    weight = jnp.asarray(np.arange(24) % 3 == 0, jnp.float32)
    one, other = (
        minibatches.shuffled(jax.random.key(seed), weight).tolist() for seed in (0, 1)
    )
    for order in (one, other):
        assert sorted(order[:8]) == list(range(0, 24, 3)) != order[:8]
        assert sorted(order) == list(range(24))
    assert one[:8] != other[:8]


def test_minibatches_of_turns_hold_each_row_once_however_many_there_are():
    """80,001 rows in twos: the number of the last times all rows is above 2**31."""
    rows, minibatch = 80_001, 2
    count, empty = -(-rows // minibatch), jnp.zeros((rows + 1, 1))
    names = [field.name for field in dataclasses.fields(Batch)]
    batch = Batch(**dict.fromkeys(names, empty)).replace(
        tokens=jnp.arange(rows + 1), is_reply=empty == 0, weight=jnp.ones(rows + 1)
    )

    @jax.jit
    @jax.vmap
    def share(index):
        order, size = jnp.arange(rows + 1), (jnp.int32(count), jnp.int32(rows))
        picked = minibatches.even_minibatch(batch, order, index, *size, minibatch)
        return jnp.where(picked.weight > 0, picked.tokens, -1)

    held = np.asarray(share(jnp.arange(count, dtype=jnp.int32)))
    np.testing.assert_array_equal(np.sort(held[held >= 0]), np.arange(rows))


def test_rows_come_in_another_order_in_each_epoch_iteration_run_and_use():
    once, thrice = (updates.settings(optimizer__reuse=n) for n in (1, 3))
    state = updates.new_state(once)

    def bits(chosen, seed, iteration, made, epoch):
        at = state.replace(iteration=iteration, updates=made)
        key = minibatches.order_key(chosen, seed, at, epoch)
        return tuple(jax.random.key_data(key).tolist())

    places = [(0, 0, 4, 0), (1, 0, 4, 0), (0, 1, 4, 0), (0, 0, 4, 1)]
    assert len({bits(once, *place) for place in places}) == 4
    assert len({bits(thrice, *place) for place in [*places, (0, 0, 6, 0)]}) == 5
    # A run that never uses episodes twice does not depend on what was skipped.
    assert bits(once, 0, 0, 6, 0) == bits(once, *places[0])


def test_schedules_expect_an_update_of_every_turn_that_may_be_played():
    usual = dict(iterations=7, filter__fraction=0.5, optimizer__minibatch=8)
    whole = updates.settings(**usual)
    turns = updates.settings(**usual, rollout__history="single", rollout__turns=3)
    assert update_counts.updates_expected(whole) == 7  # 2 groups of 4.
    assert update_counts.updates_expected(turns) == 21


# Several minibatches and epochs ------------------------------------------------------


@pytest.fixture(scope="module")
def several():
    return updates.compiled(updates.settings(**SEVERAL))


@pytest.mark.slow
def test_while_the_critic_warms_up_the_actor_stays(several):
    chosen = updates.settings(**SEVERAL)
    start = updates.new_state(chosen)
    first, _ = several(*updates.record())
    chex.assert_trees_all_equal(first.actor, start.actor)
    chex.assert_trees_all_equal(first.actor_optimizer, start.actor_optimizer)
    moved = np.abs(first.critic["value_head"] - start.critic["value_head"])
    assert moved.min() > 0 and np.median(moved) > 1e-4
    second, _ = several(*updates.record(), first)
    assert np.abs(second.actor["head"] - start.actor["head"]).max() > 1e-4


@pytest.mark.slow
def test_every_kept_row_counts_once_in_every_epoch(several):
    """The actor stays in this iteration, so two epochs are twice the whole record."""
    rows, episodes = updates.record()
    state, learned = several(rows, episodes)
    assert state.updates == 4 and learned.counts.real == 4
    chosen = updates.settings(
        **SEVERAL
        | dict(optimizer__epochs=1, optimizer__minibatch=12, optimizer__microbatch=12)
    )
    plain = plain_update.learn(chosen, rows, episodes).figures
    tokens = int(rows.is_reply[episodes.group != 2].sum())
    for name in ("policy_loss", "entropy", "approx_kl", "clip_fraction"):
        mean = getattr(learned.sums, name)
        assert mean.count == 2 * tokens
        np.testing.assert_allclose(
            mean.sum, 2 * tokens * plain[name], rtol=1e-4, err_msg=name
        )
    assert learned.sums.value_loss.count == 2 * tokens
    assert learned.sums.logprob_gap.count < tokens  # the first minibatch's alone


@pytest.mark.slow
def test_every_kept_row_is_in_one_minibatch_of_each_epoch_in_ever_new_company(several):
    """A row that holds a NaN makes the updates that it takes part in bad."""
    rows, episodes = updates.record()
    kept = np.flatnonzero(episodes.group != 2)
    first = np.argmax(np.asarray(rows.is_reply), axis=1)

    def bad_updates(*spoilt: int) -> int:
        logprobs = np.array(rows.logprobs)
        for row in spoilt:
            logprobs[row, first[row]] = np.nan
        state, learned = several(rows.replace(logprobs=logprobs), episodes)
        assert (
            state.updates + state.skipped_bad == 4
            and learned.counts.real == state.updates
        )
        return int(state.skipped_bad)

    assert [bad_updates(row) for row in kept] == [2] * 12
    # 2: together in both epochs; 3: in one of them; 4: in neither.
    company = [bad_updates(kept[0], row) for row in kept[1:]]
    assert 3 in company and min(company) >= 2 and max(company) <= 4
