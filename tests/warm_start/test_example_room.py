"""The example in the docstrings of drawings.py, relabel.py and walls.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.room_rows import tokenize, tokenizer, words

from ragen_jax.warm_start import batches, drawings, relabel, walls

ROOM = "State:\n # # # # #\n # P X O #\n # _ _ _ #\n # # # # #\n"
PLACES = " At (1, 1), box (1, 2), target (1, 3):"
WALK = " Down (2, 1), Up (1, 1), Right (1, 2)."
ANSWER = "</think><answer>Down || Up || Right</answer>"


def _texts(ids) -> list[str]:
    return [tokenizer().decode([int(token)]) for token in ids]


def _relabelled(walk: str):
    """A row that is to be imitated: its tokens, and it as relabelled."""
    tokens, is_reply = map(jnp.array, tokenize(ROOM, PLACES + walk + ANSWER))
    batch = batches.Batch(tokens, is_reply, jnp.ones(1), None)
    return tokens[0], relabel.with_best_actions(jax.random.key(0), batch, words(), 1)


def test_drawing_places_and_walk_are_read_as_the_docstrings_say():
    tokens, is_reply = (part[0] for part in tokenize(ROOM, PLACES + WALK + ANSWER))
    reading = drawings.read_replies(tokens, is_reply, words(), 1)
    meanings = ("you", "box", "target")
    assert [drawings.MEANINGS[i] for i in reading.board[0, 1, 1:4]] == [*meanings]
    places = reading.place[reading.is_place].tolist()
    assert places == [[1, 1], [1, 2], [1, 3], [2, 1], [1, 1], [1, 2]]
    assert reading.nth[reading.is_place].tolist() == [1, 2, 3, 4, 5, 6]
    assert (reading.player.tolist(), reading.box.tolist()) == ([[1, 1]], [[1, 2]])
    assert reading.player_after[reading.is_place].tolist()[3:] == places[3:]
    assert reading.box_after[reading.is_place].tolist()[-2:] == [[1, 2], [1, 3]]


def test_helpers_of_rows_give_the_numbers_of_their_docstrings():
    marks, values = jnp.array([0, 1, 0, 1, 0], bool), jnp.arange(5, 10)
    assert drawings.latest(marks, values).tolist() == [0, 6, 6, 8, 8]
    is_cell = jnp.array([0, 1, 1, 1, 0, 1], bool)
    assert drawings.columns(is_cell).tolist() == [-1, 0, 1, 2, -1, 0]
    lost = relabel._lost(jnp.array([7, 5]), jnp.array([2, 4]))
    assert lost.tolist() == [-1, -1, 2, -1, 0, -1, -1, -1, -1, -1]
    colon = words().colon
    tokens, is_reply = map(jnp.array, tokenize(ROOM, PLACES + WALK + ANSWER))
    weights = batches.token_weights(tokens, is_reply, colon, 3.0)
    assert "".join(_texts(tokens[weights == 3.0])) == PLACES.removesuffix(":")


def test_walls_and_boxes_around_the_player_are_those_of_the_docstring():
    tokens, is_reply = tokenize(ROOM, PLACES + WALK + ANSWER)
    around = walls.look_around(tokens, is_reply, words(), names_box=True)
    (first, *_) = np.flatnonzero(around.is_labelled[0])
    colon = np.flatnonzero(tokens[0] == words().colon)[-1]  # Not that of "State:".
    expected = [1, 0, 1, 0, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0, 0, 0]
    for position in (first, colon):
        bits = around.bits[0, position].astype(int).reshape(2, 8)
        np.testing.assert_array_equal(bits, expected)


@pytest.mark.slow
def test_random_actions_of_the_walk_are_replaced_by_the_best_ones():
    tokens, relabelled = _relabelled(WALK)
    imitated = "".join(_texts(relabelled.imitated[0]))
    assert PLACES + " Right (2, 1), Up (1, 1), Right (1, 2)." in imitated
    (changed,) = np.flatnonzero(relabelled.imitated[0] != tokens)
    assert relabelled.regret[0, changed, :4].tolist() == [4, 2, 4, 0]


@pytest.mark.slow
def test_nothing_is_imitated_from_an_impossible_step_on():
    tokens, relabelled = _relabelled(" Down (3, 1), Up (1, 1).")
    texts, imitated = _texts(tokens), np.asarray(relabelled.imitated[0])
    (start,) = [at for at, text in enumerate(texts) if text == " (3"]
    assert (imitated[start:] == -1).all() and (imitated[:start] >= 0).all()
