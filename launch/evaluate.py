"""Measures an agent on fixed levels that were kept from training.

  python launch/evaluate.py --checkpoint=runs/frozenlake --show=3
  python launch/evaluate.py --model=tiny --config=configs/frozenlake.py
  python launch/evaluate.py --checkpoint=runs/frozenlake --policy=planner

A checkpoint is a run's workdir (its best step, or the last if none was validated) or
one step's folder; it is played as it was trained, or as --config says. A model without
training is played as --config says. --policy=random and --policy=planner play the same
levels without a language model. The same seed and split always give the same levels.
"""

import dataclasses
import json
import math
import re
import sys
import time
import zlib
from pathlib import Path

import common
from absl import flags

from ragen_jax import settings as settings_lib
from ragen_jax.settings import Settings, UserError, WorldSettings

_DEFAULT = str(Path(__file__).parents[1] / "configs" / "frozenlake.py")
_CONFIG = common.define_config(_DEFAULT)
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Workdir or one step's folder.")
_MODEL = flags.DEFINE_string(
    "model",
    None,
    "Hugging Face folder or hub id, GGUF file, 'tiny' or 'smollm2'; with --checkpoint,"
    " where the model that the run began with lies now, if it has moved.",
)
_POLICY = flags.DEFINE_enum(
    "policy", "model", ["model", "random", "planner"], "Who plays."
)
_WORLD = flags.DEFINE_string(
    "world", None, "Label of one of several worlds; default: the first evaluated."
)
_PROMPTS = flags.DEFINE_integer("prompts", 256, "Levels.", lower_bound=1)
_ROLLOUTS = flags.DEFINE_integer("rollouts", 1, "Episodes a level.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.5, "0: the likeliest token.")
_SEED = flags.DEFINE_integer("seed", None, "Default: that of the settings.")
_SPLIT = flags.DEFINE_enum(
    "split", "test", ["train", "validation", "test"], "Which levels."
)
_OUT = flags.DEFINE_string(
    "out", None, "Trajectories, .jsonl; default WORKDIR/evaluations/..."
)
_SHOW = flags.DEFINE_integer("show", 0, "Episodes to print.", lower_bound=0)

_LOG_SECONDS = 60  # between lines of progress where no terminal shows a status


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is evaluated."""

    settings: Settings
    folder: Path  # where evaluations are written by default
    name: str  # for the default file's name
    who: str  # in words
    directory: Path | None = None  # of the checkpoint's steps
    step: int | None = None


def main() -> None:
    _check_flags()
    subject = _subject()
    common.start_jax(subject.settings.deterministic)
    # Imported here so that a wrong flag is told without waiting for JAX.
    import jax

    from ragen_jax import evaluation, results
    from ragen_jax.progress import Console
    from ragen_jax.transcripts import whole_file

    is_first = jax.process_index() == 0
    console = Console(sys.stdout if is_first else common.silence())
    settings = evaluation.fit_to_devices(subject.settings, jax.device_count())
    subject = dataclasses.replace(subject, settings=settings)
    started = time.perf_counter()
    if _POLICY.value == "model":
        score, who, out = _play_model(subject, console, is_first)
        written = [("trajectories", out)]
    else:
        score, who, out = _play_baseline(subject, console)
        written = []
    played = results.Played(
        who=who,
        policy=_POLICY.value,
        settings=settings,
        split=_SPLIT.value,
        prompts=_PROMPTS.value,
        rollouts=_ROLLOUTS.value,
        temperature=_TEMPERATURE.value,
    )
    written.append(("figures", out.with_suffix(".json")))
    if is_first:
        figures = results.figures(score, played, time.perf_counter() - started)
        with whole_file(out.with_suffix(".json")) as file:
            file.write(json.dumps(figures, indent=2, allow_nan=False) + "\n")
    console.line(results.table(score, played))
    console.line("\n".join(f"{name:12}  {path}" for name, path in written))


# Flags -------------------------------------------------------------------------------


def _check_flags() -> None:
    """Raises UserError for flags that do not go together or cannot be used."""
    if _POLICY.value == "model" and not (_CHECKPOINT.value or _MODEL.value):
        raise UserError(
            "neither --checkpoint nor --model says who plays: pass"
            " --checkpoint=runs/NAME, or --model=FOLDER for a model before training"
        )
    if _POLICY.value != "model" and (_MODEL.value or _SHOW.value):
        raise UserError(
            f"--policy={_POLICY.value} plays without a model and writes no replies:"
            " leave out --model and --show"
        )
    if not (math.isfinite(_TEMPERATURE.value) and _TEMPERATURE.value >= 0):
        raise UserError(
            f"--temperature={_TEMPERATURE.value:g} cannot be used: choose 0, for the"
            " likeliest token, or a positive number"
        )
    if _SEED.value is not None and not 0 <= _SEED.value < 2**32:
        raise UserError(f"--seed={_SEED.value} cannot be used: choose 0 to 2**32 - 1")
    if _OUT.value is not None and Path(_OUT.value).suffix != ".jsonl":
        raise UserError(
            f"--out={_OUT.value} must end in .jsonl: the figures go beside it, in .json"
        )
    if _CHECKPOINT.value and _is_overridden() and not _has_config():
        raise UserError(
            "--config.KEY=VALUE without --config would replace all of the checkpoint's"
            " settings by the default config's: name the --config to play by as well"
        )


def _is_overridden() -> bool:
    """Whether a key of the config is set on the command line."""
    arguments = flags.FLAGS.read_flags_from_files(sys.argv[1:], force_gnu=False)
    return any(re.match(r"--?(no)?config\.", argument) for argument in arguments)


def _subject() -> Subject:
    """What the flags ask for, with the seed that they ask for."""
    subject = _from_checkpoint() if _CHECKPOINT.value else _from_config()
    settings = subject.settings.alone(_chosen_world(subject.settings))
    if _SEED.value is not None:
        settings = dataclasses.replace(settings, seed=_SEED.value)
    return dataclasses.replace(subject, settings=settings)


def _chosen_world(settings: Settings) -> WorldSettings:
    """The world of several that --world names; the first where it names none."""
    worlds = {world.label: world for world in settings.evaluated_worlds()}
    worlds |= {w.label: w for w in settings.worlds() if w.label not in worlds}
    if _WORLD.value is None:
        return next(iter(worlds.values()))
    if _WORLD.value not in worlds:
        raise UserError(
            f"--world={_WORLD.value} is none of these settings' worlds: choose one of"
            f" {', '.join(worlds)}"
        )
    return worlds[_WORLD.value]


def _from_config() -> Subject:
    settings = common.read_settings(_CONFIG.value)
    path = _MODEL.value or settings.model.path
    return Subject(
        settings=common.with_model(settings, path),
        folder=Path("runs") / "evaluations",
        name=Path(path).name or "model",
        who=f"{path}, as it is",
    )


def _from_checkpoint() -> Subject:
    from ragen_jax import checkpoints

    found, settings = common.find_checkpoint(_CHECKPOINT.value, _MODEL.value)
    folder = found.directory / str(found.step)
    why = {
        "best": "the best on validation levels",
        "last": "the last, for none was validated",
        "given": "as given",
    }
    who = f"{folder}, {why[found.which]}"
    if _has_config():
        who += f", trained on {settings.env.name}"
        other = common.read_settings(_CONFIG.value)
        settings = dataclasses.replace(other, model=settings.model)
    is_workdir = found.directory.name == checkpoints.FOLDER
    workdir = found.directory.parent if is_workdir else found.directory
    return Subject(
        settings=settings,
        folder=workdir / "evaluations",
        name=f"step{found.step}",
        who=who,
        directory=found.directory,
        step=found.step,
    )


def _has_config() -> bool:
    return common.config_path() != _DEFAULT


def _prepare_out(subject: Subject) -> Path:
    """Where trajectories go, in a folder that is there and can be written to."""
    out = Path(_OUT.value or subject.folder / _default_name(subject))
    out = out.expanduser().absolute()
    if out.is_dir():
        raise UserError(f"--out={out} is a folder: name a file that ends in .jsonl")
    try:
        common.make_workdir(str(out.parent))
    except UserError as error:
        raise UserError(
            f"{out} cannot be written ({error.__cause__}): pass as --out a file in a"
            " folder of yours on a disk with room"
        ) from None
    return out


def _default_name(subject: Subject) -> str:
    """Tells apart what gives different results; the same evaluation, the same name."""
    settings, is_model = subject.settings, _POLICY.value == "model"
    parts = [
        _WORLD.value or Path(settings.env.name).stem,
        subject.name if is_model else _POLICY.value,
        f"{_SPLIT.value}{_PROMPTS.value}x{_ROLLOUTS.value}",
        f"seed{settings.seed}",
    ]
    if is_model:
        parts.append(f"temperature{_TEMPERATURE.value:g}")
    if _has_config() or _is_overridden():
        chosen = json.dumps(settings_lib.to_dict(settings), sort_keys=True)
        parts.append(f"{zlib.crc32(chosen.encode()):08x}")
    return "_".join(parts) + ".jsonl"


# Playing -----------------------------------------------------------------------------


def _play_model(subject: Subject, console, is_first: bool):
    """Plays with the language model; gives its score, who it is, and the file."""
    from ragen_jax import evaluation, loop, transcripts, weights
    from ragen_jax.envs.base import SPLITS

    with common.user_mistakes():
        run = loop.prepare(subject.settings)
        scene, tokens = run.scenes[0], run.tokens[0]
        reader = transcripts.make_reader(
            run.tokenizer, scene.world, scene.dialogue, run.source.name
        )
        if subject.step is None:
            actor = weights.load_parameters(run, value_head=False)
        else:
            actor = weights.restore_actor(run, subject.directory, subject.step)
        out = _prepare_out(subject)  # Last, so that a mistake leaves no folder behind.
    evaluator = loop.make_evaluator(
        run,
        scene,
        tokens,
        rollouts=_ROLLOUTS.value,
        prompts=_PROMPTS.value,
        greedy=_TEMPERATURE.value == 0,
    )
    shown, progress = [], _Progress(console, _PROMPTS.value)
    with transcripts.whole_file(out) if is_first else common.silence() as file:

        def on_batch(first: int, rows, episodes) -> None:
            for transcript in transcripts.read(
                reader, rows, episodes, first_episode=first * _ROLLOUTS.value
            ):
                line = json.dumps(transcript.to_dict(), ensure_ascii=False)
                file.write(line + "\n")
                if len(shown) < _SHOW.value:
                    shown.append(transcripts.readable(transcript))
            progress.tell(first + len(episodes.turns) // _ROLLOUTS.value)

        progress.tell(0)
        score = evaluation.evaluate(
            evaluator,
            actor,
            prompts=_PROMPTS.value,
            split=SPLITS.index(_SPLIT.value),
            seed=subject.settings.seed,
            temperature=_TEMPERATURE.value,
            on_batch=on_batch,
        )
    if shown:
        system = scene.dialogue.system.replace("\n", "\n    ")
        console.line("\n\n".join([f"System prompt\n    {system}", *shown, ""]))
    return score, subject.who, out


def _play_baseline(subject: Subject, console):
    """Plays with a baseline; gives its score, who it is, and what to write beside."""
    from ragen_jax import baselines, envs, evaluation
    from ragen_jax.envs.base import SPLITS

    settings = subject.settings
    with common.user_mistakes():
        chosen = settings.worlds()[0]
        world = envs.make(chosen.name, chosen.options)
        baseline = baselines.make_baseline(_POLICY.value, world, chosen)
        out = _prepare_out(subject)
    console.status("playing ...")
    episodes = baselines.play(
        world,
        baseline,
        actions=chosen.actions,
        prompts=_PROMPTS.value,
        rollouts=_ROLLOUTS.value,
        split=SPLITS.index(_SPLIT.value),
        seed=settings.seed,
    )
    who = f"{_POLICY.value}: {baseline.description}"
    return evaluation.score(episodes, _ROLLOUTS.value), who, out


class _Progress:
    """Tells how many levels are done, and how long the others will take."""

    def __init__(self, console, levels: int):
        self._console, self._levels = console, levels
        self._started = self._told = time.monotonic()

    def tell(self, done: int) -> None:
        from ragen_jax.progress import duration

        now = time.monotonic()
        text = f"{done}/{self._levels} levels"
        if done:
            left = (now - self._started) / done * (self._levels - done)
            text += f", {duration(left)} left"
        self._console.status(f"{text} ...")
        if now - self._told > _LOG_SECONDS:
            self._told = now
            self._console.line(text)


if __name__ == "__main__":
    common.run(main)
