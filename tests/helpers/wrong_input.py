"""Command lines that cannot be used, and the damaged files that they name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from safetensors.numpy import load_file, save_file

from helpers import models, runs
from ragen_jax import settings as settings_lib
from ragen_jax.reporting import metrics
from ragen_jax.training import checkpoints


class Wrong(NamedTuple):
    """A command line, and parts of what refuses it: key or file, value, remedy."""

    script: str
    arguments: tuple[str, ...]  # {place} stands for the test's folder
    parts: tuple[str, ...]


# Wrong command lines -----------------------------------------------------------------


def train(*parts: str, **changes) -> Wrong:
    """Training with wrong settings; `__` in a key stands for its dot."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    values = {**runs.SMALL, "model.path": "{place}/model", **keys}
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    given = (f"--config={runs.CONFIG}:smoke", "--workdir={place}/new/run", *overrides)
    return Wrong("train.py", given, parts)


def model(name: str, *parts: str) -> Wrong:
    """Training from a damaged model folder."""
    return train(f"{{place}}/{name}", *parts, model__path=f"{{place}}/{name}")


def config(path: str, *parts: str) -> Wrong:
    """Training by another config."""
    given = (f"--config={path}", "--workdir={place}/new/run")
    return Wrong("train.py", given, (path, *parts))


def workdir(path: str, *parts: str) -> Wrong:
    """Training in another folder."""
    return Wrong("train.py", (*train().arguments, f"--workdir={path}"), (path, *parts))


def evaluate(*arguments: str, parts: tuple[str, ...]) -> Wrong:
    """An evaluation of a usual size."""
    usual = ("--prompts=2", "--out={place}/new/out.jsonl")
    return Wrong("evaluate.py", (*usual, *arguments), parts)


