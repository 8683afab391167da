"""Settings of several environments: read, written back, and refused in one sentence."""

import copy

import pytest
from helpers import models
from helpers.paths import ROOT

from ragen_jax import cli, settings
from ragen_jax.errors import SettingsError, UserError
from ragen_jax.training import run as run_lib

CONFIG = cli.load_config(f"{ROOT}/configs/frozenlake.py:smoke").to_dict()
MIX = {
    "small": dict(name="frozen_lake", prompts=3, size=3, frozen_probability=0.7),
    "large": dict(name="frozen_lake", prompts=1, size=6, turns=2, actions=4),
}


def config_of(mix=None, evaluate=None, **env):
    config = copy.deepcopy(CONFIG)
    config["env"] = {"name": "mix" if mix else "frozen_lake", "thinking": True, **env}
    if mix is not None:
        config["env"]["mix"] = copy.deepcopy(mix)
    if evaluate is not None:
        config["env"]["evaluate"] = copy.deepcopy(evaluate)
    config["rollout"]["prompts"] = 4
    return config


def test_environments_come_in_the_order_of_their_labels_with_limits_filled_in():
    made = settings.from_dict(config_of(MIX))
    large, small = made.tasks()
    assert (large.label, large.prompts, large.turns, large.actions) == (
        *("large", 1),
        *(2, 4),
    )
    assert large.actions_per_turn == 4  # No more than an episode's.
    assert (small.turns, small.actions) == (made.rollout.turns, made.rollout.actions)
    assert dict(small.options) == {"size": 3, "frozen_probability": 0.7}
    assert made.evaluated_tasks() == made.tasks()


def test_levels_of_one_evaluated_environment_alone_cannot_be_set():
    wide = dict(name="frozen_lake", prompts=5)
    with pytest.raises(SettingsError, match=r"^env\.evaluate\.wide\.prompts is not"):
        settings.from_dict(config_of(evaluate=dict(wide=wide)))


def test_other_environments_may_be_evaluated_than_are_trained_on():
    made = settings.from_dict(config_of(evaluate=dict(wide=dict(name="frozen_lake"))))
    assert [env.label for env in made.tasks()] == ["frozen_lake"]
    (wide,) = made.evaluated_tasks()
    alone = made.alone(wide)
    assert (alone.env.name, alone.env.options) == ("frozen_lake", ())
    assert alone.evaluated_tasks()[0].label == "frozen_lake"


@pytest.mark.parametrize(
    ("evaluate", "label"),
    [
        (None, "frozen_lake"),
        (dict(a=dict(name="bandit"), z=dict(name="frozen_lake")), "z"),
        (dict(a=dict(name="frozen_lake", size=9), z=dict(name="frozen_lake")), "z"),
        (dict(a=dict(name="frozen_lake", turns=9), z=dict(name="frozen_lake")), "z"),
        (dict(a=dict(name="frozen_lake", note="b"), z=dict(name="frozen_lake")), "z"),
        (dict(a=dict(name="bandit"), z=dict(name="sokoban")), "a"),
    ],
)
def test_the_main_environment_is_the_evaluated_one_most_like_the_trained_one(
    evaluate, label
):
    made = settings.from_dict(config_of(evaluate=evaluate, size=4))
    assert settings.main_task(made).label == label


def test_the_main_environment_of_several_trained_ones_is_the_first_by_label():
    assert settings.main_task(settings.from_dict(config_of(MIX))).label == "large"


@pytest.mark.parametrize("evaluate", [None, dict(a=dict(name="frozen_lake", size=5))])
def test_what_is_written_is_read_back(evaluate):
    made = settings.from_dict(config_of(MIX, evaluate))
    assert settings.from_dict(settings.to_dict(made)) == made


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (config_of(MIX, name="frozen_lake"), ["env.name", "2 environments", "'mix'"]),
        (
            config_of(name="mix"),
            ["0 environments in env.mix", "give env.mix a section"],
        ),
        (
            config_of(MIX, size=4),
            ["env.size belongs to no environment", "env.mix.large"],
        ),
        (
            config_of(MIX, instruction="Go.", note="Slowly."),
            ["env.instruction, env.note belongs to no environment", "env.mix.large"],
        ),
        (
            config_of({"small": MIX["small"] | dict(note=3)}),
            ["env.mix.small.note = 3", "choose a text"],
        ),
        (
            config_of({**MIX, "small": dict(name="frozen_lake", prompts=2)}),
            ["rollout.prompts = 4", "small 2 = 3", "set rollout.prompts to 3"],
        ),
        (
            config_of({**MIX, "none": dict(name="frozen_lake", prompts=0)}),
            ["env.mix.none.prompts = 0", "take the environment out"],
        ),
        (
            config_of({**MIX, "small": dict(name="frozen_lake", prompts=-3)}),
            ["env.mix.small.prompts = -3", "0 or more"],
        ),
        (
            config_of({**MIX, "small": dict(prompts=3)}),
            ["env.mix.small.name is missing"],
        ),
        (
            config_of({**MIX, "small": dict(name="frozen_lake", label="big")}),
            ["env.mix.small.label = 'big' is not read", "'small': take it out"],
        ),
        (config_of({"a/b": dict(name="frozen_lake")}), ["'a/b'", "letters"]),
        (config_of({"after": dict(name="frozen_lake")}), ["'after'", "test.json"]),
        (config_of({"a": 3}), ["env.mix = {'a': 3}", "a section for each environment"]),
        (
            config_of(
                dict(a=dict(name="lake", prompts=4, actions=2, actions_per_turn=5))
            ),
            ["a: actions_per_turn = 5", "actions = 2"],
        ),
    ],
)
def test_a_wrong_mix_is_refused(config, parts):
    with pytest.raises(SettingsError) as refusal:
        settings.from_dict(config)
    message = str(refusal.value)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize("label", ["frozen_lake", "lake"])
