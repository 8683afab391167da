r"""StarPO-S with a critic (PPO) on 2048, with a target that suits short games.

  python launch/train.py --config=configs/game_2048.py --workdir=runs/game_2048

trains the small model that comes with ragen_jax, on whatever devices there are.
That model was never taught this world, and shows only that all works: to see learning,
name one that can read, --config.model.path=FOLDER, or smollm2.
Random actions make the tile of 32 in 3% of its games of 20 actions, and greedy ones in
29%. Variants, after a colon:

  --config=configs/game_2048.py:smoke  two small iterations, to see that all works
  --config=configs/game_2048.py:paper  Qwen2.5-0.5B-Instruct with the settings of
                                       "RAGEN", arXiv:2504.20073; longer games, for a
                                       tile of 128; wants a GPU or TPU

What is not said here is as in configs/frozenlake.py.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

_VARIANTS = ("", "smoke", "paper")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the settings; `variant` is "", "smoke" or "paper"."""
    if variant not in _VARIANTS:
        known = ", ".join(repr(name) for name in _VARIANTS if name)
        raise ValueError(f"unknown variant {variant!r}: choose one of {known}, or none")
    frozenlake = runpy.run_path(str(Path(__file__).with_name("frozenlake.py")))
    config = frozenlake["get_config"](variant)
    is_paper = variant == "paper"
    config.env = ConfigDict(
        dict(
            name="2048",
            thinking=True,  # Replies begin with <think>, else with <answer>.
            target=128 if is_paper else 32,  # The tile that ends the game.
            four_probability=0.1,  # Of a new tile being a 4; else a 2.
            merge_reward=0.2,  # For new tiles by merging that sum to the target.
            success_reward=1.0,  # For reaching it.
        )
    )
    if is_paper:
        config.rollout.update(
            turns=20, actions_per_turn=5, actions=100, reply_tokens=200
        )
    else:
        config.rollout.update(turns=5, actions_per_turn=4, actions=20)
    return config