DEVICES = {
    "data": train("mesh.data", "= 3 * 1 * 1", "8 devices", "to -1", mesh__data=3),
    "more devices": train("= 16 * 1 * 1 = 16", "are 8", "set", mesh__data=16),
    "fsdp": train("mesh.fsdp", "= 3 * 1", "choose sizes", mesh__fsdp=3),
    "tensor": train("mesh.tensor = 1 * 5", "one of 1, 2, 4, 8", mesh__tensor=5),
    "no axis": train("mesh.data = 0", "choose 1 or more", mesh__data=0),
    "two free axes": train("mesh.fsdp = -1", "set mesh.fsdp", mesh__fsdp=-1),
    "episodes": train(
        "rollout.prompts * rollout.group_size = 3 * 4", "to 4", rollout__prompts=3
    ),
    "slots": train("rollout.slots = 3", "set it to 8 or to 0", rollout__slots=3),
    "more slots": train("rollout.slots = 9", "lower", rollout__slots=9),
    "validation": train("evaluation.prompts", "= 5", "8", evaluation__prompts=5),
    "test": train("evaluation.test_prompts", "= 9", evaluation__test_prompts=9),
    "evaluation slots": train("evaluation.slots = 3", "to 8", evaluation__slots=3),
    "microbatch": train(
        "optimizer.microbatch = 4", "set optimizer.microb", optimizer__microbatch=4
    ),
    "layout": train("rollout.layout = 'tensor'", "raise", rollout__layout="tensor"),
}
LENGTHS = {
    "no room for a prompt": train("context = 8", "to 0", rollout__context=8),
    "short context": train("context = 99 is too short", "to 0", rollout__context=99),
    "long context": train("context = 5000", "1024", "to 0", rollout__context=5000),
    "many turns": train("60 replies", "1024 positions", "lower", rollout__turns=60),
    "short replies": train(
        "rollout.reply_tokens = 2",
        "set it to",
        rollout__reply_tokens=2,
        model__path="tiny",
    ),
    "no reply": train("rollout.reply_tokens = 0", "1 or", rollout__reply_tokens=0),
    "actions": train(
        "rollout.actions_per_turn = 11",
        "to at most 10",
        rollout__actions_per_turn=11,
    ),
    "window of nothing": train("window = 0", "choose 1 or", rollout__window=0),
    "short window": train(
        "context = 99 is too short",
        "one message and a reply of 8 can need",
        "or more, or to 0",
        rollout__history="single",
        rollout__context=99,
    ),
    "long window": train(
        "rollout.history = 'window' can need",
        "set rollout.context to 1024",
        rollout__history="window",
        rollout__window=60,
        rollout__turns=60,
    ),
    "long message": train(
        "system prompt, one message and a reply of 1000 can need",
        "lower rollout.reply_tokens",
        rollout__history="single",
        rollout__reply_tokens=1000,
    ),
}
NAMES = {
    "targets": train(
        "lora.targets = 'querry'", "choose", lora__targets="querry", lora__rank=4
    ),
    "key": train("rollout.promts", "did you mean rollout.pro", rollout__promts=3),
    "top_p": train("rollout.top_p in", "=0.9", "rollout.", rollout__top_p=0.9),
    "top_k": train("rollout.top_k in", "=50", "rollout.", rollout__top_k=50),
    "temp": train("did you mean rollout.temperature", rollout__temperatur=0.5),
    "evaluation": train("evaluation.top_p in", "evaluation.", evaluation__top_p=0.9),
    "env": train("env.name = 'maze'", "choose one of", env__name="maze"),
    "option": Wrong(
        "train.py",
        ("--config={place}/own.py", "--workdir={place}/new/run"),
        ("env.colour = 'red'", "choose one of env."),
    ),
    "no target": Wrong(
        "train.py",
        (f"--config={runs.CONFIG}:smoke", "--workdir={place}/new/run", "--plan")
        + ("--target-devices=8",),
        ("--target-devices describes", "add --plan --target=h100"),
    ),
    "deep": Wrong(
        "train.py",
        (f"--config={runs.ROOT}/configs/sokoban.py:mix",)
        + ("--config.env.mix.rooms.prompts=abc",),
        ("env.mix.rooms.prompts = 'abc'", "choose a whole number"),
    ),
    "option value": train("env.size = 1", "from 2 to 10", env__size=1),
    "observation": train(
        "env.observation = 'image'", "choose one of grid", env__observation="image"
    ),
    "algorithm": train("algorithm = 'ppo'", "choose one of", algorithm="ppo"),
    "estimator": train("estimator = 'a2c'", "one of ppo, grpo", estimator="a2c"),
    "kl_kind": train("loss.kl_kind = 'k4'", "k1, k2, k3", loss__kl_kind="k4"),
    "kl_in": train("loss.kl_in = 'both'", "loss, reward", loss__kl_in="both"),
    "aggregation": train(
        "aggregation = 'mean'", "choose one of token_mean", loss__aggregation="mean"
    ),
    "history": train(
        "history = 'last'", "one of full, window, single", rollout__history="last"
    ),
    "layout": train("layout = 'split'", "one of repl", rollout__layout="split"),
    "schedule": train("schedule = 'wsd'", "linear", optimizer__schedule="wsd"),
    "strategy": train("strategy = 'best'", "top_frac", filter__strategy="best"),
    "metric": train("filter.metric = 'max'", "return_std", filter__metric="max"),
    "decoding": train(
        "rollout.decode_attention = 'cudnn' needs an NVIDIA GPU",
        "set it to 'auto'",
        rollout__decode_attention="cudnn",
    ),
    "graph": train(
        "rollout.cuda_graph = True needs", "to False", rollout__cuda_graph=True
    ),
    "dtype": train("dtype = 'fp8'", "bfloat16", model__compute_dtype="fp8"),
}
NUMBERS = {
    "negative rate": train("actor_lr = -0.1", "0 or more", optimizer__actor_lr=-0.1),
    "nan rate": train("critic_lr = nan", "finite", optimizer__critic_lr="nan"),
    "infinite rate": train("actor_lr = inf", "finite", optimizer__actor_lr="inf"),
    "temperature": train(
        "rollout.temperature = 0.0", "1e-06 or more", rollout__temperature=0
    ),
    "clip": train("loss.clip_low = 1.0", "from 0 to below 1", loss__clip_low=1),
    "gamma": train("gamma = 1.5", "from 0 to 1", advantage__gamma=1.5),
    "fraction": train("filter.fraction = 0.0", "above 0", filter__fraction=0),
    "iterations": train("iterations = 0", "choose 1 or more", iterations=0),
    "text": train("iterations = 'many'", "a whole number", iterations="many"),
    "cadence": train("every.log = -1", "choose 0 or more", every__log=-1),
    "validation": train("every.evaluate = -2", "0 or more", every__evaluate=-2),
    "saving": train("every.checkpoint = -3", "0 or more", every__checkpoint=-3),
    "seed": train("seed = -1", "choose 0 to 2**32 - 1", seed=-1),
    "penalty": train("penalty = 0.5", "negative", reward__format_penalty=0.5),
    "groups of one": train(
        "rollout.group_size = 1",
        "raise rollout.group_size",
        algorithm="starpo_s",
        rollout__prompts=8,
        rollout__group_size=1,
    ),
    "minibatch": train(
        "optimizer.minibatch = 8",
        "set optimizer.microbatch to 2",
        optimizer__microbatch=3,
    ),
    "large minibatch": train(
        "optimizer.minibatch = 16",
        "lower optimizer.minibatch",
        optimizer__minibatch=16,
    ),
    "rank": train("lora.rank = -1", "0 or more", lora__rank=-1),
    "warmup": train("critic_warmup = 4", "to at most 3", optimizer__critic_warmup=4),
}
# What makes no sense together.
COMBINATIONS = {
    "warm-up without a critic": train(
        "critic_warmup = 2",
        "'dr_grpo', which has no critic: set it to 0",
        estimator="dr_grpo",
        optimizer__critic_warmup=2,
    ),
    "bounds crossed": train(
        "filter.low = 0.75 is not below filter.high = 0.5",
        "swap them",
        filter__strategy="percentile_range",
        filter__low=0.75,
        filter__high=0.5,
    ),
    "members without a spread": train(
        "filter.fraction = 0.25",
        "fewer than 2",
        "to 0.5 or more",
        filter__strategy="within_group",
        filter__fraction=0.25,
    ),
    "a penalty without a gradient": train(
        "loss.kl_kind = 'k1+'",
        "set it to 'k1'",
        loss__kl=0.1,
        loss__kl_in="reward",
        loss__kl_kind="k1+",
    ),
    "a row's length for tokens": train(
        "advantage.length_weight = True",
        "estimator to 'grpo'",
        estimator="turn_wise_gae",
        advantage__length_weight=True,
    ),
    "thoughts without thinking": train(
        "loss.entropy_on = 'answer'",
        "env.thinking to True",
        env__thinking=False,
        loss__entropy_on="answer",
    ),
}
MODELS = {
    "no folder": model("nowhere", "there is no folder", "give 'tiny', 'tiny_sokoban'"),
    "no config": model("no_config", "/config.json cannot be read", "needs the"),
    "broken config": model("broken_config", "/config.json cannot be read", "needs"),
    "foreign": model("foreign", "MistralForCausalLM is not supported", "choose"),
    "text for a size": model("text", "num_attention_heads = '4'", "take the config"),
    "no width": model("no_width", "hidden_size = 0 cannot be used", "take the"),
    "odd groups": model("odd_groups", "num_key_value_heads = 3", "take the config"),
    "odd heads": model("odd_heads", "head_dim = 7 cannot be used", "take the config"),
    "scaled": model("scaled", "rope_parameters = 'yarn' cannot be used", "take the"),
    "vocabulary": model("vocabulary", "vocab_size = 10", "take both from one"),
    "gap": model("gap", "ids need a vocabulary of", "vocab_size = ", "take both"),
    "truncated": model("truncated", "model.safetensors is damaged", "copy or"),
    "reshaped": model("reshaped", "model.norm.weight has shape (5,)", "take config"),
    "lacking": model("lacking", "missing ['model.norm.weight']", "take config.json"),
    "no weights": model("no_weights", "holds no .safetensors", "copy or"),
    "no tokenizer": model("no_tokenizer", "has no tokenizer.json", "copy the"),
    "broken tokenizer": model("broken_tokenizer", "no tokenizer that can", "copy"),
    "no template": model("no_template", "has no chat template", "take the instr"),
}
CONFIGS = {
    "missing": config("{place}/none.py", "there is no file", "pass --config="),
    "syntax": config("{place}/syntax.py", "line 2", "fix that line"),
    "no function": config("{place}/bare.py", "no function get_config", "add one"),
    "nothing": config("{place}/nothing.py", "returns NoneType", "let it return"),
    "a dict": config("{place}/dict.py", "returns dict", "let it return"),
    "variant": config(
        f"{runs.CONFIG}:fast", "variant 'fast'", "choose one of 'slippery'"
    ),
    "no variants": config("{place}/dict.py:fast", "has no variants", "pass --config="),
    "flag": Wrong("train.py", ("--top_p=0.9",), ("--config is missing", "pass")),
}
WORKDIRS = {
    "another run": workdir("{place}/other", "seed was 9 and is 0", "choose another"),
    "unreadable": workdir("{place}/unreadable", "not readable", "give another"),
    "unknown": workdir("{place}/unknown", "no settings.json", "give another"),
    "root": workdir("/", "root of the file system", "choose a folder"),
    "root by another name": workdir("/tmp/..", "root of the file system"),
    "file": workdir("{place}/file", "cannot be written to", "choose a folder"),
    "under a file": workdir("{place}/file/run", "cannot be written", "choose a fold"),
    "no disk": workdir("/proc/nothing/run", "cannot be written to", "choose a folder"),
}
EVALUATIONS = {
    "missing": evaluate("--checkpoint={place}/none", parts=("{place}/none", "give")),
    "foreign": evaluate(
        "--checkpoint={place}/foreign_run", parts=("foreign_run", "give a workdir")
    ),
    "damaged": evaluate(
        "--checkpoint={place}/damaged",
        parts=("checkpoints/1 is damaged: actor.", "delete"),
    ),
    "another model": evaluate(
        "--checkpoint={place}/mixed", parts=("holds another state", "use the settings")
    ),
    "k": evaluate("--model=tiny", "--k=0", parts=("unknown flag --k", "--help")),
    "rollouts": evaluate("--model=tiny", "--rollouts=0", parts=("--rollouts=0", "--h")),
    "levels": evaluate("--model=tiny", "--prompts=0", parts=("--prompts=0", "--help")),
    "heat": evaluate(
        "--model=tiny", "--temperature=inf", parts=("--temperature=inf", "choose 0")
    ),
    "weights": evaluate(
        "--model={place}/truncated", parts=("model.safetensors is damaged", "copy")
    ),
    "decoding": evaluate(
        "--model=tiny",
        "--config.rollout.decode_attention=cudnn",
        parts=("rollout.decode_attention = 'cudnn' needs", "set it to 'auto'"),
    ),
    "top_p": evaluate("--model=tiny", "--top_p=0.9", parts=("flag --top_p", "--")),
    "env": evaluate(
        "--model=tiny", "--config.env.name=maze", parts=("env.name = 'maze'", "choose")
    ),
}
TABLES = {
    "devices": DEVICES,
    "lengths": LENGTHS,
    "names": NAMES,
    "numbers": NUMBERS,
    "combinations": COMBINATIONS,
    "models": MODELS,
    "configs": CONFIGS,
    "workdirs": WORKDIRS,
    "evaluations": EVALUATIONS,
}
WRONG = {
    f"{name}: {kind}": wrong
    for name, table in TABLES.items()
    for kind, wrong in table.items()
}


