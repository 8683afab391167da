"""Rules that settings change: what the model reads, and what is refused."""

import pytest

from ragen_jax import envs
from ragen_jax.errors import SettingsError
from ragen_jax.text import prompts
from ragen_jax.text.prompts import TurnLimits

FORMAT = (
    "You have 3 turns and 9 actions in all. In one turn name up to 2 actions, separated"
    " by ||.\nReply in this format, in at most 47 tokens: <think>your thoughts</think>"
    "<answer>Down || Right</answer>"
)
OWN = envs.make("frozen_lake", [("size", 5)]).instruction
HINT, GERMAN = "Plan the whole path first.", "Erreiche G,\nmeide O.\t√"


@pytest.mark.parametrize(
    ("texts", "rules"),
    [
        ({}, OWN),
        (dict(instruction="", note=""), OWN),
        (dict(note=HINT), f"{OWN}\n{HINT}"),
        (dict(instruction=GERMAN), GERMAN),
        (dict(instruction=GERMAN, note=HINT), f"{GERMAN}\n{HINT}"),
    ],
)
def test_an_instruction_replaces_the_rules_and_a_note_stands_behind_them(texts, rules):
    env = envs.make("frozen_lake", [("size", 5), *texts.items()])
    prompt = prompts.system_prompt(env, TurnLimits(3, 2, 9, 47), thinking=True)
    assert prompt == f"{rules}\n{FORMAT}"


def test_texts_are_options_of_every_environment_that_is_played_by_its_name():
    options = envs.parse_options("frozen_lake", ["size=5", "note=Go to G, not to O=O."])
    env = envs.make("frozen_lake", options)
    assert env.instruction == f"{OWN}\nGo to G, not to O=O."


@pytest.mark.parametrize("key", ["instruction", "note"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (" \n", "' \\n' is only white space: write a text"),
        ("a\x1b[2Jb", "'a\\x1b[2Jb' holds the control character '\\x1b': leave it out"),
        ("a\rb", "'a\\rb' holds the control character '\\r': leave it out"),
        ("a\ud800", "'a\\ud800' holds '\\ud800', half of a character: write the whole"),
        ("\0" + 90 * "a", f"'\\x00{39 * 'a'}...{17 * 'a'}' holds the control char"),
    ],
)
def test_a_text_that_no_prompt_can_show_is_refused_by_its_key(key, text, said):
    with pytest.raises(SettingsError) as refused:
        envs.make("frozen_lake", [(key, text)], "env.mix.lakes.")
    assert str(refused.value).startswith(f"env.mix.lakes.{key} = {said}")
    assert "\n" not in str(refused.value)
