"""Stages of a supervised start: their seeds, and training that breaks down."""

import dataclasses
import re
import string
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models
from helpers.paths import ROOT

from ragen_jax import cli
from ragen_jax.errors import UserError
from ragen_jax.learning import supervised
from ragen_jax.models import parameters
from ragen_jax.models.io import sources
from ragen_jax.models.presets import SHAPES
from ragen_jax.text import chat_template
from ragen_jax.warm_start import STAGES, batches, stages
from ragen_jax.warm_start.batches import Batch
from ragen_jax.warm_start.recipe import KINDS, LAST_LAYERS, make_variant


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_stage_and_names_its_rate(
    capsys,
):
    small = models.small_config(500, layers=1)
    config = cli.load_config(f"{ROOT / 'configs' / 'warm_start.py'}:smoke")
    config.log_every, config.lake_boards.lr = 1, 1e30

    def batch(key):
        tokens = jax.random.randint(key, (2, 8), 0, small.vocabulary)
        opening = jnp.zeros(1, jnp.int32)
        return Batch(tokens, jnp.ones((2, 8), bool), jnp.ones(2), opening)

    def loss_of(weights, batch):
        loss = supervised.imitation_loss(
            weights, batch.tokens, batch.is_reply, small, batch.opening
        )
        return loss, batch.success.mean()

    weights = parameters.initialize(jax.random.key(0), parameters.declare(small))
    name = "lake_boards"
    with pytest.raises(UserError) as caught:
        stages._train(weights, [batch], [1.0], loss_of, config[name], config, name)
    wanted = "lake_boards: the loss is nan at step 3: lower lake_boards.lr"
    assert str(caught.value) == wanted
    assert "nan" not in capsys.readouterr().out


@pytest.mark.parametrize("opening", [8, 3])
def test_rows_that_end_before_a_reply_are_refused_and_name_the_context(opening):
    begins = jnp.zeros(opening, jnp.int32)
    no_reply = jnp.zeros((2, 8), bool)
    batch = Batch(jnp.zeros((2, 8), int), no_reply, jnp.ones(2), begins)
    with pytest.raises(UserError, match=r"lake_boards.context = 8 .* first reply"):
        stages._check_rows("lake_boards", batch)
    if opening < 8:
        stages._check_rows("lake_boards", batch._replace(is_reply=~no_reply))


def test_a_start_with_no_room_left_for_new_symbols_is_refused(monkeypatch):
    config = cli.load_config(f"{ROOT / 'configs' / 'warm_start.py'}:symbols")
    stages.begin(config, "tiny_sokoban")
    many = {**stages.SYMBOLS, "tiny_symbols": string.punctuation + string.ascii_letters}
    monkeypatch.setattr(stages, "SYMBOLS", many)
    with pytest.raises(UserError, match="has too many tokens: .* has room for 1024"):
        stages.begin(config, "tiny_sokoban")


def test_weights_that_the_last_step_breaks_are_refused():
    weights = {"layers": {"up": np.ones(3)}, "embedding": np.array([1, np.inf])}
    with pytest.raises(UserError, match=r"^last: the weights .*: lower last\.lr$"):
        stages._check_weights("last", weights)


def test_places_before_the_colon_of_each_reply_count_more_than_its_walk():
    colon, row = 7, [9, 9, 1, 2, 7, 3, 7, 4, 7, 9, 1, 7, 3, 0]
    reply = [(2 <= at < 8) or (10 <= at < 13) for at in range(len(row))]
    made = batches.token_weights(jnp.array([row]), jnp.array([reply]), colon, 5.0)
    wanted = [1, 1, 5, 5, 1, 1, 1, 1, 1, 1, 5, 1, 1, 1]
    np.testing.assert_array_equal(made[0], wanted)


def test_a_share_of_each_kinds_rows_names_places_at_random():
    stage = SimpleNamespace(relabel=False, random_places=0.25, turns=1)
    draws = [lambda key: None, lambda key: None]
    changed, shares = stages._changed_draws(draws, [3.0, 1.0], None, stage)
    assert shares == [2.25, 0.75, 0.75, 0.25]
    assert changed[:2] == draws and len(changed) == 4


def test_no_stage_of_one_seed_draws_the_levels_of_anothers():
    seeds, draws = [*range(20), 2**31, 2**32 - 1], range(100)
    drawn = {stages._draw_seed(seed, draw) for seed in seeds for draw in draws}
    assert len(drawn) == len(seeds) * len(draws)
    keys = {int(jax.random.key_data(jax.random.key(x))[1]) for x in drawn}
    assert keys == drawn


def test_seed_0_draws_what_the_librarys_own_models_were_trained_on():
    for draws in (1, 22, 2**31 - 1):
        assert stages._draw_seed(0, draws) == draws


def test_the_rooms_of_tiny_rooms_never_have_the_size_that_is_tested():
    config = cli.load_config(f"{ROOT / 'configs' / 'warm_start.py'}:rooms")
    larger = cli.load_config(f"{ROOT / 'configs' / 'sokoban.py'}:larger")
    for name in STAGES["tiny_rooms"]:
        for kind in KINDS[config[name].kinds]:
            settings = config[kind.settings].env.to_dict() | kind.changes
            size = larger.env.size
            assert settings["size"] != size
            assert (size, size) not in kind.shapes
            assert not kind.symbol_sets


@pytest.mark.parametrize("lacking", [0, LAST_LAYERS["tiny_rooms"]])
def test_a_model_grown_in_an_earlier_sitting_keeps_what_it_knows_of_its_words(lacking):
    """Also one that lacks the last layers alone."""
    config = cli.load_config(f"{ROOT / 'configs' / 'warm_start.py'}:rooms")
    shape = SHAPES["tiny_rooms"]
    shape = dataclasses.replace(shape, layers=shape.layers - lacking)
    random = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda leaf: random.normal(size=leaf.shape).astype(np.float32),
        parameters.declare(shape),
        is_leaf=parameters.is_leaf,
    )
    tokenizer = sources.locate("tiny").read_tokenizer()
    grown = stages._grown(tokenizer, weights, shape, config)[1]
    np.testing.assert_array_equal(grown["embedding"], weights["embedding"])


@pytest.mark.slow
def test_each_rows_instruction_names_the_shape_of_its_drawings():
    config = cli.load_config(f"{ROOT / 'configs' / 'warm_start.py'}:rooms")
    stage = config.rooms_dialogues
    stage.rows, stage.turns = 24, 2
    kind = next(k for k in KINDS[stage.kinds] if len(k.shapes) > 1)
    tokenizer = sources.locate("tiny").read_tokenizer()
    pieces = chat_template.cut_pieces(tokenizer, "tiny")
    draw = batches.make(pieces, tokenizer, make_variant(config, kind), stage, 1024)
    batch = jax.jit(draw)(jax.random.key(0))
    assert batch.opening is None
    seen = set()
    for row in np.asarray(batch.tokens):
        text = tokenizer.decode(row)
        (named,) = re.findall(r"a room of (\d+) x (\d+) cells", text)
        for drawn in text.split("State:\n")[1:]:
            lines = [line.split() for line in drawn.split("Turn")[0].splitlines()]
            assert {len(line) for line in lines} == {int(named[1])}
            assert len(lines) == int(named[0])
        seen.add((int(named[0]), int(named[1])))
    assert len(seen) > 5 and seen <= set(kind.shapes)
