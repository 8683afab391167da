"""Settings: presets, refusals that say what to do, devices, and resumed runs."""

import copy
import dataclasses
import json
import math
import runpy

import pytest
from helpers.paths import CONFIGS

from ragen_jax import settings
from ragen_jax.envs.frozen_lake.env import FrozenLake
from ragen_jax.errors import SettingsError
from ragen_jax.learning import aggregation, estimators, filters, losses, strategies

CONFIG = CONFIGS / "frozenlake.py"
get_config = runpy.run_path(str(CONFIG))["get_config"]
EIGHT_ROWS = dict(optimizer__minibatch=8, optimizer__microbatch=8)


def config(variant: str = "", **overrides) -> dict:
    """The FrozenLake config with leaves replaced: `rollout__prompts=3`."""
    made = get_config(variant).to_dict()
    for key, value in overrides.items():
        *sections, leaf = key.split("__")
        section = made
        for name in sections:
            section = section[name]
        section[leaf] = value
    return made


def read(variant: str = "", **overrides) -> settings.Settings:
    return settings.from_dict(config(variant, **overrides))


def refusal(call, *args) -> str:
    with pytest.raises(SettingsError) as caught:
        call(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "strategy", "clip_high", "kl"),
    [("starpo_s", "top_fraction", 0.28, 0.0), ("starpo", "none", 0.2, 0.001)],
)
def test_the_algorithm_decides_filter_clip_and_kl(algorithm, strategy, clip_high, kl):
    made = read(algorithm=algorithm)
    assert made.filter.strategy == strategy
    assert made.loss.clip_high == clip_high
    assert made.loss.kl == kl


# By estimator: whether it whitens and divides by the group's standard deviation, which
# estimate of KL it takes and where, and the discount and the value of a turn.
PRESETS = {
    "ppo": (True, False, "k1", "reward", 1.0, "first"),
    "grpo": (False, True, "k3", "loss", 1.0, "first"),
    "dr_grpo": (False, False, "k3", "loss", 1.0, "first"),
    "rloo": (False, False, "k3", "loss", 1.0, "first"),
    "reinforce_pp": (True, False, "k1", "reward", 1.0, "first"),
    "reinforce_pp_baseline": (True, False, "k2", "loss", 1.0, "first"),
    "bi_level_gae": (True, False, "k1", "reward", 0.95, "last"),
    "turn_wise_gae": (True, False, "k1", "reward", 0.95, "first"),
    "turn_grpo": (False, True, "k3", "loss", 1.0, "first"),
}


def test_the_estimator_decides_whitening_division_kl_and_the_value_of_turns():
    assert PRESETS.keys() == settings.ESTIMATORS.keys()
    for estimator, expected in PRESETS.items():
        made = read(estimator=estimator)
        advantage, loss = made.advantage, made.loss
        found = (advantage.whiten, advantage.divide_by_std, loss.kl_kind, loss.kl_in)
        found += (advantage.turn_gamma, advantage.turn_value)
        assert found == expected, estimator
    with_critic = {name for name in PRESETS if read(estimator=name).has_critic}
    assert with_critic == {"ppo", "bi_level_gae", "turn_wise_gae"}


def test_a_value_of_the_user_wins_over_every_preset():
    made = read(
        filter__strategy="none",
        loss__clip_high=0.5,
        loss__kl=0.0,
        advantage__whiten=False,
        algorithm="starpo",
    )
    assert made.filter.strategy == "none"
    assert (made.loss.clip_high, made.loss.kl) == (0.5, 0.0)
    assert made.advantage.whiten is False


def test_reading_does_not_change_the_config():
    given = config()
    before = copy.deepcopy(given)
    settings.from_dict(given)
    assert given == before


