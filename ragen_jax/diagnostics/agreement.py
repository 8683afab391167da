"""Agreement of thoughts with answers: whether a thought names what is then done."""

from collections.abc import Sequence

import numpy as np

from ragen_jax import trajectory
from ragen_jax.evaluation import transcripts
from ragen_jax.evaluation.transcripts import Reader
from ragen_jax.text.reply_automaton import END_THINK
from ragen_jax.trajectory import Episodes, Rows


def thought_agreement(
    readers: Sequence[Reader], rows: Rows, episodes: Episodes
) -> float:
    """Share of thoughts that name the first action of the answer behind them.

    Counted over the valid replies with a thought that is not blank; NaN where there is
    none. A name is found in any case, anywhere in the thought: a thought that lists all
    actions agrees with each of them, so the level means little and its fall much.

    Args:
      readers: of each environment's texts.
      rows, episodes: host arrays; `rows.episode` counts from 0.
    """
    row_of = transcripts.rows_of_turns(rows)
    turn = np.arange(episodes.is_valid.shape[1])
    counted = episodes.is_valid & (turn[None] < episodes.turns[:, None])
    named = []
    for index, turn in np.argwhere(counted).tolist():
        reader = readers[int(episodes.environment[index])]
        row = row_of[index, turn]
        tokens = rows.tokens[row][(rows.turn[row] == turn) & rows.is_reply[row]]
        if episodes.reply_end[index, turn] in trajectory.SAMPLED_STOPS:
            tokens = tokens[:-1]
        reply = transcripts.spoken_bytes(reader, tokens)
        thought, closing, _ = reply.partition(END_THINK)
        actions = transcripts.action_names(reader, reply)
        if closing and thought.strip() and actions:
            named.append(actions[0].encode().lower() in thought.lower())
    return float(np.mean(named)) if named else float("nan")
