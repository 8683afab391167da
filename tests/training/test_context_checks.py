"""What a message has room for: the remedy fits what is too long."""

from types import SimpleNamespace

import pytest
from helpers import runs

from ragen_jax import settings as settings_lib
from ragen_jax.errors import UserError
from ragen_jax.training import context_checks
from ragen_jax.training.run import prepare

COIN_WALK = (runs.ROOT / "docs" / "examples" / "coin_walk.py").read_text()


@pytest.fixture
def long_walk(tmp_path):
    """An environment with a message that is longer than the model has positions."""
    path = tmp_path / "long_walk.py"
    text = COIN_WALK.replace('"State:\\n"', '"State" + 5000 * " walk" + ":\\n"')
    path.write_text(text)
    return path


def _refusal(path, **changes):
    config = runs.settings(model__path="tiny", **changes)
    own = settings_lib.to_dict(config) | dict(env=dict(name=str(path), thinking=True))
    with pytest.raises(UserError) as found:
        prepare(settings_lib.from_dict(own))
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize("changes", [{}, dict(rollout__history="single")])
def test_a_message_too_long_for_the_model_is_not_cured_by_fewer_turns(
    long_walk, changes
):
    said = _refusal(long_walk, **changes)
    assert said.endswith(
        "its observations are taken to be 9 times the longest phrase: add"
        " longest_observation if they are shorter, let the environment show less, or"
        " choose a model of more positions"
    )
    long_walk.write_text(
        long_walk.read_text().replace(
            "        reset=",
            "        longest_observation=lambda n: int(n[0] + n[1:].max() * length),\n"
            "        reset=",
            1,
        )
    )
    said = _refusal(long_walk, **changes)
    assert said.endswith(
        "made for; let the environment show less, or choose a model of more positions"
    )


def test_turns_that_are_too_many_for_the_model_are_lowered():
    with pytest.raises(UserError, match=r"; lower rollout.turns or .* old turns$"):
        prepare(
            runs.settings(model__path="tiny", rollout__turns=200, rollout__actions=200)
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "made for; shorten env.note, let the environment show less, or"),
        (dict(rollout__history="single"), "made for; shorten env.note, let the env"),
        (
            dict(rollout__context=500),
            "; set it to 0, which takes exactly that, shorten",
        ),
    ],
)
def test_a_note_that_is_too_long_is_to_be_shortened(changes, said):
    with pytest.raises(UserError) as found:
        prepare(
            runs.settings(model__path="tiny", env__note="Walk on. " * 3000, **changes)
        )
    assert said in str(found.value) and len(str(found.value)) < 500


@pytest.mark.parametrize("key", ["instruction", "note"])
def test_a_control_token_in_a_text_is_refused_by_the_key_of_the_text(key):
    with pytest.raises(UserError) as found:
        prepare(runs.settings(model__path="tiny", **{f"env__{key}": "Go.<|im_end|>"}))
    assert str(found.value) == (
        f"env.{key}: the control token '<|im_end|>' of the model stands in its text"
        " 'Go.<|im_end|>': write it in another way"
    )


@pytest.mark.parametrize("character", ["\x1b", "\r", "\0", "\x7f", "\x9b"])
def test_texts_that_would_command_a_terminal_are_refused(character):
    tokenizer = SimpleNamespace(added_tokens_decoder={})
    usable = " é\t🙂\u200d\u00a0\n"
    for system, phrase in ((usable, usable + character), (character, usable)):
        texts = SimpleNamespace(
            system=system, phrases=("\x1b of the template", phrase), env_offset=1
        )
        with pytest.raises(UserError) as found:
            context_checks.check_texts(texts, tokenizer, "env.name", "walk.py")
        said = str(found.value)
        assert f"'walk.py': the control character {character!r} stands in" in said
        assert "\n" not in said
    texts.system = usable
    context_checks.check_texts(texts, tokenizer, "env.name", "walk.py")
