"""Lets the command line set an environment's keys that the config file omits."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from ragen_jax import settings as settings_lib
from ragen_jax.settings import TaskSettings
from ragen_jax.settings.environment import LIMITS, MIX, TEXTS
from ragen_jax.utils import user_modules

_NAME = re.compile(r"(env\.(?:(mix|evaluate)\.[^.]+\.)?)name")
# Keys that an environment may have besides its own settings, by section: env, env.mix,
# env.evaluate.
_COMMON = {
    None: TEXTS,
    "mix": ("prompts", *LIMITS, *TEXTS),
    "evaluate": (*LIMITS, *TEXTS),
}


def unnamed(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that environments have and a config does not name, with their defaults.

    Keys of a user's own environment are unknown here: its file runs after JAX starts.

    Args:
      leaves: of the config by dotted key, with overridden names of environments.

    Raises:
      SettingsError: if there is no environment of such a name.
    """
    unnamed_keys = {}
    for key, name in leaves.items():
        if match := _NAME.fullmatch(key):
            section, kind = match.groups()
            if name == MIX:  # Its environments have the keys.
                continue
            common = [
                field
                for field in dataclasses.fields(TaskSettings)
                if field.name in _COMMON[kind]
            ]
            for field in (*common, *_own_fields(name, key)):
                unnamed_keys[section + field.name] = _default(field)
    return {key: value for key, value in unnamed_keys.items() if key not in leaves}


def add(config: ConfigDict, key: str, value: Any) -> None:
    """Adds a leaf to a locked config. `key` is dotted, and its section exists."""
    *sections, leaf = key.split(".")
    with config.unlocked():
        part = config
        for section in sections:
            part = part[section]
        part[leaf] = value


def advice(key: str, leaves: Mapping[str, Any]) -> str:
    """The remedy in the error of an environment's unknown key.

    Args:
      key: dotted, "env." at its beginning.
      leaves: every leaf that can be set, by dotted key, with its value.
    """
    section = key.rpartition(".")[0] + "."
    beside = [leaf for leaf in leaves if leaf.rpartition(".")[0] + "." == section]
    anywhere = [leaf for leaf in leaves if leaf.startswith("env.")]
    remedies = [
        settings_lib.nearest(key, candidates)
        for candidates in (beside or anywhere, anywhere)
    ]
    for remedy in remedies:
        if remedy.endswith("?"):
            return remedy
    name = leaves.get(f"{section}name")
    if isinstance(name, str) and user_modules.is_path(name):
        return (
            "this config does not name it: write it into the config, if it is a setting"
            f" of {name}"
        )
    return remedies[0]


def _own_fields(name: Any, key: str) -> tuple[dataclasses.Field, ...]:
    if not isinstance(name, str) or user_modules.is_path(name):
        return ()
    from ragen_jax.envs.registry import lookup  # Brings JAX, and starts no device.

    return dataclasses.fields(lookup(name, key)[0])


def _default(field: dataclasses.Field) -> Any:
    """The field's default, as its type: absl chooses the flag's parser by it."""
    return float(field.default) if field.type is float else field.default
