"""Draws one level of each split, with a time limit: the search for it may never end.

A `reset` that draws again until a level belongs to the split runs for ever where none
does, and a compiled loop cannot be asked how far it is.
"""

import contextlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ragen_jax.envs.base import SPLITS, Environment
from ragen_jax.errors import SettingsError
from ragen_jax.utils import endings, user_modules

PATIENCE = 60.0  # seconds to wait for a single level


def check_levels_come(
    env: Environment, splits: Sequence[int], name: str, key: str = "env.name"
) -> None:
    """Draws a level of each split from a user's environment.

    Built-in environments are skipped: they check their settings for this.

    Args:
      env: made by `registry.make`, and checked by `registry.check_file`.
      splits: those that will be played.
      name: see `registry.lookup`.
      key: the config's key that names the environment; for messages.

    Raises:
      SettingsError: in one sentence, if a level does not come.
    """
    if not user_modules.is_path(name):
        return
    if (split := missing_split(env, splits)) is not None:
        raise SettingsError(f"{key} = {name!r}: {missing_sentence(split)}")


def missing_split(env: Environment, splits: Sequence[int]) -> int | None:
    """The first of the splits of which no level comes within PATIENCE; else None.

    Its search goes on in a thread that the process does not wait for.
    """
    key = jax.random.key(0)
    reset = jax.jit(env.reset).lower(key, jnp.int32(0)).compile()
    for split in splits:
        number = jnp.int32(split)

        def draw(number: jax.Array = number) -> None:
            # An error of the user's code comes again, where it is reported.
            with contextlib.suppress(Exception):
                jax.block_until_ready(reset(key, number))

        thread = endings.start_unawaited(draw)
        thread.join(PATIENCE)
        if thread.is_alive():
            return split
    return None


def missing_sentence(split: int) -> str:
    """What is wrong with a `reset` that draws no level of a split, and the remedy."""
    return (
        f"reset has drawn no {SPLITS[split]} level in {PATIENCE:g} s: let it draw each"
        " time with another key, from so many levels that every split has some"
    )
