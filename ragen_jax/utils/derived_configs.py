"""Configs that say only in what they differ from another config file."""

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict


def derive(
    base: Path, variant: str, *, own: Sequence[str] = (), inherited: Sequence[str] = ()
) -> ConfigDict:
    """The settings of another config file, to be changed.

    Args:
      base: the file, which defines get_config(variant).
      variant: as asked for after the colon of --config, or "".
      own: variants that the deriving file makes itself, of the base's plain settings.
      inherited: variants that the base makes.

    Returns:
      The base's settings: of `variant` where it is inherited, else the plain ones.

    Raises:
      ValueError: in one sentence, for a variant that is neither.
    """
    known = {*own, *inherited}
    if variant and variant not in known:
        names = ", ".join(repr(name) for name in (*own, *inherited))
        raise ValueError(f"unknown variant {variant!r}: choose one of {names}, or none")
    get_config = runpy.run_path(str(base))["get_config"]
    return get_config(variant if variant in inherited else "")


def environment(name: str, **settings: Any) -> ConfigDict:
    """The `env` section of an environment whose replies begin with a thought.

    Args:
      name: of the environment, or of a file that defines one.
      settings: its own settings; what is named here can be set on the command line.
    """
    return ConfigDict(dict(name=name, thinking=True, **settings))
