"""Prompts: the system prompt, the messages of turns, and their tokens on device.

Every text is computed from the settings and the environment, never typed twice. A
message is a sequence of phrase ids; the same ids give the tokens on device
(`phrases.py`) and the text on the host (`envs.base.text_of`).
"""

import dataclasses
import os
import unicodedata
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from transformers import PreTrainedTokenizerFast

from ragen_jax import trajectory
from ragen_jax.envs.base import NO_PHRASE, Environment
from ragen_jax.errors import UserError
from ragen_jax.text import reply_parser, token_bytes
from ragen_jax.text.chat_template import ChatPieces
from ragen_jax.text.phrases import (
    PhraseTokens,
    encode,
    join_phrases,
    tokenize_phrases,
)
from ragen_jax.utils.words import counted

# Messages give rewards to one decimal and within these bounds; the record is exact.
_REWARD_BOUND = 20.0
_TENTHS = round(_REWARD_BOUND * 10)


@dataclasses.dataclass(frozen=True)
class TurnLimits:
    """The limits that the system prompt states and that the loop enforces."""

    turns: int  # K
    actions_per_turn: int  # A
    actions: int  # in a whole episode
    reply_tokens: int  # most tokens sampled in one turn


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """The texts of one environment under given limits. Static: never a traced value."""

    system: str  # the system prompt
    phrases: tuple[str, ...]  # all phrases; the environment's begin at `env_offset`
    env_offset: int
    limits: TurnLimits
    reply_prefix: str  # "<think>" or "<answer>", written for the policy


# Phrase ids, in this order: the fixed phrases below, "Turn ... of ...", "Actions left",
# rewards and, from `Dialogue.env_offset` on, the environment's own phrases. Those of a
# message are
#   opening, reward, warning, OBSERVATION, turn, actions left, _HAND_OVER
# where reward and warning may be NO_PHRASE: M + 6, with the M of the observation.
_OPEN, _CLOSE_AND_OPEN, _OPEN_AFTER_STOP, _HAND_OVER, _WARNING = range(5)
_FIRST_TURN = 5  # id of "Turn 1 of ..."


def _first_actions_left(limits: TurnLimits) -> int:
    """Id of "Actions left: 0."."""
    return _FIRST_TURN + limits.turns


def _first_reward(limits: TurnLimits) -> int:
    """Id of the phrase of the lowest reward."""
    return _first_actions_left(limits) + limits.actions + 1


def system_prompt(env: Environment, limits: TurnLimits, thinking: bool) -> str:
    """The environment's rules, then the format of replies and its limits."""
    example = " || ".join(env.example_actions[: limits.actions_per_turn])
    most = "one action"
    if limits.actions_per_turn > 1:
        most = f"up to {limits.actions_per_turn} actions, separated by ||"
    answer = f"<answer>{example}</answer>"
    if thinking:
        reply = f"<think>your thoughts</think>{answer}"
    else:
        reply = answer
    return (
        f"{env.instruction}\n"
        f"You have {counted(limits.turns, 'turn')} and"
        f" {counted(limits.actions, 'action')} in all. In one turn name {most}.\n"
        f"Reply in this format, in at most {limits.reply_tokens} tokens: {reply}"
    )


def reply_prefix(thinking: bool) -> str:
    """The beginning of a reply, which is written for the policy."""
    return "<think>" if thinking else "<answer>"


def make_dialogue(
    env: Environment, limits: TurnLimits, pieces: ChatPieces, *, thinking: bool
) -> Dialogue:
    """Builds the texts of `env` for a model whose chat template is `pieces`."""
    system = system_prompt(env, limits, thinking)
    prefix = reply_prefix(thinking)
    # A sampled end-of-turn token is already in the row; else the template's is added.
    after_stop = pieces.after_reply.removeprefix(pieces.end_of_turn)
    fixed = (
        pieces.before_system + system + pieces.before_user,
        pieces.after_reply,
        after_stop,
        pieces.before_reply + prefix,
        "Your last reply had no valid answer or an unknown action.\n",
    )
    turns = tuple(f"Turn {k + 1} of {limits.turns}." for k in range(limits.turns))
    actions_left = tuple(f" Actions left: {n}." for n in range(limits.actions + 1))
    rewards = tuple(f"Reward: {t / 10:.1f}\n" for t in range(-_TENTHS, _TENTHS + 1))
    fixed_and_counted = fixed + turns + actions_left + rewards
    return Dialogue(
        system=system,
        phrases=fixed_and_counted + env.phrases,
        env_offset=len(fixed_and_counted),
        limits=limits,
        reply_prefix=prefix,
    )


