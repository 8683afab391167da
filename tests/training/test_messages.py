"""Messages of a run for the console."""

import shlex
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from helpers import runs
from helpers.paths import CONFIGS, ROOT

from ragen_jax import cli, settings
from ragen_jax.training import messages, profiling


def read(variant: str, **changes) -> settings.Settings:
    """The settings of a config, with leaves replaced: `loss__kl=0.1`."""
    config = cli.load_config(f"{CONFIGS}/{variant}")
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    config.update_from_flattened_dict(dotted)
    return settings.from_dict(config.to_dict())


@pytest.mark.parametrize(
    ("scope", "of"),
    [("environment", "each environment's prompts"), ("batch", "the prompts")],
)
def test_the_banner_says_that_each_environment_of_a_mix_keeps_so_many(scope, of):
    chosen = read(
        "sokoban.py:mix",
        filter__strategy="top_count",
        filter__count=2,
        filter__scope=scope,
    )
    line = messages.algorithm(chosen)
    assert f": keeps top_count 2 of {of} by return_std, clip" in line


def test_the_banner_names_each_environment_of_a_mix_with_its_share():
    chosen = read("sokoban.py:mix", env__mix__rooms__prompts=12, rollout__prompts=16)
    assert messages.environments(chosen) == [
        "4 of 16 prompts of lakes (frozen_lake): as it comes",
        "12 of 16 prompts of rooms (sokoban): as it comes",
    ]
    (line,) = messages.environments(read("frozenlake.py"))
    assert line.startswith("frozen_lake: frozen_probability 0.9")


@pytest.mark.parametrize(
    ("variant", "model", "said"),
    [
        ("frozenlake.py", "tiny", ""),
        ("bandit.py", "tiny", ""),
        ("sokoban.py:mix", "tiny", ""),
        ("sokoban.py:solver", "tiny_sokoban", ""),
        ("search_qa.py:tiny_words", "tiny_words", ""),
        ("webshop.py:tiny_words", "tiny_words", ""),
        ("countdown.py", "folder", ""),
        (
            "countdown.py",
            "tiny",
            "countdown: to see learning, choose a model that can "
            "read (--config.model.path=FOLDER)",
        ),
        (
            "webshop.py",
            "tiny",
            "webshop: to see learning, choose one that was "
            "(--config.model.path=tiny_words)",
        ),
        (
            "sokoban.py:mix",
            "tiny_sokoban",
            "frozen_lake: to see learning, choose one "
            "that was (--config.model.path=tiny)",
        ),
        (
            "sokoban.py:mix",
            "tiny_words",
            "frozen_lake and sokoban: to see learning, "
            "choose one that was (--config.model.path=tiny)",
        ),
    ],
)
def test_the_banner_says_that_an_embedded_model_was_not_taught_the_environment(
    variant, model, said
):
    notes = messages.notes(read(variant, model__path=model), processes=1)
    assert notes == ([f"{model} was not taught {said}"] if said else [])


@pytest.mark.parametrize(
    ("processes", "every", "is_said"), [(1, 10, False), (2, 10, True), (2, 0, False)]
)
def test_the_banner_says_that_several_processes_record_no_episodes(
    processes, every, is_said
):
    chosen = read("frozenlake.py", health__record_every=every)
    expected = ["2 processes train: no episodes are recorded to be read later"]
    assert messages.notes(chosen, processes) == expected * is_said


def test_a_finished_run_names_its_traces_where_there_are_some(tmp_path):
    assert "traces" not in messages.finished(tmp_path, runs.settings())
    (tmp_path / profiling.FOLDER).mkdir()
    said = messages.finished(tmp_path, runs.settings())
    assert f"\ntraces       {tmp_path / profiling.FOLDER}\n\nnext: " in said


def test_the_banner_says_where_what_changes_over_the_run_ends():
    ends = dict(loss__kl_end=0.1, loss__entropy_end=0.01, filter__fraction_end=1.0)
    line = messages.algorithm(read("frozenlake.py", **ends))
    assert "keeps top_fraction 0.25 to 1 of the prompts by return_std," in line
    assert line.endswith("KL 0 to 0.1, entropy 0.001 to 0.01")
    line = messages.algorithm(read("frozenlake.py"))
    assert "keeps top_fraction 0.25 of the prompts" in line
    assert line.endswith("KL 0, entropy 0.001")


