r"""StarPO-S with a critic (PPO) on SearchQA: questions about a generated encyclopedia.

  python launch/train.py --config=configs/search_qa.py --workdir=runs/search_qa

trains the small model that comes with ragen_jax, on whatever devices there are.
That model was not taught this environment: a run only shows that everything works. To
see learning, choose the variant tiny_words, or a model that can read
(--config.model.path=FOLDER, or smollm2), and for it learning rates and a temperature
as in the variant smollm2 of configs/frozenlake.py. Variants, after a colon:

  --config=configs/search_qa.py:smoke  two small iterations, as a test
  --config=configs/search_qa.py:tiny_words  the embedded model that was taught it, on
                                       questions of one search
  --config=configs/search_qa.py:paper  Qwen2.5-0.5B-Instruct, five turns of five
                                       passages, as in RAGEN; wants a GPU or TPU

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
        "search_qa",
        people=200,  # Up to 3,750; each adds 5 1/3 passages.
        seed=0,  # Decides the encyclopedia.
        hops="both",  # or "one", "two": how many passages an answer takes
        passages=5 if is_paper else 3,  # Shown for each search.
    )
    config.rollout.update(turns=5, actions_per_turn=1, actions=5)
    if not is_paper:
        config.rollout.reply_tokens = 64
    if variant == "tiny_words":  # As configs/warm_start_words.py taught it.
        config.env.hops = "one"
        config.model.path = "tiny_words"
        config.rollout.update(turns=4, actions=4, reply_tokens=48)
        config.iterations = 40
    return config
