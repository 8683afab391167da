"""Writes rubik.npz: what Jumanji's RubiksCube, of size 2, makes of random turns.

  pip install jumanji
  python tests/golden/make_rubik.py

The stored file was made with jumanji 1.1.2 (jumanji/environments/logic/rubiks_cube).
It holds cubes along sequences of random turns from the solved cube, the turns, and
whether each cube is solved. The later half of each sequence undoes the first, but for
one turn of some.
"""

from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("rubik.npz")
GAMES, TURNS = 60, 40
FACES, AMOUNTS = "UFRBLD", ("", "'", "2")  # Jumanji's order of faces and of turns
_UNDOES = np.array([1, 0, 2])  # amount -> the amount that undoes it


def main() -> None:
    """Runs the reference."""
    import jax
    import jax.numpy as jnp
    from jumanji.environments.logic.rubiks_cube.utils import (
        is_solved,
        make_solved_cube,
        rotate_cube,
    )

    random = np.random.default_rng(0)
    half = random.integers(0, 18, (GAMES, TURNS // 2))
    undo = 3 * (half // 3) + _UNDOES[half % 3]
    actions = np.concatenate([half, undo[:, ::-1]], axis=1)
    actions[GAMES // 2 :: 2, TURNS // 2] = random.integers(0, 18, GAMES // 4)

    def play(actions):
        def turn(cube, action):
            cube = rotate_cube(cube, action)
            return cube, (cube, is_solved(cube))

        return jax.lax.scan(turn, make_solved_cube(2), actions)[1]

    cubes, solved = jax.jit(jax.vmap(play))(jnp.asarray(actions))
    np.savez_compressed(
        FILE,
        names=np.array([face + amount for face in FACES for amount in AMOUNTS]),
        actions=actions.astype(np.uint8),
        cubes=np.asarray(cubes, np.uint8).reshape(GAMES, TURNS, 24),
        solved=np.asarray(solved),
        origin="jumanji 1.1.2",
    )


if __name__ == "__main__":
    main()
