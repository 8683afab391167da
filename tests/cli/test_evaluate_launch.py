"""launch/evaluate.py from the command line, on a checkpoint and on a model folder."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from helpers import models, runs, warm_process

from ragen_jax import settings as settings_lib
from ragen_jax.cli import evaluation
from ragen_jax.training import checkpoints

SIZES = ["--prompts=3", "--rollouts=2", "--seed=5"]
SCRIPT = runs.ROOT / "launch" / "evaluate.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run on eight devices whose second step was the best.

    Its steps hold the weights of the model that it says it started from.
    """
    folder = tmp_path_factory.mktemp("evaluate")
    model = runs.model()
    weights, _ = models.read_model(model)
    state = {"actor": jax.device_put(weights), "updates": jnp.int32(3)}
    info = {"settings": settings_lib.to_dict(runs.settings(mesh__data=8))}
    directory = folder / "run" / checkpoints.FOLDER
    with checkpoints.Checkpoints(directory, keep_last=3, keep_best=1) as saved:
        for step, score in ((1, 0.1), (2, 0.5), (3, 0.2)):
            saved.save(step, state, info, score=score)
    (folder / "file").write_text("")
    return folder


def evaluate(*arguments, devices=1):
    """Exit code, output and errors of the script in a process of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={
            **kept,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_COMPILATION_CACHE_DIR": runs.cache(),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def best(place):
    """The output of an evaluation of the best step, on two devices, as by default."""
    arguments = [f"--checkpoint={place / 'run'}", "--show=2", *SIZES]
    code, output, errors = evaluate(*arguments, devices=2)
    assert code == 0, errors
    return output


@pytest.fixture(scope="module")
def written(place, best):
    """Lines of trajectories, and the figures, from where the output says they are."""
    where = dict(line.split() for line in best.splitlines()[-2:])
    folder = place / "run" / "evaluations"
    assert {str(path) for path in folder.iterdir()} == set(where.values())
    with open(where["trajectories"], encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    with open(where["figures"]) as file:
        return lines, json.load(file)


@pytest.mark.slow
def test_the_table_says_which_checkpoint_and_what_was_played(place, best):
    for part in (
        f"played by      {place / 'run' / 'checkpoints' / '2'}, the best",
        "3 test levels of frozen_lake, 2 episodes each, seed 5",
        "temperature    1\n",
        "success        ",
        "pass@2         ",
        "valid replies  ",
    ):
        assert part in best, part


@pytest.mark.slow
def test_episodes_are_shown_to_a_reader_after_the_system_prompt(best):
    shown, _ = best.split("\nevaluation\n")
    assert shown.startswith("System prompt\n    You move on a frozen lake of 3 x 3")
    assert shown.count("Level 0, episode ") == 2
    assert "Level 1" not in shown
    assert shown.count("  reward   ") == shown.count("  actions  ") >= 2


@pytest.mark.slow
def test_every_episode_is_a_conversation_with_rewards(written):
    lines, _ = written
    assert [(line["level"], line["rollout"]) for line in lines] == [
        (level, rollout) for level in range(3) for rollout in range(2)
    ]
    for line in lines:
        turns = len(line["rewards"])
        assert len(line["valid"]) == len(line["actions"]) == turns >= 1
        roles = [message["role"] for message in line["messages"]]
        assert roles == ["system", *["user", "assistant"] * turns]
        assert line["end"] in ("environment_done", "out_of_turns", "out_of_actions")


@pytest.mark.slow
def test_episodes_of_a_level_begin_alike_and_levels_do_not(written):
    lines, _ = written
    first = [line["messages"][1]["content"] for line in lines]
    assert first[0::2] == first[1::2]
    assert len(set(first)) == 3


@pytest.mark.slow
def test_the_figures_are_those_of_the_trajectories(written):
    lines, figures = written
    success = [line["success"] for line in lines]
    assert figures["success"] == pytest.approx(sum(success) / 6)
    valid = [flag for line in lines for flag in line["valid"]]
    assert figures["valid_reply_rate"] == pytest.approx(sum(valid) / len(valid))
    assert figures["turns"] == pytest.approx(len(valid) / 6)
    assert (figures["seed"], figures["split"], figures["prompts"]) == (5, "test", 3)


@pytest.mark.slow
def test_a_model_folder_with_the_same_weights_plays_the_same(place, written):
    """On one device instead of two, and into the file that was asked for.

    At the temperature of the run's settings, which is not that of the default config.
    """
    out = place / "new" / "before.jsonl"
    overrides = [
        f"--config.{key}={value}"
        for key, value in runs.SMALL.items()
        if key.startswith("env.") or key in evaluation._KEYS
    ]
    model = runs.model()
    code, output, errors = evaluate(
        f"--model={model}", f"--out={out}", *SIZES, *overrides
    )
    assert code == 0, errors
    assert f"played by      {model}, as it is" in output
    lines, figures = written
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines
    again = json.loads(out.with_suffix(".json").read_text())
    for name in ("success", "reply_tokens", "valid_reply_rate", "return", "env"):
        assert again[name] == pytest.approx(figures[name])
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "before.json",
        "before.jsonl",
    ]


@pytest.mark.slow
def test_the_planner_plays_the_runs_environment(place):
    code, output, errors = evaluate(
        f"--checkpoint={place / 'run'}",
        "--policy=planner",
        "--prompts=9",
        f"--out={place / 'planner.jsonl'}",
    )
    assert code == 0, errors
    assert "played by  planner: value iteration that knows the slip" in output
    figures = json.loads((place / "planner.json").read_text())
    assert figures["success"] > 0.5
    assert not (place / "planner.jsonl").exists()


WRONG = {
    "nobody": ([], "neither --checkpoint nor --model says who plays: pass"),
    "moved": (
        ["--checkpoint={place}/run", "--model={place}/none"],
        "there is no folder {place}/none; give",
    ),
    "missing": (["--checkpoint={place}/none"], "there is no folder {place}/none; give"),
    "foreign": (["--checkpoint={place}"], "holds no complete ragen_jax check"),
    "step": (["--checkpoint={place}/run/checkpoints/9"], "there is no folder"),
    "no model": (["--model={place}/none"], "there is no folder {place}/none; give"),
    "nothing": (["--verify"], "--verify needs --checkpoint: a workdir or a step"),
    "unread": (
        ["--verify", "--checkpoint={place}", "--out=a"],
        "--out has no effect with --verify: leave one out",
    ),
    "no step": (
        ["--verify", "--checkpoint={place}/none"],
        "{place}/none: there is no such",
    ),
    "no levels": (["--model=x", "--prompts=0"], "--prompts=0"),
    "no episodes": (["--model=x", "--rollouts=0"], "--rollouts=0"),
    "many episodes": (["--model=x", "--rollouts=2000000000"], "lower --rollouts"),
    "too many": (["--policy=random", "--prompts=2000000000"], "lower --prompts"),
    "no number": (["--model=x", "--prompts=99999999999"], "in the range [1, 2147"),
    "cold": (["--model=x", "--temperature=-0.5"], "--temperature=-0.5 cannot be used"),
    "nan": (["--model=x", "--temperature=nan"], "choose 0, for the likeliest token"),
    "warm twice": (
        ["--model=x", "--temperature=1", "--config.evaluation.temperature=0"],
        "both choose the temperature: pass one of them",
    ),
    "levels by key": (
        ["--model=x", "--config.evaluation.prompts=8"],
        "--config.evaluation.prompts says how a training run is evaluated",
    ),
    "episodes by key": (
        ["--model=x", "--config.evaluation.test_rollouts=8"],
        "is not read here: pass --rollouts",
    ),
    "seed": (["--model=x", "--seed=-1"], "choose 0 to 2**32 - 1"),
    "split": (["--model=x", "--split=dev"], "<train|validation|test>"),
    "policy": (["--model=x", "--policy=oracle"], "<model|random|rule|planner>"),
    "suffix": (["--model=x", "--out=a.json"], "--out=a.json must end in .jsonl"),
    "no folder": (
        ["--checkpoint={place}/run", "--out={place}/file/a.jsonl"],
        "{place}/file/a.jsonl cannot be written",
    ),
    "folder": (
        ["--policy=random", "--out={place}/folder.jsonl"],
        "{place}/folder.jsonl is a folder: name a file",
    ),
    "folder of figures": (
        ["--policy=random", "--out={place}/figures.jsonl"],
        "{place}/figures.json is a folder: name a file",
    ),
    "a run's own file": (
        ["--policy=random", "--prompts=1", "--out={place}/other/settings.jsonl"],
        "--out={place}/other/settings.json would change what the run in",
    ),
    "show": (["--policy=random", "--show=1"], "leave out --model and --show"),
    "overrides": (
        ["--checkpoint={place}/run", "--config.env.size=5"],
        "name the --config to play by as well",
    ),
    "config": (["--model=x", "--config.env.siz=5"], "did you mean env.size"),
}


@pytest.fixture(scope="module")
def refusals(place):
    """What each wrong command line ends in."""
    (place / "folder.jsonl").mkdir()
    (place / "figures.json").mkdir()
    (place / "other").mkdir()
    (place / "other" / "settings.json").write_text("{}")

    return {
        name: warm_process.submit(
            SCRIPT, [argument.format(place=place) for argument in arguments], place
        )
        for name, (arguments, _) in WRONG.items()
    }


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_command_line_is_refused_in_one_sentence(place, refusals, name):
    code, output, errors, compiled, made = refusals[name].result()
    assert (code, output, made) == (2, "", []), errors
    assert [one for one in compiled if not warm_process.COPY.match(one)] == []
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert WRONG[name][1].format(place=place) in errors


def test_nothing_is_left_behind_by_a_refusal(place, refusals):
    assert {path.name for path in place.iterdir()} <= {
        "run",
        "file",
        "folder.jsonl",
        "figures.json",
        "new",
        "other",
        "planner.json",
    }
