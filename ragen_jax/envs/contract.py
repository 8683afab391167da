"""What every world must keep to, whatever the game.

  python -m ragen_jax.envs.contract my_world.py --size=4

plays random games of a world (a file's, or a built-in one's) with its own settings,
says what was checked, and ends with "ok" or with one sentence and exit code 1. Further
flag: --endless, for a world that chance never ends and that cannot solve itself.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    # Before transformers is imported: it advises to install PyTorch, which nothing
    # here needs.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from ragen_jax import envs, user_code  # noqa: E402
from ragen_jax.envs import base
from ragen_jax.envs import contract_rules as rules
from ragen_jax.envs import contract_texts as texts
from ragen_jax.envs.contract_rules import ContractError
from ragen_jax.settings import SettingsError

__all__ = ["ContractError", "check_contract"]

_ENDLESS = "--endless"
_LONGER = 8  # times the steps, if none of the games ended


def check_contract(
    world: base.World,
    *,
    games: int = 48,
    steps: int = 40,
    must_end: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Plays random games to find out whether the world keeps to `base.World`.

    Args:
      world: any world.
      games: played, spread over the splits.
      steps: random actions in each.
      must_end: whether random play, or a solution, must end some game, so that the
        absorbing end is really seen. Off only where neither does.
      tell: is called with a line about each check that was passed.

    Raises:
      ContractError: in one sentence, for the first rule that is broken.
    """
    _check_static(world)
    tell("names, phrases and instruction can be used")
    rules.check_types(world)
    tell("a step keeps the state's shapes and types")
    functions, play = (
        rules.compile_functions(world),
        rules.make_player(world, games, steps),
    )
    played = play()
    rules.check_finite(played)
    tell("all numbers are finite")
    rules.check_repeats(world, functions, played, play())
    tell("the same key gives the same game, alone and in a batch, compiled once")
    texts.check_observations(world, played)
    tell("phrases cover every observation")
    if world.longest_observation is not None:
        texts.check_longest(world, played)
        tell("longest_observation holds, however phrases are cut into tokens")
    texts.check_tokens(world, played)
    tell("the tokens joined on device read as the text on the host")
    has_ended = world.solve is not None and rules.check_solve(world, functions, played)
    if world.solve is not None:
        tell("solutions lead to success, where no chance is in the way")
    must_end = must_end and not has_ended
    if must_end and not played.outcome.done.any():
        longer = rules.make_player(world, games, _LONGER * steps)()
        rules.check_end(longer, must_end=True)
    rules.check_end(played, must_end=False)
    tell("an ended game stays as it is")
    rules.check_no_action(played)
    tell("no action changes nothing")
    rules.check_starts(played)
    tell("members of a group begin alike, and each level is of one split")
    if world.read_action is None:
        texts.check_names(world)
        tell("replies mean on device what the regular expression says")
    else:
        texts.check_free_form(world, played)
        tell("read_action equals read_action_text on any bytes")
    if world.landmarks is not None:
        rules.check_landmarks(world, played)
        tell("landmarks are places")
    if world.picture is not None:
        rules.check_picture(world, played)
        tell("pictures are pictures")


def _check_static(world: base.World) -> None:
    try:
        base.check_world(world)
    except ValueError as error:
        raise ContractError(str(error)) from error
    unknown = set(world.example_actions) - set(world.action_names)
    is_named = world.read_action is None
    rules.require(
        not (is_named and unknown),
        f"example_actions holds {sorted(unknown)}: choose from {world.action_names}",
    )
    rules.require(
        world.example_actions,
        "example_actions is empty: name one or two, for the prompt shows them",
    )
    rules.require(
        world.instruction.strip() == world.instruction != "",
        "instruction is empty or has white space around it: say the rules and the goal",
    )
    rules.require(
        is_named or world.read_action_text is not None,
        "read_action has no read_action_text beside it: add its definition in Python",
    )


def main(arguments: list[str]) -> int:
    """Runs the contract as the command line says; gives the exit code."""
    names = [a for a in arguments if not a.startswith("--")]
    options = [a.removeprefix("--") for a in arguments if a.startswith("--")]
    options = [option for option in options if f"--{option}" != _ENDLESS]
    if len(names) != 1:
        known = ", ".join(envs.NAMES)
        print(
            "error: name one world, as in python -m ragen_jax.envs.contract my_world.py"
            f" --size=4: a Python file, or one of {known}",
            file=sys.stderr,
        )
        return 2
    (name,) = names
    try:
        world = envs.make(name, envs.parse_options(name, options))
        check_contract(world, must_end=_ENDLESS not in arguments, tell=print)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ContractError as error:
        print(f"broken: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if not envs.is_path(name):
            raise
        told = user_code.told(error, Path(name).resolve())
        print(f"broken: {name}, {told}", file=sys.stderr)
        return 1
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
