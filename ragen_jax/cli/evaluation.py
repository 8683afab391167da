"""The job of launch/evaluate.py: who plays what, and where the results go."""

import dataclasses
import json
import sys
import time
from pathlib import Path

from ragen_jax import settings as settings_lib
from ragen_jax.cli import outputs, startup, subjects
from ragen_jax.cli.subjects import Subject
from ragen_jax.errors import UserError
from ragen_jax.parallel import facts
from ragen_jax.settings import Settings
from ragen_jax.settings.environment import LIMITS
from ragen_jax.settings.limits import LEAST_TEMPERATURE

# What an evaluation reads of the config: sections, and single keys.
_SECTIONS = ("env", "model", "lora", "mesh")
_KEYS = {
    "seed",
    "deterministic",
    *(f"evaluation.{name}" for name in ("temperature", "slots")),
    *(f"rollout.{name}" for name in (*LIMITS, "reply_tokens", "history", "window")),
    *(f"rollout.{name}" for name in ("context", "stop_at_answer", "layout")),
    *(f"rollout.{name}" for name in ("decode_chunk", "buckets", "decode_attention")),
    "rollout.cuda_graph",
}
# Keys that only training reads -> what to use here instead.
_INSTEAD = {
    "evaluation.prompts": "pass --prompts",
    "evaluation.rollouts": "pass --rollouts",
    "evaluation.test_prompts": "pass --prompts",
    "evaluation.test_rollouts": "pass --rollouts",
    "rollout.prompts": "pass --prompts",
    "rollout.group_size": "pass --rollouts",
    "rollout.temperature": "pass --temperature",
    "rollout.slots": "set --config.evaluation.slots",
}


@dataclasses.dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    checkpoint: str | None  # a workdir or one step's folder
    model: str | None  # path of a model
    config: Settings  # the config's, or the default config's
    has_config: bool  # whether the config was named
    is_overridden: bool  # whether a key of it was set
    policy: str  # "model", or a baseline: "random", "rule", "planner"
    env: str | None  # label of one of several environments
    prompts: int  # P, levels
    rollouts: int  # n, episodes of each
    temperature: float | None  # None: evaluation.temperature of the settings
    seed: int | None
    split: str  # one of base.SPLITS
    out: str | None  # file of trajectories
    show: int  # episodes to print
    keys: tuple[str, ...] = ()  # of the config, that were set


def check(request: Request) -> None:
    """Raises UserError for flags that do not go together or cannot be used."""
    if request.policy == "model" and not (request.checkpoint or request.model):
        raise UserError(
            "neither --checkpoint nor --model says who plays: pass"
            " --checkpoint=runs/NAME, or --model=FOLDER for a model before training"
        )
    if request.policy != "model" and (request.model or request.show):
        raise UserError(
            f"--policy={request.policy} plays without a model and writes no replies:"
            " leave out --model and --show"
        )
    _check_temperature(request)
    if request.seed is not None and not 0 <= request.seed < 2**32:
        raise UserError(f"--seed={request.seed} cannot be used: choose 0 to 2**32 - 1")
    if request.out is not None and Path(request.out).suffix != ".jsonl":
        raise UserError(
            f"--out={request.out} must end in .jsonl: name such a file; the figures are"
            " written beside it, in .json"
        )
    if request.checkpoint:
        _check_config(request, "checkpoint")
    _check_keys(request)


def _check_config(request: Request, whose: str) -> None:
    """Raises UserError for keys without a config, of what has settings of its own."""
    if request.is_overridden and not request.has_config:
        raise UserError(
            f"--config.KEY=VALUE without --config would replace all of the {whose}'s"
            " settings by the default config's: name the --config to play by as well"
        )


def _check_temperature(request: Request) -> None:
    """Raises UserError for a temperature that is given twice, unread or unusable."""
    temperature, key = request.temperature, "evaluation.temperature"
    names = ["--temperature"] * (temperature is not None)
    names += [f"--config.{key}"] * (key in request.keys)
    if len(names) > 1:
        raise UserError(
            f"{' and '.join(names)} both choose the temperature: pass one of them"
        )
    if names and request.policy != "model":
        raise UserError(
            f"--policy={request.policy} samples no tokens: leave out {names[0]}"
        )
    # It is float32 in the compiled program, as that of the settings, and at least this.
    if temperature and (
        temperature < LEAST_TEMPERATURE or settings_lib.type_remedy(temperature, float)
    ):
        raise UserError(
            f"--temperature={temperature:g} cannot be used: choose 0, for the"
            f" likeliest token, or a number from {LEAST_TEMPERATURE:g} to 1e38"
        )


