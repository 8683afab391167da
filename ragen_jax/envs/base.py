"""The environment interface: static settings bound into a few pure functions.

Each function handles one episode: `vmap` to batch. Environments know nothing of
tokenizers: an observation is a sequence of phrase ids, and `phrases` has the text of
each id. docs/environments.md shows how to write one.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.errors import UserError

TRAIN, VALIDATION, TEST = 0, 1, 2  # The splits a level can belong to.
SPLITS = ("train", "validation", "test")
NO_ACTION = -1  # Nothing to do: the state stays as it is and the reward is 0.
NO_PHRASE = -1  # Pads observations to their fixed length.
MAX_PHRASES = 65_536


@struct.dataclass
class Outcome:
    """The result of one action."""

    reward: jax.Array  # float32[], the environment's reward, unscaled; 0 after the end
    success: jax.Array  # bool[], True on the action that solved the level
    done: jax.Array  # bool[], the episode is over; later steps change nothing


@dataclasses.dataclass(frozen=True)
class Environment:
    """One environment with its settings bound in. Static: never a traced value.

    The fields down to `example_actions` are required, all others optional. "Host side"
    marks functions that run outside `jit`, on a State of NumPy arrays.
    """

    # Texts.
    name: str
    action_names: tuple[str, ...]  # action a is called action_names[a] in text
    phrases: tuple[str, ...]  # the texts of the ids that `observe` returns
    observation_phrases: int  # M, the fixed length of `observe`'s result
    instruction: str  # the rules, goal and symbols, for the system prompt

    # Rules.
    reset: Callable[[jax.Array, jax.Array], Any]  # (key, split int32[]) -> State
    # (key, State, action) -> (State, Outcome)
    step: Callable[[jax.Array, Any, jax.Array], tuple[Any, Outcome]]
    observe: Callable[[Any], jax.Array]  # State -> int32[M], padded with NO_PHRASE

    # One or two action names, for the reply-format line of the prompt.
    example_actions: tuple[str, ...] = ()

    # Limits.
    # Host side: int[phrases], the number of tokens in each phrase -> the most tokens
    # that an observation can have. Without it, M times the longest phrase is assumed.
    longest_observation: Callable[[Any], int] | None = None
    # Upper limit on the actions in one reply; 0: none. Set it to 1 where the possible
    # actions depend on the one before, or where `answer_bytes` has room for one only.
    most_actions: int = 0

    # Free-form answers (an equation, the name of an arm): all three, or none. The
    # answer is split at `||`, and each segment is stripped of ASCII white space and
    # lower-cased. Without these, segments are matched against `action_names`.
    # An answer of more than so many bytes between its tags cannot be read.
    answer_bytes: int = 0
    # (uint8[answer_bytes] segment, padded with 0; int32[] length, above 0; State before
    # the reply, for all its segments) -> action; NO_ACTION for a text that names none
    read_action: Callable[[jax.Array, jax.Array, Any], jax.Array] | None = None
    # Host side: (bytes, State) -> the same in plain Python. It defines `read_action`.
    read_action_text: Callable[[bytes, Any], int] | None = None

    # Actions of several numbers, such as the words of a query.
    # 0: an action is int32[]. Above 0: it is int32[action_size], its first number the
    # index in `action_names`, or NO_ACTION; needs `read_action` and the next two.
    action_size: int = 0
    # key -> a random action. Without it each of `action_names` is equally likely.
    sample_action: Callable[[jax.Array], jax.Array] | None = None
    # Host side: (action, State) -> its text in a reply. Without it, its action name.
    action_text: Callable[[Any, Any], str] | None = None

    # Players.
    # State -> the action of a rule-based player that uses only what the observation
    # shows; NO_ACTION where it has none. A baseline.
    rule: Callable[[Any], jax.Array] | None = None
    # Host side: State -> the actions of a shortest or at least good play, empty where
    # there are none.
    solve: Callable[[Any], tuple[int, ...]] | None = None
    # Demonstrations, for a supervised start: (key, State) -> int32[Md], a reply as
    # indices into `reply_phrases`; NO_PHRASE, anywhere in it, stands for no text.
    demonstrate: Callable[[jax.Array, Any], jax.Array] | None = None
    reply_phrases: tuple[str, ...] = ()

    # Views.
    # State -> int32[n, 2], the (row, column) of what a thought should name: the player,
    # the goal, ..., each below 10; padded with (-1, -1). Read by `reward.grounding`.
    landmarks: Callable[[Any], jax.Array] | None = None
    # Host side: State -> a picture, uint8[height, width, 3] (RGB).
    picture: Callable[[Any], np.ndarray] | None = None


def check_environment(env: Environment) -> None:
    """Raises ValueError if the environment's static parts cannot be used."""
    _check_kinds(env)
    for part in ("action_names", "phrases", "example_actions", "reply_phrases"):
        texts = getattr(env, part)
        if not isinstance(texts, tuple) or not all(isinstance(x, str) for x in texts):
            raise ValueError(
                f"environment {env.name!r}: {part} has to be a tuple of texts, as in"
                " ('Left', 'Right')"
            )
    if not env.action_names:
        raise ValueError(f"environment {env.name!r} has no action_names: add one")
    if not 0 < len(env.phrases) <= MAX_PHRASES:
        raise ValueError(
            f"environment {env.name!r} has {len(env.phrases)} phrases; between 1 and"
            f" {MAX_PHRASES} are possible: build observations from smaller phrases"
        )
    if env.demonstrate is not None and not env.reply_phrases:
        raise ValueError(
            f"environment {env.name!r} has demonstrate and no reply_phrases: add the"
            " texts that its replies consist of"
        )
    _check_names(env)
    # Matching a reply against action names gives only one number for each action.
    if env.action_size and None in (
        env.read_action,
        env.sample_action,
        env.action_text,
    ):
        raise ValueError(
            f"environment {env.name!r} has action_size = {env.action_size}: actions of"
            " several numbers need read_action, sample_action and action_text"
        )
    if (env.read_action is None) != (env.answer_bytes == 0) or env.answer_bytes < 0:
        raise ValueError(
            f"environment {env.name!r} has answer_bytes = {env.answer_bytes}: free-form"
            " answers need both read_action and a positive answer_bytes"
        )
    if (env.read_action is None) != (env.read_action_text is None):
        raise ValueError(
            f"environment {env.name!r} has only one of read_action and"
            " read_action_text: the second is the definition of the first in Python"
        )


