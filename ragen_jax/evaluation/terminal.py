"""Plays episodes in the terminal, and writes pictures of their states if asked to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragen_jax.envs.base import SPLITS, Environment
from ragen_jax.errors import UserError
from ragen_jax.evaluation import interactive


def play(
    name: str,
    env: Environment,
    *,
    policy: str,
    episodes: int,
    actions: int,
    seed: int,
    split: str,
    pictures: str | None,
) -> bool:
    """Plays episodes of one environment on standard input and output.

    Args:
      name: for titles and, as a path's stem, for the pictures' file names. `env.name`
        would not do: members of a mix may be the same environment.
      env: the rules.
      policy: who plays, "human", "random", "rule" or "solver".
      episodes: their number; a person who leaves ends them all.
      actions: the most of an episode.
      seed, split: decide the levels, as in evaluations.
      pictures: folder for a PNG of each state, or None.

    Returns:
      Whether to go on with another environment: False where a person has left.

    Raises:
      UserError: if the environment has no such player or no pictures, or they cannot
        be written.
    """
    table = interactive.make_table(env, lambda text: print(text, flush=True))
    if policy == "human":
        player = interactive.human_player(table, _ask)
        print(f"{env.instruction}\nq leaves.\n")
    elif policy == "random":
        player = interactive.random_player(env, seed)
    elif policy == "rule":
        player = interactive.rule_player(env)
    else:
        player = interactive.solving_player(table)
    folder = None if pictures is None else _picture_folder(env, pictures)
    stays = True
    for episode in range(episodes):
        print(f"{name}, {split} level {episode}, seed {seed}")
        continues = interactive.play_episode(
            table,
            player,
            seed=seed,
            split=SPLITS.index(split),
            episode=episode,
            actions=actions,
            show=_painter(env, folder, f"{Path(name).stem}_{episode}"),
        )
        print()
        if policy == "human" and not continues:
            stays = False
            break
    if folder is not None:
        print(f"pictures  {folder}")
    return stays


def _painter(
    env: Environment, folder: Path | None, beginning: str
) -> Callable[[int, Any], None]:
    """Writes a picture of each state, by its number; nothing without a folder."""

    def show(number: int, state: Any) -> None:
        if folder is None:
            return
        from PIL import Image

        path = folder / f"{beginning}_{number:03d}.png"
        try:
            Image.fromarray(env.picture(state)).save(path)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror})") from error

    return show


def _picture_folder(env: Environment, path: str) -> Path:
    if env.picture is None:
        raise UserError(
            f"--picture: the environment {env.name} draws no pictures: leave it out"
        )
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--picture={path} cannot be made ({error.strerror}): choose a"
            " writable folder"
        ) from error
    return folder


def _ask(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        print()
        return None