def test_the_paper_variant_holds_the_papers_numbers():
    made = read("paper")
    rollout, optimizer, evaluation = made.rollout, made.optimizer, made.evaluation
    assert made.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (made.iterations, rollout.prompts, rollout.group_size) == (200, 8, 16)
    assert (rollout.turns, rollout.actions_per_turn, rollout.actions) == (5, 5, 10)
    assert (optimizer.actor_lr, optimizer.critic_lr) == (1e-6, 1e-5)
    assert (optimizer.beta1, optimizer.beta2, optimizer.minibatch) == (0.9, 0.999, 32)
    assert (made.advantage.gamma, made.advantage.lam) == (1.0, 1.0)
    assert (made.loss.entropy, made.reward.format_penalty) == (0.001, -0.1)
    assert (made.loss.clip_low, made.loss.clip_high, made.loss.kl) == (0.2, 0.28, 0.0)
    assert made.filter.fraction == 0.25
    assert (evaluation.prompts, evaluation.temperature) == (256, 0.5)
    assert dict(made.env.options)["success_probability"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("history", "turns"), [("full", 0), ("window", 3), ("single", 1)]
)
def test_a_history_says_how_many_turns_a_row_holds(history, turns):
    made = read(rollout__history=history, rollout__window=3)
    assert made.rollout.window_turns == turns


def test_an_unknown_variant_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'smok'.*'smoke', 'smollm2', 'paper'"):
        get_config("smok")


