"""Reading walls: what is around places, against rooms read from their text."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models
from helpers.paths import ROOT
from helpers.room_rows import tokenize, tokenizer, words

from ragen_jax import cli
from ragen_jax.errors import SettingsError
from ragen_jax.learning import supervised
from ragen_jax.models import parameters
from ragen_jax.text import chat_template
from ragen_jax.warm_start import STAGES, batches, checks, walls
from ragen_jax.warm_start.batches import Batch
from ragen_jax.warm_start.recipe import KINDS, make_variant

_LEGEND = "Symbols: # wall, _ floor, O target, X box, √ box on target, P you.\n"
_FIRST = " # # # # #\n # _ P _ #\n # X # _ #\n # # # # #\nTurn 1.\n"
_SECOND = " # # # # #\n # P _ X #\n # _ O √ #\n # # # # #\nTurn 2.\n"
_REPLIES = (
    "<think> At (1, 2), box (2, 1), target (1, 3): Down (1, 2).</think>",
    "<think> At (1, 1), box (1, 3), target (2, 2): Right (1, 2).</think>",
)


def _row() -> tuple[np.ndarray, np.ndarray]:
    """int32[1, T] and bool[1, T]: a legend, and two drawings with their replies."""
    return tokenize(_LEGEND + _FIRST, _REPLIES[0], _SECOND, _REPLIES[1])


def _is_place(around: walls.Around, tokens) -> np.ndarray:
    """bool[R, T], those of the told tokens that are the last of a place."""
    return np.asarray(around.is_labelled & (words().column[tokens] >= 0))


@pytest.mark.slow
def test_walls_and_boxes_around_each_place_are_told():
    tokens, is_reply = _row()
    around = walls.look_around(tokens, is_reply, words(), names_box=True)
    found = np.asarray(around.bits[0])[_is_place(around, tokens)[0]]
    # Up, Down, Left, Right, and the same two cells away; beyond the drawing is wall.
    wanted = [
        "11001111 00000000",  # (1, 2): a wall below it; two to each side are border
        "01111110 00000000",  # (2, 1), the box: free above; a wall beside it
        "10011101 00000000",  # (1, 3): the border above and to the right; free below
        "11001111 00000000",  # (1, 2) again
        "10101110 00000001",  # (1, 1) of the second drawing; a box two to the right
        "10011101 01000000",  # (1, 3), that box: the other box below it
        "01001111 00010000",  # (2, 2): that one to its right; the border is two away
        "10001111 00010000",  # (1, 2), free below; the named box to the right
    ]
    text = ["".join("01"[int(x)] for x in bits) for bits in found]
    assert [f"{bits[:8]} {bits[8:]}" for bits in text] == wanted


@pytest.mark.slow
def test_a_box_is_where_the_walk_has_pushed_it():
    drawing = " # # # # # #\n # P _ X _ #\n # _ _ _ X #\n # # # # # #\nTurn 1.\n"
    reply = (
        "<think> At (1, 1), box (1, 3), target (2, 4): Right (1, 2), Right (1, 3),"
        " Right (1, 3).</think>"
    )
    tokens, is_reply = tokenize(drawing, reply)
    around = walls.look_around(tokens, is_reply, words(), names_box=True)
    boxes = np.asarray(around.bits[0])[_is_place(around, tokens)[0], 8:].astype(int)
    assert boxes[3].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]  # at (1, 2), before the push
    assert boxes[4].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]  # at (1, 3): box at (1, 4)
    # Standing still, against the border, pushes nothing in truth; and the walk's words
    # are taken as they are where they name a cell without the box.
    assert boxes[5].tolist() == boxes[4].tolist()


@pytest.mark.slow
def test_commas_are_about_the_place_before_them_and_colons_about_the_walks_beginning():
    tokens, is_reply = _row()
    around = walls.look_around(tokens, is_reply, words(), names_box=True)
    told, text = (
        np.flatnonzero(around.is_labelled[0]),
        tokenizer().convert_ids_to_tokens,
    )
    assert "".join(text(tokens[0, told].tolist())) == (
        ",Ġ2),,Ġ1),,Ġ3):,Ġ2)" + ",Ġ1),,Ġ3),,Ġ2):,Ġ2)"
    )
    bits = np.asarray(around.bits[0])[told].astype(int).tolist()
    # Each reply: player, comma, box, comma, target, colon, the place walked to.
    for player, comma, box, behind, _, colon, _ in (bits[:7], bits[7:]):
        assert comma == player == colon and behind == box != player


@pytest.mark.slow
def test_places_at_random_are_of_the_first_drawing_and_behind_its_replys_beginning():
    tokens, is_reply = (np.pad(x, ((0, 7), (0, 900)), "edge") for x in _row())
    batch = Batch(jnp.array(tokens), jnp.array(is_reply), jnp.ones(8, bool), None)
    made = walls.with_random_places(jax.random.key(0), batch, words())
    start = int(np.argmax(is_reply[0]))
    kept = np.s_[:, : start + 4]
    np.testing.assert_array_equal(made.tokens[kept], tokens[kept])
    assert not made.is_reply.any() and made.is_named[:, start:].all()
    texts = [tokenizer().decode(row) for row in made.tokens[:, start:]]
    place = r" \((\d), (\d)\)"
    as_replies_begin = f" At{place}, box{place}, target{place}:"
    found = [re.fullmatch(f"<think>({as_replies_begin})+.{{,40}}", x) for x in texts]
    in_a_row = [re.fullmatch(f"<think> At({place},)+.{{,10}}", x) for x in texts]
    assert any(found) and any(in_a_row)
    assert all(bool(x) != bool(y) for x, y in zip(found, in_a_row, strict=True))
    places = re.findall(place, "".join(texts))
    assert len(places) > 1600
    assert set(places) == {(str(r), str(c)) for r in range(4) for c in range(5)}


def _untrained():
    """A shape, weights, and a batch of one row."""
    config = models.small_config(1024, layers=4, tied=True)
    weights = parameters.initialize(jax.random.key(0), parameters.declare(config))
    tokens, is_reply = map(jnp.array, _row())
    return config, weights, Batch(tokens, is_reply, jnp.ones(1, bool), None)


@pytest.mark.slow
def test_heads_that_know_nothing_add_the_logarithm_of_two_to_imitation():
    config, weights, batch = _untrained()
    tokens, is_reply = batch.tokens, batch.is_reply
    weight = jnp.linspace(1.0, 2.0, tokens.shape[1])[None]
    learned = weights, walls.begin_heads(config)
    made, _ = walls.loss(learned, batch, config, words(), weight, 3.0)
    imitation = supervised.imitation_loss(
        weights, tokens, is_reply, config, weight=weight
    )
    np.testing.assert_allclose(made, imitation + 3 * np.log(2), rtol=1e-5)
    # Where each word that can be chosen loses 7, so does any choice; its weight is 2.
    lossy = batch._replace(regret=jnp.full((*tokens.shape, 24), 7.0))
    with_regret, _ = walls.loss(learned, lossy, config, words(), weight, 3.0, 2.0)
    np.testing.assert_allclose(with_regret, made + 14, rtol=1e-5)
    named = walls.with_random_places(jax.random.key(1), batch, words())
    made, _ = walls.loss(learned, named, config, words(), None, 3.0)
    np.testing.assert_allclose(made, 3 * np.log(2), rtol=1e-5)


@pytest.mark.slow
def test_heads_learn_what_is_around_places():
    config, weights, batch = _untrained()
    learned = weights, walls.begin_heads(config)
    value = jax.jit(
        jax.value_and_grad(
            lambda learned: walls.loss(learned, batch, config, words(), None, 1.0),
            has_aux=True,
        )
    )
    (before, _), _ = value(learned)
    for _ in range(120):
        _, gradient = value(learned)
        learned = jax.tree.map(lambda w, g: w - 0.1 * g, learned, gradient)
    (after, rightly), _ = value(learned)
    assert after < before - 0.3
    assert rightly > 0.85  # Three quarters of the bits are 0 in a row like this.


@pytest.mark.slow
@pytest.mark.parametrize("kind", [1, 6])
def test_of_demonstrated_rows_it_tells_what_their_text_shows(kind):
    config = cli.load_config(f"{ROOT / 'configs' / 'warm_start.py'}:rooms")
    stage = config.rooms_walls
    stage.rows, stage.turns = 24, 2
    pieces = chat_template.cut_pieces(tokenizer(), config.model)
    variant = make_variant(config, KINDS[stage.kinds][kind], noise=0.5)
    made = batches.make(pieces, tokenizer(), variant, stage, 1024)
    batch = jax.jit(made)(jax.random.key(3))
    around = walls.look_around(batch.tokens, batch.is_reply, words(), names_box=True)
    seen = 0
    for row in range(stage.rows):
        text = tokenizer().decode(batch.tokens[row])
        found = iter(
            np.asarray(around.bits[row])[
                np.asarray(_is_place(around, batch.tokens)[row])
            ]
        )
        for turn in text.split("State:\n")[1:]:
            drawing, _, reply = turn.partition("Turn ")
            board = [line.split() for line in drawing.splitlines()]
            if len(thought := reply.split("<think>")) > 1:
                for wanted in _around_places(board, thought[1].split("</think>")[0]):
                    np.testing.assert_array_equal(next(found), wanted)
                    seen += 1
        assert next(found, None) is None
    assert seen > 150


def _around_places(board: list[list[str]], thought: str) -> list[list[bool]]:
    """The same read from text: for each place, where walls and boxes are around it."""
    inside = lambda r, c: 0 <= r < len(board) and 0 <= c < len(board[0])
    cells = [(r, c) for r, line in enumerate(board) for c in range(len(line))]
    boxes = {at for at in cells if board[at[0]][at[1]] in "X√"}
    # Up, Down, Left and Right.
    moves = [(-1, 0), (1, 0), (0, -1), (0, 1)]
    steps = moves + [(2 * r, 2 * c) for r, c in moves]
    told, player, named = [], None, None
    numbers = re.findall(r" \((\d), (\d)\)", thought)
    for index, (r, c) in enumerate((int(r), int(c)) for r, c in numbers):
        if index == 1:
            named = (r, c)
        if index > 2 and (r, c) == named and named in boxes:
            boxes.remove(named)
            named = (2 * r - player[0], 2 * c - player[1])
            boxes.add(named)
        if index == 0 or index > 2:
            player = (r, c)
        around = [(r + dr, c + dc) for dr, dc in steps]
        is_wall = [not inside(*at) or board[at[0]][at[1]] == "#" for at in around]
        told.append(is_wall + [at in boxes for at in around])
    return told


def test_stages_that_cannot_read_walls_are_refused():
    def refusal(changes: dict, stage: str = "rooms_walls") -> str:
        config = cli.load_config(f"{ROOT / 'configs' / 'warm_start.py'}:rooms")
        config.update_from_flattened_dict(changes)
        with pytest.raises(SettingsError) as caught:
            checks.check(config, [stage], 1024)
        return str(caught.value)

    assert "rooms_walls.kinds = 'lakes' has other boards" in refusal(
        {"rooms_walls.kinds": "lakes"}
    )
    assert "rooms_walls.walls_weight = 0 reads none" in refusal(
        {"rooms_walls.walls_weight": 0.0}
    )
    assert "sokoban_large.limits.turns = 17" in refusal(
        {"sokoban_large.limits.turns": 17}
    )
    assert "rooms_walls.noise = 2.0 cannot be used" in refusal(
        {"rooms_walls.noise": 2.0}
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda c: c.sokoban.__delitem__("demonstrator"),
            "no section sokoban.demonstrator",
        ),
        (lambda c: c.sokoban.__delitem__("env"), "no section sokoban.env"),
        (lambda c: c.rooms_walls.update(kinds=["rooms"]), r"kinds = \['rooms'\] is un"),
    ],
)
def test_a_config_of_ones_own_that_lacks_a_section_is_refused(change, told):
    config = cli.load_config(f"{ROOT / 'configs' / 'warm_start.py'}:rooms")
    with config.unlocked(), config.ignore_type():
        change(config)
    with pytest.raises(SettingsError, match=told):
        checks.check(config, ["rooms_walls"], 1024)


def test_noise_is_refused_where_no_demonstrator_has_it():
    config = cli.load_config(f"{ROOT / 'configs' / 'warm_start_words.py'}")
    config.search_pages.noise = 0.2
    with pytest.raises(SettingsError, match=r"search_pages\.noise = 0\.2 is of"):
        checks.check(config, ["search_pages"], 2048)


def test_only_stages_of_rooms_read_walls():
    for variant, model in (("", "tiny"), ("symbols", "tiny_symbols")):
        config = cli.load_config(f"{ROOT / 'configs' / 'warm_start.py'}:{variant}")
        assert not any(config[name].walls_weight for name in STAGES[model])
