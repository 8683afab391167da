"""An auxiliary loss: predict the walls and boxes around the places that a reply names.

Demonstrators seldom run into something, so imitation teaches little about obstacles.
Linear heads on hidden states, dropped after training, learn to predict them: at the
places of walks and right behind these, where the next action is chosen; and, as a
denser signal, at places drawn at random. Of stages with `walls_weight` or `relabel`.

In the example of drawings.py the player's place is (1, 1). Above it and to its left is
wall, and so are the cells two above, two below and two to the left; the cell two to the
right is not, and the box is to the right. So the label, of walls and then of boxes in
the order of AROUND, is

   up  down  left  right   and two cells away
   [1   0     1     0      1   1   1   0]       walls
   [0   0     0     1      0   0   0   0]       boxes
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ragen_jax.envs.sokoban.types import MOVES
from ragen_jax.learning import supervised, vocabulary_scores
from ragen_jax.models import transformer
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.warm_start import drawings, reading
from ragen_jax.warm_start.batches import NO_CHOICE, Batch

# int[8, 2], (row, column) offsets: the 4 neighbours, then the cells behind these.
AROUND = np.concatenate([MOVES, 2 * MOVES])
# Weight of the colon, where a walk's first action is chosen: it is rarer.
_FIRST_WEIGHT = 4.0
# Multiplies the logits, so that heads learn faster than the layers below.
_HEAD_SCALE = 10.0


class Around(NamedTuple):
    """The labels of the heads: what is around the places that replies name."""

    # bool[R, T, 16]: which of the 8 cells AROUND are walls, then which hold a box.
    bits: jax.Array
    # bool[R, T], the tokens that have labels: the last token of a place and a comma
    # behind it, for that place; the colon before a walk, for the player's place.
    is_labelled: jax.Array


def look_around(
    tokens: jax.Array, is_reply: jax.Array, words: drawings.Words, *, names_box: bool
) -> Around:
    """The labels, from the drawing that each reply was shown.

    Args:
      tokens: int32[R, T], rows of rooms in Sokoban's own symbols, 10 x 10 at most, and
        up to 16 replies.
      is_reply: bool[R, T].
      words: of the tokenizer.
      names_box: whether replies are walks, whose second place is the box that they
        push: that box is then where the walk has pushed it. Else all are as drawn.
    """

    def one_row(tokens, is_reply):
        board, which = drawings.boards(tokens, is_reply, words)
        # bool[K, 14, 14], boxes that stay as drawn; the named one is taken out below.
        is_box = jnp.isin(board, jnp.array(drawings.BOXES))

        is_place, nth, place = drawings.named_places(tokens, is_reply, words)
        place += drawings.MARGIN
        pushed = jnp.full_like(place, -1)
        if names_box:
            is_named = (nth == 2) & is_box[which, place[:, 0], place[:, 1]]
            # A reply's index at the name of its box; elsewhere out of bounds: dropped.
            reply = jnp.where(is_named, which, drawings.REPLIES)
            is_box = is_box.at[reply, place[:, 0], place[:, 1]].set(False, mode="drop")
            named = jnp.full((drawings.REPLIES, 2), -1)
            named = named.at[reply].set(place, mode="drop")  # int32[K, 2]
            pushed = drawings.walked(nth, place, named[which])[1]

        labelled, is_labelled = _labelled_place(tokens, is_place, words)
        cells = place[labelled][:, None] + jnp.asarray(AROUND)[None]  # [T, 8, 2]
        cells = jnp.clip(cells, 0, board.shape[1] - 1)
        at = which[:, None], cells[..., 0], cells[..., 1]
        is_pushed = (cells == pushed[:, None]).all(-1)
        bits = jnp.concatenate([board[at] == drawings.WALL, is_box[at] | is_pushed], 1)
        return Around(bits, is_labelled)

    return jax.vmap(one_row)(tokens, is_reply)


def _labelled_place(
    tokens, is_place, words: drawings.Words
) -> tuple[jax.Array, jax.Array]:
    """int32[T], index of the last token of each label's place; bool[T], has a label.

    Of "At (1, 1), box (1, 2), target (1, 3): Right" these are labelled: ", 1)" and the
    comma behind it with the place (1, 1), ", 2)" and its comma with (1, 2), ", 3)" with
    (1, 3), and the colon with the player's place, (1, 1).
    """
    position = jnp.arange(tokens.shape[0])
    is_behind = drawings.before(is_place)
    is_first = is_place & (drawings.before(drawings.before(tokens)) == words.at)
    first = drawings.latest(is_first, position)
    is_colon = is_behind & (tokens == words.colon)
    labelled = jnp.where(is_place, position, jnp.where(is_colon, first, position - 1))
    is_labelled = is_place | is_colon | (is_behind & (tokens == words.comma))
    return labelled, is_labelled


def with_random_places(key: jax.Array, batch: Batch, words: drawings.Words) -> Batch:
    """Rows that name random places of the first drawing, from the first reply on.

    Half of the rows name one place after the other; the others repeat the beginning of
    a reply (" At ..., box ..., target ...:"). No reply is left to be imitated. Behind
    the drawing of the example, which has 4 rows and 5 columns, a row may read

       At (1, 1), (2, 2), (0, 2), (1, 1), (2, 4), ...
       At (3, 0), box (1, 4), target (2, 2): At (0, 1), box ...

    Args:
      key: consumed.
      batch: rows as demonstrated.
      words: of the tokenizer.
    """
    row_here, column_here = -1, -2  # Stand for tokens that are filled in below.
    place = (row_here, column_here, words.comma)
    beginning = [words.at, *place, words.box, *place, words.target, *place]
    beginning[-1] = words.colon
    patterns = jnp.array([beginning, place * 4])

    def one_row(key, tokens, is_reply):
        position = jnp.arange(tokens.shape[0])
        start = jnp.argmax(is_reply)
        is_cell = (words.meaning[tokens] >= 0) & (position < start)
        rows = ((tokens == words.newline) & drawings.before(is_cell)).sum()
        columns = jnp.where(is_cell, drawings.columns(is_cell) + 1, 0).max()
        row_key, column_key, pattern_key = jax.random.split(key, 3)
        row = jax.random.randint(row_key, tokens.shape, 0, rows)
        column = jax.random.randint(column_key, tokens.shape, 0, columns)
        pattern = jax.random.bernoulli(pattern_key).astype(jnp.int32)
        # A reply's fourth token is " At", with which the first pattern begins.
        since = position - start - 3 - pattern
        token = patterns[pattern, since % len(beginning)]
        token = jnp.where(token == row_here, words.rows[row], token)
        token = jnp.where(token == column_here, words.columns[column], token)
        return jnp.where(since >= 0, token, tokens), position >= start

    keys = jax.random.split(key, batch.tokens.shape[0])
    tokens, is_named = jax.vmap(one_row)(keys, batch.tokens, batch.is_reply)
    return batch._replace(
        tokens=tokens,
        is_reply=jnp.zeros_like(is_named),
        is_named=is_named,
        imitated=None,
        regret=None,
    )


def begin_heads(config: ModelConfig) -> Parameters:
    """Two heads at 0, for the states after half and two thirds of the layers.

    float32[2, D, 16] `weight` and float32[2, 16] `bias`.
    """
    bits = 2 * len(AROUND)
    return {"weight": jnp.zeros((2, config.width, bits)), "bias": jnp.zeros((2, bits))}


def loss(
    learned: tuple[Parameters, Parameters],
    batch: Batch,
    config: ModelConfig,
    words: drawings.Words,
    weight: jax.Array | None,
    walls_weight: float,
    regret_weight: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Imitation plus the loss of the heads; of random places the latter alone.

    Args:
      learned: the model's weights, and the heads (`begin_heads`).
      batch: demonstrated rows, or those of `with_random_places`.
      config: the model's shape.
      words: of the tokenizer.
      weight: float[R, T], as for `supervised.imitation_loss`.
      walls_weight: of the mean binary cross-entropy of the heads, in nats.
      regret_weight: of `expected_regret`, in actions; else the batch needs none.

    Returns:
      float32[], the loss; float32[], the share of labels that the later head predicts
      correctly.
    """
    weights, heads = learned
    is_walk = batch.is_named is None
    replies = batch.is_reply if is_walk else batch.is_named
    labels = look_around(batch.tokens, replies, words, names_box=is_walk)
    middle, two_thirds, final = _hidden_states(weights, batch.tokens, config)
    # The heads: float32[2, R, T, D] states, and float32[2, R, T, 16] logits.
    states = jnp.stack([_scaled(middle), _scaled(two_thirds)])
    logits = jnp.einsum("hrtd,hdk->hrtk", states, heads["weight"])
    logits = _HEAD_SCALE * (logits + heads["bias"][:, None, None])
    cross_entropy = optax.sigmoid_binary_cross_entropy(logits, labels.bits[None] * 1.0)
    is_colon = batch.tokens == words.colon
    label_weights = labels.is_labelled * jnp.where(is_colon, _FIRST_WEIGHT, 1.0)
    label_weights = label_weights[..., None] / (label_weights.sum() * 2 * len(AROUND))
    total = walls_weight * (cross_entropy.mean(0) * label_weights).sum()
    is_right = (logits[1] > 0) == labels.bits
    share_right = (is_right * label_weights).sum()
    if not is_walk:
        return total, share_right
    # Imitation: each token of a reply by the state before it.
    imitated = batch.tokens if batch.imitated is None else batch.imitated
    is_imitated = (batch.is_reply & (imitated >= 0))[:, 1:]
    scores = vocabulary_scores.score_vocabulary(
        weights["embedding"],
        final[:, :-1],
        jnp.maximum(imitated[:, 1:], 0),
        is_imitated,
        temperature=1.0,
        is_tied=True,
        with_entropy=False,
    )
    weight = None if weight is None else weight[:, 1:]
    imitation = supervised.mean_over_replies(scores.logprobs, is_imitated, weight)
    if regret_weight:
        table = weights["embedding"]
        total += regret_weight * expected_regret(table, final, batch, words)
    return total + imitation, share_right


