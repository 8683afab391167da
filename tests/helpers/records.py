"""Small records written as text, for tests."""

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.trajectory import END_OF_TURN, ENV_DONE, Episodes, Rows


def rows_of(*lines: str, episode: list[int]) -> Rows:
    """Rows from one line each: r and R reply tokens, R the last of its turn, o a token
    that was fed (prompt or observation), a dot padding. Turns count from 0 in a line.

    Tokens, log-probs and entropies are all different, so that mixing them up shows.
    """
    letters = np.array([list(line) for line in lines])
    turn_end = letters == "R"
    is_padding = letters == "."
    is_reply = turn_end | (letters == "r")
    turn = np.cumsum(turn_end, axis=1) - turn_end
    numbers = np.arange(1, letters.size + 1).reshape(letters.shape)
    return Rows(
        tokens=jnp.asarray(numbers, jnp.int32),
        is_reply=jnp.asarray(is_reply),
        logprobs=jnp.asarray(np.where(is_reply, -numbers / 10, 0), jnp.float32),
        entropy=jnp.asarray(np.where(is_reply, numbers / 7, 0), jnp.float32),
        episode=jnp.asarray(
            np.where(is_padding, -1, np.array(episode)[:, None]), jnp.int32
        ),
        turn=jnp.asarray(np.where(is_padding, -1, turn), jnp.int32),
        turn_end=jnp.asarray(turn_end),
        policy_version=jnp.arange(len(lines), dtype=jnp.int32) + 3,
    )


def split_turns(rows: Rows) -> Rows:
    """One row a turn from rows of whole episodes: each cut behind a turn's reply.

    Earlier replies of a row become its prompt, as in a window of all turns.
    """
    whole, pieces = jax.device_get(rows), []
    for row, end in np.argwhere(whole.turn_end):
        is_in = np.arange(whole.tokens.shape[1]) <= end
        is_own = is_in & (whole.turn[row] == whole.turn[row, end])
        is_reply = is_own & whole.is_reply[row]
        pieces.append(
            Rows(
                tokens=np.where(is_in, whole.tokens[row], 0),
                is_reply=is_reply,
                logprobs=np.where(is_reply, whole.logprobs[row], 0),
                entropy=np.where(is_reply, whole.entropy[row], 0),
                episode=np.where(is_in, whole.episode[row], -1),
                turn=np.where(is_in, whole.turn[row], -1),
                turn_end=is_own & whole.turn_end[row],
                policy_version=whole.policy_version[row],
            )
        )
    return jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *pieces)


def episodes_of(
    reward: list[list[float]],
    is_valid: list[list[bool]] | None = None,
    turns: list[int] | None = None,
    group: list[int] | None = None,
) -> Episodes:
    """Episodes with these rewards; by default all turns played, valid, in group 0."""
    reward = jnp.asarray(reward, jnp.float32)
    episodes, most_turns = reward.shape
    everywhere = jnp.ones(reward.shape, jnp.int32)
    return Episodes(
        group=jnp.asarray(group or [0] * episodes, jnp.int32),
        environment=jnp.zeros(episodes, jnp.int32),
        success=jnp.zeros(episodes, bool),
        end=jnp.full(episodes, ENV_DONE, jnp.int32),
        turns=jnp.asarray(turns or [most_turns] * episodes, jnp.int32),
        reward=reward,
        is_valid=everywhere.astype(bool) if is_valid is None else jnp.asarray(is_valid),
        actions=everywhere,
        reply_tokens=everywhere,
        reply_end=everywhere * END_OF_TURN,
        thought_tokens=everywhere,
        grounded=jnp.zeros(reward.shape, jnp.float32),
    )
