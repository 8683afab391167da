"""What launch/evaluate.py makes of its flags and of the settings."""

import dataclasses
import io
from types import SimpleNamespace

import pytest
from helpers import runs
from helpers.paths import ROOT

from ragen_jax import cli
from ragen_jax import settings as settings_lib
from ragen_jax.cli import evaluation, trust
from ragen_jax.cli.evaluation import Request
from ragen_jax.cli.subjects import Subject
from ragen_jax.envs.base import SPLITS, TEST, VALIDATION
from ragen_jax.errors import SettingsError, UserError
from ragen_jax.evaluation import baselines
from ragen_jax.models.io import hugging_face
from ragen_jax.parallel import facts
from ragen_jax.reporting.console import Console


def make_request(**changes):
    """One that leaves all to the settings, but for what is given."""
    usual = dict(
        checkpoint="run",
        model=None,
        config=runs.settings(),
        has_config=False,
        is_overridden=False,
        policy="model",
        env=None,
        prompts=2,
        rollouts=1,
        temperature=None,
        seed=None,
        split="test",
        out=None,
        show=0,
    )
    return Request(**(usual | changes))


def test_an_exported_agent_plays_by_its_own_settings_unless_a_config_is_named(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(trust, "restrict_to_trusted", lambda *given: None)
    trained = settings_lib.to_dict(runs.settings(seed=7))
    origin = {"run": "lakes", "step": 40, "settings": trained}
    hugging_face.write_origin(tmp_path, origin)
    asked = dict(checkpoint=None, model=str(tmp_path), config=runs.settings(seed=3))
    seeds = [
        evaluation._subject(make_request(**asked, has_config=named)).settings.seed
        for named in (False, True)
    ]
    assert seeds == [7, 3]
    with pytest.raises(UserError, match="replace all of the agent's settings"):
        evaluation._subject(make_request(**asked, is_overridden=True))


@pytest.mark.parametrize(("asked", "played"), [(None, 0.0), (0.7, 0.7), (0.0, 0.0)])
def test_the_settings_temperature_holds_where_none_is_asked_for(asked, played):
    settings = runs.settings(evaluation__temperature=0.0)
    request = evaluation.with_temperature(make_request(temperature=asked), settings)
    assert request.temperature == played


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.path", "model.path is not read here: pass --model"),
        ("model.compute_dtype", "model.compute_dtype says how a model is made, but a"),
        ("lora.rank", "lora.rank says how a model is made, but a checkpoint fixes"),
    ],
)
def test_keys_that_are_up_to_the_checkpoint_are_refused_beside_it(key, words):
    request = make_request(has_config=True, is_overridden=True, keys=(key,))
    with pytest.raises(UserError, match=words):
        evaluation.check(request)
    evaluation.check(dataclasses.replace(request, keys=("rollout.turns",)))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rollout.temperature", "says how a run trains, .*: pass --temperature"),
        ("rollout.group_size", "pass --rollouts"),
        ("rollout.slots", "set --config.evaluation.slots"),
        ("evaluation.test_prompts", "how a training run is evaluated, .*--prompts"),
        ("loss.kl", "--config.loss.kl says how a run trains, .*here: leave it out"),
        ("iterations", "leave it out"),
    ],
)
def test_a_key_that_only_training_reads_is_refused(key, words):
    request = make_request(checkpoint=None, model="tiny", keys=("env.size", key))
    with pytest.raises(UserError, match=words):
        evaluation.check(request)


def test_every_key_that_is_accepted_is_a_setting():
    leaves = settings_lib.flatten(settings_lib.to_dict(runs.settings()))
    assert (
        evaluation._KEYS <= leaves.keys()
        and evaluation._INSTEAD.keys() <= leaves.keys()
    )
    sections = {key.partition(".")[0] for key in leaves}
    assert set(evaluation._SECTIONS) <= sections


@pytest.mark.parametrize("temperature", [1e39, 1e-50, float("inf"), float("nan"), -1.0])
def test_a_temperature_that_float32_does_not_hold_is_refused(temperature):
    with pytest.raises(UserError, match=r"--temperature=.* cannot be used: choose 0"):
        evaluation.check(make_request(temperature=temperature))


