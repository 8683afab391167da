"""Draws and shows a level of each split, in a limited time: a search may never end.

A `reset` that draws again until a level belongs to the split runs for ever where none
does, and a compiled loop cannot be asked how far it is.
"""

import contextlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.base import NO_PHRASE, SPLITS, Environment
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
      SettingsError: in one sentence, if a level does not come, or is shown by phrases
        that there are not.
    """
    if not user_modules.is_path(name):
        return
    for split, ids in _first_observations(env, splits):
        if ids is None:
            raise SettingsError(f"{key} = {name!r}: {missing_sentence(split)}")
        if wrong := unknown_sentence(env, ids):
            raise SettingsError(f"{key} = {name!r}, {SPLITS[split]} level: {wrong}")


def missing_split(env: Environment, splits: Sequence[int]) -> int | None:
    """The first of the splits of which no level comes within PATIENCE; else None."""
    found = _first_observations(env, splits)
    return next((split for split, ids in found if ids is None), None)


def _first_observations(
    env: Environment, splits: Sequence[int]
) -> Iterator[tuple[int, np.ndarray | None]]:
    """Each split with the phrase ids of its first level; None if none comes in time.

    The search for it goes on in a thread that the process does not wait for.
    """

    def show(key: jax.Array, split: jax.Array) -> jax.Array:
        return env.observe(env.reset(key, split))

    key = jax.random.key(0)
    compiled = jax.jit(show).lower(key, jnp.int32(0)).compile()
    for split in splits:
        number, shown = jnp.int32(split), []

        def draw(number: jax.Array = number, shown: list = shown) -> None:
            # An error of the user's code comes again, where it is reported.
            with contextlib.suppress(Exception):
                shown.append(np.asarray(compiled(key, number)))

        thread = endings.start_unawaited(draw)
        thread.join(PATIENCE)
        if thread.is_alive():
            yield split, None
        else:
            yield split, shown[0] if shown else np.zeros(0, np.int32)


def unknown_sentence(env: Environment, ids: np.ndarray) -> str | None:
    """What is wrong with the ids of an observation, and the remedy; None if nothing."""
    # On device, others would stand for the first or the last phrase, or for none.
    wrong = ids[(ids < NO_PHRASE) | (ids >= len(env.phrases))]
    if not wrong.size:
        return None
    return (
        f"observe gives the id {wrong[0]}: give those of phrases, 0 to"
        f" {len(env.phrases) - 1}, or base.NO_PHRASE"
    )


def missing_sentence(split: int) -> str:
    """What is wrong with a `reset` that draws no level of a split, and the remedy."""
    return (
        f"reset has drawn no {SPLITS[split]} level in {PATIENCE:g} s: let it draw each"
        " time with another key, from so many levels that every split has some"
    )
