r"""StarPO-S with a critic (PPO) on word problems, with several attempts.

  python launch/train.py --config=configs/math.py --workdir=runs/math

trains the small model that comes with ragen_jax, on whatever devices there are.
That model was not taught this environment: a run only shows that everything works. To
see learning, choose the variant smollm2 or a model that can read:
--config.model.path=FOLDER. Variants, after a colon:

  --config=configs/math.py:smoke  two small iterations, as a test
  --config=configs/math.py:smollm2  SmolLM2-135M-Instruct on problems of one step, in
                                  sizes for a CPU; see configs/frozenlake.py:smollm2
  --config=configs/math.py:paper  Qwen2.5-0.5B-Instruct, one attempt, as in
                                  RAGEN's settings of MetaMathQA; wants a GPU
                                  or TPU

All other settings are those of configs/frozenlake.py.
"""

from pathlib import Path

from ml_collections import ConfigDict

from ragen_jax.utils.derived_configs import derive, environment

_BASE = Path(__file__).with_name("frozenlake.py")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the settings; `variant` is "", "smoke", "smollm2" or "paper"."""
    config = derive(_BASE, variant, inherited=["smoke", "smollm2", "paper"])
    is_paper = variant == "paper"
    config.env = environment(
        "math",
        min_steps=1,  # Changes of an amount that a problem tells of, at least
        max_steps=3,  # and at most.
        highest_number=50,  # In the text of a problem.
        fractions=False,  # If True, divisions may leave a fraction.
    )
    turns = 1 if is_paper else 3
    config.rollout.update(turns=turns, actions_per_turn=1, actions=turns)
    if not is_paper:
        config.rollout.reply_tokens = 64
    if variant == "smollm2":
        config.env.max_steps = 1
        config.iterations = 20
        config.rollout.update(turns=1, actions=1)  # One attempt.
        config.evaluation.update(prompts=32, test_prompts=128, slots=32)
    return config
