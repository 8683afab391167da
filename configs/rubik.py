r"""StarPO-S with a critic (PPO) on the 2 x 2 x 2 Rubik's cube.

  python launch/train.py --config=configs/rubik.py --workdir=runs/rubik

trains the small model that comes with ragen_jax, on whatever devices there are.
That model was not taught this environment: a run only shows that everything works. To
see learning, choose one that can read (--config.model.path=FOLDER, or smollm2), and for
it learning rates and a temperature as in the variant smollm2 of configs/frozenlake.py.
Random actions solve 4% of the cubes that are two turns away. Variants, after a colon:

  --config=configs/rubik.py:smoke  two small iterations, as a test
  --config=configs/rubik.py:paper  Qwen2.5-0.5B-Instruct with the settings of "RAGEN",
                                   arXiv:2504.20073, and cubes five turns away, as by
                                   default in its code; wants a GPU or TPU

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
        "rubik",
        depth=5 if is_paper else 2,  # Random turns away from a solved cube.
        faces="URFDLB",  # or "URF", which suffices for every position
        half_turns=False,  # If True, there are also actions like U2.
        step_reward=0.0,  # For each turn that does not solve.
    )
    if is_paper:
        config.rollout.update(turns=5, actions_per_turn=5, actions=20)
    return config
