"""Checks the results of an environment's functions by tracing; nothing is compiled.

Called before a run (`registry.check_file`) and by `ragen_jax.testing`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.base import Environment, Outcome
from ragen_jax.utils import tracing

# Fields that hold texts which the model reads or writes.
_TEXTS = "instruction", "action_names", "phrases", "example_actions", "reply_phrases"
# The fields of an Outcome, all of them scalars.
_TYPES = {"reward": jnp.float32, "success": jnp.bool_, "done": jnp.bool_}


class InterfaceError(ValueError):
    """A result has a wrong structure, shape or type; one sentence with the remedy."""


class FunctionError(Exception):
    """A function raised an exception, which is this one's `__cause__`."""

    def __init__(self, part: str):
        super().__init__(f"{part} fails")
        self.part = part  # the name of the function's field in `Environment`


def check_functions(env: Environment) -> None:
    """Traces the environment's functions on one episode and, as in runs, on a batch.

    Raises:
      InterfaceError: if a text holds half of a character, a step changes the types of
        the state, an outcome is no scalar, observations, actions or landmarks are not
        of the declared shape and type, or a function reads a traced value that was
        stored outside the state.
      FunctionError: if one of them raises.
    """
    _check_texts(env)
    key = jax.eval_shape(jax.random.key, 0)
    action = jax.ShapeDtypeStruct(
        (env.action_size,) if env.action_size else (), jnp.int32
    )
    split = jax.ShapeDtypeStruct((), jnp.int32)
    first = _shapes(env, "reset", key, split)
    if env.sample_action is not None:
        random_action = _shapes(env, "sample_action", key)
        _require(
            _is_like(random_action, action),
            f"sample_action gives {_type(random_action)}: make it {_type(action)}",
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(first):
        _require(
            not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key),
            f"State{jax.tree_util.keystr(path)} is a key: keep its"
            " jax.random.key_data, or draw from the key that step is given",
        )
    result = _shapes(env, "step", key, first, action)
    is_pair = isinstance(result, tuple) and len(result) == 2
    _require(
        is_pair and isinstance(result[1], Outcome),
        f"step gives {_kinds(result)}: let it return (State, base.Outcome)",
    )
    after, outcome = result
    _check_state(first, after)
    for name, dtype in _TYPES.items():
        value = getattr(outcome, name)
        _require(
            _is_like(value, jax.ShapeDtypeStruct((), dtype)),
            f"step gives outcome.{name} as {_type(value)}: make it {dtype.__name__}[]",
        )
    ids = _shapes(env, "observe", first)
    shape = jax.ShapeDtypeStruct((env.observation_phrases,), jnp.int32)
    _require(
        _is_like(ids, shape),
        f"observe gives {_type(ids)}: make it {_type(shape)}, as observation_phrases ="
        f" {env.observation_phrases} says",
    )
    _check_optional(env, key, first, action)
    _check_batches(env, key, split, first, action)


def _check_texts(env: Environment) -> None:
    """Checks that the texts can be written: half of a surrogate pair has no bytes."""
    for part in _TEXTS:
        for text in (env.instruction,) if part == "instruction" else getattr(env, part):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                at = error.start
                near = text[max(0, at - 20) : at + 20]
                raise InterfaceError(
                    f"{part} holds {text[at]!r} in {near!r}, half of a character: write"
                    " the whole one"
                ) from None


