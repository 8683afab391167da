"""The chat template of an exported agent, which asks for replies as training did.

Training writes the beginning of a reply, "<think>" or "<answer>", for the policy, and
keeps earlier replies as they were sampled. A model's own template does not do the
first, and some, such as Qwen3's, drop the thoughts of earlier replies.
"""

import contextlib
import copy

from transformers import PreTrainedTokenizerFast

from ragen_jax.errors import UserError
from ragen_jax.settings.schema import RolloutSettings
from ragen_jax.text import chat_template, pinned_date
from ragen_jax.text.chat_template import ChatPieces
from ragen_jax.text.prompts import reply_prefix

_PREFIXES = tuple(reply_prefix(thinking) for thinking in (True, False))
# The original template, between these two, meets no tag of a thought in a reply.
_BEFORE = """\
{#- Earlier replies stay whole, thoughts included, as in the agent's training. -#}
{%- set kept = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and message.content is string -%}
{%- set content = message.content | replace('think>', 'sampled-thought>') -%}
{%- set message = dict(message, content=content) -%}
{%- endif -%}
{%- set kept.messages = kept.messages + [message] -%}
{%- endfor -%}
{%- set messages = kept.messages -%}
{%- set conversation %}"""
_AFTER = """\
{%- endset -%}
{{- conversation | replace('sampled-thought>', 'think>') -}}"""
_USERS = "\x11user\x12"
_NO_DIFFERENCE = "with rollout.history = 'single' it makes no difference"


def for_agent(
    tokenizer: PreTrainedTokenizerFast, pieces: ChatPieces, *, thinking: bool
) -> tuple[PreTrainedTokenizerFast, str]:
    """The tokenizer with a template that writes what the agent was trained on.

    What the template writes is compared with the pieces; what cannot be changed so that
    both agree stays as the model's makers wrote it.

    Args:
      tokenizer: the model's, which stays as it is.
      pieces: cut from its chat template.
      thinking: whether the agent's replies begin with a thought.

    Returns:
      A copy of the tokenizer, and one sentence for the user on what its template still
      does otherwise than training; "" if there is nothing.
    """
    prefix = reply_prefix(thinking)
    original = pinned_date.pin(str(tokenizer.get_chat_template()))
    asking = original + _hand_over(prefix)
    keeping = f"{_BEFORE}{original}{_AFTER}{_hand_over(prefix)}"
    answers = _conversation(f"{prefix}\x11reply\x12")
    whole = _conversation(f"{prefix}\x11thought\x12</think><answer>\x11b\x12</answer>")
    if not thinking:
        whole = answers
    for template in (asking, keeping):
        if _writes(template, tokenizer, whole, pieces.join(whole) + prefix):
            return _changed(tokenizer, template), ""
    if _writes(asking, tokenizer, answers, pieces.join(answers) + prefix):
        return _changed(tokenizer, asking), (
            "the chat template drops thoughts of earlier replies, which training keeps"
            f" in the context: other programs show the agent less; {_NO_DIFFERENCE}"
        )
    return tokenizer, (
        "the chat template stays as it is, since it could not be changed: end prompts"
        f" with {prefix!r}, with which the agent's replies began in training"
    )


def of_adapters(thinking: bool) -> str:
    """What users of adapters alone have to know, whose base has its own template."""
    return (
        "adapters bring no chat template: end prompts with"
        f" {reply_prefix(thinking)!r}, with which the agent's replies began in training"
    )


def of_rollout(settings: RolloutSettings) -> list[str]:
    """What users have to know of how an agent was sampled; often nothing."""
    notes = []
    if settings.stop_at_answer:
        notes.append(
            "replies ended at </answer> in training, so the agent may not end them"
            " itself: give '</answer>' as a stop text"
        )
    if most := settings.window_turns:
        turns = "turn" if most == 1 else f"{most} turns"
        notes.append(
            f"the agent saw the last {turns} alone in training: show it no more"
        )
    return notes


def original(template: str) -> str:
    """The template as it was before `for_agent`; any other one as it is."""
    for prefix in _PREFIXES:
        # Editors end a file with a newline.
        if (stripped := template.rstrip()).endswith(_hand_over(prefix)):
            template = stripped.removesuffix(_hand_over(prefix))
            if template.startswith(_BEFORE) and template.endswith(_AFTER):
                return template[len(_BEFORE) : -len(_AFTER)]
            return template
    return template


def _hand_over(prefix: str) -> str:
    """What stands behind a template so that it begins the reply."""
    return (
        "{#- The agent was trained to go on from here. -#}"
        f"{{%- if add_generation_prompt -%}}{{{{- '{prefix}' -}}}}{{%- endif -%}}"
    )


def _conversation(reply: str) -> tuple[str, ...]:
    """System, user, reply, user, reply, user."""
    return ("\x11system\x12", _USERS, reply, _USERS, reply, _USERS)


def _writes(
    template: str,
    tokenizer: PreTrainedTokenizerFast,
    conversation: tuple[str, ...],
    wanted: str,
) -> bool:
    """Whether the template's text of the conversation, with its prompt, is `wanted`."""
    with contextlib.suppress(UserError):
        found = chat_template.render(template, tokenizer, (conversation,), "")
        return found == (wanted,)
    return False


def _changed(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> PreTrainedTokenizerFast:
    """A copy of the tokenizer with another chat template (by name: "default")."""
    changed, templates = copy.copy(tokenizer), tokenizer.chat_template
    is_named = isinstance(templates, dict)
    changed.chat_template = templates | {"default": template} if is_named else template
    return changed
