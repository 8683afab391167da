"""What differs between prompts of much and of little spread, before any training.

python docs/examples/spread_quarters.py --config=configs/sokoban.py --batches=24

Samples batches of training episodes, sorts the prompts of each by the standard
deviation of their episodes' returns, as the filter does, and tells of each quarter how
often its episodes succeed and what their returns go with. The rows of
docs/results.md about quarters of Sokoban's prompts come from the command above.
"""

import warnings

import jax
import numpy as np
from absl import flags

from ragen_jax import cli
from ragen_jax.errors import UserError
from ragen_jax.learning import rewards
from ragen_jax.learning.filters import counted_penalty
from ragen_jax.rollout.rollout import training_rollout_args
from ragen_jax.training import programs as programs_lib
from ragen_jax.training import run as run_lib
from ragen_jax.training import weights
from ragen_jax.trajectory import Episodes

_CONFIG = cli.define_config()
_BATCHES = flags.DEFINE_integer("batches", 24, "Batches to sample.", lower_bound=1)
_QUARTERS = 4
_HEADS = ("spread", "success", "none solved", "actions", "correlation")


def main() -> None:
    """Samples batches of --config, and prints a row of means for each quarter."""
    settings = cli.read_settings(_CONFIG.value)
    if settings.rollout.prompts % _QUARTERS:
        raise UserError(
            f"rollout.prompts = {settings.rollout.prompts} has no quarters: choose a"
            " multiple of 4"
        )
    if settings.rollout.group_size < 2:
        raise UserError("rollout.group_size = 1 has no spread: choose 2 or more")
    cli.start_jax_alone(settings, "sampling")
    with cli.user_mistakes():
        run = run_lib.prepare(settings)
    programs = programs_lib.make_programs(run)
    state = weights.new_state(run)
    actor = programs.merge(state.actor, programs.frozen)
    batches = []
    for batch in range(_BATCHES.value):
        drawn = training_rollout_args(settings, np.int32(batch), np.int32(0))
        episodes = programs.rollout(actor, run.tokens, drawn).episodes
        episodes = jax.device_get(episodes)
        batches.append(quarters(episodes, counted_penalty(settings)))
    print("quarter", *(f"{head:>12}" for head in _HEADS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of a quarter without any correlation.
        rows = np.nanmean(np.concatenate(batches, axis=1), axis=1)
    for number, row in enumerate(rows, 1):
        print(f"{number:7}", *(f"{value:12.3f}" for value in row))


def quarters(episodes: Episodes, format_penalty: float = 0.0) -> np.ndarray:
    """float[4, prompts / 4, 5], by spread, the largest first: the columns of _HEADS.

    A prompt's in-group std of the return, its success, whether none of its episodes
    succeeded, their actions, and the correlation of return and actions (NaN where one
    of them does not vary).

    Args:
      episodes: of a batch, as host arrays.
      format_penalty: units of reward, taken off the returns; see `counted_penalty`.
    """
    returns = np.asarray(rewards.returns(episodes, format_penalty))
    actions = episodes.actions.sum(axis=1)
    found = []
    for group in np.unique(episodes.group):
        own = episodes.group == group
        success, both = episodes.success[own].mean(), (returns[own], actions[own])
        varies = all(values.std() > 0 for values in both)
        correlation = np.corrcoef(*both)[0, 1] if varies else np.nan
        spread = returns[own].std(ddof=1)
        found.append((spread, success, success == 0, actions[own].mean(), correlation))
    table = np.array(found, float)
    return table[np.argsort(-table[:, 0], kind="stable")].reshape(_QUARTERS, -1, 5)


if __name__ == "__main__":
    cli.run(main)
