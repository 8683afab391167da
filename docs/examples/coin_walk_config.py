"""StarPO-S with a critic (PPO) on the coin walk, an environment of one's own.

  python launch/train.py --config=docs/examples/coin_walk_config.py --workdir=runs/coins

What is not said here is as in configs/frozenlake.py; so are the variants `smoke` and
`paper`, as in coin_walk_config.py:smoke.
"""

from pathlib import Path

from ml_collections import ConfigDict

from ragen_jax.utils.derived_configs import derive, environment

_BASE = Path("configs/frozenlake.py")  # From the current directory, as below.


def get_config(variant: str = "") -> ConfigDict:
    """Returns the settings; `variant` is "", "smoke" or "paper"."""
    config = derive(_BASE, variant, inherited=["smoke", "paper"])
    config.env = environment(
        "docs/examples/coin_walk.py",
        length=8,
        coins=3,
        step_cost=0.1,
    )
    return config
