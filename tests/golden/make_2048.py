"""Writes 2048.npz: what Jumanji's Game2048 makes of boards, before new tiles come.

  pip install jumanji
  python tests/golden/make_2048.py

The stored file was made with jumanji 1.1.2 (jumanji/environments/logic/game_2048). It
holds random boards of every fullness, and those of games that Jumanji played itself;
for each and each of the actions up, right, down and left, the board after the move, the
reward, and whether the action was legal.
"""

from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("2048.npz")
RANDOM, GAMES, TURNS = 1500, 12, 120


def main() -> None:
    """Runs the reference."""
    import jax
    import jax.numpy as jnp
    from jumanji.environments import Game2048
    from jumanji.environments.logic.game_2048.utils import can_move, move

    random = np.random.default_rng(0)
    # Few kinds of tiles make many merges.
    kinds = random.integers(1, 12, (RANDOM, 1, 1))
    boards = 1 + random.integers(0, 12, (RANDOM, 4, 4)) % kinds
    # A third is full, so that actions that change nothing and lost boards are there.
    gaps = np.maximum(0, 1.5 * random.random((RANDOM, 1, 1)) - 0.5)
    is_empty = random.random((RANDOM, 4, 4)) < gaps
    boards = np.where(is_empty, 0, boards)
    boards = boards[boards.any(axis=(1, 2))]

    environment = Game2048()
    step = jax.jit(environment.step)
    played = []
    for game in range(GAMES):
        state, timestep = environment.reset(jax.random.PRNGKey(game))
        for _ in range(TURNS):
            played.append(np.asarray(state.board))
            if timestep.last():
                break
            legal = np.flatnonzero(state.action_mask)
            state, timestep = step(state, jnp.int32(random.choice(legal)))
    boards = np.concatenate([boards, played]).astype(np.int32)

    actions = jnp.arange(4)
    all_actions = jax.jit(jax.vmap(jax.vmap(move, (None, 0)), (0, None)))
    all_legal = jax.jit(jax.vmap(jax.vmap(can_move, (None, 0)), (0, None)))
    moved, reward = all_actions(jnp.asarray(boards), actions)
    np.savez_compressed(
        FILE,
        boards=boards.astype(np.uint8),
        moved=np.asarray(moved, np.uint8),
        reward=np.asarray(reward, np.float32),
        legal=np.asarray(all_legal(jnp.asarray(boards), actions)),
        origin="jumanji 1.1.2",
    )


if __name__ == "__main__":
    main()
