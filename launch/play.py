"""Plays an environment in the terminal, by you, at random, by a rule or by a solver.

  python launch/play.py --env=frozen_lake
  python launch/play.py --env=frozen_lake --set=size=6 --policy=solver
  python launch/play.py --env=my_env.py --policy=random --picture=pictures
  python launch/play.py --config=configs/frozenlake.py --config.env.size=6

Type actions by name or by their first letters, several separated by || (or spaces,
where names are fixed); q leaves. The same seed and split give the levels that
launch/evaluate.py plays. --picture writes one PNG for each state.
"""

from ragen_jax.utils import endings

if __name__ == "__main__":
    endings.install()  # Before the other imports, which take seconds.

from pathlib import Path

from absl import flags

from ragen_jax import cli
from ragen_jax.errors import UserError

_DEFAULT = str(Path(__file__).parents[1] / "configs" / "frozenlake.py")
_CONFIG = cli.define_config(_DEFAULT)
_ENV = flags.DEFINE_string(
    "env", None, "An environment's name, or the path of its file."
)
_SET = flags.DEFINE_multi_string(
    "set",
    [],
    "KEY=VALUE, a setting of --env, or its instruction or note; a tuple of texts as in"
    " symbols=P,.,O,G,X,Y or \"symbols=('P', '.', 'O', 'G', 'X', 'Y')\"",
)
_POLICY = flags.DEFINE_enum(
    "policy", "human", ["human", "random", "rule", "solver"], "Who plays."
)
_EPISODES = flags.DEFINE_integer("episodes", 1, "Episodes to play.", lower_bound=1)
_ACTIONS = flags.DEFINE_integer(
    "actions",
    None,
    "Most actions of an episode; default: that of --config, or 100.",
    lower_bound=1,
)
_SEED = flags.DEFINE_integer(
    "seed", None, "Seed of the levels; default: that of --config, or 0.", 0, 2**32 - 1
)
_SPLIT = flags.DEFINE_enum(
    "split", "train", ["train", "validation", "test"], "Split of the levels."
)
_PICTURE = flags.DEFINE_string(
    "picture", None, "Folder for a PNG picture of each state."
)

# What is read of --config, beside the sections' keys.
_KEYS = ("seed", "rollout.actions")
_MANY = 100  # most actions of an episode with --env, which has no config


def main() -> None:
    _check_flags()
    # One small game at a time needs no GPU, and the GPU may be busy training.
    cli.use_cpu()
    # Imported here so that a wrong flag is reported without waiting for JAX.
    from ragen_jax import envs
    from ragen_jax.envs import first_levels
    from ragen_jax.envs.base import SPLITS
    from ragen_jax.evaluation import terminal

    # (config section for messages, label, environment, options, most actions) of each
    if _ENV.value:
        options = envs.parse_options(_ENV.value, _SET.value)
        tasks = [("env.", _ENV.value, _ENV.value, options, _MANY)]
        seed = 0
    else:
        settings = cli.read_settings(_CONFIG.value)
        seed = settings.seed
        tasks = [
            (
                f"env.mix.{task.label}." if settings.env.mix else "env.",
                task.label,
                task.name,
                task.options_and_texts,
                task.actions,
            )
            for task in settings.tasks()
        ]
    pictures = _PICTURE.value and str(cli.local_path("picture", _PICTURE.value))
    games, split = [], SPLITS.index(_SPLIT.value)
    for section, label, name, options, limit in tasks:
        env = envs.make(name, options, section)
        envs.check_file(env, name, f"{section}name")
        first_levels.check_levels_come(env, [split], name, f"{section}name")
        games.append((label, envs.guard(env, name, f"{section}name"), limit))
    for label, env, limit in games:
        leaves = not terminal.play(
            label,
            env,
            policy=_POLICY.value,
            episodes=_EPISODES.value,
            actions=_ACTIONS.value or limit,
            seed=seed if _SEED.value is None else _SEED.value,
            split=_SPLIT.value,
            pictures=pictures,
        )
        if leaves:
            return


def _check_flags() -> None:
    """Raises UserError for flags that do not go together."""
    if _ENV.value and cli.names_config():
        raise UserError(
            "--env and --config both choose an environment: pass one of them; set the"
            " options of --env by --set=KEY=VALUE"
        )
    if _SET.value and not _ENV.value:
        raise UserError(
            f"--set={_SET.value[0]} needs an environment named by --env: add --env, or"
            f" write --config.env.{_SET.value[0]}"
        )
    for key in cli.keys_set():
        if key.split(".")[0] != "env" and key not in _KEYS:
            raise UserError(
                f"--config.{key} says how a run trains, and is not read here: leave it"
                " out"
            )


if __name__ == "__main__":
    cli.run(main)