def _check_optional(env: Environment, key, first, action) -> None:
    """Checks the optional functions.

    Args:
      env: whose functions they are.
      key, first, action: their arguments, as shapes; `first` is a state.
    """
    if env.read_action is not None:
        text = jax.ShapeDtypeStruct((env.answer_bytes,), jnp.uint8)
        length = jax.ShapeDtypeStruct((), jnp.int32)
        text_action = _shapes(env, "read_action", text, length, first)
        _require(
            _is_like(text_action, action),
            f"read_action gives {_type(text_action)}: make it {_type(action)}",
        )
    if env.rule is not None:
        rule_action = _shapes(env, "rule", first)
        _require(
            _is_like(rule_action, action),
            f"rule gives {_type(rule_action)}: make it {_type(action)}",
        )
    if env.demonstrate is not None:
        reply = _shapes(env, "demonstrate", key, first)
        _require(
            len(getattr(reply, "shape", ())) == 1 and reply.dtype == jnp.int32,
            f"demonstrate gives {_type(reply)}: make it int32[n], indices into"
            " reply_phrases",
        )
    if env.landmarks is not None:
        places = _shapes(env, "landmarks", first)
        is_pairs = len(getattr(places, "shape", ())) == 2 and places.shape[1] == 2
        _require(
            is_pairs and places.dtype == jnp.int32,
            f"landmarks gives {_type(places)}: make it int32[n, 2]",
        )
    if env.longest_observation is not None:
        longest = _call(env, "longest_observation", np.ones(len(env.phrases), int))
        _require(
            isinstance(longest, int | np.integer) and longest > 0,
            f"longest_observation gives {longest!r}: make it a whole number above 0, of"
            " Python or NumPy",
        )


def _check_batches(env: Environment, key, split, first, action) -> None:
    """Checks that `vmap` works on the functions that runs batch, and that none reads a
    traced value which an earlier call stored in a variable.

    Args:
      env: whose functions they are; each has been traced on one episode.
      key, split, first, action: their arguments, as shapes; `first` is a state.
    """
    text = jax.ShapeDtypeStruct((env.answer_bytes,), jnp.uint8)
    takes = {
        "reset": (key, split),
        "step": (key, first, action),
        "observe": (first,),
        "sample_action": (key,),
        "read_action": (text, split, first),  # A length is int32[], as a split is.
        "rule": (first,),
        "demonstrate": (key, first),
        "landmarks": (first,),
    }
    for part, arguments in takes.items():
        if (function := getattr(env, part)) is None:
            continue
        several = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct((2, *one.shape), one.dtype), arguments
        )
        try:
            keeps = tracing.keeps_traced_values(jax.vmap(function), *several)
        except Exception as error:
            raise FunctionError(part) from error
        _require(
            not keeps,
            f"{part} reads what a function has stored outside the State, as in a"
            " global list: keep all that is computed in the State",
        )


def _check_state(first: Any, after: Any) -> None:
    """Checks that a step keeps the fields of the state, their shapes and types."""
    before, later = (jax.tree.structure(tree) for tree in (first, after))
    _require(
        before == later, f"step turns {before} into {later}: return the same fields"
    )
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(after), strict=True
    )
    for (path, old), new in pairs:
        _require(
            _is_like(old, new),
            f"step turns State{jax.tree_util.keystr(path)} from {_type(old)} into"
            f" {_type(new)}: let it keep shape and type",
        )


def _shapes(env: Environment, part: str, *arguments: Any) -> Any:
    """The result of a function of the environment, as shapes and types."""
    return _call(env, part, *arguments, through=jax.eval_shape)


def _call(
    env: Environment, part: str, *arguments: Any, through: Callable | None = None
) -> Any:
    function = getattr(env, part)
    try:
        return through(function, *arguments) if through else function(*arguments)
    except Exception as error:
        raise FunctionError(part) from error


def _kinds(result: Any) -> str:
    """The type of a result, for messages; of a tuple, those of its parts."""
    if not isinstance(result, tuple) or hasattr(result, "_fields"):
        return _type(result)
    return f"({', '.join(map(_type, result))})"


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise InterfaceError(sentence)


def _is_like(one: Any, other: Any) -> bool:
    """Whether both are arrays, of the same shape and type."""
    if not (hasattr(one, "dtype") and hasattr(other, "dtype")):
        return False
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _type(array: Any) -> str:
    if not hasattr(array, "dtype"):
        return type(array).__name__
    return f"{array.dtype}{list(array.shape)}"