def _check_kinds(env: Environment) -> None:
    """Raises ValueError unless each field is of its kind: text, integer, function."""
    for part in ("name", "instruction"):
        text = getattr(env, part)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"environment {env.name!r}: {part} is"
                f" {text!r:.60}: make it a text that is not empty"
            )
    for part, least in _LEAST.items():
        number = getattr(env, part)
        if not isinstance(number, int | np.integer) or number < least:
            raise ValueError(
                f"environment {env.name!r}: {part} is {number!r}: make it a whole"
                f" number of {least} or more"
            )
    for field in dataclasses.fields(env):
        function = getattr(env, field.name)
        is_left_out = function is None and field.default is None
        if "Callable" in str(field.type) and not (is_left_out or callable(function)):
            raise ValueError(
                f"environment {env.name!r}: {field.name} is of type"
                f" {type(function).__name__}: make it a function"
            )


_LEAST = {"observation_phrases": 1, "most_actions": 0, "action_size": 0}


def _check_names(env: Environment) -> None:
    """Raises ValueError unless replies can contain the names, and the examples do."""
    lowered = [as_read(name) for name in env.action_names]
    times = collections.Counter(lowered)
    for name, low in zip(env.action_names, lowered, strict=True):
        wrong = ""
        if not low:
            wrong = "is empty: name every action"
        elif times[low] > 1:
            wrong = "is repeated (capital and small letters are read alike): rename one"
        elif any(c in name for c in "<|>"):
            wrong = "contains one of < | >, which the reply format needs for itself"
        if wrong:
            raise ValueError(f"environment {env.name!r}: action name {name!r} {wrong}")
    if not env.example_actions:
        raise ValueError(
            f"environment {env.name!r}: example_actions is empty: name one or two, for"
            " the prompt shows them"
        )
    known = set(map(as_read, env.action_names))
    unknown = [text for text in env.example_actions if as_read(text) not in known]
    if env.read_action is None and unknown:
        raise ValueError(
            f"environment {env.name!r}: example_actions holds {unknown}, which the"
            f" prompt would show: choose from {listed(env.action_names)}"
        )


def listed(names: tuple[str, ...]) -> str:
    """The names separated by commas, for a message. If there are many, only the
    first of them and their number."""
    if len(names) <= 12:
        return ", ".join(names)
    return f"{', '.join(names[:6])}, ... ({len(names)} in all)"