# What they are given ------------------------------------------------------------------


def edit_config(**changes) -> Callable[[Path], None]:
    """Damage to a model folder: other values in its config.json."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def edit_weights(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """Damage to a model folder: other tensors."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return edit


def drop(name: str) -> Callable[[Path], None]:
    """Damage to a model folder: a file is gone."""
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    """Damage to a model folder: another text in a file."""
    return lambda folder: (folder / name).write_text(text)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def move_id(folder: Path) -> None:
    """No more tokens than before, but one of them behind the end of the vocabulary."""
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = size
    path.write_text(json.dumps(content))


def drop_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text())
    content.pop("chat_template", None)
    path.write_text(json.dumps(content))


DAMAGE = {
    "no_config": drop("config.json"),
    "broken_config": write("config.json", '{"hidden_size": 32,'),
    "foreign": edit_config(architectures=["MistralForCausalLM"], model_type="mistral"),
    "text": edit_config(num_attention_heads="4"),
    "no_width": edit_config(hidden_size=0),
    "odd_groups": edit_config(num_key_value_heads=3),
    "odd_heads": edit_config(head_dim=7),
    "scaled": edit_config(rope_parameters="yarn"),
    "vocabulary": edit_config(vocab_size=10),
    "gap": move_id,
    "truncated": truncate,
    "reshaped": edit_weights(
        lambda tensors: tensors.update(
            {"model.norm.weight": tensors["model.norm.weight"][:5]}
        )
    ),
    "lacking": edit_weights(lambda tensors: tensors.pop("model.norm.weight")),
    "no_weights": drop("model.safetensors"),
    "no_tokenizer": drop("tokenizer.json"),
    "broken_tokenizer": write("tokenizer.json", '{"model": {"type": "X"}}'),
    "no_template": drop_template,
}
FILES = {
    "file": "",
    "own.py": "import runpy\n"
    "def get_config():\n"
    f"    config = runpy.run_path({str(runs.CONFIG)!r})['get_config']('smoke')\n"
    "    config.env['colour'] = 'red'\n"
    "    return config\n",
    "syntax.py": "def get_config():\n    return (\n",
    "bare.py": "seed = 1\n",
    "nothing.py": "def get_config():\n    pass\n",
    "dict.py": "def get_config():\n    return {'seed': 1}\n",
    "unreadable/settings.json": "[1",
    "unknown/checkpoints/none": "",
    "foreign_run/checkpoints/3/info/info.json": '{"step": 3}',
    f"other/{metrics.FILE}": '{"iteration": 1}\n',
}


