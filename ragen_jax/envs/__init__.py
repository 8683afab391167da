"""Environments: pure `reset`, `step` and `observe`; rules only, no tokens."""

from ragen_jax.envs.host_calls import guard
from ragen_jax.envs.registry import NAMES, check_file, lookup, make, parse_options
from ragen_jax.utils.user_modules import is_path

__all__ = ["NAMES", "check_file", "guard", "is_path", "lookup", "make", "parse_options"]
