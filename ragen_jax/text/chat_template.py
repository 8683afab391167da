"""The fixed pieces of a chat template, cut once from the template itself."""

import dataclasses
import functools
import inspect
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2
import markupsafe
from transformers import PreTrainedTokenizerFast

from ragen_jax.errors import UserError
from ragen_jax.text import pinned_date, template_process
from ragen_jax.text.phrases import encode
from ragen_jax.text.token_bytes import highest_id

_SECONDS = 60  # wall time in which the template's process has to end

# Marked texts of a conversation, found again in what the template writes.
_SYSTEM, _USER, _REPLY, _NEXT = (
    "\x11system\x12",
    "\x11user\x12",
    "\x11re\x12",
    "\x11n\x12",
)


@dataclasses.dataclass(frozen=True)
class ChatPieces:
    """What a template writes around the texts of a conversation, and its stop tokens.

    A conversation is  before_system SYSTEM before_user USER before_reply REPLY
    after_reply USER before_reply REPLY ...  where `after_reply` starts with the
    end-of-turn token that the policy should sample itself.
    """

    before_system: str
    before_user: str
    before_reply: str
    after_reply: str
    end_of_turn: str  # text of the control token that closes a reply
    end_token: int  # its id
    stop_tokens: tuple[int, ...]  # ids whose sampling ends a reply, that one included

    def join(self, texts: Sequence[str]) -> str:
        """The prompt for a reply to system, user, reply, user, ... : the last a user's.

        The texts begin and end without white space, which some templates strip.
        """
        system, *others = texts
        parts = [self.before_system, system, self.before_user, others[0]]
        for reply, user in zip(others[1::2], others[2::2], strict=True):
            parts += [self.before_reply, reply, self.after_reply, user]
        return "".join([*parts, self.before_reply])


def cut_pieces(
    tokenizer: PreTrainedTokenizerFast, where: str, more_stops: Sequence[int] = ()
) -> ChatPieces:
    """Renders marked texts with the template, and cuts the result at the marks.

    Args:
      tokenizer: with a chat template.
      where: the model's name or path, for messages.
      more_stops: ids that end a reply beside the template's own and the tokenizer's.

    Raises:
      UserError: if there is no template, or it does not keep the given texts in order
        with the same text around each turn, or closes a reply with no control token, or
        one of the ids is of no token, or of one that is a piece of ordinary text.
    """
    _check_stops(tokenizer, more_stops, where)
    if not tokenizer.chat_template:
        raise UserError(
            f"{where} has no chat template; take the instruction-tuned model, whose"
            " tokenizer_config.json or chat_template.jinja holds one"
        )
    # The longer conversation shows whether earlier turns are written like the last.
    longer = (_SYSTEM, _USER, _REPLY, _NEXT, _REPLY, _NEXT, _REPLY, _NEXT)
    shorter = longer[:4]
    other = ("Be brief.", "How many?", "1", "Why?")
    parts = []
    template = _template_of(tokenizer, where)
    rest, longer_text, other_text = render(
        template, tokenizer, (shorter, longer, other), where
    )
    for marker in shorter:
        piece, separator, rest = rest.partition(marker)
        if not separator:
            raise UserError(
                f"{where}: the chat template drops or reorders texts (system, user,"
                " assistant, user), so a conversation cannot be continued in place;"
                " choose a model whose template keeps them"
            )
        parts.append(piece)
    before_system, before_user, _, after_reply = parts
    token, end = _end_of_turn(tokenizer, after_reply, where)
    stops = {token, *more_stops}
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    pieces = ChatPieces(
        before_system=before_system,
        before_user=before_user,
        before_reply=rest,
        after_reply=after_reply,
        end_of_turn=end,
        end_token=token,
        stop_tokens=tuple(sorted(stops)),
    )
    if pieces.join(longer) != longer_text:
        raise UserError(
            f"{where}: the chat template writes earlier turns in another way than the"
            " last, so a conversation cannot be continued in place; choose a model"
            " whose template writes every turn alike"
        )
    if pieces.join(other) != other_text:
        raise UserError(
            f"{where}: the chat template writes a text twice, or not the same around"
            " every text, so a conversation cannot be continued in place; choose a"
            " model whose template writes each text once"
        )
    return pieces