@pytest.mark.parametrize(
    ("changes", "moving"),
    [
        (dict(), ["optimizer.schedule = 'cosine'"]),
        (dict(optimizer__schedule="constant"), []),
        (dict(optimizer__schedule_updates=50), []),
        (
            dict(optimizer__schedule_updates=50, optimizer__critic_warmup=2),
            ["optimizer.schedule = 'cosine'"],
        ),
        (
            dict(optimizer__critic_schedule="linear"),
            ["optimizer.schedule = 'cosine'", "optimizer.critic_schedule = 'linear'"],
        ),
        (
            dict(
                optimizer__schedule_updates=50,
                optimizer__critic_schedule="linear",
                loss__kl_end=0.1,
            ),
            ["loss.kl_end = 0.1"],
        ),
        (
            dict(
                optimizer__schedule="constant",
                loss__kl=0.1,
                loss__kl_end=0.1,
                loss__entropy=0.0,
                loss__entropy_end=0.0,
                filter__fraction=0.5,
                filter__fraction_end=0.5,
            ),
            [],
        ),
    ],
)
def test_another_number_of_iterations_is_warned_of_where_it_moves_something(
    changes, moving
):
    said = messages.changed_schedule(
        read("frozenlake.py", **changes), saved_iterations=30
    )
    expected = (
        "warning: iterations was 30 and is 60, which moves the end of"
        f" {', '.join(moving)}: the result will differ"
        if moving
        else ""
    )
    assert said.startswith(expected) and bool(said) == bool(moving)


def test_the_command_that_follows_a_run_can_be_copied_whatever_the_folders_name(
    tmp_path,
):
    workdir = tmp_path / "my rün"
    command = messages.finished(workdir, runs.settings()).split("next: ")[1]
    assert shlex.split(command)[2:] == [f"--checkpoint={workdir}", "--show=3"]


def test_the_command_that_follows_a_run_measures_the_environment_it_was_trained_in(
    tmp_path,
):
    config = cli.load_config(f"{ROOT}/configs/sokoban.py:generalize").to_dict()
    said = messages.finished(tmp_path, settings.from_dict(config))
    command, others = said.split("next: ")[1].splitlines()
    assert shlex.split(command)[-1] == "--env=sokoban"
    assert others.endswith(": --env=frozen_lake, --env=larger, --env=newvocab")


def test_the_command_that_follows_a_run_in_ones_own_environment_lets_its_file_be_run(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    config = cli.load_config("docs/examples/coin_walk_config.py").to_dict()
    said = messages.finished(tmp_path, settings.from_dict(config))
    assert shlex.split(said.split("next: ")[1])[-1] == "--trust-code"


def test_the_command_that_follows_an_export_lets_the_users_file_be_run_if_there_is_one(
    monkeypatch,
):
    monkeypatch.chdir(ROOT)
    config = cli.load_config("docs/examples/coin_walk_config.py").to_dict()
    begin = ["python", "launch/evaluate.py", "--model=a b"]
    for read_from, trusted in ((runs.settings(), []), (config, ["--trust-code"])):
        own = settings.from_dict(read_from) if trusted else read_from
        assert messages.evaluation(begin[2], settings=own) == begin + trusted


def test_of_an_example_the_first_prompt_and_the_first_reply_are_shown():
    turn = jnp.array([[0, 0, 0, 1, 1, 1]])
    is_reply = jnp.array([[False, True, True, False, True, True]])
    tokens = jnp.array([[1, 2, 3, 4, 5, 6]])
    decode = lambda ids: " ".join(map(str, ids.tolist()))
    run = SimpleNamespace(
        model=SimpleNamespace(tokenizer=SimpleNamespace(decode=decode))
    )
    rows = SimpleNamespace(tokens=tokens, turn=turn, is_reply=is_reply)
    said = messages.example(run, SimpleNamespace(rows=rows))
    assert [line.strip() for line in said.splitlines()] == [
        "--- an example prompt",
        "1",
        "--- its reply",
        "2 3",
    ]
