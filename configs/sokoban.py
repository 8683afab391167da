r"""StarPO-S with a critic (PPO) on Sokoban: 6x6 rooms with one box.

  python launch/train.py --config=configs/sokoban.py --workdir=runs/sokoban

trains the small model that comes with ragen_jax, on whatever devices there are.
Variants, after a colon:

  --config=configs/sokoban.py:solver       the embedded model after a supervised start
                                           from a solver's play, instead of `tiny`
  --config=configs/sokoban.py:larger       8x8 rooms with two boxes
  --config=configs/sokoban.py:newvocab     other symbols
  --config=configs/sokoban.py:coordinates  places instead of a drawing
  --config=configs/sokoban.py:generalize   trained on 6x6 rooms, evaluated on those, on
                                           other symbols, larger rooms and FrozenLake
  --config=configs/sokoban.py:generalize_paper  the same with the settings of :paper
  --config=configs/sokoban.py:mix          rooms and lakes in one batch
  --config=configs/sokoban.py:smoke        two small iterations, as a test
  --config=configs/sokoban.py:paper        Qwen2.5-0.5B-Instruct with the settings of
                                           "RAGEN", arXiv:2504.20073; wants a GPU or TPU

All other settings are those of configs/frozenlake.py.
"""

from pathlib import Path

from ml_collections import ConfigDict

from ragen_jax.utils.derived_configs import derive, environment

_BASE = Path(__file__).with_name("frozenlake.py")
_OWN = (
    "solver",
    "larger",
    "newvocab",
    "coordinates",
    "generalize",
    "generalize_paper",
    "mix",
)
_NEW_SYMBOLS = ("W", ".", "G", "B", "C", "A", "@")
_LARGER_LIMITS = dict(turns=10, actions=20)  # Half of these rooms need above 9 actions.


def get_config(variant: str = "") -> ConfigDict:
    """Returns the settings; `variant` is one of those above, or ""."""
    is_paper = variant in ("paper", "generalize_paper")
    base_variant = "paper" if is_paper else variant
    config = derive(_BASE, base_variant, own=_OWN, inherited=["smoke", "paper"])
    config.env = environment(
        "sokoban",
        size=6,  # Rows and columns, the border included.
        boxes=1,
        search_depth=100,  # Moves of reverse play for each box; more make it harder.
        observation="grid",  # or "coordinates", "both"
        # Wall, floor, target, box, box on target, player, player on target.
        symbols=("#", "_", "O", "X", "√", "P", "S"),
    )
    if not is_paper:
        config.rollout.reply_tokens = 64  # A thought names player, box and target.
    if variant == "solver":
        config.model.path = "tiny_sokoban"
    elif variant == "larger":
        config.env.update(size=8, boxes=2)
        config.rollout.update(_LARGER_LIMITS)
    elif variant == "newvocab":
        config.env.symbols = _NEW_SYMBOLS
    elif variant in ("generalize", "generalize_paper"):
        config.env.evaluate = dict(
            sokoban=dict(name="sokoban"),
            newvocab=dict(name="sokoban", symbols=_NEW_SYMBOLS),
            larger=dict(name="sokoban", size=8, boxes=2, **_LARGER_LIMITS),
            frozen_lake=dict(name="frozen_lake"),
        )
    elif variant == "mix":
        config.env = environment(
            "mix",
            mix=dict(  # `prompts` sum up to rollout.prompts.
                rooms=dict(name="sokoban", prompts=4),
                lakes=dict(name="frozen_lake", prompts=4),
            ),
        )
    elif variant == "coordinates":
        config.env.observation = "coordinates"
    return config
