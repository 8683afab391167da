"""StarPO from Python, as in a notebook: iterations, and what they were computed from.

python docs/examples/from_python.py
"""

import chex
import jax.numpy as jnp
import numpy as np

from ragen_jax import cli, starpo
from ragen_jax import settings as settings_lib
from ragen_jax.learning import advantages
from ragen_jax.training import programs as programs_lib
from ragen_jax.training import run as run_lib
from ragen_jax.training import weights


def main() -> None:
    """Trains two small iterations by GRPO and looks at the last one's record."""
    config = cli.load_config("configs/frozenlake.py:smoke")
    config.estimator = "grpo"
    run = run_lib.prepare(settings_lib.from_dict(config.to_dict()))
    programs = programs_lib.make_programs(run)
    state = weights.new_state(run)
    for _ in range(2):
        # The old state's buffers are reused: only the new one may be read.
        state, metrics, rollout = starpo.iterate(run, programs, state)
        print(f"success {metrics['train/success']:.2f}")

    # The record: rows of tokens [R, T], and episodes [B] with turns [B, K].
    is_padding = np.asarray(rollout.rows.turn[0]) < 0
    print(run.model.tokenizer.decode(np.asarray(rollout.rows.tokens[0])[~is_padding]))
    print("rewards by turn:", np.asarray(rollout.episodes.reward[0]))

    # What the next update would learn from it: the rows kept, and their advantages.
    scored = starpo.score(
        programs_lib.update_plan(run),
        state,
        programs.frozen,
        programs.reference,
        rollout.rows,
        rollout.episodes,
    )
    print("largest advantage:", float(jnp.abs(scored.batch.advantages).max()))
    check_gae()


def check_gae() -> None:
    """Tests one part of the method on numbers worked out by hand."""
    estimate = advantages.gae(
        jnp.array([[0.0, 0.0, 1.0]]),  # rewards
        jnp.array([[0.5, 9.0, 0.75]]),  # values
        jnp.array([[True, False, True]]),  # which tokens are the agent's
        gamma=1.0,
        lam=0.5,
    )
    # The last token: 1 - 0.75. The first, whose next reply token is the last:
    # 0.75 - 0.5, and half of what the last has.
    chex.assert_trees_all_close(estimate.advantages[0, ::2], jnp.array([0.375, 0.25]))


if __name__ == "__main__":
    main()