@pytest.mark.parametrize("variant", ["", "smoke", "paper"])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_every_variant_runs_on_any_usual_number_of_devices(variant, devices):
    sizes = settings.check_devices(read(variant), devices)
    assert sizes == {"data": devices, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize("devices", [1, 2])
def test_the_small_steps_of_smollm2_suit_one_device_or_two(devices):
    sizes = settings.check_devices(read("smollm2"), devices)
    assert sizes == {"data": 1, "fsdp": devices, "tensor": 1}


def test_the_tables_of_names_are_the_librarys():
    assert settings.ESTIMATORS.keys() == estimators.ESTIMATORS.keys()
    assert settings.KL_KINDS.keys() == losses.KL_KINDS.keys()
    assert settings.AGGREGATIONS.keys() == aggregation.AGGREGATIONS.keys()
    assert settings.FILTER_STRATEGIES.keys() == strategies.STRATEGIES.keys()
    assert settings.FILTER_METRICS.keys() == filters.METRICS.keys()


# The overrides, then what the message must contain: keys, values and a remedy.
WRONG = [
    # Unknown keys, with the nearest known one.
    (dict(rollout__promts=3), ["rollout.promts = 3", "did you mean rollout.prompts"]),
    (dict(temperature=0.7), ["temperature = 0.7", "rollout.temperature"]),
    (dict(optimizer__lr=1e-6), ["optimizer.lr = 1e-06", "optimizer.actor_lr"]),
    (dict(optimizer__zzz=1), ["optimizer.zzz = 1", "choose one of optimizer.actor_lr"]),
    (dict(sed=1), ["sed = 1", "did you mean seed"]),
    # Wrong types.
    (dict(rollout__prompts=True), ["rollout.prompts = True", "a whole number"]),
    (dict(rollout__prompts=8.0), ["rollout.prompts = 8.0", "a whole number"]),
    (dict(rollout__prompts="8"), ["rollout.prompts = '8'", "a whole number"]),
    (dict(loss__entropy=False), ["loss.entropy = False", "a number"]),
    (dict(loss__entropy="small"), ["loss.entropy = 'small'", "a number"]),
    (dict(deterministic=1), ["deterministic = 1", "True or False"]),
    (dict(model__path=None), ["model.path = None", "a text"]),
    (dict(rollout=8), ["rollout = 8", "section", "rollout.prompts"]),
    # Numbers that are not finite, or beyond their limits.
    (dict(loss__kl=math.nan), ["loss.kl = nan", "a finite number"]),
    (dict(optimizer__actor_lr=math.inf), ["optimizer.actor_lr = inf", "finite"]),
    (dict(optimizer__actor_lr=-1e-6), ["optimizer.actor_lr = -1e-06", "0 or more"]),
    (dict(optimizer__beta2=1.0), ["optimizer.beta2 = 1.0", "below 1"]),
    # 1 in float32: the first step of Adam would divide by 0.
    (dict(optimizer__beta1=1 - 1e-8), ["beta1 = 0.99999999", "at most 0.9999999"]),
    (dict(optimizer__clip_norm=0), ["optimizer.clip_norm = 0", "above 0"]),
    (dict(rollout__temperature=0.0), ["rollout.temperature = 0.0", "1e-06 or more"]),
    (dict(rollout__temperature=1e-37), ["rollout.temperature = 1e-37", "1e-06 or"]),
    (
        dict(evaluation__temperature=1e-7),
        ["evaluation.temperature = 1e-07", "choose 0, or 1e-06 or more"],
    ),
    (dict(rollout__turns=0), ["rollout.turns = 0", "1 or more"]),
    (dict(rollout__reply_tokens=-5), ["rollout.reply_tokens = -5", "1 or more"]),
    (dict(iterations=0), ["iterations = 0", "1 or more"]),
    (dict(seed=-1), ["seed = -1", "0 to 2**32 - 1"]),
    (dict(seed=2**32), ["seed = 4294967296", "0 to 2**32 - 1"]),
    (dict(every__evaluate=-1), ["every.evaluate = -1", "0 or more"]),
    (dict(checkpoint__keep_last=0), ["checkpoint.keep_last = 0", "1 or more"]),
    (dict(filter__fraction=0.0), ["filter.fraction = 0.0", "above 0 and at most 1"]),
    (dict(filter__fraction=1.5), ["filter.fraction = 1.5", "above 0 and at most 1"]),
    (dict(advantage__gamma=1.01), ["advantage.gamma = 1.01", "from 0 to 1"]),
    (dict(loss__clip_low=1.0), ["loss.clip_low = 1.0", "below 1"]),
    (dict(reward__format_penalty=0.1), ["format_penalty = 0.1", "0 or a negative"]),
    (dict(mesh__fsdp=0), ["mesh.fsdp = 0", "1 or more, or -1"]),
    # Names from lists.
    (dict(algorithm="grpo"), ["algorithm = 'grpo'", "starpo, starpo_s"]),
    (dict(estimator="gae"), ["estimator = 'gae'", "one of ppo, grpo"]),
    (dict(filter__strategy="best"), ["filter.strategy = 'best'", "top_fraction"]),
    (dict(loss__kl_kind="k4"), ["loss.kl_kind = 'k4'", "k1, k2, k3"]),
    (dict(model__compute_dtype="fp16"), ["compute_dtype = 'fp16'", "bfloat16"]),
    (dict(optimizer__schedule="step"), ["optimizer.schedule = 'step'", "cosine"]),
    (dict(env__name=" "), ["env.name = ' '", "not empty"]),
    # Combinations.
    (
        dict(mesh__fsdp=-1),
        ["mesh.data = -1", "mesh.fsdp = -1", "set mesh.fsdp to a number"],
    ),
    (
        dict(rollout__group_size=1, filter__strategy="top_fraction"),
        ["group_size = 1", "'return_std'", "2 or more", "filter.strategy to 'none'"],
    ),
    (
        dict(rollout__group_size=1, algorithm="starpo", estimator="grpo"),
        ["group_size = 1", "estimator = 'grpo'", "2 or more", "'ppo'"],
    ),
    (
        dict(estimator="grpo", optimizer__critic_warmup=3),
        ["critic_warmup = 3", "'grpo'", "set it to 0"],
    ),
    (
        dict(iterations=100, optimizer__critic_warmup=100),
        ["critic_warmup = 100", "iterations = 100", "at most 99"],
    ),
    (
        dict(optimizer__schedule_updates=5, optimizer__warmup=5),
        [
            "schedule_updates = 5 leaves no gradient step",
            "warmup = 5",
            "above 5",
            "at most 4",
        ],
    ),
    (
        # 50 * 40 / 100 = 20 are the actor's; 53 * 40 / 100 = 21.2.
        dict(
            iterations=100,
            optimizer__critic_warmup=60,
            optimizer__warmup=20,
            optimizer__schedule_updates=50,
        ),
        [
            "schedule_updates = 50 leaves the actor 20 gradient steps",
            "critic_warmup = 60",
            "iterations = 100",
            "optimizer.warmup = 20",
            "to 53 or more",
            "set it to 0",
            "at most 19",
        ],
    ),
    (
        dict(rollout__actions_per_turn=11),
        ["actions_per_turn = 11", "rollout.actions = 10", "at most 10"],
    ),
    (
        dict(rollout__slots=129),
        ["rollout.slots = 129", "8 * 16 = 128", "to 0 for what suits CPU or GPU"],
    ),
    # Records that int32 cannot count.
    (
        dict(evaluation__rollouts=2**31 - 1),
        ["evaluation.rollouts * rollout.turns", "lower evaluation.rollouts"],
    ),
    (
        dict(evaluation__test_prompts=10**9, evaluation__slots=0),
        ["evaluation.test_prompts * evaluation.test_rollouts", "test_prompts, the"],
    ),
    (
        dict(evaluation__test_prompts=10**9, evaluation__slots=2**30),
        ["evaluation.test_prompts * evaluation.test_rollouts", "test_prompts, the"],
    ),
    (
        dict(rollout__turns=10**4, rollout__reply_tokens=10**6),
        ["rollout.turns * rollout.reply_tokens", "lower rollout.reply_tokens"],
    ),
    (
        dict(rollout__context=40),
        ["rollout.context = 40", "reply_tokens = 48", "rollout.context to 0"],
    ),
    (
        dict(optimizer__microbatch=12),
        ["minibatch = 32", "microbatch = 12", "set optimizer.microbatch to 8"],
    ),
    (
        dict(optimizer__minibatch=2**31 - 1, optimizer__microbatch=2 * 10**9),
        ["minibatch = 2147483647 rows is more than", "at most 128"],
    ),
    (
        dict(optimizer__minibatch=126, optimizer__microbatch=64),
        ["minibatch = 126", "set optimizer.microbatch to 63"],
    ),
    (
        dict(optimizer__minibatch=256),
        ["minibatch = 256", "8 * 16 = 128", "at most 128"],
    ),
    (
        dict(rollout__history="window", optimizer__minibatch=1024),
        ["minibatch = 1024", "8 * 16 * 5 = 640 turns", "rollout.turns", "at most 640"],
    ),
    (
        dict(loss__kl=0.01, loss__kl_in="loss", loss__kl_kind="k1"),
        ["loss.kl = 0.01", "kl_in to 'reward'", "kl_kind to 'k3'"],
    ),
    (
        dict(loss__kl=0.0, loss__kl_end=0.02, loss__kl_in="loss", loss__kl_kind="k1"),
        ["loss.kl_end = 0.02 with", "kl_in to 'reward'"],
    ),
    # Filters, estimators and losses that make no sense together.
    (
        dict(loss__kl=0.0, loss__kl_end=0.02, advantage__zero_task=True),
        ["but loss.kl_end = 0.02 with", "or loss.kl_end to 0"],
    ),
    (
        dict(estimator="turn_grpo", advantage__length_weight=True),
        ["length_weight = True", "'turn_grpo' gives each turn", "estimator to 'grpo'"],
    ),
    (
        dict(algorithm="starpo", advantage__zero_task=True),
        ["zero_task = True", "loss.kl = 0.001", "kl_in to 'loss'", "loss.kl to 0"],
    ),
    (
        dict(estimator="dr_grpo", optimizer__critic_warmup=3),
        ["critic_warmup = 3", "'dr_grpo', which has no critic", "set it to 0"],
    ),
    (
        dict(estimator="dr_grpo", advantage__divide_by_std=True),
        ["divide_by_std = True", "'dr_grpo'", "estimator to 'grpo'"],
    ),
    (
        dict(loss__kl=0.01, loss__kl_in="reward", loss__kl_kind="k1+"),
        ["kl_kind = 'k1+'", "gradient alone", "set it to 'k1'"],
    ),
    (
        dict(estimator="bi_level_gae", advantage__length_weight=True),
        ["length_weight = True", "'bi_level_gae'", "estimator to 'grpo'"],
    ),
    (
        dict(estimator="reinforce_pp", advantage__length_weight=True),
        ["length_weight = True", "'reinforce_pp'", "estimator to 'grpo'"],
    ),
    (
        dict(loss__entropy_on="thought", env__thinking=False),
        ["entropy_on = 'thought'", "env.thinking = False", "set it to 'reply'"],
    ),
    (
        dict(filter__strategy="percentile_range", filter__low=0.5, filter__high=0.25),
        ["filter.low = 0.5", "filter.high = 0.25", "swap them"],
    ),
    (
        dict(filter__strategy="top_count", filter__count=9),
        ["filter.count = 9", "rollout.prompts = 8", "lower it"],
    ),
    (
        dict(filter__strategy="within_group", filter__fraction=0.05),
        ["fraction = 0.05", "group_size = 16", "fewer than 2", "0.125 or more"],
    ),
    (
        dict(filter__strategy="none", filter__fraction_end=0.5),
        ["fraction_end = 0.5", "does nothing", "set it to -1"],
    ),
    (
        dict(filter__fraction_end=-0.5),
        ["fraction_end = -0.5", "-1 for the same throughout"],
    ),
    (dict(loss__dual_clip=0.5), ["dual_clip = 0.5", "above 1, or 0"]),
    (dict(loss__surrogate="ppo"), ["loss.surrogate = 'ppo'", "clip, cispo"]),
    (dict(loss__cut_replies="drop"), ["loss.cut_replies = 'drop'", "learn, mask"]),
    (
        dict(loss__surrogate="cispo", loss__dual_clip=3.0),
        ["loss.dual_clip = 3 does nothing", "'cispo'", "surrogate to 'clip'"],
    ),
    (dict(loss__kl_end=-2.0), ["kl_end = -2.0", "0 or more, or -1"]),
    (
        dict(rollout__group_size=1, filter__strategy="none", filter__reweight=True)
        | EIGHT_ROWS,
        ["group_size = 1", "filter.reweight = True", "set it to False"],
    ),
    (
        dict(rollout__group_size=1, filter__strategy="none", reward__normalize="mean")
        | EIGHT_ROWS,
        ["reward.normalize = 'mean'", "group_size = 1", "normalize_by to 'batch'"],
    ),
]


@pytest.mark.parametrize(("overrides", "parts"), WRONG, ids=lambda x: str(x)[:40])
def test_a_wrong_setting_is_refused_with_key_value_and_remedy(overrides, parts):
    message = refusal(settings.from_dict, config(**overrides))
    assert [part for part in parts if part not in message] == [], message
    assert "\n" not in message


def test_a_missing_key_is_named():
    made = config()
    del made["rollout"]["turns"]
    assert "rollout.turns is missing: add it" in refusal(settings.from_dict, made)


def test_slots_for_more_episodes_than_an_evaluation_has_are_a_limit_that_is_not_met():
    found = read(evaluation__prompts=64, evaluation__test_prompts=32)
    assert found.evaluation.slots == 128
    settings.check_devices(found, 2)


def test_no_remedy_is_a_schedule_as_short_as_the_one_that_is_refused():
    few = dict(iterations=4, optimizer__warmup=5, optimizer__schedule_updates=5)
    for changes in (few, few | dict(optimizer__critic_warmup=2)):
        with pytest.raises(SettingsError) as refusal:
            read(**changes)
        assert "set it to 0" not in str(refusal.value)


def test_a_validation_that_is_off_limits_neither_devices_nor_its_record():
    off = dict(every__evaluate=0, evaluation__prompts=10**9 + 1, evaluation__slots=0)
    settings.check_devices(read(**off), 2)


def test_remedies_of_combinations_are_accepted():
    read(rollout__group_size=1, filter__strategy="none", **EIGHT_ROWS)
    read(iterations=100, optimizer__critic_warmup=99)
    read(optimizer__schedule_updates=6, optimizer__warmup=5)
    read(optimizer__schedule_updates=5, optimizer__warmup=4)
    windows = dict(rollout__history="window", optimizer__minibatch=640)
    read(estimator="turn_grpo", advantage__length_weight=True, **windows)
    of_critic = dict(iterations=100, optimizer__critic_warmup=60)
    read(**of_critic, optimizer__schedule_updates=53, optimizer__warmup=20)
    read(**of_critic, optimizer__schedule_updates=50, optimizer__warmup=19)
    read(**of_critic, optimizer__schedule_updates=0, optimizer__warmup=20)
    constant = dict(optimizer__schedule="constant", optimizer__critic_schedule="linear")
    few = dict(optimizer__schedule_updates=50, optimizer__warmup=20)
    read(**of_critic, **constant, **few)
    read(algorithm="starpo", estimator="grpo", advantage__zero_task=True)
    read(rollout__actions_per_turn=10)
    read(evaluation__test_prompts=10**9)
    read(optimizer__microbatch=8)
    read(optimizer__minibatch=128)
    read(optimizer__minibatch=640, rollout__history="window")
    read(loss__kl=0.01, loss__kl_in="loss", loss__kl_kind="k3")
    read(loss__kl=0.01, loss__kl_in="reward", loss__kl_kind="k1")
    read(filter__strategy="within_group", filter__fraction=0.125)
    read(filter__strategy="top_count", filter__count=8)
    read(rollout__group_size=1, filter__metric="length", **EIGHT_ROWS)
    normalized = dict(reward__normalize="mean", reward__normalize_by="batch")
    alone = dict(rollout__group_size=1, filter__strategy="none")
    read(**alone, **normalized, **EIGHT_ROWS)


@pytest.mark.parametrize("name", sorted(settings.ESTIMATORS))
def test_every_estimator_can_be_chosen_with_its_presets_and_a_kl_term(name):
    made, facts = read(estimator=name, algorithm="starpo"), settings.ESTIMATORS[name]
    assert made.has_critic is facts.has_critic and made.has_reference
    assert settings.flatten(settings.to_dict(made)).items() >= facts.presets.items()


def test_a_whole_number_may_stand_for_a_float_and_becomes_one():
    value = read(optimizer__clip_norm=2).optimizer.clip_norm
    assert value == 2.0 and type(value) is float


def test_an_environment_reads_its_options_and_keeps_its_defaults_for_the_rest():
    made = settings.env_settings(read(env__size=6).env.options, FrozenLake)
    assert made == FrozenLake(size=6)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (dict(env__sizes=5), ["env.sizes = 5", "did you mean env.size"]),
        (dict(env__thinkin=True), ["env.thinkin = True", "env.thinking"]),
        (dict(env__options=3), ["env.options = 3", "choose one of env."]),
        (dict(env__size="big"), ["env.size = 'big'", "a whole number"]),
        (dict(env__frozen_probability=math.nan), ["env.frozen_probability = nan"]),
        (dict(env__symbols=[1, 2]), ["env.symbols = (1, 2)", "a tuple of texts"]),
    ],
)
def test_a_wrong_option_of_an_environment_is_refused(options, parts):
    given = read(**options).env.options
    message = refusal(settings.env_settings, given, FrozenLake)
    assert [part for part in parts if part not in message] == [], message


