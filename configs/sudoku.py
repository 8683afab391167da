r"""StarPO-S with a critic (PPO) on Sudoku of 4 x 4 or 9 x 9 cells.

  python launch/train.py --config=configs/sudoku.py --workdir=runs/sudoku

trains the small model that comes with ragen_jax, on whatever devices there are.
That model was not taught this environment: a run only shows that everything works. To
see learning, choose one that can read (--config.model.path=FOLDER, or smollm2), and for
it learning rates and a temperature as in the variant smollm2 of configs/frozenlake.py.
Variants, after a colon:

  --config=configs/sudoku.py:nine   9 x 9 cells
  --config=configs/sudoku.py:smoke  two small iterations, as a test
  --config=configs/sudoku.py:paper  Qwen2.5-0.5B-Instruct with the settings of "RAGEN",
                                    arXiv:2504.20073, and the puzzles of its code: 4 x 4
                                    with ten numbers given; wants a GPU or TPU

All other settings are those of configs/frozenlake.py.
"""

from pathlib import Path

from ml_collections import ConfigDict

from ragen_jax.utils.derived_configs import derive, environment

_BASE = Path(__file__).with_name("frozenlake.py")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the settings; `variant` is "", "nine", "smoke" or "paper"."""
    config = derive(_BASE, variant, own=["nine"], inherited=["smoke", "paper"])
    is_nine = variant == "nine"
    config.env = environment(
        "sudoku",
        size=9 if is_nine else 4,  # Rows and columns.
        clues=45 if is_nine else 10,  # Numbers given, at least.
        correct_reward=0.1,  # For each cell that becomes right; lost if it is changed.
        wrong_reward=-0.1,  # For a placement that is refused.
    )
    # Every empty cell takes an action, and some may go wrong.
    if is_nine:
        config.rollout.update(turns=8, actions_per_turn=6, actions=48)
    else:
        config.rollout.update(turns=4, actions_per_turn=3, actions=9)
    if variant != "paper":
        # Placements are words, and each costs several tokens.
        config.rollout.reply_tokens = 160 if is_nine else 96
    return config