def frames(dialogue: Dialogue) -> tuple[tuple[str, ...], str]:
    """The phrases that may open a message, and the one that ends each message.

    Openings: the system prompt's, for the oldest message of a row; the closing of the
    reply before, with the end-of-turn token; and without, if the policy sampled it.
    """
    openings = (_OPEN, _CLOSE_AND_OPEN, _OPEN_AFTER_STOP)
    return tuple(dialogue.phrases[i] for i in openings), dialogue.phrases[_HAND_OVER]


def first_message(dialogue: Dialogue, observation: jax.Array) -> jax.Array:
    """Phrase ids of the whole first prompt: system, first observation, reply prefix.

    Args:
      dialogue: the texts.
      observation: int32[M], from the environment's `observe`.

    Returns:
      int32[M + 6].
    """
    before = [_OPEN, NO_PHRASE, NO_PHRASE]
    turn = jnp.zeros((), jnp.int32)
    left = jnp.full((), dialogue.limits.actions, jnp.int32)
    return _message(dialogue, jnp.array(before), observation, turn, left)


def next_message(
    dialogue: Dialogue,
    observation: jax.Array,
    *,
    turn: jax.Array,
    actions_left: jax.Array,
    reward: jax.Array,
    is_valid: jax.Array,
    stopped_itself: jax.Array,
) -> jax.Array:
    """Phrase ids of what follows a reply: closing, feedback, observation, reply prefix.

    Args:
      dialogue: the texts.
      observation: int32[M], after the turn's actions.
      turn: int32[], 0-based index of the turn that now begins.
      actions_left: int32[], for the rest of the episode.
      reward: float32[], the environment's reward in the turn that ended.
      is_valid: bool[], whether its reply was; a warning is added where not.
      stopped_itself: bool[], whether the reply ends in a sampled end-of-turn token.

    Returns:
      int32[M + 6].
    """
    tenths = jnp.round(jnp.clip(reward, -_REWARD_BOUND, _REWARD_BOUND) * 10)
    zero_reward = _first_reward(dialogue.limits) + _TENTHS
    before = jnp.stack(
        [
            jnp.where(stopped_itself, _OPEN_AFTER_STOP, _CLOSE_AND_OPEN),
            zero_reward + tenths.astype(jnp.int32),
            jnp.where(is_valid, NO_PHRASE, _WARNING),
        ]
    )
    return _message(dialogue, before, observation, turn, actions_left)


def _message(dialogue, before, observation, turn, actions_left) -> jax.Array:
    """int32[M + 6]; `before` are the ids of opening, reward and warning."""
    env = jnp.where(
        observation == NO_PHRASE, NO_PHRASE, observation + dialogue.env_offset
    )
    first_left = _first_actions_left(dialogue.limits)
    after = jnp.stack(
        [_FIRST_TURN + turn, first_left + actions_left, jnp.full((), _HAND_OVER)]
    )
    return jnp.concatenate([before, env, after]).astype(jnp.int32)


@struct.dataclass
class DialogueTokens:
    """A dialogue's tokens under one tokenizer, on device."""

    phrases: PhraseTokens  # of `Dialogue.phrases`
    replies: reply_parser.ReplyTables  # reply tokens -> actions
    # int32[V], `trajectory.Episodes.reply_end` once token v is sampled; NO_REPLY if the
    # reply goes on.
    stops: jax.Array
    # Most tokens, static, of: the first message; a later one; and, with windows, the
    # system prompt followed by a later message without its closing of a reply.
    first_capacity: int = struct.field(pytree_node=False)
    next_capacity: int = struct.field(pytree_node=False)
    window_capacity: int = struct.field(pytree_node=False)


def tokenize_dialogue(
    dialogue: Dialogue,
    env: Environment,
    pieces: ChatPieces,
    tokenizer: PreTrainedTokenizerFast,
    vocabulary: int,
    *,
    with_text: bool = False,
) -> DialogueTokens:
    """Tokenizes every phrase and builds the reply tables. Host side, once a run.

    Args:
      dialogue: from `make_dialogue` with the same environment and pieces.
      env: whose action names the replies are matched against.
      pieces: the chat template's.
      tokenizer: the model's.
      vocabulary: V of the model, which may exceed the tokenizer's.
      with_text: whether the tables also find the text of replies; with free-form
        answers they always do.

    Raises:
      UserError: if the tokenizer breaks down on a text, or writes another one.
    """
    is_free = env.read_action is not None
    phrases = tokenize_phrases(tokenizer, dialogue.phrases)
    bytes_of = token_bytes.token_bytes(tokenizer, vocabulary)
    system = encode(tokenizer, dialogue.system)
    name = tokenizer.name_or_path or "the model"
    _check_kept(dialogue, phrases, system, bytes_of, name)
    stops = np.full(vocabulary, trajectory.NO_REPLY, np.int32)
    stops[list(pieces.stop_tokens)] = trajectory.OTHER_STOP
    stops[pieces.end_token] = trajectory.END_OF_TURN
    first, following, behind_opening = _capacities(
        dialogue, env, np.asarray(phrases.lengths)
    )
    return DialogueTokens(
        phrases=phrases,
        replies=reply_parser.reply_tables(
            bytes_of,
            () if is_free else env.action_names,
            dialogue.reply_prefix.encode(),
            thinking=dialogue.reply_prefix == "<think>",
            with_text=with_text or is_free,
        ),
        stops=jnp.asarray(stops),
        first_capacity=first,
        next_capacity=following,
        window_capacity=behind_opening,
    )