def test_the_free_axis_takes_what_the_others_leave():
    made = read(mesh__data=2, mesh__fsdp=-1, mesh__tensor=2)
    assert settings.check_devices(made, 8) == {"data": 2, "fsdp": 2, "tensor": 2}


WRONG_DEVICES = [
    (
        dict(mesh__tensor=3),
        8,
        ["mesh.fsdp * mesh.tensor = 1 * 3 = 3", "8 devices", "one of 1, 2, 4, 8"],
    ),
    (
        dict(mesh__data=2),
        8,
        ["= 2 * 1 * 1 = 2, but there are 8 devices", "set mesh.data to -1"],
    ),
    (
        dict(mesh__data=2, mesh__fsdp=3),
        8,
        ["= 2 * 3 * 1 = 6", "mesh.fsdp * mesh.tensor to a divisor of 8"],
    ),
    # 8 groups of 16 over 12 devices: 12 groups are the next that share.
    (
        dict(),
        12,
        ["8 * 16 = 128 episodes", "12 devices", "rollout.prompts to 12", "8 devices"],
    ),
    # 96 episodes on 4 shards are 24 each, which is one and a half groups.
    (
        dict(rollout__prompts=6),
        4,
        ["6 * 16 = 96 episodes", "4 devices", "rollout.prompts to 8", "3 devices"],
    ),
    (
        dict(rollout__slots=30),
        8,
        ["rollout.slots = 30", "8 devices", "set it to 32", "to 0"],
    ),
    (
        dict(optimizer__minibatch=40, optimizer__microbatch=20),
        8,
        ["microbatch = 20", "8 devices", "microbatch to 16", "minibatch to 32"],
    ),
    (
        dict(evaluation__prompts=100, evaluation__slots=0),
        8,
        ["evaluation.prompts * evaluation.rollouts = 100 * 1", "prompts to 104"],
    ),
    (
        dict(evaluation__test_prompts=255, evaluation__slots=0),
        2,
        ["evaluation.test_prompts", "255 * 1 = 255", "test_prompts to 256"],
    ),
    (
        dict(rollout__layout="tensor"),
        8,
        ["rollout.layout = 'tensor'", "mesh.tensor = 1", "'replicated'"],
    ),
]