def _check_keys(request: Request) -> None:
    """Raises UserError for an overridden key that is not read here."""
    for key in request.keys:
        if key.split(".")[0] not in _SECTIONS and key not in _KEYS:
            section = key.split(".")[0]
            whose = "a training run is evaluated" * (section == "evaluation")
            raise UserError(
                f"--config.{key} says how {whose or 'a run trains'}, and is not read"
                f" here: {_INSTEAD.get(key, 'leave it out')}"
            )
        if key == "model.path":
            raise UserError("--config.model.path is not read here: pass --model")
        if request.checkpoint and key.split(".")[0] in ("model", "lora"):
            raise UserError(
                f"--config.{key} says how a model is made, but a checkpoint fixes its"
                " model: leave it out"
            )


def evaluate(request: Request) -> None:
    """Plays, writes what was played and prints the table.

    Raises:
      UserError: for what cannot be evaluated.
    """
    check(request)
    subject = _subject(request)
    request = with_temperature(request, subject.settings)
    _check_size(request, subject.settings)
    # Imported here so that a wrong flag is reported without waiting for JAX.
    import jax

    startup.start_jax(subject.settings, shared_facts(request, subject), trains=False)
    from ragen_jax.evaluation import report
    from ragen_jax.reporting.console import Console
    from ragen_jax.utils.atomic_files import new_file

    is_first = jax.process_index() == 0
    console = Console(sys.stdout if is_first else startup.silence())
    started = time.perf_counter()
    play = _play_model if request.policy == "model" else _play_baseline
    score, who, out = play(request, subject, console)
    played = dataclasses.replace(_played(request, subject), who=who)
    written = {"figures": out.with_suffix(".json")}
    if played.is_model:
        written = {"trajectories": out} | written
    if is_first:
        figures = report.figures(score, played, time.perf_counter() - started)
    try:
        if is_first:
            with new_file(written["figures"]) as file:
                file.write(json.dumps(figures, indent=2, allow_nan=False) + "\n")
    finally:  # A full disk does not keep what was measured from the user.
        console.line(report.table(score, played))
    console.line("\n".join(f"{name:12}  {path}" for name, path in written.items()))


def shared_facts(request: Request, subject: Subject) -> dict[str, str]:
    """In what the processes of one evaluation have to agree, as texts.

    One with other levels or another checkpoint would compute, and wait for, other
    programs than the rest.
    """
    flags = ("policy", "prompts", "rollouts", "temperature", "split")
    flag_values = {f"--{name}": str(getattr(request, name)) for name in flags}
    return (
        facts.of_run(subject.settings) | flag_values | {"the step": str(subject.step)}
    )


def with_temperature(request: Request, settings: Settings) -> Request:
    """The request with a temperature: its own, or else that of the settings."""
    if request.temperature is not None:
        return request
    return dataclasses.replace(request, temperature=settings.evaluation.temperature)


def _check_size(request: Request, settings: Settings) -> None:
    """Raises SettingsError for more episodes than one batch can hold."""
    sizes = {"--prompts": request.prompts, "--rollouts": request.rollouts}
    if request.policy != "model":
        sizes["rollout.actions"] = settings.rollout.actions
    else:
        if settings.evaluation.slots:  # Levels are then played one after another.
            del sizes["--prompts"]
        sizes |= settings_lib.turn_sizes(settings)
    settings_lib.check_record(sizes)


def _subject(request: Request) -> Subject:
    if request.checkpoint:
        other = request.config if request.has_config else None
        subject = subjects.of_checkpoint(request.checkpoint, request.model, other)
    elif not request.has_config and subjects.has_origin(request.model):
        _check_config(request, "agent")
        subject = subjects.of_exported(request.model)
    else:
        subject = subjects.of_model(request.config, request.model)
    return subject.only(request.env, request.seed)


def _played(request: Request, subject: Subject):
    from ragen_jax.evaluation.report import Played

    return Played(
        who=subject.who,
        policy=request.policy,
        settings=subject.settings,
        split=request.split,
        prompts=request.prompts,
        rollouts=request.rollouts,
        temperature=request.temperature,
    )


# Playing -----------------------------------------------------------------------------


