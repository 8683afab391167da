"""Helpers for config files that only state how they differ from another one."""

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict


def derive(
    base: Path, variant: str, *, own: Sequence[str] = (), inherited: Sequence[str] = ()
) -> ConfigDict:
    """The settings of another config file, for the caller to change.

    Args:
      base: the other file, which defines get_config(variant).
      variant: the text after the colon of --config, or "".
      own: variants that the caller makes from the base's settings without a variant.
      inherited: variants that are taken from the base.

    Returns:
      The base's settings, with `variant` if that is inherited, else without.

    Raises:
      ValueError: if `variant` is in neither list.
    """
    known = {*own, *inherited}
    if variant and variant not in known:
        names = ", ".join(repr(name) for name in (*own, *inherited))
        raise ValueError(f"unknown variant {variant!r}: choose one of {names}, or none")
    get_config = runpy.run_path(str(base))["get_config"]
    return get_config(variant if variant in inherited else "")


def environment(name: str, **settings: Any) -> ConfigDict:
    """The `env` section of a config, with thoughts.

    Args:
      name: of the environment, or of a file that defines one.
      settings: the environment's own. Of a file of one's own, only those named here
        can be overridden on the command line.
    """
    return ConfigDict(dict(name=name, thinking=True, **settings))