def test_the_actions_of_an_environment_to_evaluate_are_checked_whatever_its_label(
    label,
):
    wrong = {label: dict(name="frozen_lake", actions=5, actions_per_turn=9)}
    with pytest.raises(SettingsError) as refusal:
        settings.from_dict(config_of(evaluate=wrong))
    assert f"{label}: actions_per_turn = 9 is more than actions = 5" in str(
        refusal.value
    )


def test_a_file_of_ones_own_is_refused_too_many_actions_by_the_key_to_change():
    config = config_of(name="my/lake.py")
    config["rollout"].update(actions_per_turn=7, actions=5)
    with pytest.raises(SettingsError, match=r"^rollout\.actions_per_turn = 7"):
        settings.from_dict(config)


def test_so_many_groups_as_each_environment_keeps_must_be_in_the_smallest():
    config = config_of(MIX)
    config["filter"].update(strategy="top_count", count=2)
    with pytest.raises(SettingsError) as refusal:
        settings.from_dict(config)
    message = str(refusal.value)
    assert "filter.count = 2 is more than env.mix.large.prompts = 1" in message
    assert message.endswith("lower filter.count to 1 or set filter.scope to 'batch'")
    config["filter"]["scope"] = "batch"
    settings.from_dict(config)


@pytest.mark.parametrize("section", ["mix", "evaluate"])
@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        (dict(name="chess"), ["'chess'"]),
        (dict(name="frozen_lake", size=1), ["small.size = 1", "2 to 10"]),
        (dict(name="frozen_lake", sizes=4), ["small.sizes = 4", "small.size"]),
    ],
)
def test_a_wrong_environment_of_several_is_refused_by_its_own_key(
    section, wrong, parts
):
    # Two prompts of four episodes each: eight devices can share them.
    changed = {"large": {**MIX["large"], "prompts": 2}, "small": wrong | {"prompts": 2}}
    if section == "evaluate":  # Which levels to evaluate is no share of a batch.
        for task in changed.values():
            del task["prompts"]
    config = config_of(**{section: changed})
    made = settings.from_dict(config)
    with pytest.raises(UserError) as refusal:
        run_lib.prepare(made)
    message = str(refusal.value)
    assert [part for part in parts if part not in message] == [], message
    if "size" in str(wrong):
        assert f"env.{section}.small." in message


def test_a_run_makes_each_environment_that_it_evaluates():
    other = dict(
        wide=dict(name="frozen_lake", size=5, turns=3), same=dict(name="frozen_lake")
    )
    run = run_lib.prepare(settings.from_dict(config_of(evaluate=other)))
    assert [task.label for task in run.tasks] == ["frozen_lake"]
    tasks = [task for task, _ in run.evaluated]
    assert [task.label for task in tasks] == ["same", "wide"]
    assert tasks[1].dialogue.limits.turns == 3


def test_the_context_of_training_does_not_bind_what_is_evaluated_alone():
    config = config_of(evaluate=dict(wide=dict(name="frozen_lake", size=6, turns=5)))
    context = run_lib.prepare(settings.from_dict(config)).plan.context
    config["rollout"]["context"] = context
    assert run_lib.prepare(settings.from_dict(config)).plan.context == context
    with pytest.raises(UserError, match="is too short"):
        trained = config_of(size=6)
        trained["rollout"].update(context=context, turns=5)
        run_lib.prepare(settings.from_dict(trained))