def _play_model(request: Request, subject: Subject, console):
    """Plays with the language model: (score, who played, file of trajectories)."""
    import jax

    from ragen_jax.evaluation import recording, transcripts
    from ragen_jax.parallel import gloo_groups
    from ragen_jax.parallel import mesh as meshes
    from ragen_jax.training import weights
    from ragen_jax.training.model import make_model
    from ragen_jax.training.tasks import check_decoding, make_task
    from ragen_jax.training.validation import make_evaluator

    settings = subject.settings
    with startup.user_mistakes():
        _check_graph(request)
        sizes = settings_lib.fit_mesh(settings.mesh, jax.device_count())
        model = make_model(settings, meshes.make_mesh(**sizes))
        check_decoding(model)
        task, tokens = make_task(model, settings.tasks()[0], is_training=False)
        _check_levels(request, subject, task.env)
        reader = transcripts.make_reader(model.tokenizer, task.env, task.dialogue)
        if jax.process_count() > 1:
            _check_same_everywhere(model, subject, tokens)
            gloo_groups.connect(model.mesh)
        if subject.step is None:
            actor = weights.load_parameters(model)
        else:
            actor = weights.restore_actor(model, subject.directory, subject.step)
        out = _prepare_out(request, subject)  # Last: a mistake leaves no folder behind.
    evaluator = make_evaluator(
        model,
        task,
        tokens,
        rollouts=request.rollouts,
        prompts=request.prompts,
        greedy=request.temperature == 0,
    )
    score, shown = recording.play(
        evaluator,
        actor,
        reader,
        _played(request, subject),
        console,
        out=out if jax.process_index() == 0 else None,
        show=request.show,
    )
    if shown:
        system = task.dialogue.system.replace("\n", "\n    ")
        console.line("\n\n".join([f"System prompt\n    {system}", *shown, ""]))
    return score, subject.who, out


def _check_same_everywhere(model, subject: Subject, tokens) -> None:
    """Raises UserError, in every process, if one is about to play something else."""
    from ragen_jax.training import weights, workdir
    from ragen_jax.training.run import texts_fingerprint

    played = weights.played_fingerprint(model, subject.directory, subject.step)
    workdir.check_same_everywhere(played)
    workdir.check_same_texts(texts_fingerprint(tokens))


def _check_graph(request: Request) -> None:
    """Raises SettingsError for a CUDA graph asked for here, on a device without."""
    from ragen_jax.parallel import backend_choices

    if "rollout.cuda_graph" in request.keys:
        backend_choices.check_cuda_graph(request.config.rollout.cuda_graph)


def _check_levels(request: Request, subject: Subject, env) -> None:
    """Raises SettingsError if a user's environment draws no level of the split."""
    from ragen_jax.envs import first_levels
    from ragen_jax.envs.base import SPLITS

    (chosen,) = subject.settings.tasks()
    split = SPLITS.index(request.split)
    first_levels.check_levels_come(env, [split], chosen.name)


def _play_baseline(request: Request, subject: Subject, console):
    """Plays with a baseline: (score, who played, path that the figures go beside)."""
    from ragen_jax import envs
    from ragen_jax.envs.base import SPLITS
    from ragen_jax.evaluation import baselines
    from ragen_jax.evaluation import evaluator as evaluator_lib

    with startup.user_mistakes():
        task = subject.settings.tasks()[0]
        env = envs.make(task.name, task.options_and_texts)
        envs.check_file(env, task.name)
        _check_levels(request, subject, env)
        env = envs.guard(env, task.name)
        baseline = baselines.make_baseline(request.policy, env, task)
        out = _prepare_out(request, subject)
    console.status("playing ...")
    episodes = baselines.play(
        env,
        baseline,
        actions=task.actions,
        prompts=request.prompts,
        rollouts=request.rollouts,
        split=SPLITS.index(request.split),
        seed=subject.settings.seed,
    )
    who = f"{request.policy}: {baseline.description}"
    return evaluator_lib.score(episodes, request.rollouts), who, out


# Files -------------------------------------------------------------------------------


def _prepare_out(request: Request, subject: Subject) -> Path:
    """The path of the trajectories, in a folder that exists and is writable."""
    path = request.out or str(subject.folder / _default_name(request, subject))
    out = startup.local_path("out", path)
    outputs.refuse_files_of_a_run(out)
    outputs.refuse_files_of_a_run(out.with_suffix(".json"))
    for file in (out, out.with_suffix(".json")):
        if file.is_dir():
            raise UserError(
                f"--out={out}: {file} is a folder: name a file that ends in .jsonl"
            )
    try:
        startup.make_workdir(str(out.parent))
    except UserError as error:
        raise UserError(
            f"{out} cannot be written ({error.__cause__}): set --out to a file in a"
            " writable folder on a disk with free space"
        ) from None
    return out


def _default_name(request: Request, subject: Subject) -> str:
    """A file name that is a function of what is evaluated, and how."""
    settings, is_model = subject.settings, request.policy == "model"
    parts = [
        subject.label,
        subject.name if is_model else request.policy,
        f"{request.split}{request.prompts}x{request.rollouts}",
        f"seed{settings.seed}",
    ]
    if is_model:
        parts.append(f"temperature{request.temperature:g}")
    if request.has_config or request.is_overridden:
        parts.append(subjects.settings_mark(settings))
    return "_".join(parts) + ".jsonl"
