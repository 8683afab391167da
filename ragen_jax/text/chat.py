"""The fixed pieces of a chat template, cut once from the template itself."""

import dataclasses

from transformers import PreTrainedTokenizerFast

from ragen_jax.settings import UserError

_SYSTEM, _USER, _REPLY, _NEXT = (
    "\x11system\x12",
    "\x11user\x12",
    "\x11re\x12",
    "\x11n\x12",
)


@dataclasses.dataclass(frozen=True)
class ChatPieces:
    """What a template writes around the texts of a conversation, and its tokens' ends.

    A conversation is  before_system SYSTEM before_user USER before_reply REPLY
    after_reply USER before_reply REPLY ...  where `after_reply` starts with the
    end-of-turn token that the policy should sample itself.
    """

    before_system: str
    before_user: str
    before_reply: str
    after_reply: str
    end_of_turn: str  # text of the control token that closes a reply
    stop_tokens: tuple[int, ...]  # ids whose sampling ends a reply


def cut_pieces(tokenizer: PreTrainedTokenizerFast, where: str) -> ChatPieces:
    """Cuts the template with marked texts.

    Args:
      tokenizer: with a chat template.
      where: the model's name or path, for messages.

    Raises:
      UserError: if there is no template, or it does not keep the given texts in order,
        or closes a reply with no control token.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"{where} has no chat template; take the instruction-tuned model, whose"
            " tokenizer_config.json or chat_template.jinja holds one"
        )
    whole = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": _USER},
            {"role": "assistant", "content": _REPLY},
            {"role": "user", "content": _NEXT},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    parts, rest = [], whole
    for marker in (_SYSTEM, _USER, _REPLY, _NEXT):
        piece, found, rest = rest.partition(marker)
        if not found:
            raise UserError(
                f"{where}: the chat template drops or reorders texts (system, user,"
                " assistant, user), so a conversation cannot be continued in place;"
                " choose a model whose template keeps them"
            )
        parts.append(piece)
    specials = set(tokenizer.all_special_ids)
    closing = tokenizer.encode(parts[3], add_special_tokens=False)
    if not closing or closing[0] not in specials:
        raise UserError(
            f"{where}: the chat template closes a reply with {parts[3]!r}, which does"
            " not begin with a control token that the policy could sample; choose a"
            " model with an end-of-turn token"
        )
    stops = {closing[0]}
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    return ChatPieces(
        before_system=parts[0],
        before_user=parts[1],
        before_reply=rest,
        after_reply=parts[3],
        end_of_turn=tokenizer.convert_ids_to_tokens(closing[0]),
        stop_tokens=tuple(sorted(stops)),
    )