def expected_regret(
    embedding: jax.Array, last: jax.Array, batch: Batch, words: drawings.Words
) -> jax.Array:
    """float32[], the expected number of actions that one choice loses, on average.

    A choice is of an action, or of a row or column that names a box or target. As in
    AggreVaTe (Ross and Bagnell, arXiv:1406.5979), the model's probabilities are
    weighted by the expert's costs: none of equally good choices is preferred, and one
    that cannot be repaired costs most. Probabilities are over the possible choices
    alone, not over other tokens. At the colon of the example, where Up, Down, Left and
    Right lose 4, 2, 4 and 0 actions, probabilities 0.1, 0.2, 0.1 and 0.6 lose 1.2.

    Args:
      embedding: float32[V, D], whose products with states are logits.
      last: float32[R, T, D], states behind the last layer.
      batch: with `regret`.
      words: of the tokenizer.
    """
    logits = last[:, :-1] @ embedding[words.choices].T  # [R, T - 1, 24]
    lost = batch.regret[:, 1:]
    logits = jnp.where(lost == NO_CHOICE, -jnp.inf, logits)
    is_choice = (lost > 0).any(-1)
    # All are minus infinity where there is no choice, and a softmax would be NaN.
    logits = jnp.where(is_choice[..., None], logits, 0.0)
    expected = (jax.nn.softmax(logits) * jnp.maximum(lost, 0)).sum(-1)
    expected = jnp.where(is_choice, expected, 0.0)
    return expected.sum() / jnp.maximum(is_choice.sum(), 1)


def _hidden_states(
    weights: Parameters, tokens: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32[R, T, D] after a half and two thirds of the layers, and at the end."""
    half, two_thirds = config.layers // 2, 2 * config.layers // 3
    first, others = reading.split(weights, half)
    second, third = reading.split(others, two_thirds - half)
    at_half = reading.hidden_states(first, weights["embedding"][tokens], config)
    at_two_thirds = reading.hidden_states(second, at_half, config)
    last = reading.hidden_states(third["layers"], at_two_thirds, config)
    last = transformer.rms_norm(last, weights["final_norm"], config.norm_epsilon)
    return at_half, at_two_thirds, last


def _scaled(x: jax.Array) -> jax.Array:
    """RMS-normalized, without learned weights."""
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