@pytest.mark.parametrize(("overrides", "devices", "parts"), WRONG_DEVICES)
def test_devices_that_do_not_fit_are_refused_with_a_way_out(overrides, devices, parts):
    message = refusal(settings.check_devices, read(**overrides), devices)
    assert [part for part in parts if part not in message] == [], message
    assert "\n" not in message


def test_remedies_for_devices_are_accepted():
    settings.check_devices(read(rollout__prompts=8), 4)
    settings.check_devices(read(rollout__slots=32), 8)
    settings.check_devices(read(rollout__layout="tensor", mesh__tensor=2), 8)


def test_a_group_may_be_split_into_equal_parts_only():
    # 2 groups of 12 on 8 shards are 3 each, a quarter of a group. 3 groups of 8 on 4
    # shards are 6 each, which is not.
    quarters = read(rollout__prompts=2, rollout__group_size=12, **EIGHT_ROWS)
    settings.check_devices(quarters, 8)
    uneven = read(rollout__prompts=3, rollout__group_size=8, **EIGHT_ROWS)
    assert "rollout.prompts to 4" in refusal(settings.check_devices, uneven, 4)


@pytest.mark.parametrize(
    "variant", ["", "slippery", "firm", "smoke", "smollm2", "paper"]
)
def test_settings_survive_a_json_file(variant):
    made = read(variant, env__symbols=("a", "b", "c", "d", "e", "f"))
    assert settings.from_dict(json.loads(json.dumps(settings.to_dict(made)))) == made


