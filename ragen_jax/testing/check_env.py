"""Checks that an environment does what `base.Environment` says.

  python -m ragen_jax.testing.check_env my_env.py --size=4

plays an environment (one in a file, or a built-in one) at random with these settings,
prints a line for each check passed, and ends with "ok", or with one sentence and exit
code 1. The flag --endless is for an environment that random actions never end and that
has no solver.
"""

import os
import sys
from collections.abc import Callable

if __name__ == "__main__":
    # Before transformers is imported: it would advise installing PyTorch, which is not
    # needed here.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from ragen_jax import envs
from ragen_jax.envs import base
from ragen_jax.envs.traced_checks import FunctionError
from ragen_jax.errors import SettingsError
from ragen_jax.testing import check_dynamics as dynamics
from ragen_jax.testing import check_helpers as helpers
from ragen_jax.testing import check_texts as texts
from ragen_jax.testing import play_report
from ragen_jax.testing.check_demonstrations import check_demonstrations
from ragen_jax.testing.check_dynamics import CheckError
from ragen_jax.testing.check_splits import check_every_split_comes, check_splits
from ragen_jax.utils import user_modules

__all__ = ["CheckError", "check_env"]

_ENDLESS = "--endless"
_PLAYS = 48  # at least, spread over the splits
_STEPS = 40  # random actions in each
_LONGER = 8  # factor on the number of steps, if no play ended


def check_env(
    env: base.Environment,
    *,
    must_end: bool = True,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Plays at random, and checks what `base.Environment` says.

    Args:
      env: any environment.
      must_end: whether some play must end, at random or by a solution, so that the
        checks see an ended episode. Turn it off only if no play can.
      report: called with a line about each check passed.

    Raises:
      CheckError: in one sentence, for the first check that fails.
    """
    _check_static(env)
    report("names, phrases and instruction can be used")
    dynamics.check_types(env)
    report("a step keeps the state's shapes and types")
    check_every_split_comes(env)
    report("every split has levels")
    functions = dynamics.compile_functions(env)
    play = dynamics.make_player(env, _PLAYS, _STEPS)
    played = play()
    dynamics.check_finite(played)
    report("all numbers are finite")
    dynamics.check_repeats(env, functions, played, play())
    report("the same key gives the same play, alone and in a batch, compiled once")
    texts.check_observations(env, played)
    report("phrases cover every observation")
    if env.longest_observation is not None:
        texts.check_longest(env, played)
        report("longest_observation holds, however phrases are cut into tokens")
    most, room = texts.check_tokens(env, played)
    report(
        "the tokens joined on device read as the text on the host: up to"
        f" {most} of the embedded model's, with room for {room}"
    )
    solved = helpers.Solved(False, False)
    if env.solve is not None:
        solved = helpers.check_solve(env, functions, played)
        report("solutions lead to success, where the result is not random")
    longer = played
    if must_end and not solved.has_ended and not played.outcome.done[:, :-1].any():
        longer = dynamics.make_player(env, _PLAYS, _LONGER * _STEPS)()
        dynamics.check_end(longer, must_end=True)
    dynamics.check_end(played, must_end=False)
    report("an ended episode stays as it is")
    report(play_report.outcomes_seen(longer, has_succeeded=solved.has_succeeded))
    dynamics.check_no_action(played)
    report("base.NO_ACTION changes nothing")
    report(play_report.steps_seen(env, played))
    dynamics.check_starts(played)
    report("members of a group begin alike")
    levels = check_splits(env)
    numbers = zip(levels.different, base.SPLITS, strict=True)
    report(
        f"each level is of one split, of {levels.count} of each: different ones are"
        f" {', '.join(f'{number} of {split}' for number, split in numbers)}"
    )
    _check_answers_and_helpers(env, played, report)
    if env.demonstrate is not None:
        report(check_demonstrations(env, functions, played, must_end=must_end))


def _check_answers_and_helpers(
    env: base.Environment, played: dynamics.Plays, report: Callable[[str], None]
) -> None:
    if env.read_action is None:
        texts.check_names(env)
        report("replies mean on device what the regular expression says")
        report(texts.names_told(env))
    else:
        texts.check_free_form(env, played)
        report("read_action equals read_action_text on any bytes")
        report(texts.check_written(env, played))
    if env.sample_action is not None or env.rule is not None:
        helpers.check_choices(env, played)
        report("actions that the environment chooses are actions")
    if env.landmarks is not None:
        helpers.check_landmarks(env, played)
        report("landmarks are places")
    if env.picture is not None:
        helpers.check_picture(env, played)
        report("pictures are pictures")


def _check_static(env: base.Environment) -> None:
    try:
        base.check_environment(env)
    except ValueError as error:
        raise CheckError(str(error)) from error
    dynamics.require(
        env.instruction.strip() == env.instruction != "",
        "instruction is empty or has white space around it: say the rules and the goal",
    )


def main(arguments: list[str]) -> int:
    """Runs the checks as the command line says; returns the exit code."""
    if {"--help", "-h"} & set(arguments):
        print((__doc__ or "").strip())
        return 0
    names = [a for a in arguments if not a.startswith("--")]
    options = [a.removeprefix("--") for a in arguments if a.startswith("--")]
    options = [option for option in options if f"--{option}" != _ENDLESS]
    if len(names) != 1:
        env_names = ", ".join(envs.NAMES)
        print(
            "error: name one environment, as in python -m ragen_jax.testing.check_env"
            f" my_env.py --size=4: a Python file, or one of {env_names}",
            file=sys.stderr,
        )
        return 2
    (name,) = names
    try:
        env = envs.make(name, envs.parse_options(name, options))
        check_env(env, must_end=_ENDLESS not in arguments, report=print)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CheckError as error:
        print(f"broken: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if not envs.is_path(name):
            raise
        cause: BaseException = error
        part = ""
        if isinstance(error, FunctionError) and error.__cause__ is not None:
            part, cause = f"{error.part} fails: ", error.__cause__
        line = user_modules.in_one_line(cause, user_modules.resolved(name))
        print(f"broken: {name}, {part}{line}", file=sys.stderr)
        return 1
    print("ok")
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # Not sys.exit: a thread may still be drawing a level.
