"""Input that means harm, or asks for what no machine has: checkpoints, sizes, paths."""

from pathlib import Path

from helpers import runs
from helpers.wrong_input import Wrong, evaluate, save_checkpoint, train, workdir
from ragen_jax import settings as settings_lib
from ragen_jax.utils import user_modules

_EXPORT = ("--checkpoint={place}/coded", "--out={place}/new/exported")

TRUST = {
    "evaluation": evaluate(
        "--checkpoint={place}/coded",
        parts=("checkpoints/1 names this Python file", "--code=", "--trust-code"),
    ),
    "changed": evaluate(
        "--checkpoint={place}/coded",
        "--trust-code",
        parts=("coded.py is not the file that", "pass --code="),
    ),
    "another file": evaluate(
        "--checkpoint={place}/coded",
        "--code={place}/own.py",
        parts=("names this Python file", "pass --code="),
    ),
    "export": Wrong(
        "export.py",
        (*_EXPORT, "--trust-code"),
        ("coded.py is not the file that", "pass --code="),
    ),
    "diagnosis": Wrong(
        "diagnose.py",
        ("--checkpoint={place}/coded",),
        ("names this Python file", "--trust-code"),
    ),
}
SIZES = {
    "buckets": train(
        "rollout.buckets = 1000000000", "at most 64", rollout__buckets=10**9
    ),
    "chunk": train("decode_chunk = 1000", "at most 1024", rollout__decode_chunk=10**9),
    "passes": train("optimizer.epochs = 1000", "1000", optimizer__epochs=10**9),
    "reuse": train("optimizer.reuse = 1000", "at most 1000", optimizer__reuse=10**9),
    "turns": train("rollout.turns = 1000", "2**31", rollout__turns=10**30),
    "actions": train("rollout.actions = 200", "at most", rollout__actions=2 * 10**7),
    "group": train("group_size = 1000", "2**31", rollout__group_size=10**24),
    "prompts": train("rollout.prompts = 4294967296", "2**31", rollout__prompts=2**32),
    "iterations": train("iterations = 2147483648", "2**31", iterations=2**31),
    "warmup": train("optimizer.warmup", "2**31", optimizer__warmup=2**40),
    "epochs": train("optimizer.epochs", "2**31", optimizer__epochs=10**24),
    "levels": train("evaluation.prompts", "2**31", evaluation__prompts=2**33),
    "record": train(
        "numbers of its record", "lower", rollout__group_size=10**9, rollout__prompts=2
    ),
}
FLOATS = {
    "entropy": train("loss.entropy = 1e+39", "float32", loss__entropy=1e39),
    "rate": train("actor_lr = 1e+39", "float32", optimizer__actor_lr=1e39),
    "clip": train("clip_norm = 1e-60", "float32", optimizer__clip_norm=1e-60),
    "heat": train("temperature = 1e-50", "float32", rollout__temperature=1e-50),
}
NOTHING = {
    "grounding": Wrong(
        "train.py",
        (
            f"--config={runs.ROOT}/configs/bandit.py",
            "--workdir={place}/new/run",
            "--config.reward.grounding=0.1",
        ),
        ("reward.grounding = 0.1 does nothing", "set reward.grounding to 0"),
    ),
    "control token": Wrong(
        "train.py",
        ("--config={place}/control.py", "--workdir={place}/new/run"),
        ("the control token '<|im_end|>' of the model", "write it in another way"),
    ),
}
_WARM = (f"--config={runs.ROOT}/configs/warm_start.py:smoke",)


