"""Gives chat templates that ask for today's date always the same date.

It is the one that Llama 3.1's template falls back to. So a run, its continuation on
another day, and users of the trained model have the same prompt.
"""

from collections.abc import Callable

_FUNCTION = "strftime_now"  # which templates call
_PINNED = """\
{%- macro strftime_now(format) -%}
{{- format | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July')
    | replace('%m', '07') | replace('%Y', '2024') | replace('%y', '24') -}}
{%- endmacro %}"""


def pin(template: str) -> str:
    """The template with the date in front, if it asks for one and has none in it."""
    if _FUNCTION not in template or _PINNED in template:
        return template
    return _PINNED + template


def unpin(template: str) -> str:
    """The template as it was before `pin`."""
    return template.removeprefix(_PINNED)


def change_each(templates, change: Callable[[str], str]):
    """Applies `change` to a tokenizer's chat template: a text, a dict of texts, or
    None.

    Values that are no texts, from a damaged file, stay as they are.
    """
    if isinstance(templates, dict):
        return {name: change_each(each, change) for name, each in templates.items()}
    return change(templates) if isinstance(templates, str) else templates
