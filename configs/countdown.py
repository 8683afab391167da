r"""StarPO-S with a critic (PPO) on Countdown: make the target from the given numbers.

  python launch/train.py --config=configs/countdown.py --workdir=runs/countdown

trains the small model that comes with ragen_jax, on whatever devices there are.
That model was not taught this environment: a run only shows that everything works. To
see learning, choose one that can read (--config.model.path=FOLDER, or smollm2), and for
it learning rates and a temperature as in the variant smollm2 of configs/frozenlake.py.
Variants, after a colon:

  --config=configs/countdown.py:smoke  two small iterations, as a test
  --config=configs/countdown.py:paper  Qwen2.5-0.5B-Instruct with the settings of
                                       "RAGEN", arXiv:2504.20073, and the rules of its
                                       code: one turn, in which every number has to be
                                       used; wants a GPU or TPU

All other settings are those of configs/frozenlake.py.
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
        min_numbers=3,  # A puzzle gives this many numbers
        max_numbers=4,  # to this many,
        highest_number=99,  # each from 1 to this.
        highest_target=999,
        use_all=is_paper,  # If True, an answer must use every number.
        partial_reward=0.1,  # Once, for a legal answer with another value.
    )
    # One expression a turn; after a wrong one there may be another turn.
    turns = 1 if is_paper else 3
    config.rollout.update(turns=turns, actions_per_turn=1, actions=turns)
    if not is_paper:
        config.rollout.reply_tokens = 64
    return config
