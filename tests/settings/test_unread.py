"""What a command changes and nothing reads is refused in one sentence."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from helpers import updates
from helpers.paths import CONFIGS

from ragen_jax import cli, settings
from ragen_jax.errors import SettingsError
from ragen_jax.learning import filters, rewards, strategies
from ragen_jax.settings import FILTER_STRATEGIES


def check(*changes: str) -> None:
    """As launch/train.py does for a new run."""
    flag_values = flags.FlagValues()
    cli.define_config(flag_values=flag_values)
    given = [f"--config.{change}" for change in changes]
    cli.parse(["train.py", f"--config={CONFIGS}/frozenlake.py", *given], flag_values)
    config = flag_values.config
    settings.check_changed(cli.read_settings(config), cli.changed_keys(config))


@pytest.mark.parametrize(
    ("changes", "chooser", "other"),
    [
        (["estimator=grpo", "advantage.gamma=0.9"], "estimator = 'grpo'", "ppo"),
        (["estimator=reinforce_pp", "advantage.lam=0.9"], "'reinforce_pp'", "ppo"),
        (["advantage.turn_gamma=0.5"], "estimator = 'ppo'", "bi_level_gae"),
        (["advantage.turn_value=last"], "estimator = 'ppo'", "bi_level_gae"),
        (
            ["filter.strategy=none", "filter.loss_scale=sqrt"],
            "filter.strategy = 'none'",
            "top_fraction",
        ),
        (["algorithm=starpo", "filter.fraction=0.5"], "'none'", "top_fraction"),
        (["filter.count=3"], "filter.strategy = 'top_fraction'", "top_count"),
        (["algorithm=starpo", "filter.scope=batch"], "'none'", "top_fraction"),
        (
            ["filter.strategy=within_group", "filter.scope=batch"],
            "'within_group'",
            "top_fraction",
        ),
        (["estimator=grpo", "optimizer.critic_lr=0.1"], "estimator = 'grpo'", "ppo"),
        (["estimator=rloo", "optimizer.critic_schedule=linear"], "'rloo'", "ppo"),
        (["estimator=reinforce_pp", "loss.value_clip=0.0"], "'reinforce_pp'", "ppo"),
    ],
)
def test_a_change_that_does_nothing_is_refused(changes, chooser, other):
    with pytest.raises(SettingsError) as refusal:
        check(*changes)
    message = str(refusal.value)
    assert message.startswith(changes[-1].split("=")[0] + " = ")
    assert chooser in message and message.endswith(f" to {other!r}")


@pytest.mark.parametrize(
    ("changes", "chooser", "remedy"),
    [
        (["lora.alpha=16.0"], "lora.rank = 0", "above 0"),
        (["lora.targets=mlp"], "lora.rank = 0", "above 0"),
        (["loss.kl=0.0", "loss.kl_kind=k2"], "loss.kl = 0.0", "above 0"),
        (["loss.kl=0.0", "loss.kl_in=loss"], "loss.kl = 0.0", "above 0"),
        (["rollout.window=3"], "rollout.history = 'full'", "to 'window'"),
        (
            ["rollout.history=single", "rollout.window=3"],
            "rollout.history = 'single'",
            "to 'window'",
        ),
        (["reward.length_low=1"], "reward.length_bonus = 0.0", "above 0"),
        (["reward.length_high=9"], "reward.length_bonus = 0.0", "above 0"),
        (["reward.grounding_by=episode"], "reward.grounding = 0.0", "above 0"),
        (["reward.normalize_by=batch"], "reward.normalize = 'none'", "to 'mean_std'"),
        (
            ["loss.entropy=0.0", "loss.entropy_on=thought"],
            "loss.entropy = 0.0",
            "above 0",
        ),
        (["health.remedy=filter"], "health.on_collapse = 'warn'", "to 'rollback'"),
        (
            ["every.checkpoint=0", "health.on_collapse=rollback"],
            "every.checkpoint = 0",
            "above 0",
        ),
        (
            ["filter.keep_zero=True", "filter.zero=0.1"],
            "filter.keep_zero = True",
            "to False",
        ),
        (["estimator=rloo", "reward.normalize=mean"], "estimator = 'rloo'", "to 'ppo'"),
        (
            ["estimator=grpo", "reward.normalize=mean_std"],
            "estimator = 'grpo'",
            "to 'ppo'",
        ),
        (
            [
                *("estimator=reinforce_pp_baseline", "reward.normalize_by=batch"),
                "reward.normalize=mean_std",
            ],
            "estimator = 'reinforce_pp_baseline'",
            "to 'ppo'",
        ),
        (["every.evaluate=0", "evaluation.prompts=8"], "every.evaluate = 0", "above 0"),
        (
            ["every.evaluate=0", "evaluation.rollouts=8"],
            "every.evaluate = 0",
            "above 0",
        ),
        (
            ["every.evaluate=0", "checkpoint.keep_best=2"],
            "every.evaluate = 0",
            "above 0",
        ),
        (
            ["health.record_every=0", "health.record_episodes=2"],
            "health.record_every = 0",
            "above 0",
        ),
        (
            ["optimizer.schedule=constant", "optimizer.schedule_updates=500"],
            "optimizer.schedule = 'constant'",
            "to 'linear' or 'cosine'",
        ),
    ],
)
def test_a_change_of_what_is_off_is_refused(changes, chooser, remedy):
    with pytest.raises(SettingsError) as refusal:
        check(*changes)
    message = str(refusal.value)
    assert message.startswith(changes[-1].split("=")[0] + " = ")
    key = chooser.split(" = ")[0]
    end = f" does nothing with {chooser}: leave it out or set {key} {remedy}"
    assert message.endswith(end)


def test_a_limit_of_which_every_environment_has_its_own_is_refused():
    config = cli.load_config(f"{CONFIGS}/sokoban.py:mix").unlock()
    for label in config.env.mix:
        config.env.mix[label].turns = 3
    with pytest.raises(SettingsError, match=r"rollout\.turns = \d+ does nothing, as"):
        settings.check_changed(settings.from_dict(config.to_dict()), ["rollout.turns"])
    config.env.mix[label].turns = 0
    settings.check_changed(settings.from_dict(config.to_dict()), ["rollout.turns"])


@pytest.mark.parametrize(
    "changes",
    [
        ["lora.rank=4", "lora.alpha=64.0", "lora.targets=mlp"],
        ["loss.kl=0.0", "loss.kl_end=0.1", "loss.kl_kind=k2"],
        ["loss.kl=0.0", "loss.kl_kind=k1", "loss.kl_in=reward"],  # as preset
        ["rollout.history=window", "rollout.window=3"],
        ["reward.length_bonus=0.1", "reward.length_low=1", "reward.length_high=9"],
        ["reward.grounding=0.1", "reward.grounding_by=episode"],
        ["reward.normalize=mean", "reward.normalize_by=batch"],
        ["estimator=dr_grpo", "reward.normalize=mean_std"],
        ["estimator=reinforce_pp_baseline", "reward.normalize=mean_std"],
        ["estimator=grpo", "reward.normalize=asym_clip"],
        [
            *("estimator=grpo", "reward.normalize=mean_std"),
            *("loss.kl=0.1", "loss.kl_in=reward", "loss.kl_kind=k1"),
        ],
        ["every.evaluate=0", "checkpoint.keep_best=0"],
        ["loss.entropy=0.0", "loss.entropy_end=0.1", "loss.entropy_on=thought"],
        ["health.on_collapse=rollback", "health.remedy=filter"],
        [
            *("optimizer.schedule=constant", "optimizer.critic_schedule=linear"),
            "optimizer.schedule_updates=500",
        ],
        ["optimizer.schedule_updates=500"],
        ["estimator=grpo"],
        ["estimator=grpo", "advantage.gamma=1.0"],  # as the config has it
        ["advantage.turn_gamma=1.0", "advantage.turn_value=first"],  # as preset
        ["estimator=turn_grpo", "advantage.turn_gamma=0.9"],
        ["filter.strategy=top_count", "filter.count=3", "filter.prefer=smallest"],
        ["filter.strategy=none", "filter.keep_zero=True"],
        # Of any filter the recorded in-group std reads it.
        ["algorithm=starpo", "filter.with_penalty=True"],
        ["filter.metric=entropy", "filter.with_penalty=True"],
        ["algorithm=starpo", "filter.reweight=True", "filter.scope=batch"],
        ["filter.metric=return_mean", "filter.with_penalty=True", "filter.scope=batch"],
        ["estimator=turn_wise_gae", "optimizer.critic_lr=0.1", "loss.value_clip=0.0"],
    ],
)
def test_what_is_read_or_left_as_it_is_is_accepted(changes):
    check(*changes)


OTHERS = dict(
    fraction=0.9, count=3, low=0.5, high=0.75, prefer="smallest", metric="length",
    keep_zero=True, zero=2.0, margin=2.0, rounding="down", loss_scale="sqrt",
)  # fmt: skip


OF_THE_RUN = dict(scope="batch")  # not read by `keep_groups`


def test_every_leaf_that_only_some_strategies_read_is_tried_below():
    known = frozenset().union(*(facts.reads for facts in FILTER_STRATEGIES.values()))
    assert known == {f"filter.{name}" for name in OTHERS | OF_THE_RUN}


@pytest.mark.parametrize("strategy", ["none", "within_group"])
def test_scope_changes_nothing_where_it_is_said_not_to_be_read(strategy):
    assert "filter.scope" not in FILTER_STRATEGIES[strategy].reads
    task = dict(name="frozen_lake", prompts=2)
    rows, episodes = updates.record()
    episodes = episodes.replace(environment=episodes.group // 2)
    kept = []
    for change in ({}, {"filter__scope": OF_THE_RUN["scope"]}):
        chosen = updates.settings(
            env=dict(name="mix", thinking=True, mix=dict(one=task, other=task)),
            filter__strategy=strategy,
            filter__fraction=0.5,
            **change,
        )
        found = filters.uncertainty_filter(
            chosen, rows, episodes, jnp.int32(0), rewards.played_rewards(episodes, 0.0)
        )
        kept.append(found.keep.tolist())
    assert kept[0] == kept[1]


@pytest.mark.parametrize("strategy", list(FILTER_STRATEGIES))
def test_what_a_strategy_is_said_not_to_read_does_not_change_what_it_keeps(strategy):
    config = cli.load_config(f"{CONFIGS}/frozenlake.py")
    config.filter.update(strategy=strategy, fraction=0.5)
    chosen = settings.from_dict(config.to_dict()).filter
    score = jnp.array([3.0, 0.0, 1.0, 0.5, 1.5, 0.25])
    kept = strategies.keep_groups(score, chosen, 0.5)
    for name, value in OTHERS.items():
        if f"filter.{name}" in FILTER_STRATEGIES[strategy].reads:
            continue
        other = dataclasses.replace(chosen, **{name: value})
        fraction = 0.9 if name == "fraction" else 0.5
        found = strategies.keep_groups(score, other, fraction)
        np.testing.assert_array_equal(found, kept, err_msg=name)


def test_a_config_is_executed_once_whatever_is_asked_of_it(tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(
        "from ml_collections import ConfigDict\n"
        "open('executed', 'a').write('x')\n"
        "def get_config(): return ConfigDict(dict(a=1, b=dict(c=2, d=3)))\n"
    )
    monkeypatch.chdir(tmp_path)
    flag_values = flags.FlagValues()
    cli.define_config(flag_values=flag_values)
    cli.parse(["train.py", f"--config={path}", "--config.b.d=4"], flag_values)
    assert cli.changed_keys(flag_values.config) == ["b.d"]
    assert (tmp_path / "executed").read_text() == "x"
