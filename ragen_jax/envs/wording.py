"""Changes an environment's rules in the system prompt as settings ask for it."""

import dataclasses
import re
from collections.abc import Mapping

from ragen_jax.envs.base import Environment
from ragen_jax.errors import SettingsError
from ragen_jax.utils.words import shortened

# Characters that texts for models cannot have: all such but newline and tab.
CONTROL = re.compile(r"[^\n\t -~\xa0-\U0010ffff]")


def check(texts: Mapping[str, str], section: str) -> None:
    """Raises SettingsError for a text that no prompt or terminal can show.

    Args:
      texts: those of settings.TEXTS that are set, by key.
      section: what precedes the keys in the config, ending in a dot.
    """
    for key, text in texts.items():
        where = f"{section}{key} = {shortened(text)!r}"
        if text and not text.strip():
            raise SettingsError(f"{where} is only white space: write a text, or ''")
        if character := CONTROL.search(text):
            raise SettingsError(
                f"{where} holds the control character {character[0]!r}: leave it out;"
                " of such characters only newlines and tabs can be used"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SettingsError(
                f"{where} holds {text[error.start]!r}, half of a character: write the"
                " whole one"
            ) from None


def reworded(env: Environment, texts: Mapping[str, str]) -> Environment:
    """The environment with other rules in the system prompt; nothing else changes.

    Args:
      env: with its own rules.
      texts: "instruction" replaces them, "note" stands behind them, on a new line.
    """
    rules = texts.get("instruction") or env.instruction
    if note := texts.get("note"):
        rules = f"{rules}\n{note}"
    return dataclasses.replace(env, instruction=rules)
