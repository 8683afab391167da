"""Checks that what a run may say has room: in rows, replies and model positions."""

from collections.abc import Collection, Mapping

from transformers import PreTrainedTokenizerFast

from ragen_jax.envs.wording import CONTROL
from ragen_jax.errors import SettingsError, UserError
from ragen_jax.models.config import ModelConfig
from ragen_jax.rollout.tasks import Task, longest_row
from ragen_jax.settings import Settings, limit_key
from ragen_jax.text import reply_parser
from ragen_jax.text.prompts import Dialogue, DialogueTokens
from ragen_jax.utils.words import listed, shortened


def check_context(
    settings: Settings,
    config: ModelConfig,
    task: Task,
    tokens: DialogueTokens,
    *,
    is_training: bool,
    texts: Collection[str] = (),
) -> None:
    """Raises UserError unless rows have room for what may be said, and models for rows.

    Args:
      settings: of the run.
      config: the model's.
      task, tokens: an environment of the run, and its texts' tokens.
      is_training: whether training plays it, in rows of `rollout.context` tokens; an
        environment that is evaluated alone takes the room that it needs, unless it is
        played in windows.
      texts: dotted keys of the settings that the system prompt has texts from.
    """
    shorten = f"shorten {listed(sorted(texts))}, " if texts else ""
    if settings.rollout.window_turns:
        _check_window(settings, config, task, tokens, shorten)
        return
    needed = longest_row((task,), (tokens,))
    context = settings.rollout.context if is_training else 0
    parts = (
        f"a first prompt of up to {tokens.first_capacity} tokens,"
        f" {task.dialogue.limits.turns} replies of {settings.rollout.reply_tokens}"
        f" and later messages of up to {tokens.next_capacity}"
    )
    if settings.env.mix or settings.env.evaluate:
        parts = f"{task.label}: {parts}"
    turns = limit_key(settings, "turns", task.label, is_training=is_training)
    if 0 < context < needed:
        raise UserError(
            f"rollout.context = {context} is too short: {parts} can need {needed}"
            f" tokens; set it to 0, which takes exactly that, {shorten}lower {turns} or"
            " rollout.reply_tokens, or let rollout.history = 'window' forget old turns"
        )
    if needed > config.longest_context:
        remedy = (
            f"{shorten}lower {turns} or rollout.reply_tokens, or let rollout.history ="
            " 'window' forget old turns"
        )
        if max(tokens.first_capacity, tokens.window_capacity) > config.longest_context:
            remedy = shorten + _show_less(task)
        raise UserError(
            f"{parts} can need {needed} tokens, more than the {config.longest_context}"
            f" positions that model.path was made for; {remedy}"
        )
    if context > config.longest_context:
        raise UserError(
            f"rollout.context = {context} is more than the {config.longest_context}"
            " positions that model.path was made for; set it to 0 or to fewer"
        )


def _check_window(
    settings: Settings,
    config: ModelConfig,
    task: Task,
    tokens: DialogueTokens,
    shorten: str,
) -> None:
    rollout, positions = settings.rollout, config.longest_context
    least = longest_row((task,), (tokens,), window=1)
    longest = longest_row((task,), (tokens,), rollout.window_turns)
    one = (
        f"system prompt, one message and a reply of {rollout.reply_tokens} can need"
        f" {least} tokens"
    )
    some = f"rollout.history = {rollout.history!r} can need {longest} tokens"
    if settings.env.mix or settings.env.evaluate:
        one, some = f"{task.label}: {one}", f"{task.label}: {some}"
    if least > positions:
        remedy = f"{shorten}lower rollout.reply_tokens"
        if least - rollout.reply_tokens > positions:
            remedy = shorten + _show_less(task)
        raise UserError(
            f"{one}, more than the {positions} positions that model.path was made for;"
            f" {remedy}"
        )
    if 0 < rollout.context < least:
        raise UserError(
            f"rollout.context = {rollout.context} is too short: {one}; {shorten}set it"
            f" to {least} or more, or to 0 for all that the turns of a window can need"
        )
    if min(longest, rollout.context or longest) > positions:
        raise UserError(
            f"{some}, more than the {positions} positions that model.path was made for;"
            f" set rollout.context to {positions}, which drops the oldest turns where"
            f" they do not fit, or rollout.window to fewer than {rollout.window_turns}"
        )


def _show_less(task: Task) -> str:
    """What to do where a single message is too long for the model."""
    remedy = "let the environment show less, or choose a model of more positions"
    if task.env.longest_observation is not None:
        return remedy
    return (
        f"its observations are taken to be {task.env.observation_phrases} times the"
        f" longest phrase: add longest_observation if they are shorter, {remedy}"
    )


def check_reply(settings: Settings, tokens: DialogueTokens) -> None:
    """Raises UserError unless a reply has room for the shortest valid one."""
    room, fewest = (
        settings.rollout.reply_tokens,
        reply_parser.fewest_tokens(tokens.replies),
    )
    if room < fewest:
        raise UserError(
            f"rollout.reply_tokens = {room} leaves no room for a valid reply, which"
            f" takes {fewest} tokens of model.path at least; set it to {fewest} or more"
        )


def check_texts(
    dialogue: Dialogue,
    tokenizer: PreTrainedTokenizerFast,
    key: str,
    name: str,
    own: Mapping[str, str] | None = None,
) -> None:
    """Refuses texts in which the tokenizer finds control tokens, or terminals commands.

    Control tokens would end a turn, or begin another one, in the midst of an
    observation; control characters would change the screen that shows an example.

    Args:
      dialogue: the environment's instruction and phrases.
      tokenizer: of the model.
      key, name: of the environment; for the message.
      own: texts of the settings that stand in the instruction, by dotted key.

    Raises:
      SettingsError: naming the token or character, and the text.
    """
    added = tokenizer.added_tokens_decoder.values()
    control = {token.content for token in added if token.special and token.content}
    # Those before are the chat template's, which has control tokens of its own.
    texts = (dialogue.system, *dialogue.phrases[dialogue.env_offset :])
    others = [(f"{key} = {name!r}", text) for text in texts]
    for where, text in (*(own or {}).items(), *others):
        if found := sorted(token for token in control if token in text):
            raise SettingsError(
                f"{where}: the control token {found[0]!r} of the model stands in its"
                f" text {shortened(text)!r}: write it in another way"
            )
        if character := CONTROL.search(text):
            raise SettingsError(
                f"{where}: the control character {character[0]!r} stands in its text"
                f" {shortened(text)!r}: leave it out; of such characters only newlines"
                " and tabs can be used"
            )
