"""Chat templates that ask for today's date are given always the same one.

It is the date on which Llama 3.1's template falls back, so that a run, its continuation
on another day and whoever uses the trained model read the same prompt.
"""

from collections.abc import Callable

_FUNCTION = "strftime_now"  # by which templates ask
_PINNED = """\
{%- macro strftime_now(format) -%}
{{- format | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July')
    | replace('%m', '07') | replace('%Y', '2024') | replace('%y', '24') -}}
{%- endmacro %}"""


def pin(template: str) -> str:
    """The template with the date in front, if it asks for one and has none yet."""
    if _FUNCTION not in template or template.startswith(_PINNED):
        return template
    return _PINNED + template


def unpin(template: str) -> str:
    """The template as it was before `pin`."""
    return template.removeprefix(_PINNED)


def change_each(templates, change: Callable[[str], str]):
    """`change` of a tokenizer's template: one, several by name, or None.

    What a damaged file gives instead of a text stays as it is.
    """
    if isinstance(templates, dict):
        return {name: change_each(each, change) for name, each in templates.items()}
    return change(templates) if isinstance(templates, str) else templates
