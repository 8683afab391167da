"""Plays games of a world in the terminal: you, chance, or the world's own solver.

  python launch/play.py --env=frozen_lake
  python launch/play.py --env=frozen_lake --set=size=6 --policy=solver
  python launch/play.py --env=my_world.py --policy=random --picture=pictures
  python launch/play.py --config=configs/frozenlake.py --config.env.size=6

Type actions by name or by their first letters, several separated by || (or spaces,
where names are fixed); q leaves. The same seed and split give the levels that
launch/evaluate.py plays. --picture writes one PNG for each state.
"""

import os
import re
import sys
from pathlib import Path

import common
from absl import flags

from ragen_jax.settings import UserError

_DEFAULT = str(Path(__file__).parents[1] / "configs" / "frozenlake.py")
_CONFIG = common.define_config(_DEFAULT)
_ENV = flags.DEFINE_string("env", None, "A world's name, or the path of its file.")
_SET = flags.DEFINE_multi_string("set", [], "KEY=VALUE, a setting of --env.")
_POLICY = flags.DEFINE_enum(
    "policy", "human", ["human", "random", "solver"], "Who plays."
)
_EPISODES = flags.DEFINE_integer("episodes", 1, "How many.", lower_bound=1)
_ACTIONS = flags.DEFINE_integer(
    "actions", None, "Most of an episode; default: --config's, or 100.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Decides the levels.", 0, 2**32 - 1)
_SPLIT = flags.DEFINE_enum(
    "split", "train", ["train", "validation", "test"], "Which levels."
)
_PICTURE = flags.DEFINE_string("picture", None, "Folder for pictures.")

_MANY = 100  # actions of an episode, where no config says how many


def main() -> None:
    _check_flags()
    # One small game at a time: not worth a GPU, which may be busy training.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Imported here so that a wrong flag is told without waiting for JAX.
    from ragen_jax import envs

    if _ENV.value:
        name, limit = _ENV.value, _MANY
        worlds = [(name, envs.make(name, envs.parse_options(name, _SET.value)), limit)]
    else:
        worlds = [
            (chosen.label, envs.make(chosen.name, chosen.options), chosen.actions)
            for chosen in common.read_settings(_CONFIG.value).worlds()
        ]
    for name, world, limit in worlds:
        _play(name, world, _ACTIONS.value or limit)


def _play(name: str, world, limit: int) -> None:
    """Plays the episodes of one world, at most `limit` actions in each."""
    from ragen_jax import playing
    from ragen_jax.envs.base import SPLITS

    table = playing.make_table(world, lambda text: print(text, flush=True))
    if _POLICY.value == "human":
        player = playing.human_player(table, _ask)
        print(f"{world.instruction}\nq leaves.\n")
    elif _POLICY.value == "random":
        player = playing.random_player(world, _SEED.value)
    else:
        player = playing.solving_player(table)
    folder = _picture_folder(world)
    for episode in range(_EPISODES.value):
        print(f"{name}, {_SPLIT.value} level {episode}, seed {_SEED.value}")

        def show(number: int, state, episode: int = episode) -> None:
            if folder is not None:
                path = folder / f"{world.name}_{episode}_{number:03d}.png"
                _write_picture(path, world, state)

        goes_on = playing.play_episode(
            table,
            player,
            seed=_SEED.value,
            split=SPLITS.index(_SPLIT.value),
            episode=episode,
            actions=limit,
            show=show,
        )
        print()
        if _POLICY.value == "human" and not goes_on:
            break
    if folder is not None:
        print(f"pictures  {folder}")


def _check_flags() -> None:
    """Raises UserError for flags that do not go together."""
    arguments = flags.FLAGS.read_flags_from_files(sys.argv[1:], force_gnu=False)
    sets_config = any(re.match(r"--?(no)?config\b", argument) for argument in arguments)
    if _ENV.value and sets_config:
        raise UserError(
            "--env and --config both choose a world: pass one of them; settings of"
            " --env go by --set=KEY=VALUE"
        )
    if _SET.value and not _ENV.value:
        raise UserError(
            f"--set={_SET.value[0]} changes a world named by --env: name it, or write"
            f" --config.env.{_SET.value[0]}"
        )


def _picture_folder(world) -> Path | None:
    if _PICTURE.value is None:
        return None
    if world.picture is None:
        raise UserError(f"--picture: the world {world.name} draws none: leave it out")
    folder = Path(_PICTURE.value).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--picture={_PICTURE.value} cannot be made ({error.strerror}): choose a"
            " folder of yours"
        ) from error
    return folder


def _write_picture(path: Path, world, state) -> None:
    from PIL import Image

    with common.user_mistakes():
        Image.fromarray(world.picture(state)).save(path)


def _ask(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


if __name__ == "__main__":
    common.run(main)
