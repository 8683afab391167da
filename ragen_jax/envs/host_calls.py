"""Guards the functions of a user's file that run outside `jit`: one-sentence errors."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ragen_jax.envs.base import NO_ACTION, Environment
from ragen_jax.errors import UserError
from ragen_jax.utils import user_modules


def guard(env: Environment, name: str, key: str = "env.name") -> Environment:
    """Wraps the host-side functions of a user's environment in checks.

    A built-in environment is returned unchanged: its tests cover this.

    Args:
      env: made by `registry.make`.
      name: see `registry.lookup`.
      key: the config's key that names the environment; for messages.

    Returns:
      The environment with `picture`, `solve`, `read_action_text` and `action_text`
      wrapped: they raise UserError, in one sentence, if the file's code raises or
      returns something else than `Environment` says.
    """
    if not user_modules.is_path(name):
        return env
    guarded = {
        part: _guarded(getattr(env, part), part, is_promised, f"{key} = {name!r}", name)
        for part, is_promised in _promises(env).items()
        if getattr(env, part) is not None
    }
    return dataclasses.replace(env, **guarded)


def _guarded(
    function: Callable, part: str, is_promised: Callable, where: str, name: str
) -> Callable:
    expected = _WANTED[part]

    def call(*arguments: Any) -> Any:
        try:
            result = function(*arguments)
        except Exception as error:
            line = user_modules.in_one_line(error, user_modules.resolved(name))
            raise UserError(f"{where}: {part} fails: {line}") from error
        if not is_promised(result):
            text = " ".join(repr(result).split())[:60]
            raise UserError(f"{where}: {part} gives {text}: let it give {expected}")
        return result

    return call


_WANTED = {
    "picture": "a NumPy array uint8[height, width, 3]",
    "solve": "a tuple of actions, empty where there is no solution",
    "read_action_text": "an action, or base.NO_ACTION",
    "action_text": "a text",
}


def _promises(env: Environment) -> dict[str, Callable[[Any], bool]]:
    """For each function a predicate: whether a result is what `Environment` says."""

    def is_action(value: Any) -> bool:
        number = np.asarray(value)
        shape = (env.action_size,) if env.action_size else ()
        if number.shape != shape or number.dtype.kind not in "iu":
            return False
        return 0 <= np.ravel(number)[0] < len(env.action_names)

    def is_action_or_none(value: Any) -> bool:
        number = np.ravel(value)
        return is_action(value) or (number.size > 0 and number[0] == NO_ACTION)

    def is_plan(plan: Any) -> bool:
        return isinstance(plan, tuple | list | np.ndarray) and all(map(is_action, plan))

    def is_picture(image: Any) -> bool:
        is_bytes = isinstance(image, np.ndarray) and image.dtype == np.uint8
        return is_bytes and image.ndim == 3 and image.shape[2] == 3 and image.size > 0

    return {
        "picture": is_picture,
        "solve": is_plan,
        "read_action_text": is_action_or_none,
        "action_text": lambda text: isinstance(text, str),
    }
