"""Reads a config into the tree of settings, with every preset resolved, and back.

`from_dict` is called by the commands and for saved runs; each environment's own
settings dataclass is read by `env_settings`.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from ragen_jax.errors import SettingsError
from ragen_jax.settings import schema as tree
from ragen_jax.settings.checks import check_combinations
from ragen_jax.settings.environment import TEXTS, TaskSettings
from ragen_jax.settings.schema import Settings
from ragen_jax.utils.words import shortened

# Keys, or prefixes of keys, that a resumed run may change. A model may have moved: its
# fingerprint is compared when a checkpoint is read. How the work is divided goes with
# the mesh, which may ask for it: it changes numbers by rounding alone.
_MAY_DIFFER = (
    "iterations",
    "model.path",
    "mesh.",
    # What computes the same in another way, as other devices may need.
    "model.attention",
    "rollout.cuda_graph",
    "rollout.decode_attention",
    "rollout.layout",
    "rollout.slots",
    "optimizer.microbatch",
    "every.",
    "evaluation.",
    "checkpoint.",
    "safety.",
    "health.",
    "loss.logprob_gap_limit",
)
_MOST_LISTED = 8  # settings that differ, in one sentence


# Nonzero floats must have a size in this range, which float32 holds with some room for
# arithmetic.
_TINIEST, _LARGEST = 1e-37, 1e38
_TASKS = tuple[TaskSettings, ...]  # The type of `env.mix` and `env.evaluate`.


def from_dict(config: Mapping[str, Any]) -> Settings:
    """Reads and checks the settings of a config.

    Args:
      config: nested, as `ConfigDict.to_dict()` gives it. A leaf that has a preset may
        be None: then the algorithm or the estimator decides.

    Raises:
      SettingsError: for the first key, value or combination that cannot be used.
    """
    _refuse_unknown(flatten(config), known_keys(), free="env.")
    settings = _read(Settings, _with_presets(config), "")
    check_combinations(settings)
    return settings


def to_dict(settings: Settings) -> dict[str, Any]:
    """The nested dict that `from_dict` reads back; JSON can hold it."""
    config = dataclasses.asdict(settings)
    config["env"] = _task_to_dict(config["env"])
    for name in ("mix", "evaluate"):
        tasks = map(_task_to_dict, config["env"].pop(name))
        if by_label := {task.pop("label"): task for task in tasks}:
            config["env"][name] = by_label
    return config


def _task_to_dict(values: dict[str, Any]) -> dict[str, Any]:
    """Moves the entries of `options` up among the other fields, as in a config.

    Texts that are empty are left out: then the settings are written as they were before
    there were any.
    """
    options = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in values["options"]
    }
    unset = {"options", *(key for key in TEXTS if not values[key])}
    return {k: v for k, v in values.items() if k not in unset} | options


def env_settings(
    options: Iterable[tuple[str, Any]],
    settings_type: type,
    section: str = "env.",
    name: str = "",
) -> Any:
    """Reads an environment's own settings from `EnvironmentSettings.options`.

    Args:
      options: pairs of key and value.
      settings_type: the frozen dataclass of the environment's settings, whose defaults
        fill in missing keys.
      section: the config section of the options, ending in a dot; for messages.
      name: of the environment; for messages.

    Raises:
      SettingsError: if the environment has no such key, or wants another type.
    """
    names = [field.name for field in dataclasses.fields(settings_type)]
    # `env.thinking` holds for all environments of a mix, so their sections lack it.
    common = ("name", *TEXTS, *(("thinking",) if section == "env." else ()))
    valid_keys = [f"{section}{name}" for name in (*common, *names)]
    leaves = {f"{section}{key}": value for key, value in options}
    try:
        _refuse_unknown(leaves, valid_keys)
    except SettingsError as error:
        if not name:
            raise
        # Usually the command names the config of another environment.
        other = "" if str(error).endswith("?") else f", or a config made for {name!r}"
        raise SettingsError(f"{section}name = {name!r}: {error}{other}") from None
    return _read(settings_type, dict(options), section)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings that must not change within one run but do, one phrase each.

    Compares two results of `to_dict`. Keys in _MAY_DIFFER, such as the mesh and the
    number of iterations, are left out.
    """
    old, new = flatten(saved), flatten(now)

    def written(leaves: Mapping[str, Any], key: str) -> str:
        return repr(leaves[key]) if key in leaves else "absent"

    def shown(leaves: Mapping[str, Any], key: str) -> str:
        is_long = key.rpartition(".")[2] in TEXTS
        return shortened(written(leaves, key)) if is_long else written(leaves, key)

    return [
        f"{key} was {shown(old, key)} and is {shown(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if written(old, key) != written(new, key) and not key.startswith(_MAY_DIFFER)
    ]


