"""Configs of the environments of text; replies whose actions have several numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models
from helpers.paths import ROOT

from ragen_jax import cli, envs
from ragen_jax import settings as settings_lib
from ragen_jax.envs import base
from ragen_jax.errors import UserError
from ragen_jax.models.io import sources
from ragen_jax.text import free_form, reference_parser, reply_parser, token_bytes
from ragen_jax.training import run as run_lib

TURNS = {"webshop": (9, 9), "search_qa": (5, 5), "math": (3, 1), "household": (15, 50)}
_PREFIX = b"<answer>"


@pytest.mark.parametrize("name", TURNS)
def test_configs_have_their_environments_defaults_and_limits(name):
    usual, paper = TURNS[name]
    for variant, turns in (("", usual), ("smoke", usual), ("paper", paper)):
        made = settings_lib.from_dict(
            cli.load_config(f"{ROOT}/configs/{name}.py:{variant}").to_dict()
        )
        kind, _ = envs.registry.lookup(name)
        chosen = settings_lib.env_settings(made.env.options, kind)
        assert made.env.name == name and (chosen == kind() or variant == "paper")
        assert (made.rollout.turns, made.rollout.actions) == (turns, turns)
        assert made.rollout.actions_per_turn == 1
    with pytest.raises(UserError, match="'big': choose one of .*'smoke'"):
        cli.load_config(f"{ROOT}/configs/{name}.py:big")


@pytest.mark.parametrize("name", [*TURNS, "countdown"])
def test_more_actions_a_reply_than_can_be_read_of_it_are_refused(name):
    config = cli.load_config(f"{ROOT}/configs/{name}.py:smoke")
    config.rollout.update(actions_per_turn=3, actions=9)
    with pytest.raises(UserError) as caught:
        run_lib.prepare(settings_lib.from_dict(config.to_dict()), models.one_device())
    assert str(caught.value) == (
        f"{name}: actions_per_turn = 3, and of one reply {name} reads 1 at most: set"
        " rollout.actions_per_turn to 1"
    )


def test_a_reply_of_several_searches_is_read_as_the_reference_reads_it():
    """Actions of several numbers, two in one reply, from the tokens of a reply."""
    env = envs.make("search_qa", dict(people=40).items())
    tokenizer = sources.locate("tiny").read_tokenizer()
    bytes_of = token_bytes.token_bytes(tokenizer)
    tables = reply_parser.reply_tables(
        bytes_of, (), _PREFIX, thinking=False, with_text=True
    )
    state = env.reset(jax.random.key(0), jnp.int32(base.TRAIN))

    def read(tokens, count):
        start = reply_parser.start_reply(tables, 2)
        reply, _ = jax.lax.scan(
            lambda reply, token: (reply_parser.read_token(tables, reply, token), None),
            start,
            tokens,
        )
        return free_form.read_answer(
            tables,
            reply,
            tokens,
            count,
            lambda text, length: env.read_action(text, length, state),
            env.answer_bytes,
            2,
        )

    read = jax.jit(read)
    for text in (
        "search[ada born] || Finish[The Malta]</answer>",
        "finish[malta]</answer> more",
        "look || search[born town]</answer>",
        "nothing at all</answer>",
        "search[ada",
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens = np.zeros(48, np.int32)
        tokens[: len(ids)] = ids
        actions, is_valid = read(tokens, jnp.int32(len(ids)))
        meant = reference_parser.parse_free_form(
            _PREFIX,
            b"".join(bytes_of[token] for token in ids),
            lambda segment: env.read_action_text(segment, state),
            env.answer_bytes,
            2,
            thinking=False,
        )
        found = [tuple(row) for row in actions.tolist() if row[0] != base.NO_ACTION]
        assert tuple(found) == meant.actions and bool(is_valid) == meant.is_valid