def make_place(folder: Path) -> None:
    """Writes a good model, and everything that can be wrong, into a folder."""
    shutil.copytree(runs.model(), folder / "model")
    for name, damage in DAMAGE.items():
        shutil.copytree(folder / "model", folder / name)
        damage(folder / name)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    settings = settings_lib.to_dict(runs.settings(model__path=str(folder / "model")))
    other = {**settings, "seed": 9}
    (folder / "other" / "settings.json").write_text(json.dumps(other))
    save_checkpoint(folder / "damaged", folder / "model", settings)
    data = folder / "damaged" / checkpoints.FOLDER / "1" / "state"
    for path in data.rglob("0*"):
        path.write_bytes(b"")
    # Of a model with other shapes than the folder that the settings name has now.
    shutil.copytree(folder / "model", folder / "wider")
    edit_config(intermediate_size=50)(folder / "wider")
    wider = {**settings, "model": {**settings["model"], "path": str(folder / "wider")}}
    save_checkpoint(folder / "mixed", folder / "model", wider)


def save_checkpoint(workdir: Path, model_folder: Path, settings: dict, **info) -> None:
    weights, _ = models.read_model(model_folder)
    state = {"actor": jax.device_put(weights), "updates": jnp.int32(3)}
    directory = workdir / checkpoints.FOLDER
    with checkpoints.Checkpoints(directory, keep_last=1, keep_best=0) as saved:
        saved.save(1, state, {"settings": settings, **info}, score=None)