def check_same_run(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    where: str,
    remedy: str = "Go back to the saved values",
) -> None:
    """Raises SettingsError if the run saved in `where` was made with other settings.

    A setting of schema.py that is newer than the saved run counts as its default, so
    that a run can resume with a later version of the code; an environment's own do not.
    """
    try:
        saved = to_dict(from_dict(saved))
    except SettingsError:  # What cannot be read is reported below.
        remedy = (
            "This version cannot use the saved settings: take the one that wrote them,"
            " or restore settings.json from a copy,"
        )
    if changes := differences(saved, now):
        listed = "; ".join(changes[:_MOST_LISTED])
        if len(changes) > _MOST_LISTED:
            listed += f"; and {len(changes) - _MOST_LISTED} more"
        raise SettingsError(
            f"{where} holds a run made with other settings: {listed}. {remedy} or"
            " choose another --workdir (launch/export.py makes a model of its"
            " weights, to begin with: --config.model.path)"
        )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict's leaves by dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def nearest(key: str, valid_keys: Iterable[str]) -> str:
    """The remedy for an unknown dotted key: names the most similar known keys."""
    valid_keys = sorted(valid_keys)
    leaf = {name: name.rsplit(".", 1)[-1] for name in valid_keys}
    alike = difflib.get_close_matches(key.rsplit(".", 1)[-1], set(leaf.values()), 3)
    near = [name for name in valid_keys if leaf[name] in alike]
    near.sort(key=lambda name: -difflib.SequenceMatcher(None, key, name).ratio())
    if near:
        return f"did you mean {' or '.join(near[:3])}?"
    section = key.split(".")[0] + "."
    siblings = [name for name in valid_keys if name.startswith(section)]
    sections = sorted({name.split(".")[0] for name in valid_keys})
    return f"choose one of {', '.join(siblings or sections)}"