def _check_kept(
    dialogue: Dialogue,
    phrases: PhraseTokens,
    system: Sequence[int],
    bytes_of: Sequence[bytes],
    where: str,
) -> None:
    """Refuses a tokenizer that does not reproduce the texts exactly.

    One that prepends a space would put it between any two phrases, and one without a
    token for some character would drop it, unseen by the host. Texts that are equal
    after Unicode's NFC count as the same. The template's own phrases are not checked:
    they have control tokens, which stand for no text. One of them has the system prompt
    within, whose tokens alone are `system`.
    """
    tokens, lengths = np.asarray(phrases.tokens), np.asarray(phrases.lengths)
    texts = [
        (text, tokens[index, : lengths[index]].tolist())
        for index, text in enumerate(dialogue.phrases)
        if index > _HAND_OVER
    ]
    for text, ids in (*texts, (dialogue.system, system)):
        decoded = b"".join(bytes_of[i] for i in ids).decode(errors="replace")
        if decoded == text:
            continue
        if unicodedata.normalize("NFC", decoded) != unicodedata.normalize("NFC", text):
            at = max(0, len(os.path.commonprefix([text, decoded])) - 20)
            raise UserError(
                f"{where}: the tokenizer writes {text[at : at + 40]!r} as"
                f" {decoded[at : at + 40]!r}; choose a model whose tokenizer keeps"
                " texts as they are"
            )


def opening_tokens(tokens: DialogueTokens) -> tuple[int, ...]:
    """The tokens that every episode begins with: the system prompt's."""
    phrases = tokens.phrases
    opening = np.asarray(phrases.tokens)[_OPEN][: int(phrases.lengths[_OPEN])]
    return tuple(opening.tolist())


def opening_length(tokens: DialogueTokens) -> jax.Array:
    """int32[], tokens of the opening: system prompt, and the start of a user message.

    Any message, less the tokens that close a reply, may follow it directly.
    """
    return tokens.phrases.lengths[_OPEN]


def closing_lengths(tokens: DialogueTokens) -> jax.Array:
    """int32[2], leading tokens of a later message that close the reply before it.

    First after a reply that was cut off, then after one that sampled its end of turn.
    """
    return tokens.phrases.lengths[jnp.array([_CLOSE_AND_OPEN, _OPEN_AFTER_STOP])]


def _capacities(dialogue: Dialogue, env: Environment, lengths) -> tuple[int, int, int]:
    """`DialogueTokens`' three capacities, from the lengths of all phrases."""
    own_lengths = lengths[: dialogue.env_offset]
    limits = dialogue.limits
    first_left, first_reward = _first_actions_left(limits), _first_reward(limits)
    turns = own_lengths[_FIRST_TURN:first_left].max()
    left = own_lengths[first_left:first_reward].max()
    reward = own_lengths[first_reward:].max()
    env_lengths = lengths[dialogue.env_offset :]
    longest = int(env_lengths.max()) * env.observation_phrases
    if env.longest_observation is not None:  # Its bound may be a loose one.
        longest = min(longest, int(env.longest_observation(env_lengths)))
    shared = int(longest + turns + left + own_lengths[_HAND_OVER])
    closing = int(max(own_lengths[_CLOSE_AND_OPEN], own_lengths[_OPEN_AFTER_STOP]))
    opening = int(own_lengths[_OPEN])
    later = int(reward + own_lengths[_WARNING]) + shared
    return opening + shared, closing + later, opening + later


def message_tokens(
    tokens: DialogueTokens, ids: jax.Array, *, is_first: bool
) -> tuple[jax.Array, jax.Array]:
    """Tokens of a message, and their number. See `phrases.join_phrases`."""
    capacity = tokens.first_capacity if is_first else tokens.next_capacity
    return join_phrases(tokens.phrases, ids, capacity)