def test_a_run_may_be_resumed_with_another_mesh_length_cadence_and_kernels():
    now = read(
        iterations=7,
        model__attention="xla",
        rollout__decode_attention="xla",
        rollout__cuda_graph=True,
        mesh__fsdp=2,
        every__log=3,
        evaluation__temperature=0.0,
        checkpoint__keep_last=9,
    )
    saved, now = settings.to_dict(read()), settings.to_dict(now)
    assert settings.differences(saved, now) == []
    settings.check_same_run(saved, now, "runs/a")


def test_a_run_may_be_resumed_with_what_the_documents_list_and_nothing_else():
    keys = {"iterations", "model.path", "model.attention", "optimizer.microbatch"}
    keys |= {"loss.logprob_gap_limit"}
    names = ("layout", "slots", "cuda_graph", "decode_attention")
    keys |= {f"rollout.{name}" for name in names}
    sections = {"mesh", "every", "evaluation", "checkpoint", "safety", "health"}
    saved = settings.to_dict(read())
    may = {
        key
        for key in settings.flatten(saved)
        if settings.differences(saved, _with_leaf(saved, key.split("."))) == []
    }
    listed = {key for key in settings.flatten(saved) if key.split(".")[0] in sections}
    assert may == keys | listed


def _with_leaf(tree, key):
    """The tree with another value at a leaf."""
    name, *rest = key
    return tree | {name: _with_leaf(tree[name], rest) if rest else "another"}


