"""Measures this machine: the environment, an iteration's phases, the sampler's passes.

  python launch/benchmark.py --config=configs/frozenlake.py --iterations=5
  python launch/benchmark.py --env=all

Trains for a few iterations without saving anything, then samples conversations of fixed
lengths, prints a table, and with --out writes it as JSON. Gymnasium's FrozenLake is
measured too if it is installed; with --peers also transformers (with torch) and
google-tunix, on the same weights and tokens. --shape uses random weights, as in
--config=configs/frozenlake.py:smollm2 --shape=smollm2 --iterations=0 --peers.
--suite=gpu --out=DIR measures a GPU in stages of at most ten minutes; the same command
continues a suite that was interrupted.
"""

from ragen_jax.utils import endings

if __name__ == "__main__":
    endings.install()  # Before the other imports, which take seconds.

import functools
import json
import sys
from pathlib import Path

from absl import flags

from ragen_jax import cli
from ragen_jax.benchmarks import tables
from ragen_jax.errors import UserError
from ragen_jax.models.presets import SHAPES
from ragen_jax.utils import atomic_files

_DEFAULT = str(Path(__file__).parents[1] / "configs" / "frozenlake.py")
_CONFIG = cli.define_config(_DEFAULT)
_ITERATIONS = flags.DEFINE_integer(
    "iterations", 5, "Iterations to time, after one that compiles.", lower_bound=0
)
_OUT = flags.DEFINE_string("out", None, "JSON file to write; with --suite, a folder.")
_ENV = flags.DEFINE_string(
    "env", None, "Measure only this environment, or 'all', beside public ones."
)
_SHAPE = flags.DEFINE_enum(
    "shape", None, list(SHAPES), "Random weights of this shape, with tiny's tokenizer."
)
_SUITE = flags.DEFINE_enum(
    "suite", None, ["gpu"], "Measure a GPU in stages; needs --out."
)
_INSTRUMENTS = flags.DEFINE_boolean(
    "instruments", False, "Only measure the cost of diagnostics and report."
)
_SMOKE = flags.DEFINE_boolean("smoke", False, "With --suite: small sizes, for a CPU.")
_STAGE = flags.DEFINE_string("stage", None, "Run only this stage of the suite.")
_FORECASTS = flags.DEFINE_enum(
    "forecasts", "also", ["also", "no", "only"], "Plans too? 'only': without a GPU."
)
_OTHERS = flags.DEFINE_boolean("peers", False, "Measure other libraries too.")
_SIZES = {
    name: flags.DEFINE_integer(name, usual, help, 1, 1_000_000)
    for name, usual, help in [
        ("repeats", 3, "How often each conversation is timed."),
        ("batch", 8, "Conversations in a batch."),
        ("prompt_tokens", 128, "Single-turn test: tokens of the prompt."),
        ("new_tokens", 64, "Single-turn test: tokens of the reply."),
        ("turns", 5, "Multi-turn test: number of turns."),
        ("observation_tokens", 100, "Multi-turn test: tokens of each observation."),
        ("reply_tokens", 48, "Multi-turn test: tokens of each reply."),
    ]
}
cli.group_flags("Sizes of the sampler's conversations", *_SIZES)
_LIMIT = flags.DEFINE_integer("stage_seconds", 600, "Time limit of a stage.", 1)
_TOTAL = flags.DEFINE_integer("suite_seconds", 0, "Time limit of all; 0: none.", 0)
_OF_THE_SUITE = ("stage", "smoke", "forecasts", _LIMIT.name, _TOTAL.name)
cli.group_flags("The suite", "suite", *_OF_THE_SUITE)
# Flags that are read neither with --suite nor with --env.
_OF_A_RUN = ("instruments", "shape", "peers", "iterations", *_SIZES)


def main() -> None:
    _check_flags()
    if _SUITE.value:
        from ragen_jax.benchmarks import gpu_suite

        out = _OUT.value and str(cli.local_path("out", _OUT.value))
        asked = dict(stage=_STAGE, is_small=_SMOKE, limit=_LIMIT, total=_TOTAL)
        values = {name: flag.value for name, flag in asked.items()}
        values |= dict(show=tables.show, forecasts=_FORECASTS.value)
        return gpu_suite.run_suite(Path(__file__), out, **values)
    if _INSTRUMENTS.value and not _ITERATIONS.value:
        raise UserError("--instruments needs iterations: give --iterations=1 or more")
    out = cli.check_out(_OUT.value) if _OUT.value else None  # Before the measuring.
    report = _environments() if _ENV.value else _machine()
    if out:
        atomic_files.write_text(out, json.dumps(report, indent=2) + "\n")


def _check_flags() -> None:
    """Raises UserError for flags that would have no effect."""
    cli.refuse_unread(("env", *_OF_A_RUN), beside="suite")
    cli.refuse_unread(_OF_A_RUN, beside="env")
    cli.refuse_unread(("shape", "peers", *_SIZES), beside="instruments")
    for name in ("suite", "env"):
        if flags.FLAGS[name].value and cli.names_config():
            raise UserError(f"--{name} reads no --config: leave it and its keys out")
    cli.refuse_unread(("forecasts",), beside="stage")
    for name in _OF_THE_SUITE:
        if flags.FLAGS[name].present and not _SUITE.value:
            raise UserError(f"--{name} is the suite's: add --suite=gpu --out=DIR")


def _environments() -> dict:
    from ragen_jax.benchmarks import environment_comparison as comparison
    from ragen_jax.reporting.console import Console

    games = 1024  # in parallel
    return comparison.compare_environments(_ENV.value, games, Console(sys.stdout))


def _machine() -> dict:
    """Measures what --config says, or with --instruments what diagnostics cost."""
    settings = cli.read_settings(_CONFIG.value)
    cli.use_every_core(settings)
    cli.start_jax_alone(settings, "a benchmark")
    # Imported here so that a wrong setting is reported without waiting for JAX.
    if _INSTRUMENTS.value:
        from ragen_jax.benchmarks import instruments

        measure = functools.partial(instruments.measure, settings, _ITERATIONS.value)
        return tables.shown(measure)
    from ragen_jax.benchmarks import machine

    sizes = {name: flag.value for name, flag in _SIZES.items()}
    sizes["iterations"] = _ITERATIONS.value
    request = machine.Request(shape=_SHAPE.value, peers=_OTHERS.value, **sizes)
    return tables.shown(functools.partial(machine.measure, settings, request))


if __name__ == "__main__":
    cli.run(main)
