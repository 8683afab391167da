r"""StarPO-S with a critic (PPO) on WebShop: products that instructions describe.

  python launch/train.py --config=configs/webshop.py --workdir=runs/webshop

trains the small model that comes with ragen_jax, on whatever devices there are.
That model was not taught this environment: a run only shows that everything works. To
see learning, choose the variant tiny_words, or a model that can read
(--config.model.path=FOLDER, or smollm2), and for it learning rates and a temperature
as in the variant smollm2 of configs/frozenlake.py. Variants, after a colon:

  --config=configs/webshop.py:smoke  two small iterations, as a test
  --config=configs/webshop.py:tiny_words  the embedded model that was taught it, in a
                                     shop of 50 products
  --config=configs/webshop.py:paper  Qwen2.5-0.5B-Instruct, paid for the full score
                                     alone, as in RAGEN; wants a GPU or TPU

All other settings are those of configs/frozenlake.py.
"""

from pathlib import Path

from ml_collections import ConfigDict

from ragen_jax.utils.derived_configs import derive, environment

_BASE = Path(__file__).with_name("frozenlake.py")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the settings; `variant` is "", "smoke", "tiny_words" or "paper"."""
    config = derive(_BASE, variant, own=["tiny_words"], inherited=["smoke", "paper"])
    is_paper = variant == "paper"
    config.env = environment(
        "webshop",
        products=1000,  # Up to 20,000.
        seed=0,  # Decides the catalogue and the goals.
        goal_attributes=2,  # Attributes that an instruction names, of four.
        observation="text",  # or "rich", with marked buttons
        reward="success" if is_paper else "score",  # 1 for the full score, or the score
    )
    # Nine turns of pages: the last three stay in sight.
    config.rollout.update(
        turns=9, actions_per_turn=1, actions=9, history="window", window=3
    )
    if not is_paper:
        config.rollout.reply_tokens = 64
    if variant == "tiny_words":  # As configs/warm_start_words.py taught it.
        config.env.products = 50
        config.model.path = "tiny_words"
        # Every page repeats the instruction: two turns in sight earn as much as all.
        config.rollout.update(turns=6, actions=6, reply_tokens=32, window=2)
        config.iterations = 40
    return config
