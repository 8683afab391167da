r"""StarPO-S with a critic (PPO) on Countdown: make the target from the given numbers.

  python launch/train.py --config=configs/countdown.py --workdir=runs/countdown

trains the small model that comes with ragen_jax, on whatever devices there are.
That model was never taught this environment, and shows only that all works: to see
learning, name one that can read, --config.model.path=FOLDER, or smollm2.
Variants, after a colon:

  --config=configs/countdown.py:smoke  two small iterations, to see that all works
  --config=configs/countdown.py:paper  Qwen2.5-0.5B-Instruct with the settings of
                                       "RAGEN", arXiv:2504.20073, and the rules of its
                                       code: one turn, in which every number has to be
                                       used; wants a GPU or TPU

What is not said here is as in configs/frozenlake.py.
"""

from pathlib import Path

from ml_collections import ConfigDict

from ragen_jax.utils.derived_configs import derive, environment

_BASE = Path(__file__).with_name("frozenlake.py")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the settings; `variant` is "", "smoke" or "paper"."""
    config = derive(_BASE, variant, inherited=["smoke", "paper"])
    is_paper = variant == "paper"
    config.env = environment(
        "countdown",
        min_numbers=3,  # Given in a puzzle: so many
        max_numbers=4,  # to so many,
        highest_number=99,  # each from 1 to this.
        highest_target=999,
        use_all=is_paper,  # Refuses answers that leave a number over.
        partial_reward=0.1,  # Of 1, for a legal answer of another value; once.
    )
    # One expression a turn; after a wrong one there may be another turn.
    turns = 1 if is_paper else 3
    config.rollout.update(turns=turns, actions_per_turn=1, actions=turns)
    if not is_paper:
        config.rollout.reply_tokens = 64
    return config