@pytest.mark.parametrize(
    "given", [{"temperature": 0.0}, {"keys": ("evaluation.temperature",)}]
)
def test_a_baseline_has_no_temperature(given):
    with pytest.raises(UserError, match="random samples no tokens: leave out --.*temp"):
        evaluation.check(make_request(checkpoint=None, policy="random", **given))


def test_a_model_without_training_is_made_as_the_keys_say():
    keys = ("model.compute_dtype",)
    evaluation.check(make_request(checkpoint=None, model="tiny", keys=keys))


def test_a_graph_that_the_user_asks_for_needs_a_gpu_and_a_runs_own_does_not():
    config = runs.settings(rollout__cuda_graph=True)
    evaluation._check_graph(make_request(config=config))
    with pytest.raises(SettingsError, match="cuda_graph = True needs an NVIDIA GPU"):
        evaluation._check_graph(
            make_request(config=config, keys=("rollout.cuda_graph",))
        )


def test_two_environments_of_one_game_are_written_into_two_files(tmp_path):
    config = cli.load_config(f"{ROOT}/configs/sokoban.py:generalize").to_dict()
    del config["env"]["evaluate"]["sokoban"]
    settings = settings_lib.from_dict(config)
    subject = Subject(settings, tmp_path, "step1", "the last")
    names = {
        label: evaluation._default_name(
            make_request(env=label, temperature=0.5), subject.only(label, None)
        )
        for label in (None, "newvocab", "larger", "sokoban", "frozen_lake")
    }
    assert names["sokoban"] == "sokoban_step1_test2x1_seed0_temperature0.5.jsonl"
    assert names[None] == names["newvocab"]
    assert len(set(names.values())) == 4


@pytest.mark.parametrize("policy", ["random", "rule"])
def test_a_file_that_breaks_its_promise_is_refused_before_a_baseline_plays(
    policy, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    config = cli.load_config("docs/examples/coin_walk_config.py:smoke").to_dict()
    sound = (ROOT / config["env"]["name"]).read_text()
    assert "solve=solve," in sound
    file = tmp_path / "walk.py"
    file.write_text(sound.replace("solve=solve,", "rule=lambda state: state.done,"))
    config["env"]["name"] = str(file)
    subject = Subject(settings_lib.from_dict(config), tmp_path, "walk", "walk")
    with pytest.raises(SettingsError, match="walk.py': rule gives bool.*: make it int"):
        evaluation._play_baseline(make_request(policy=policy), subject, None)


def test_a_baseline_plays_the_split_the_levels_and_the_seed_asked_for(
    tmp_path, monkeypatch
):
    taken = []
    monkeypatch.setattr(baselines, "make_baseline", lambda *_: SimpleNamespace())

    def play(env, baseline, **how):
        taken.append(how)
        raise StopIteration

    monkeypatch.setattr(baselines, "play", play)
    settings = runs.settings(seed=6, rollout__actions=5)
    for number, split in enumerate(SPLITS):
        request = make_request(policy="random", split=split, prompts=3, rollouts=4)
        with pytest.raises(StopIteration):
            subject = Subject(settings, tmp_path, "walk", "walk")
            evaluation._play_baseline(request, subject, Console(io.StringIO()))
        how = dict(actions=5, prompts=3, rollouts=4, split=number, seed=6)
        assert taken[-1] == how
    assert SPLITS.index("validation") == VALIDATION and SPLITS.index("test") == TEST


def test_processes_that_play_other_levels_or_checkpoints_do_not_fit():
    """Each program of the one would wait for one that the other never starts."""

    def facts_of(step: int = 4, **changes):
        request = make_request(temperature=0.0, **changes)
        subject = Subject(runs.settings(), ROOT, "run", "who", ROOT, step)
        return evaluation.shared_facts(request, subject)

    assert not facts.difference(1, facts_of(show=3), facts_of(out="other.jsonl"))
    for other, said in {
        "--prompts is 80 there and 2 here": facts_of(prompts=80),
        "--rollouts is 3 there and 1 here": facts_of(rollouts=3),
        "the step is 5 there and 4 here": facts_of(step=5),
    }.items():
        assert other in facts.difference(1, said, facts_of())
