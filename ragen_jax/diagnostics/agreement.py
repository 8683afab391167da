"""Agreement of thoughts with answers: whether a thought names the action then taken.

A health metric of every batch (monitor.py) and of launch/diagnose.py.
"""

from collections.abc import Sequence

import numpy as np

from ragen_jax.evaluation import transcripts
from ragen_jax.evaluation.transcripts import Reader
from ragen_jax.text.reply_automaton import END_THINK
from ragen_jax.trajectory import Episodes, Rows, is_played


def thought_agreement(
    readers: Sequence[Reader], rows: Rows, episodes: Episodes
) -> float:
    """Share of thoughts that name the first action of the answer after them.

    Counted over the valid replies whose thought is not blank; NaN if there is none. The
    name may stand anywhere in the thought, in upper or lower case. A thought that lists
    all actions agrees with each of them, so the level means little, but a fall does.

    Args:
      readers: one per environment, which decode its tokens.
      rows, episodes: host arrays; `rows.episode` counts from 0.
    """
    row_of = transcripts.rows_of_turns(rows)
    is_counted = episodes.is_valid & is_played(episodes)
    named = []
    for index, turn in np.argwhere(is_counted).tolist():
        reader = readers[int(episodes.environment[index])]
        row = row_of[index, turn]
        tokens = rows.tokens[row][(rows.turn[row] == turn) & rows.is_reply[row]]
        reply = transcripts.spoken_bytes(reader, tokens)
        thought, closing, _ = reply.partition(END_THINK)
        actions = transcripts.action_names(reader, reply)
        if closing and thought.strip() and actions:
            named.append(actions[0].encode().lower() in thought.lower())
    return float(np.mean(named)) if named else float("nan")