def _with_presets(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with None replaced by the presets of algorithm and estimator."""
    resolved = {
        key: dict(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
    }
    presets: dict[str, Any] = {}
    for key, table in (
        ("algorithm", tree.PER_ALGORITHM),
        ("estimator", tree.PER_ESTIMATOR),
    ):
        name = config.get(key)
        presets |= table.get(name, {}) if isinstance(name, str) else {}
    for key, value in presets.items():
        section, leaf = key.split(".")
        values = resolved.get(section)
        if isinstance(values, dict) and leaf in values and values[leaf] is None:
            values[leaf] = value
    return resolved


def known_keys(kind: type = Settings, prefix: str = "") -> list[str]:
    """The dotted key of every leaf of the tree, except those of the environment."""
    keys = []
    for field in dataclasses.fields(kind):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            keys += known_keys(field.type, f"{prefix}{field.name}.")
        elif field.name != "options" and field.type != _TASKS:
            keys.append(prefix + field.name)
    return keys


def _refuse_unknown(
    leaves: Mapping[str, Any], valid_keys: Iterable[str], free: str | None = None
) -> None:
    """Raises SettingsError for an unknown leaf.

    Args:
      leaves: by dotted key.
      valid_keys: dotted keys.
      free: leaves whose key begins with it are not checked here.
    """
    sections = {key.split(".")[0] for key in valid_keys}
    for key, value in leaves.items():
        is_free = free is not None and key.startswith(free)
        # `_read` reports a section that holds a single value instead of keys.
        if key not in valid_keys and key not in sections and not is_free:
            raise SettingsError(
                f"unknown key {key} = {value!r}: {nearest(key, valid_keys)}"
            )


def _read(kind: type, values: Any, prefix: str) -> Any:
    """Reads one dataclass of the tree, and those within it.

    Args:
      kind: the dataclass.
      values: its fields by name, not yet checked; unknown names were refused before.
      prefix: "" or the section's dotted key and a dot.
    """
    if not isinstance(values, Mapping):
        raise SettingsError(
            f"{prefix[:-1]} = {values!r} is a section: set its keys one by one, as in"
            f" {prefix}{dataclasses.fields(kind)[0].name}"
        )
    read: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        key = prefix + field.name
        if field.name == "options":
            read["options"] = _env_options(values, kind)
        elif field.type == _TASKS:
            read[field.name] = _read_tasks(values.get(field.name, {}), key)
        elif field.name == "label":
            read["label"] = values["label"]
        elif field.name in values:
            value = values[field.name]
            if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
                read[field.name] = _read(field.type, value, f"{key}.")
            else:
                read[field.name] = _read_leaf(field, value, key)
        elif field.default is dataclasses.MISSING:
            raise SettingsError(
                f"{key} is missing: add it to the config, as configs/frozenlake.py does"
            )
    return kind(**read)


def _env_options(values: Mapping[str, Any], kind: type) -> tuple[tuple[str, Any], ...]:
    """The environment's own keys of a section, which are not fields of `kind`, sorted.

    Lists become tuples, so that settings can be hashed.
    """
    fields = {field.name for field in dataclasses.fields(kind)} - {"options"}
    return tuple(
        (key, tuple(value) if isinstance(value, list) else value)
        for key, value in sorted(values.items())
        if key not in fields
    )


def _read_tasks(values: Any, key: str) -> tuple[TaskSettings, ...]:
    """The environments of `env.mix` or `env.evaluate`, in the order of their labels."""
    if not isinstance(values, Mapping) or not all(
        isinstance(task, Mapping) for task in values.values()
    ):
        raise SettingsError(
            f"{key} = {values!r} must hold a section for each environment, as in"
            f" {key}.easy.name = 'sokoban'"
        )
    for label, task in values.items():
        if "label" in task:
            raise SettingsError(
                f"{key}.{label}.label = {task['label']!r} is not read: an environment's"
                f" label is the name of its section, {label!r}: take it out"
            )
        if not label.replace("_", "").replace("-", "").isalnum():
            raise SettingsError(
                f"{key} calls an environment {label!r}, which cannot name a metric:"
                " choose letters, digits, - and _"
            )
        if label in ("before", "after"):
            raise SettingsError(
                f"{key} calls an environment {label!r}, which in test.json stands for"
                f" the test {label} training: choose another name"
            )
    return tuple(
        _read(TaskSettings, {**task, "label": label}, f"{key}.{label}.")
        for label, task in sorted(values.items())
    )


def _read_leaf(field: dataclasses.Field, value: Any, key: str) -> Any:
    """The value of a leaf, after checks of its type and limits; floats become float."""
    remedy = type_remedy(value, field.type)
    limit = field.metadata.get("limit")
    # Compiled programs hold numbers as int32; the seed has a limit of its own.
    if remedy is None and field.type is int and abs(value) >= 2**31 and key != "seed":
        remedy = "a whole number below 2**31"
    if remedy is None and limit is not None and not limit.allows(value):
        remedy = limit.remedy
    if remedy is not None:
        raise SettingsError(f"{key} = {value!r} cannot be used: choose {remedy}")
    return float(value) if field.type is float else value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # An int too large for a float.
        return False


def type_remedy(value: Any, kind: Any) -> str | None:
    """What to choose instead of a value of the wrong type, or None.

    An int may stand for a float, but a bool never for a number.
    """
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "a number"
        if not _is_finite(value):
            return "a finite number"
        if value and not _TINIEST <= abs(value) <= _LARGEST:
            return "0, or a number whose size is from 1e-37 to 1e38: float32 holds it"
        return None
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return None
    if typing.get_origin(kind) is tuple:  # Only tuples of texts are in use.
        is_texts = isinstance(value, tuple) and all(isinstance(v, str) for v in value)
        return None if is_texts else "a tuple of texts, as ('a', 'b') is"
    if kind is not int and isinstance(value, kind):
        return None
    return {int: "a whole number", bool: "True or False", str: "a text"}[kind]
