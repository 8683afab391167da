"""What evaluation, export and diagnosis read: a checkpoint or model, with settings."""

import contextlib
import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import ragen_jax
from ragen_jax import settings as settings_lib
from ragen_jax.cli import trust
from ragen_jax.errors import UserError
from ragen_jax.settings import Settings, TaskSettings
from ragen_jax.utils import json_files

_WHY = {
    "best": "the best on validation levels",
    "last": "the last, for none was validated",
    "given": "as given",
}


@dataclasses.dataclass(frozen=True)
class Subject:
    """The checkpoint or untrained model that plays, and the settings it plays by."""

    settings: Settings
    folder: Path  # where evaluations are written by default
    name: str  # its part of the default file name
    who: str  # a description for people
    directory: Path | None = None  # of the checkpoint's steps
    step: int | None = None
    label: str = ""  # of the only environment, once it is chosen

    def only(self, label: str | None, seed: int | None) -> "Subject":
        """With one environment only, and another seed.

        Args:
          label: of the environment; None: `settings.main_task`.
          seed: None: that of the settings.

        Raises:
          UserError: if the settings have no such environment.
        """
        task = _chosen_task(self.settings, label)
        settings = self.settings.alone(task)
        if seed is not None:
            settings = dataclasses.replace(settings, seed=seed)
        return dataclasses.replace(self, settings=settings, label=task.label)


def find_checkpoint(path: str, model: str | None = None, other: Settings | None = None):
    """Finds what --checkpoint names: (checkpoints.Found, its Settings).

    The settings are those that it was saved with, except that a kernel which this
    device may lack becomes "auto". From then on this process executes no Python file
    that they name, unless the command line trusts it.

    Args:
      path: a workdir or one step's folder.
      model: the present path of the run's model; None: that of the settings.
      other: settings that the user chose to play by; their files are trusted.

    Raises:
      UserError: if there is none, or none that this version can read.
    """
    # Imports JAX: late, so that wrong flags are reported at once.
    from ragen_jax.training import checkpoints

    checkpoint = checkpoints.find(path)
    step_folder = checkpoint.directory / str(checkpoint.step)
    info = checkpoints.read_info(checkpoint.directory, checkpoint.step)
    if not isinstance(info.get("settings"), dict):
        raise UserError(
            f"{step_folder} was saved without settings: give a"
            " checkpoint of a training run"
        )
    try:
        settings = settings_lib.from_dict(info["settings"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{step_folder} was saved with settings that this version cannot read"
            f" ({error}): use it with the version that trained it"
        ) from None
    named = () if other is None else other.files()
    trust.restrict_to_trusted(step_folder, settings, info, named)
    return checkpoint, with_model(_for_any_device(settings), model)


def origin_of(checkpoint, settings: Settings) -> dict[str, Any]:
    """What an exported folder says of where it comes from, for JSON.

    Args:
      checkpoint, settings: from `find_checkpoint`.
    """
    from ragen_jax.training import checkpoints

    info = checkpoints.read_info(checkpoint.directory, checkpoint.step)
    return {
        "ragen_jax": ragen_jax.__version__,
        "run": checkpoint.workdir.name,
        "step": checkpoint.step,
        "code": info.get("code", {}),
        "settings": settings_lib.to_dict(settings),
    }


def _origin_file(model: str) -> Path:
    from ragen_jax.models.io import hugging_face

    with contextlib.suppress(RuntimeError):  # No such user's home: no folder either.
        return Path(model).expanduser() / hugging_face.ORIGIN
    return Path(model) / hugging_face.ORIGIN


def has_origin(model: str | None) -> bool:
    """Whether a model is an exported agent's folder, which says how it was trained."""
    return model is not None and _origin_file(model).exists()


def _for_any_device(settings: Settings) -> Settings:
    """The settings with "auto" in place of kernels that not every device has.

    Where they exist, "auto" chooses them.
    """
    model, rollout = settings.model, settings.rollout
    if model.attention in ("cudnn", "splash"):
        model = dataclasses.replace(model, attention="auto")
    if rollout.decode_attention == "cudnn":
        rollout = dataclasses.replace(rollout, decode_attention="auto")
    return dataclasses.replace(settings, model=model, rollout=rollout)


def with_model(settings: Settings, path: str | None) -> Settings:
    """The settings with another `model.path`; None leaves it."""
    if path is None:
        return settings
    model_settings = dataclasses.replace(settings.model, path=path)
    return dataclasses.replace(settings, model=model_settings)


def of_model(settings: Settings, path: str | None) -> Subject:
    """A model without training, played as the settings say.

    Args:
      settings: of a config.
      path: of the model; None: `model.path`.
    """
    path = path or settings.model.path
    return Subject(
        settings=with_model(settings, path),
        folder=Path("runs") / "evaluations",
        name=_model_name(path),
        who=f"{path}, as it is",
    )


def of_exported(path: str) -> Subject:
    """An exported agent, played as it was trained.

    From then on this process executes no Python file that the folder names, unless the
    command line trusts it.

    Args:
      path: of a folder for which `has_origin`.

    Raises:
      UserError: if the folder's settings cannot be read.
    """
    file = _origin_file(path)
    try:
        origin = json_files.read_object(file)
        settings = settings_lib.from_dict(origin["settings"])
        who = f"{path}, step {origin['step']} of the run {origin['run']}"
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{file} does not say how to play this agent ({reason}): name the --config"
            " to play it by"
        ) from None
    trust.restrict_to_trusted(file, settings, origin)
    # Adapters were added to the weights.
    lora = dataclasses.replace(settings.lora, rank=0)
    settings = dataclasses.replace(_for_any_device(settings), lora=lora)
    return dataclasses.replace(of_model(settings, path), who=who)