def _check_stops(
    tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], where: str
) -> None:
    """Refuses ids of tokens that the tokenizer lacks, or that spell texts."""
    source = f"{where}: generation_config.json, or without it config.json, ends replies"
    # The highest id, not the number of tokens: ids may have gaps.
    if ids and max(ids) > (highest := highest_id(tokenizer)):
        raise UserError(
            f"{source} at token {max(ids)}, and the tokenizer's ids reach {highest};"
            " take both from one model"
        )
    own = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    if ordinary := sorted({*ids} - own):
        text = tokenizer.convert_ids_to_tokens(ordinary[0])
        raise UserError(
            f"{source} at token {ordinary[0]} ({text!r:.40}), which is a piece of"
            " ordinary text; take both files from one model"
        )


def _end_of_turn(
    tokenizer: PreTrainedTokenizerFast, after_reply: str, where: str
) -> tuple[int, str]:
    """The control token that a template closes a reply with: its id and its text.

    Raises:
      UserError: if there is none.
    """
    added = tokenizer.added_tokens_decoder.items()
    specials = {index for index, token in added if token.special}
    closing = encode(tokenizer, after_reply)
    end = str(tokenizer.convert_ids_to_tokens(closing[0])) if closing else ""
    # The text has to start with it as well: a token may swallow white space before it,
    # but what follows a reply that sampled its end of turn is cut from the text.
    if not closing or closing[0] not in specials or not after_reply.startswith(end):
        raise UserError(
            f"{where}: the chat template closes a reply with {after_reply!r}, which"
            " does not begin with a control token that the policy could sample; choose"
            " a model with an end-of-turn token"
        )
    return closing[0], end


def _template_of(tokenizer: PreTrainedTokenizerFast, where: str) -> str:
    """The tokenizer's own template, with its date. Raises UserError without one."""
    try:
        template = tokenizer.get_chat_template()
        if not isinstance(template, str):
            raise ValueError(f"it is not a string but {type(template).__name__}")
    except ValueError as error:
        raise _unusable(where, str(error).splitlines()[0]) from None
    return pinned_date.pin(template)


def render(
    template: str,
    tokenizer: PreTrainedTokenizerFast,
    conversations: Sequence[Sequence[str]],
    where: str,
) -> tuple[str, ...]:
    """A template's text of each conversation, with the prompt for another reply.

    Args:
      template: in Jinja's language.
      tokenizer: whose special tokens it may write.
      conversations: the texts of each: system, user, reply, user, ...
      where: the model's name or path, for messages.

    Raises:
      UserError: if the template refuses one, or does not end.
    """
    tokens = {name: str(x) for name, x in tokenizer.special_tokens_map.items()}
    request = json.dumps([template, tokens, conversations], sort_keys=True)
    texts, problem = _render_in_a_process(request)
    if problem:
        raise _unusable(where, problem)
    return texts


def _unusable(where: str, problem: str) -> UserError:
    return UserError(
        f"{where}: the chat template refuses a conversation of system, user,"
        f" assistant, user ({problem}); choose a model whose template takes it"
    )


def _jinja_folders() -> list[str]:
    """Where Jinja and then what it imports lie, as this process has found them."""
    files = (Path(inspect.getfile(module)) for module in (jinja2, markupsafe))
    return list(dict.fromkeys(str(file.parents[1]) for file in files))


@functools.lru_cache(maxsize=64)
def _render_in_a_process(request: str) -> tuple[tuple[str, ...], str]:
    """Runs `template_process`: (texts, ""), or ((), what went wrong)."""
    template, tokens, conversations = json.loads(request)
    roles = ["system", *("user", "assistant") * max(map(len, conversations))]
    job = {
        "template": template,
        "tokens": tokens,
        "conversations": [
            [
                {"role": role, "content": text}
                for role, text in zip(roles, texts, strict=False)
            ]
            for texts in conversations
        ],
    }
    # Nothing of the folder that it is started in is imported (-I), and no other Jinja
    # than here, such as an older one of the system's (-S).
    script = template_process.__file__
    command = [sys.executable, "-I", "-S", script, *_jinja_folders()]
    try:
        process = subprocess.run(
            command,
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return (), f"it takes longer than {_SECONDS} s"
    try:
        answer = json.loads(process.stdout)
    except ValueError:
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return (), f"it takes longer than {template_process.CPU_SECONDS} s"
        return (), f"its process ended with code {process.returncode}"
    return tuple(answer.get("texts", ())), answer.get("error", "")