def test_a_run_may_be_resumed_with_what_another_mesh_asks_for():
    tensor = dict(mesh__tensor=2, rollout__layout="tensor", rollout__slots=6)
    before = read(optimizer__minibatch=8, optimizer__microbatch=4, **tensor)
    saved = settings.to_dict(before)
    alone = dataclasses.replace(before, mesh=settings.MeshSettings(-1, 1, 1))
    assert "rollout.layout to 'replicated'" in refusal(settings.check_devices, alone, 8)
    chosen = dict(rollout__layout="replicated", rollout__slots=8)
    now = read(**EIGHT_ROWS | chosen)
    settings.check_devices(now, 8)
    settings.check_same_run(saved, settings.to_dict(now), "runs/a")


def test_a_run_is_not_resumed_with_other_numbers():
    saved = settings.to_dict(read(optimizer__actor_lr=1e-4))
    now = settings.to_dict(read(optimizer__actor_lr=5e-5, env__size=5, seed=1))
    assert settings.differences(saved, now) == [
        "env.size was 4 and is 5",
        "optimizer.actor_lr was 0.0001 and is 5e-05",
        "seed was 0 and is 1",
    ]
    message = refusal(settings.check_same_run, saved, now, "runs/a")
    assert message.startswith("runs/a holds a run made with other settings")
    assert "env.size was 4 and is 5" in message and "--workdir" in message


