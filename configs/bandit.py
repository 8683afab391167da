r"""StarPO-S with a critic (PPO) on Bandit: one turn, two arms, chosen by their names.

  python launch/train.py --config=configs/bandit.py --workdir=runs/bandit

trains the small model that comes with ragen_jax, on whatever devices there are, in a
few minutes. From its supervised start it knows which names sound risky and which
steady, and learns which of them pay. Training, validation and test have different
names. Variants, after a colon:

  --config=configs/bandit.py:rev    BanditRev: the names mislead
  --config=configs/bandit.py:smoke  two small iterations, as a test
  --config=configs/bandit.py:paper  Qwen2.5-0.5B-Instruct with the settings of "RAGEN",
                                    arXiv:2504.20073; wants a GPU or TPU; with
                                    --config.env.reverse also for BanditRev

All other settings are those of configs/frozenlake.py.
"""

from pathlib import Path

from ml_collections import ConfigDict

from ragen_jax.utils.derived_configs import derive, environment

_BASE = Path(__file__).with_name("frozenlake.py")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the settings; `variant` is "", "rev", "smoke" or "paper"."""
    config = derive(_BASE, variant, own=["rev"], inherited=["smoke", "paper"])
    config.env = environment(
        "bandit",
        low_reward=0.15,  # What the low-risk arm pays.
        high_probability=0.25,  # That the high-risk arm pays 1; else it pays 0.
        reverse=variant == "rev",  # The high-risk arm's name sounds steady.
    )
    # One arm is pulled, once.
    config.rollout.update(turns=1, actions_per_turn=1, actions=1)
    return config