def warm(*parts: str, out: str = "{place}/new/tiny", **changes) -> Wrong:
    """A supervised start with wrong values; `__` in a key stands for its dot."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    overrides = [f"--config.{key}={value}" for key, value in keys.items()]
    return Wrong("warm_start.py", (*_WARM, f"--out={out}", *overrides), parts)


WARM_START = {
    "steps": warm("lake_boards.steps = -1", "choose", lake_boards__steps=-1),
    "rows": warm("lake_boards.rows = 0", "choose", lake_boards__rows=0),
    "many rows": warm("logits a step", "lower", lake_boards__rows=10**8),
    "rate": warm("lake_boards.lr = nan", "finite", lake_boards__lr="nan"),
    "large rate": warm("lake_boards.lr = 1e+39", "float32", lake_boards__lr=1e39),
    "small rate": warm("lake_boards.lr = 1e-60", "float32", lake_boards__lr=1e-60),
    "longest": warm(
        "demonstrator.longest = -1", "choose", sokoban__demonstrator__longest=-1
    ),
    "risky": warm("risky = nan", "0 to 1", bandit__demonstrator__risky="nan"),
    "player's noise": warm("noise = 7.0", "0 to 1", sokoban__demonstrator__noise=7.0),
    "rows for one": warm("rows_for_one = 0", "choose", bandit__rows_for_one=0),
    "seed": warm("seed = -1", "choose", seed=-1),
    "log": warm("log_every = 0", "choose", log_every=0),
    "context": warm("lake_boards.context = 0", "choose", lake_boards__context=0),
    "size": warm("frozen_lake.size = 0", "choose", frozen_lake__env__size=0),
    "turns": warm("limits.turns = 1000000000", frozen_lake__limits__turns=10**9),
    "kinds": warm("kinds = 'x'", "choose one of", lake_boards__kinds="x"),
    "read layers": warm(
        "lake_boards.read_layers = 2", "choose 0", lake_boards__read_layers=2
    ),
    "momentum": warm("optimizer.beta2 = 1.0", "below 1", optimizer__beta2=1.0),
    "momentum of 1 in float32": warm(
        "beta2 = 0.99999999", "at most 0.9999999", optimizer__beta2=1 - 1e-8
    ),
    "out below a file": warm("--out={place}/file/x", "cannot be", out="{place}/file/x"),
    "out a file": warm("is not empty", "new folder", out="{place}/file"),
    "out a device": warm("is not empty", "new folder", out="/dev/null"),
    "foreign config": Wrong(
        "warm_start.py",
        (f"--config={runs.CONFIG}:smoke", "--out={place}/new/tiny"),
        ("of another command", "pass one"),
    ),
}
_BENCHMARK = (f"--config={runs.CONFIG}:smoke", "--iterations=0")
_LONG = "x" * 300
PATHS = {
    "unknown user": Wrong(
        "train.py",
        (*train().arguments, "--workdir=~nouser/run"),
        ("begins with ~ and a user who is not known", "write it out"),
    ),
    "links in a circle": workdir("{place}/circle/run", "cannot be written"),
    "long name": workdir("{place}/" + _LONG, "File name too long"),
    "model of no user": train("user who is not known", model__path="~nouser/model"),
    "out of no user": warm("write it out", out="~nouser/tiny"),
    "out in a circle": warm("lead in a circle", out="{place}/circle/tiny"),
    "long out": warm("choose a shorter name", out="{place}/" + _LONG),
    "figures to a folder": Wrong(
        "benchmark.py", (*_BENCHMARK, "--out={place}"), ("is a folder", "name a file")
    ),
    "figures to a device": Wrong(
        "benchmark.py", (*_BENCHMARK, "--out=/dev/full"), ("is a device", "name a file")
    ),
    "a file for the suite's folder": Wrong(
        "benchmark.py",
        ("--suite=gpu", "--smoke", "--out={place}/file"),
        ("/file: File exists", "choose another path"),
    ),
    "figures in a circle": Wrong(
        "benchmark.py", (*_BENCHMARK, "--out={place}/circle"), ("lead in a circle",)
    ),
}
COMMANDS = {
    "endless flags": Wrong(
        "train.py", ("--flagfile=/dev/zero",), ("a device", "name a text file")
    ),
    "flags in a circle": Wrong(
        "train.py", ("--flagfile={place}/flags",), ("leads back to itself", "take")
    ),
    "binary flags": Wrong(
        "train.py",
        ("--flagfile={place}/bytes",),
        ("check the path of --flagfile", "text file"),
    ),
    "other digits": train("seed=0x10", "decimal", seed="0x10"),
    "other digits apart": Wrong(
        "train.py",
        (*train().arguments, "--config.seed", "0x10"),
        ("--config.seed 0x10: write", "decimal"),
    ),
    "no switch": Wrong(
        "train.py",
        (*train().arguments, "--noconfig.seed=1"),
        ("unknown flag --noconfig.seed", "did you mean"),
    ),
    "a study that is not Python": Wrong(
        "study.py", ("--study={place}/flags",), ("ends in .py",)
    ),
}
TABLES = {"paths": PATHS, "commands": COMMANDS, "warm start": WARM_START}
TABLES |= {"trust": TRUST, "sizes": SIZES, "floats": FLOATS, "nothing": NOTHING}
WRONG = {
    f"{name}: {kind}": wrong
    for name, table in TABLES.items()
    for kind, wrong in table.items()
}

# Leaves a mark where it is executed.
_CODED = "from pathlib import Path\n\nPath('executed').touch()\n"
_CONTROL = f"""
import runpy
def get_config():
    config = runpy.run_path({str(runs.CONFIG)!r})['get_config']('smoke')
    config.env['symbols'] = ('P', '_', 'O', 'G', 'X', '<|im_end|>')
    return config
"""


def make_place(folder: Path) -> None:
    """Writes what the command lines name.

    Among it a checkpoint whose settings name a file, after which the file changed.
    """
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "flags").write_text(f"--flagfile={folder / 'flags'}\n")
    (folder / "bytes").write_bytes(bytes(range(256)))
    path = folder / "coded.py"
    path.write_text("")
    settings = settings_lib.to_dict(runs.settings(model__path=str(folder / "model")))
    settings["env"] = {"name": str(path), "thinking": True}
    digests = user_modules.digests([str(path)])
    save_checkpoint(folder / "coded", folder / "model", settings, code=digests)
    path.write_text(_CODED)
    (folder / "control.py").write_text(_CONTROL)
