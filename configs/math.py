r"""StarPO-S with a critic (PPO) on word problems, with several attempts.

  python launch/train.py --config=configs/math.py --workdir=runs/math

trains the small model that comes with ragen_jax, on whatever devices there are.
That model was never taught this environment, and shows only that all works: to see
learning, take the variant smollm2, or name a model that can read,
--config.model.path=FOLDER. Variants, after a colon:

  --config=configs/math.py:smoke  two small iterations, to see that all works
  --config=configs/math.py:smollm2  SmolLM2-135M-Instruct on problems of one step, in
                                  sizes for a CPU; see configs/frozenlake.py:smollm2
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
    """Returns the settings; `variant` is "", "smoke", "smollm2" or "paper"."""
    config = derive(_BASE, variant, inherited=["smoke", "smollm2", "paper"])
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
    if variant == "smollm2":
        config.env.max_steps = 1
        config.iterations = 20
        config.rollout.update(turns=1, actions=1)  # One attempt.
        config.evaluation.update(prompts=32, test_prompts=128, slots=32)
    return config
