r"""StarPO-S with a critic (PPO) on word problems, with several attempts.

  python launch/train.py --config=configs/math.py --workdir=runs/math

trains the small model that comes with ragen_jax, on whatever devices there are.
That model was never taught this environment, and shows only that all works: to see
learning, name one that can read, --config.model.path=FOLDER, or smollm2.
Variants, after a colon:

  --config=configs/math.py:smoke  two small iterations, to see that all works
  --config=configs/math.py:paper  Qwen2.5-0.5B-Instruct, one attempt, as in
                                  RAGEN's settings of MetaMathQA; wants a GPU
                                  or TPU

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
        "math",
        min_steps=1,  # That change what somebody has: so many
        max_steps=3,  # to so many.
        highest_number=50,  # Of a problem's text.
        fractions=False,  # Shares need not come out even.
    )
    turns = 1 if is_paper else 3
    config.rollout.update(turns=turns, actions_per_turn=1, actions=turns)
    if not is_paper:
        config.rollout.reply_tokens = 64
    return config
