"""StarPO-S with a critic (PPO) on the coin walk, an environment of one's own.

  python launch/train.py --config=docs/examples/coin_walk_config.py --workdir=runs/coins

Variants are those of configs/frozenlake.py, as in coin_walk_config.py:smoke.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

_ROOT = Path(__file__).parents[2]


def get_config(variant: str = "") -> ConfigDict:
    """Returns the settings of configs/frozenlake.py with another world."""
    frozenlake = runpy.run_path(str(_ROOT / "configs" / "frozenlake.py"))
    config = frozenlake["get_config"](variant)
    config.env = ConfigDict(
        dict(
            name="docs/examples/coin_walk.py",  # From the current directory.
            thinking=True,  # Replies begin with <think>, else with <answer>.
            length=8,
            coins=3,
            step_cost=0.1,
        )
    )
    return config
