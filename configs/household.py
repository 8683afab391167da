r"""StarPO-S with a critic (PPO) on Household: tasks in a house of words.

  python launch/train.py --config=configs/household.py --workdir=runs/household

trains the small model that comes with ragen_jax, on whatever devices there are.
That model was not taught this environment: a run only shows that everything works. To
see learning, choose one that can read (--config.model.path=FOLDER, or smollm2), and for
it learning rates and a temperature as in the variant smollm2 of configs/frozenlake.py.
Variants, after a colon:

  --config=configs/household.py:smoke  two small iterations, as a test
  --config=configs/household.py:paper  Qwen2.5-0.5B-Instruct, 50 commands as in RAGEN;
                                       wants a GPU or TPU

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
        "household",
        objects=8,  # In the house.
        tasks=("put", "look", "clean", "heat", "cool", "two"),  # The kinds that occur.
        list_commands=True,  # Show the commands that would have an effect.
    )
    # Long episodes: the last three turns stay in sight.
    turns = 50 if is_paper else 15
    config.rollout.update(
        turns=turns, actions_per_turn=1, actions=turns, history="window", window=3
    )
    if not is_paper:
        config.rollout.reply_tokens = 64
    return config
