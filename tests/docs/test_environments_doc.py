"""docs/environments.md: its example passes the checks, trains, and its tables hold."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from helpers import models, runs

from ragen_jax import cli, envs
from ragen_jax import settings as settings_lib
from ragen_jax.envs import base, registry
from ragen_jax.envs.frozen_lake.env import FrozenLake
from ragen_jax.learning import shaping
from ragen_jax.testing import check_env
from ragen_jax.text import prompts
from ragen_jax.training import run as run_lib
from ragen_jax.trajectory import blank_episodes

DOC = (runs.ROOT / "docs" / "environments.md").read_text()
EXAMPLE = "docs/examples/coin_walk.py"
CONFIG = "docs/examples/coin_walk_config.py"


@pytest.fixture
def at_root(monkeypatch):
    """The current directory that the document supposes."""
    monkeypatch.chdir(runs.ROOT)


@pytest.mark.slow
def test_the_example_that_reads_text_passes_the_checks(at_root, capsys):
    assert check_env.main(["docs/examples/guess.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ok"
    assert "read_action equals read_action_text on any bytes" in lines


@pytest.mark.slow
def test_the_example_passes_the_checks(at_root, capsys):
    assert check_env.main([EXAMPLE, "--length=9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ok" and len(lines) == 19
    (moves,) = (line for line in lines if "moves" in line)
    assert "and 0 on the key" in moves  # Of a corridor without chance.


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "error: name one environment, as in python -m"),
        ([EXAMPLE, "frozen_lake"], 2, "error: name one environment"),
        ([EXAMPLE, "--lenght=9"], 2, "did you mean env.length"),
        ([EXAMPLE, "--length=5"], 2, "env.length = 5: choose a number from 8 to 20"),
        (["my_env.py"], 2, "'my_env.py': there is no such file"),
    ],
)
def test_the_command_reports_a_mistake_in_one_sentence(
    at_root, capsys, arguments, code, message
):
    assert check_env.main(arguments) == code
    out, errors = capsys.readouterr()
    assert (out, errors.count("\n")) == ("", 1)
    assert message in errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("& (action != base.NO_ACTION)", ""), "broken: NO_ACTION"),
        (
            ("1 + shown", "shown + nothing"),
            "my_env.py, observe fails: line 113: NameError",
        ),
    ],
)
def test_the_command_reports_what_an_environment_breaks(
    tmp_path, capsys, change, message
):
    text = (runs.ROOT / EXAMPLE).read_text()
    assert change[0] in text
    path = tmp_path / "my_env.py"
    path.write_text(text.replace(*change))
    assert check_env.main([str(path)]) == 1
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


def test_the_example_trains_from_its_config(at_root):
    from ragen_jax import cli

    config = cli.load_config(f"{CONFIG}:smoke")
    config.env.length = 10
    run = run_lib.prepare(settings_lib.from_dict(config.to_dict()))
    (task,) = run.tasks
    assert (task.label, task.env.name) == ("coin_walk", "coin_walk")
    system = task.dialogue.system
    assert system.startswith("You walk in a corridor of 10 cells. P you, _ floor")
    assert "<answer>Left || Right</answer>" in system


def test_the_examples_rules_are_as_it_says(at_root):
    env = envs.make(EXAMPLE, [("length", 8)])
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    key = jax.random.key(0)
    state = reset(key, np.int32(base.TEST)).replace(
        coins=np.array([0, 0, 1, 0, 0, 0, 1, 0], bool), player=np.int32(5)
    )
    text = base.text_of(env.phrases, np.asarray(env.observe(state)))
    assert text == "State:\n _ _ o _ _ P o _\n"
    plan = env.solve(jax.device_get(state))
    assert plan == (1, 0, 0, 0, 0)
    rewards, ends = [], []
    for action in (*plan, 0):
        state, outcome = step(key, state, np.int32(action))
        rewards.append(float(outcome.reward))
        ends.append((bool(outcome.success), bool(outcome.done)))
    np.testing.assert_allclose(rewards, [0.9, -0.1, -0.1, -0.1, 0.9, 0], atol=1e-6)
    assert ends == [(False, False)] * 4 + [(True, True), (False, True)]


def test_the_reward_function_of_the_document_does_what_it_says(tmp_path):
    (text,) = re.findall(r"```python\n# my_rewards.py\n(.*?)```", DOC, re.DOTALL)
    path = tmp_path / "my_rewards.py"
    path.write_text(text)
    shaping.check_hook(str(path), 2, 2)
    episodes = blank_episodes(2, 2).replace(actions=np.array([[1, 3], [2, 5]]))
    rewards = shaping.load_hook(str(path))(episodes)
    np.testing.assert_allclose(rewards, [[0, -0.05], [0, -0.05]], atol=1e-7)


def test_the_other_words_of_the_document_give_the_prompt_that_it_shows():
    section = DOC.split("## Other words in the prompt")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)\n```", section, re.DOTALL)
    config = cli.load_config(str(runs.ROOT / "configs" / "frozenlake.py"))
    exec(code, {"config": config})
    settings = cli.read_settings(config)
    (task,) = settings.tasks()
    limits = prompts.TurnLimits(
        task.turns, task.actions_per_turn, task.actions, settings.rollout.reply_tokens
    )
    env = envs.make(task.name, task.options_and_texts)
    prompt = prompts.system_prompt(env, limits, settings.env.thinking)
    first, last = shown.split(" ... ")
    assert prompt.startswith(first) and prompt.endswith(last)
    assert prompt.count("\n") == shown.count("\n")
    # It says all that an instruction has to.
    assert all(name in env.instruction for name in env.action_names)
    assert all(f"{symbol}: " in env.instruction for symbol in FrozenLake().symbols)


def test_the_document_lists_the_names_that_no_setting_of_an_environment_may_have():
    said = DOC.split("cannot be\n  fields:")[1].split("\n* ")[0]
    assert set(re.findall(r"`(\w+)`", said)) == registry._RESERVED


@pytest.mark.parametrize("name", envs.NAMES)
def test_the_table_lists_the_settings_defaults_and_actions_of_an_environment(name):
    (row,) = re.findall(rf"^\| `{name}` \|(.*)$", DOC, re.MULTILINE)
    kind, _ = envs.lookup(name)
    for field in dataclasses.fields(kind):
        assert f"`{field.name}`" in row, field.name
        if isinstance(field.default, tuple):
            continue
        shown = {str: f'"{field.default}"', bool: str(field.default).lower()}
        default = shown.get(
            field.type,
            f"{field.default:g}" if field.type is float else str(field.default),
        )
        said = re.escape(f"`{field.name}` {default}") + r"(?![\d.]*\d)"
        assert re.search(said, row), field.name
    env = envs.make(name, ())
    if env.read_action is None and len(env.action_names) < 5:
        assert ", ".join(env.action_names) in row


def test_the_documents_fields_are_those_of_an_environment():
    table = DOC.split("| of `base.Environment` | is |")[1].split("\n\n")[0]
    fields = {field.name for field in dataclasses.fields(base.Environment)} - {"name"}
    named = set(re.findall(r"`(\w+)", table.replace("base.", "")))
    assert fields <= named


def test_rewards_are_told_to_the_agent_as_the_document_says():
    (said,) = re.findall(
        r"reward of ([\d.]+) reads as ([\d.]+), and one\s+of ([\d.]+) as ([\d.]+)\.",
        DOC,
    )
    task = models.make_task()
    dialogue = task.dialogue
    for earned, told in (said[:2], said[2:]):
        ids = prompts.next_message(
            dialogue,
            np.zeros(task.env.observation_phrases, np.int32),
            turn=np.int32(1),
            actions_left=np.int32(1),
            reward=np.float32(earned),
            is_valid=np.bool_(True),
            stopped_itself=np.bool_(True),
        )
        text = base.text_of(dialogue.phrases, np.asarray(ids))
        assert f"Reward: {told}\n" in text


def test_a_copy_of_the_examples_config_serves_another_environment(at_root, tmp_path):
    text = (runs.ROOT / CONFIG).read_text()
    section = re.search(r"environment\(.*?\n    \)", text, re.DOTALL)[0]
    path = tmp_path / "my_config.py"
    path.write_text(text.replace(section, 'environment("sudoku", clues=9)'))
    settings = cli.read_settings(cli.load_config(f"{path}:smoke"))
    assert (settings.env.name, settings.env.options) == ("sudoku", (("clues", 9),))