def as_read(name: str) -> bytes:
    """The bytes of a name that replies are compared with: stripped, A to Z lower-cased.

    Other letters keep their case, since replies are read byte by byte.
    """
    # Half a character is refused later, with its place (`traced_checks`).
    return name.encode(errors="surrogatepass").strip().lower()


def action_kind(action: jax.Array, env: Environment) -> jax.Array:
    """int32[...], the index in `action_names` of each action, or NO_ACTION.

    Args:
      action: int32[...], or int32[..., action_size] where `action_size` is above 0.
      env: whose actions they are.
    """
    return action[..., 0] if env.action_size else action


def random_action(key: jax.Array, env: Environment) -> jax.Array:
    """A random action of the environment, int32[] or int32[action_size]."""
    if env.sample_action is not None:
        return env.sample_action(key)
    return jax.random.randint(key, (), 0, len(env.action_names))


def text_of_action(action: Any, env: Environment, state: Any) -> str:
    """The text that names an action in a reply to `state`. Host side.

    NO_ACTION, which no reply can say, reads "nothing".

    Raises:
      UserError: if there is no such action.
    """
    number, most = int(np.ravel(action)[0]), len(env.action_names) - 1
    if number == NO_ACTION:
        return "nothing"
    if not 0 <= number <= most:
        raise UserError(
            f"environment {env.name!r}: there is no action {number}, only 0 to {most}:"
            " look at what rule, sample_action or solve gives"
        )
    if env.action_text is not None:
        return env.action_text(action, state)
    return env.action_names[action]


def content_hash(*arrays: jax.Array) -> jax.Array:
    """uint32[], a hash of the arrays' integers, used to assign levels to splits.

    FNV-1a with 32-bit words in place of bytes, then the finalizer of MurmurHash3. The
    same content gives the same hash on every machine, whatever key made it.

    Raises:
      TypeError: while tracing, for floats. Truncated to integers, many would be equal
        (every place between 0 and 1 is 0), and levels could not be told apart.
    """
    for array in arrays:
        if not (jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == jnp.bool_):
            raise TypeError(
                f"content_hash takes integers and bools, not {array.dtype}"
                f"{list(array.shape)}: hash what the agent is shown of it, as"
                " jnp.floor(10 * place).astype(jnp.int32)"
            )
    value = jnp.uint32(2166136261)
    flat = jnp.concatenate([a.reshape(-1).astype(jnp.uint32) for a in arrays])
    for word in flat:  # Levels are small; unrolled so that it fuses.
        value = (value ^ word) * jnp.uint32(16777619)
    value = (value ^ (value >> 16)) * jnp.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)


def split_of(content: jax.Array) -> jax.Array:
    """int32[], the split of a level: 1 in 8 validation, 1 in 8 test, the rest train.

    Args:
      content: uint32[], the level's `content_hash`.
    """
    eighth = (content % jnp.uint32(8)).astype(jnp.int32)
    return jnp.where(eighth == 0, TEST, jnp.where(eighth == 1, VALIDATION, TRAIN))


def draw_until_fit(
    draw: Callable[..., tuple[Any, jax.Array]], key: jax.Array, keys: int = 1
) -> Any:
    """Draws with new keys until a draw is fit, such as a level of the wanted split.

    In Python it would be

      while True:
          key, *draw_keys = jax.random.split(key, 1 + keys)
          candidate, is_fit = draw(*draw_keys)
          if is_fit:
              return candidate

    It never returns if no draw is fit: let `make` refuse settings with too few levels.

    Args:
      draw: from `keys` keys a candidate, any pytree of arrays, and bool[], whether it
        is fit.
      key: consumed.
      keys: how many keys `draw` takes.
    """

    def redraw(carry):
        key, _, _ = carry
        key, *draw_keys = jax.random.split(key, 1 + keys)
        candidate, is_fit = draw(*draw_keys)
        return key, candidate, is_fit

    def is_unfit(carry):
        return ~carry[2]

    # The loop needs a candidate before the first draw; it is not fit, and not returned.
    shapes, _ = jax.eval_shape(draw, *[key] * keys)
    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    _, candidate, _ = jax.lax.while_loop(
        is_unfit, redraw, (key, blank, jnp.zeros((), bool))
    )
    return candidate


def text_of(phrases: tuple[str, ...], ids) -> str:
    """The text that phrase ids stand for, on the host. NO_PHRASE reads as nothing."""
    return "".join(phrases[i] for i in ids if i != NO_PHRASE)