def test_a_key_that_one_of_two_runs_lacks_is_a_difference():
    saved = settings.to_dict(read())
    now = copy.deepcopy(saved)
    del now["env"]["size"]
    assert settings.differences(saved, now) == ["env.size was 4 and is absent"]
    assert settings.differences(now, saved) == ["env.size was absent and is 4"]


@pytest.mark.parametrize(
    ("key", "default", "other"),
    [
        ("rollout.decode_weights", "same", "int8"),
        ("loss.surrogate", "clip", "cispo"),
        ("loss.cut_replies", "learn", "mask"),
    ],
)
def test_a_setting_that_the_saved_run_did_not_know_yet_had_its_default(
    key, default, other
):
    saved, (section, leaf) = settings.to_dict(read()), key.split(".")
    del saved[section][leaf]
    settings.check_same_run(saved, settings.to_dict(read()), "runs/a")
    now = settings.to_dict(read(**{f"{section}__{leaf}": other}))
    message = refusal(settings.check_same_run, saved, now, "runs/a")
    assert f"{key} was {default!r} and is {other!r}" in message


def test_a_run_of_before_there_were_texts_resumes_and_is_written_as_it_was():
    saved = settings.to_dict(read())
    assert not {"instruction", "note"} & saved["env"].keys()
    without = config()
    del without["env"]["instruction"], without["env"]["note"]
    now = settings.to_dict(settings.from_dict(without))
    assert now == saved == json.loads(json.dumps(saved))
    settings.check_same_run(saved, now, "runs/a")


def test_a_run_is_not_resumed_with_another_text_of_the_prompt():
    long = "Look. " * 50
    saved = settings.to_dict(read(env__note=long))
    settings.check_same_run(json.loads(json.dumps(saved)), saved, "runs/a")
    message = refusal(
        settings.check_same_run, saved, settings.to_dict(read(env__note="a")), "runs/a"
    )
    assert "env.note was 'Look. Look. " in message and " and is 'a'" in message
    assert len(message) < 400
    new = refusal(settings.check_same_run, settings.to_dict(read()), saved, "runs/a")
    assert "env.note was absent and is 'Look. Look. " in new and len(new) < 400
    # Two that differ in the middle alone, of which the message shows the ends.
    middle = settings.to_dict(read(env__note=f"{long[:150]}!{long[150:]}"))
    assert settings.differences(saved, middle)


def test_a_setting_that_only_the_saved_run_knew_is_a_difference():
    now = settings.to_dict(read())
    saved = copy.deepcopy(now)
    saved["rollout"]["colour"] = "red"
    message = refusal(settings.check_same_run, saved, now, "runs/a")
    assert "rollout.colour was 'red' and is absent" in message
    assert "take the one that wrote them" in message and "Go back" not in message


def test_of_many_settings_that_differ_the_first_are_listed_and_the_rest_counted():
    now = settings.to_dict(read())
    saved = {key: value for key, value in now.items() if key != "rollout"}
    message = refusal(settings.check_same_run, saved, now, "runs/a")
    assert message.count("was absent and is") == 8
    differing = len(settings.differences(saved, now))
    assert f"; and {differing - 8} more. This version cannot use" in message


def test_settings_are_frozen_and_can_be_static_arguments():
    made = read()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.rollout.prompts = 3
    assert hash(made) == hash(read())


def test_the_config_has_exactly_the_known_keys():
    leaves = settings.flatten(config())
    own = {f"env.{field.name}" for field in dataclasses.fields(FrozenLake)}
    assert leaves.keys() - own == set(settings.known_keys())


@pytest.mark.parametrize(
    ("mesh", "devices", "fitted"),
    [
        ((8, 1, 1), 8, (8, 1, 1)),
        ((8, 1, 1), 1, (1, 1, 1)),
        ((2, 2, 2), 16, (4, 2, 2)),
        ((2, 2, 2), 6, (6, 1, 1)),
        ((4, -1, 1), 3, (3, 1, 1)),
        ((1, -1, 1), 7, (1, 7, 1)),
        ((-1, 1, 4), 1, (1, 1, 1)),
    ],
)
def test_the_mesh_of_a_run_is_fitted_to_any_number_of_devices(mesh, devices, fitted):
    sizes = settings.fit_mesh(settings.MeshSettings(*mesh), devices)
    assert tuple(sizes) == ("data", "fsdp", "tensor")
    assert tuple(sizes.values()) == fitted