def _model_name(path: str) -> str:
    """The last part of a path or hub id; if there are more, with a hash of all."""
    parts = Path(path).parts
    last = Path(path).name or "model"
    return f"{last}-{_crc32(str(Path(path)))}" if len(parts) > 1 else last


def of_checkpoint(path: str, model: str | None, other: Settings | None) -> Subject:
    """A trained agent, played as it was trained or by other settings.

    Args:
      path: a workdir or one step's folder.
      model: the present path of the run's model; None: that of the settings.
      other: settings to play by instead; None: those of the run.

    Raises:
      UserError: as `find_checkpoint`.
    """
    checkpoint, settings = find_checkpoint(path, model, other)
    who = f"{checkpoint.directory / str(checkpoint.step)}, {_WHY[checkpoint.which]}"
    if other is not None:
        who += f", trained on {settings.env.name}"
        # Model and adapters are the checkpoint's own in any case.
        settings = dataclasses.replace(other, model=settings.model, lora=settings.lora)
    return Subject(
        settings=settings,
        folder=checkpoint.workdir / "evaluations",
        name=f"step{checkpoint.step}",
        who=who,
        directory=checkpoint.directory,
        step=checkpoint.step,
    )


def _chosen_task(settings: Settings, label: str | None) -> TaskSettings:
    """The environment of that label, evaluated or trained in."""
    if label is None:
        return settings_lib.main_task(settings)
    tasks = {task.label: task for task in settings.evaluated_tasks()}
    tasks |= {t.label: t for t in settings.tasks() if t.label not in tasks}
    if label not in tasks:
        raise UserError(
            f"--env={label} is not an environment of these settings: choose one of"
            f" {', '.join(tasks)}"
        )
    return tasks[label]


def settings_mark(settings: Settings) -> str:
    """A hash of the settings, eight hexadecimal digits."""
    text = json.dumps(settings_lib.to_dict(settings), sort_keys=True)
    return _crc32(text)


def _crc32(text: str) -> str:
    return f"{zlib.crc32(text.encode('utf-8', 'surrogateescape')):08x}"
