r"""StarPO-S with a critic (PPO) on 2048, with a target that suits short episodes.

  python launch/train.py --config=configs/game_2048.py --workdir=runs/game_2048

trains the small model that comes with ragen_jax, on whatever devices there are.
That model was not taught this environment: a run only shows that everything works. To
see learning, choose one that can read (--config.model.path=FOLDER, or smollm2), and for
it learning rates and a temperature as in the variant smollm2 of configs/frozenlake.py.
Random actions make the tile of 32 in 3% of the episodes of 20 actions, and greedy
ones in 29%. Variants, after a colon:

  --config=configs/game_2048.py:smoke  two small iterations, as a test
  --config=configs/game_2048.py:paper  Qwen2.5-0.5B-Instruct with the settings of
                                       "RAGEN", arXiv:2504.20073; longer episodes, for a
                                       tile of 128; wants a GPU or TPU

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
        "2048",
        target=128 if is_paper else 32,  # The tile that ends the episode.
        four_probability=0.1,  # Of a new tile being a 4; else a 2.
        merge_reward=0.2,  # For merged tiles that sum up to the target; in proportion.
        success_reward=1.0,  # For reaching it.
    )
    if is_paper:
        config.rollout.update(
            turns=20, actions_per_turn=5, actions=100, reply_tokens=200
        )
    else:
        config.rollout.update(turns=5, actions_per_turn=4, actions=20)
    return config
