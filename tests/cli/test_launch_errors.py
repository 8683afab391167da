"""The command line of launch scripts: one sentence, exit code 2, no traceback."""

import os
import signal
import subprocess
import sys

import jax
import pytest
from absl import flags
from helpers import warm_process
from helpers.paths import ROOT

import ragen_jax
from ragen_jax import cli
from ragen_jax.errors import UserError

CONFIG = f"--config={ROOT / 'configs' / 'frozenlake.py'}"

# A launch script like any other, whose main does what --what says.
SCRIPT = '''"""Probes the launcher.

  python launch/probe.py --config=configs/frozenlake.py
"""

from absl import flags

from ragen_jax import cli
from ragen_jax.errors import UserError

CONFIG = cli.define_config()
WHAT = flags.DEFINE_string("what", "print", "what main does")


def main():
    settings = cli.read_settings(CONFIG.value)
    if WHAT.value == "print":
        import jax

        print(settings.rollout.prompts, jax.config.jax_compilation_cache_dir)
    elif WHAT.value == "interrupt":
        raise KeyboardInterrupt
    elif WHAT.value == "mistake":
        raise UserError("model.path = 'x' is not a folder: choose one that is")
    elif WHAT.value == "fault":
        raise ValueError("a fault of the program")


cli.run(main)
'''


def parse(*arguments: str, takes_config: bool = True, default: str | None = None):
    """The flags of a script that has --workdir and --steps, and maybe --config."""
    flag_values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "folder", flag_values=flag_values)
    flags.DEFINE_integer("steps", 1, "number", flag_values=flag_values)
    if takes_config:
        cli.define_config(default, flag_values)
    cli.parse(["probe.py", *arguments], flag_values)
    return flag_values


def read(*arguments: str):
    return cli.read_settings(parse(*arguments).config)


@pytest.fixture
def probe(tmp_path):
    """The script, in a folder of its own."""
    script = tmp_path / "probe.py"
    script.write_text(SCRIPT)
    return script


@pytest.fixture
def attempt(probe):
    """Runs the probe in a process that other scripts ran in before."""
    return lambda *arguments: warm_process.attempt(probe, arguments, probe.parent)