def test_a_reward_hook_may_count_on_as_many_turns_as_the_longest_environment_has(
    tmp_path,
):
    hook = tmp_path / "hook.py"
    hook.write_text(
        "import jax.numpy as jnp\n\n\n"
        "def turn_rewards(episodes):\n"
        "    return episodes.reward * jnp.arange(7.0)[None]\n"
    )
    config = config_of({**MIX, "large": {**MIX["large"], "turns": 7}})
    config["reward"]["hook"] = str(hook)
    made = settings.from_dict(config)
    assert made.rollout.turns < 7
    run = run_lib.prepare(made, models.one_device())
    assert run.plan.turns == 7


def long_mix(own_turns, **rollout):
    """A mix of which one environment has most turns: its own, or rollout.turns."""
    config = config_of({**MIX, "large": {**MIX["large"], "turns": own_turns}})
    config["rollout"].update(rollout)
    return config


@pytest.mark.parametrize(
    ("own_turns", "key", "most"),
    [(7, "env.mix.large.turns", 7), (2, "rollout.turns", 3)],
)
def test_messages_name_the_key_that_sets_the_most_turns(own_turns, key, most):
    config = long_mix(own_turns, turns=3, group_size=2, slots=0, history="window")
    config["optimizer"].update(minibatch=128, microbatch=4)
    with pytest.raises(SettingsError) as found:
        settings.from_dict(config)
    said = f"more than the 4 * 2 * {most} = {8 * most} turns of"
    assert f"{said} rollout.prompts * rollout.group_size * {key}: lower" in str(
        found.value
    )


def test_a_record_too_large_for_int32_names_the_key_of_its_own_turns():
    config = long_mix(10**4, reply_tokens=10**6)
    with pytest.raises(
        SettingsError, match=r"\* env\.mix\.large\.turns \* rollout\.reply"
    ):
        settings.from_dict(config)


def test_a_record_of_what_is_evaluated_names_the_key_of_its_own_turns():
    evaluate = dict(wide=dict(name="frozen_lake", turns=10**4))
    config = config_of(evaluate=evaluate)
    config["rollout"].update(reply_tokens=10**5)
    with pytest.raises(SettingsError, match=r"env\.evaluate\.wide\.turns \* rollout\."):
        settings.from_dict(config)


@pytest.mark.parametrize(
    ("own_turns", "key"), [(40, "env.mix.large.turns"), (0, "rollout.turns")]
)
def test_a_row_without_room_is_cured_by_the_key_that_sets_its_turns(own_turns, key):
    made = settings.from_dict(long_mix(own_turns, context=300, turns=6))
    with pytest.raises(UserError) as found:
        run_lib.prepare(made, models.one_device())
    assert f"exactly that, lower {key} or rollout.reply_tokens, or" in str(found.value)


def test_too_many_turns_for_the_model_are_cured_by_the_key_that_sets_them():
    made = settings.from_dict(long_mix(200, context=0))
    with pytest.raises(UserError) as found:
        run_lib.prepare(made, models.one_device())
    assert "; lower env.mix.large.turns or rollout.reply_tokens" in str(found.value)


def test_each_of_several_environments_has_its_own_texts():
    small, large = (dict(MIX[label]) for label in ("small", "large"))
    mix = dict(small=small | dict(instruction="Geh."), large=large | dict(note="Soon."))
    wide = dict(name="frozen_lake", instruction="Go.", note="Now.")
    config = config_of(mix, dict(wide=wide))
    config["rollout"]["prompts"] = 4
    made = settings.from_dict(config)
    assert settings.from_dict(settings.to_dict(made)) == made
    found = [
        (task.label, task.instruction, task.note)
        for task in (*made.tasks(), *made.evaluated_tasks())
    ]
    assert found == [
        ("large", "", "Soon."),
        ("small", "Geh.", ""),
        ("wide", "Go.", "Now."),
    ]
    (alone,) = made.alone(made.evaluated_tasks()[0]).tasks()
    assert alone.options_and_texts == (("instruction", "Go."), ("note", "Now."))
    assert settings.described(made.tasks()[0]) == "size 6, note 'Soon.'"


def test_a_run_on_several_environments_shows_each_its_own_texts():
    mix = dict(
        small=dict(name="frozen_lake", prompts=2, size=3, instruction="Geh zu G."),
        large=dict(name="frozen_lake", prompts=2, size=4, note="Think twice."),
    )
    wide = dict(name="frozen_lake", size=3, note="Avoid O.")
    run = run_lib.prepare(settings.from_dict(config_of(mix, dict(wide=wide))))
    large, small = (task.dialogue.system for task in run.tasks)
    assert "4 x 4 tiles" in large and "\nThink twice.\nYou have" in large
    assert small.startswith("Geh zu G.\nYou have")
    ((evaluated, _),) = run.evaluated
    assert "\nAvoid O.\nYou have" in evaluated.dialogue.system
