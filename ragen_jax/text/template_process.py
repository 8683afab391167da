"""Renders a chat template: a script, run in a process of its own within limits.

A template is a program written by the model's maker. Jinja's sandbox keeps it from
files and from Python, but not from looping for hours or filling the memory; the
operating system's limits do. Reads one JSON object from standard input, and writes one:
{"texts": [...]} or {"error": "..."}. Imports nothing of this package, and not
transformers, which would take seconds. Its arguments are the folders of Jinja and of
what Jinja imports, because isolated Python ignores PYTHONPATH and the user's own
packages.
"""

import contextlib
import json
import sys

if __name__ == "__main__":
    sys.path += sys.argv[1:]

import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 3  # a hundred times what a published template takes
MEMORY = 2**30  # bytes
LONGEST = 2**20  # characters of a rendered conversation


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks a reply's text for those who want to know; not here."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Dictionary:
    """`dict`, of which a template can call nothing else."""

    def __call__(self, *arguments, **named):
        return dict(*arguments, **named)

    def fromkeys(self, *arguments):
        return dict.fromkeys(*arguments)


def _refuse(message):
    raise jinja2.TemplateError(str(message))


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def environment() -> ImmutableSandboxedEnvironment:
    """What a template meets in transformers' `apply_chat_template`.

    But the clock, and what draws at random: prompts would differ each time.
    """
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    sandbox.filters["tojson"] = _to_json
    del sandbox.filters["random"], sandbox.globals["lipsum"]
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["dict"] = _Dictionary()
    return sandbox


def _limit() -> None:
    try:
        import resource
    except ImportError:  # Not a POSIX system: whoever started this waits for so long.
        return
    limits = {resource.RLIMIT_CPU: CPU_SECONDS, resource.RLIMIT_AS: MEMORY}
    for kind, most in limits.items():
        # One below is set already; or this is macOS, which refuses any of memory that
        # is less than what it maps into each process (CPython's issue 78783).
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))


def _render(job) -> dict:
    template = environment().from_string(job["template"])
    texts = []
    for messages in job["conversations"]:
        texts.append(
            template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **job["tokens"],
            )
        )
        if len(texts[-1]) > LONGEST:
            raise ValueError(f"it writes {len(texts[-1])} characters")
    return {"texts": texts}


def main() -> None:
    job = json.load(sys.stdin)
    _limit()
    try:
        answer = _render(job)
    except MemoryError:
        answer = {"error": f"it takes more than {MEMORY >> 30} GiB of memory"}
    except Exception as error:  # Of a program that may do anything.
        line = (str(error).strip().splitlines() or [""])[0][:200]
        kind = "" if isinstance(error, jinja2.TemplateError) else type(error).__name__
        answer = {"error": ": ".join(filter(None, [kind, line])) or "it fails"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