@pytest.fixture
def run(probe, tmp_path):
    """Runs the probe in a process of its own, with its own home."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("JAX_") or key == "JAX_PLATFORMS"
    }
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def call(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, str(probe), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return call


def test_overrides_reach_the_settings_in_every_spelling():
    flag_values = parse(
        "--config.rollout.prompts=16",  # Before --config: the order does not matter.
        CONFIG,
        "--config.loss.kl",
        "0.25",
        "-config.filter.strategy=none",
        "--noconfig.env.thinking",
        "--config.deterministic",
        "--config.optimizer.clip_norm=2",
        "--workdir=runs/a",
        "--steps=3",
    )
    settings = cli.read_settings(flag_values.config)
    assert settings.rollout.prompts == 16
    assert settings.loss.kl == 0.25
    assert settings.filter.strategy == "none"
    assert settings.env.thinking is False
    assert settings.deterministic is True
    assert settings.optimizer.clip_norm == 2.0
    assert (flag_values.workdir, flag_values.steps) == ("runs/a", 3)


def test_the_last_of_several_values_counts():
    settings = read(CONFIG, "--config.seed=1", f"{CONFIG}:smoke", "--config.seed=2")
    assert (settings.seed, settings.iterations) == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "is_chosen"),
    [
        ([CONFIG], True),
        (["--config", "configs/frozenlake.py"], True),
        (["--config.seed=1", "--noconfig.deterministic"], False),
        ([], False),
    ],
)
def test_a_config_is_chosen_by_its_flag_and_not_by_its_keys(
    monkeypatch, arguments, is_chosen
):
    monkeypatch.setattr(sys, "argv", ["probe.py", *arguments])
    assert cli.chooses_config() == is_chosen


@pytest.mark.parametrize(
    "text", ["import sys\nsys.exit(0)", "def get_config():\n    raise SystemExit(0)"]
)
def test_a_config_that_exits_is_refused(tmp_path, text):
    file = tmp_path / "own.py"
    file.write_text(text)
    with pytest.raises(UserError, match="exits: raise a ValueError with the reason"):
        parse(f"--config={file}")


def test_arguments_may_stand_in_a_file(tmp_path):
    file = tmp_path / "arguments"
    file.write_text(f"{CONFIG}:smoke\n--config.seed=5\n")
    settings = read(f"--flagfile={file}")
    assert (settings.seed, settings.iterations) == (5, 2)


def test_a_script_without_a_config_gets_its_flags_alone():
    assert parse("--steps=4", takes_config=False).steps == 4
    with pytest.raises(UserError, match="unknown flag --config"):
        parse(CONFIG, takes_config=False)


def test_a_script_may_have_a_config_of_its_own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config():\n  return ConfigDict(dict(heat=dict(steps=4)))"
    )
    config = parse("--config.heat.steps=9", default=str(file)).config
    assert config.to_dict() == {"heat": {"steps": 9}}


@pytest.mark.parametrize("script", ["benchmark.py", "warm_start.py"])
def test_a_script_finds_its_usual_config_from_any_folder(tmp_path, script):
    command = [sys.executable, str(ROOT / "launch" / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "The settings of" in done.stdout


def test_help_shows_flags_and_every_key_with_its_value(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(f"{CONFIG}:smoke", "--helpfull")
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert "--steps: number" in shown
    assert "--config.rollout.prompts=4\n" in shown
    assert "--config.KEY=VALUE" in shown


@pytest.mark.parametrize("takes_config", [True, False])
def test_a_script_says_its_versions_without_a_config_and_does_nothing(
    takes_config, capsys
):
    with pytest.raises(SystemExit) as caught:
        parse("--version", "--workdri=x", takes_config=takes_config)
    assert caught.value.code == 0
    python = ".".join(map(str, sys.version_info[:3]))
    versions = f"ragen_jax {ragen_jax.__version__}, jax {jax.__version__}, python "
    assert capsys.readouterr().out == f"{versions}{python}\n"


WRONG = [
    ([], ["--config is missing", "pass --config="]),
    (["--config"], ["--config is missing", "pass --config="]),
    (["--config=none.py"], ["'none.py'", "there is no file", "configs/frozenlake.py"]),
    ([f"--config={ROOT}"], ["there is no file"]),
    ([f"{CONFIG}:smok"], ["'smok'", "choose one of 'slippery', 'firm', 'smoke'"]),
    (
        [CONFIG, "--config.rollout.promts=3"],
        ["rollout.promts", "=3", "did you mean rollout.prompts"],
    ),
    (
        [CONFIG, "--config.temperature=1"],
        ["temperature", "rollout.temperature or evaluation.temperature"],
    ),
    ([CONFIG, "--noconfig.env.thinkin"], ["env.thinkin", "mean env.thinking"]),
    (
        [CONFIG, "--noconfig.env.thinking=True"],
        ["--noconfig.env.thinking=True does not take", "--noKEY without a value"],
    ),
    ([CONFIG, "--config.a..b=1"], ["a..b", "choose one of", "rollout"]),
    ([CONFIG, "--config.seed.x=1"], ["seed.x", "choose one of"]),
    (
        [CONFIG, "--config.rollout=3"],
        ["rollout is a section", "as in --config.rollout.actions=10"],
    ),
    (
        [CONFIG, "--config.rollout.prompts=3.5"],
        ["rollout.prompts = '3.5'", "a whole number"],
    ),
    ([CONFIG, "--config.loss.kl=low"], ["loss.kl = 'low'", "choose a number"]),
    ([CONFIG, "--config.seed=one"], ["seed = 'one'", "a whole number"]),
    (
        [CONFIG, "--config.env.thinking=maybe"],
        ["env.thinking = 'maybe'", "true or false"],
    ),
    ([CONFIG, "--config.seed"], ["--config.seed", "Missing value"]),
    ([CONFIG, "--config.iterations=0"], ["iterations = 0", "1 or more"]),
    ([CONFIG, "--config.loss.kl=nan"], ["loss.kl = nan", "a finite number"]),
    ([CONFIG, "--workdri=x"], ["unknown flag --workdri", "did you mean --workdir"]),
    ([CONFIG, "--zzz=x"], ["unknown flag --zzz", "--help lists"]),
    ([CONFIG, "--steps=few"], ["--steps=few", "--help lists"]),
    ([CONFIG, "paper"], ["unexpected argument 'paper'", "--config.KEY=VALUE"]),
    (["--flagfile=/none"], ["/none", "check the path of --flagfile"]),
]


@pytest.mark.parametrize(("arguments", "parts"), WRONG)
def test_a_wrong_argument_is_refused_with_a_way_out(arguments, parts):
    with pytest.raises(UserError) as caught:
        read(*arguments)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "text", "argument", "part"),
    [
        ("config.py", "x = 1", "", "has no function get_config"),
        ("config.py", "def get_config():\n  return None", ":a", "has no variants"),
        ("config.txt", "", "", "choose a file that ends in .py"),
        ("config.py", "get_config = 5", "", "has no function get_config"),
        ("config.py", "def get_config(a, *, b): 0", ":a", "cannot be called with a v"),
        ("config.py", "def get_config(a): 0", "", "cannot be called with nothing"),
        ("config.py", "\0", "", r"config\.py is not Python from line 1 on"),
        ("config.py", "raise ValueError('no data')", "", r"config\.py: no data$"),
        (
            "config.py",
            "from ml_collections import ConfigDict, config_dict\n"
            "seed = config_dict.required_placeholder(int)\n"
            "def get_config(): return ConfigDict(dict(seed=seed))",
            "",
            "a required_placeholder in it has no value",
        ),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, name, text, argument, part):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=part):
        cli.load_config(f"{tmp_path / name}{argument}")


def test_a_frozen_config_is_read_as_any_other(tmp_path):
    (tmp_path / "frozen.py").write_text(
        "from ml_collections import FrozenConfigDict\n"
        "def get_config(): return FrozenConfigDict(dict(seed=3))"
    )
    assert cli.load_config(str(tmp_path / "frozen.py")).to_dict() == {"seed": 3}


def test_the_workdir_is_made_and_left_empty(tmp_path):
    made = cli.make_workdir(str(tmp_path / "a" / "b"))
    assert made == tmp_path / "a" / "b"
    assert made.is_dir() and list(made.iterdir()) == []


def test_a_path_is_told_without_its_dots_unless_they_follow_a_link(tmp_path):
    for name in ("a/b", "c/d"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "c" / "d")
    for given, told in (
        ("a/../runs/y", "runs/y"),
        ("a/b/../../link/new", "link/new"),
        ("none/../link", "link"),
        ("link/../new", "link/../new"),  # It is c/new, and new is another.
    ):
        found = cli.local_path("workdir", str(tmp_path / given))
        assert str(found) == str(tmp_path / told)


def test_a_workdir_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=f"--workdir={path} .*choose a folder"):
            cli.make_workdir(str(path))
    with pytest.raises(UserError, match="pass --workdir"):
        cli.make_workdir(None)


def test_a_url_is_refused_where_it_would_name_a_folder_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = "gs://bucket/a"
    for flag, check in (
        ("workdir", cli.make_workdir),
        ("out", cli.check_out),
        ("out", cli.check_out_folder),
    ):
        with pytest.raises(UserError, match=f"--{flag}={url} is a URL"):
            check(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path",
    ["settings.json", "test.json", "metrics.jsonl", "checkpoints/7", "checkpoints"],
)
def test_what_a_run_keeps_is_replaced_by_no_other_output(tmp_path, path):
    for check in (cli.check_out, cli.check_out_folder):
        assert check(str(tmp_path / path))  # No run is here.
    (tmp_path / "settings.json").write_text("{}")
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for place in (tmp_path, link):
        for check in (cli.check_out, cli.check_out_folder):
            with pytest.raises(
                UserError, match="would change what the run in .* keeps"
            ):
                check(str(place / path))
    assert cli.check_out(str(tmp_path / "diagnosis.json"))
    assert (tmp_path / "settings.json").read_text() == "{}"


def test_what_a_run_keeps_on_another_disk_is_replaced_by_no_other_output(tmp_path):
    run, disk = tmp_path / "run", tmp_path / "disk"
    (disk / "7").mkdir(parents=True)
    run.mkdir()
    (run / "settings.json").write_text("{}")
    (run / "checkpoints").symlink_to(disk)
    with pytest.raises(UserError, match=f"what the run in {run} keeps"):
        cli.check_out(str(run / "checkpoints" / "7" / "digests.json"))


@pytest.mark.parametrize("error", [ValueError("no\n such"), OSError("no such")])
def test_errors_of_checks_become_the_users(error):
    with pytest.raises(UserError, match="^no such$"), cli.user_mistakes():
        raise error


def test_other_errors_of_checks_stay_what_they_are():
    with pytest.raises(KeyError), cli.user_mistakes():
        raise KeyError("fault")


def test_a_wrong_setting_ends_in_one_sentence_without_a_traceback(attempt):
    done = attempt(CONFIG, "--config.rollout.turns=0")
    assert done.code == 2
    assert done.errors == (
        "error: rollout.turns = 0 cannot be used: choose 1 or more, and at most 10000\n"
    )
    assert (done.output, done.made) == ("", [])


def test_main_gets_the_settings_and_a_cache_of_compiled_programs(run, tmp_path):
    done = run(f"{CONFIG}:smoke")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"4 {tmp_path}/.cache/ragen_jax/jax\n"


@pytest.mark.parametrize(
    ("what", "code", "stderr"),
    [
        ("mistake", 2, "error: model.path = 'x' is not a folder: choose one that is\n"),
        ("interrupt", 130, "interrupted\n"),
    ],
)
def test_mistakes_and_interrupts_while_running_end_in_one_line(
    attempt, what, code, stderr
):
    done = attempt(CONFIG, f"--what={what}")
    assert (done.code, done.errors) == (code, stderr)


def test_a_fault_of_the_program_keeps_its_traceback(run):
    done = run(CONFIG, "--what=fault")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "a fault of the program" in done.stderr


def test_help_begins_with_the_scripts_own_words(attempt):
    done = attempt(CONFIG, "--help")
    assert done.code == 0
    assert done.output.startswith("Probes the launcher.")
    assert "--what: what main does" in done.output
    assert (
        "  --config.rollout.prompts=8\n"
        "      P, levels of an iteration, drawn independently\n" in done.output
    )
    assert "--config.env.size=4\n      S, rows and columns\n" in done.output


@pytest.mark.parametrize(
    "script, names",
    [
        ("train", ["coordinator", "processes", "process"]),
        ("evaluate", ["coordinator", "code", "[no]trust-code"]),
        ("export", ["code", "[no]trust-code"]),
        ("diagnose", ["code", "[no]trust-code"]),
    ],
)
def test_help_lists_flags_that_several_scripts_share(script, names):
    command = [sys.executable, str(ROOT / "launch" / f"{script}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in names:
        assert f"\n  --{name}: " in done.stdout


def test_help_without_a_config_says_how_to_see_its_keys(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    assert (
        "Add --config=configs/frozenlake.py to list the settings"
        in capsys.readouterr().out
    )
    # A process that goes on, as this one does, would die of the next closed pipe.
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN
