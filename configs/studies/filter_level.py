"""Filtering prompts or single episodes (arXiv:2604.06268, Table 7).

python launch/study.py --study=configs/studies/filter_level.py --jobs=2 --only=Bandit
"""

from ragen_jax.studies.definition import Claim, Study

# The paper's table is of Sokoban; episodes of Bandit, one turn each, cost far less.
_ENVIRONMENTS = {"Sokoban": "configs/sokoban.py", "Bandit": "configs/bandit.py"}
_LEVELS = {
    "all": {"filter.strategy": "none"},
    "prompts": {"filter.strategy": "top_p", "filter.fraction": 0.9},
    "episodes": {"filter.strategy": "within_group", "filter.fraction": 0.5},
}


def get_study() -> Study:
    """The study."""
    arms = {
        f"{name}, {level}": {"config": config, **changes}
        for name, config in _ENVIRONMENTS.items()
        for level, changes in _LEVELS.items()
    }
    better = tuple(
        Claim(
            text=f"On {name} keeping prompts that vary most ends above keeping all.",
            left=f"{name}, prompts",
            right=f"{name}, all",
        )
        for name in _ENVIRONMENTS
    )
    coarser = tuple(
        Claim(
            text=f"On {name} it ends above keeping of each prompt the half of the"
            " episodes that varies most.",
            left=f"{name}, prompts",
            right=f"{name}, episodes",
        )
        for name in _ENVIRONMENTS
    )
    return Study(
        name="filter_level",
        question="Should whole prompts be dropped, or single episodes of each?",
        source="arXiv:2604.06268, Table 7",
        config="configs/sokoban.py",
        changes={
            "iterations": 100,
            "every.evaluate": 10,
            "every.checkpoint": 10,
            "checkpoint.keep_last": 10,
        },
        arms=arms,
        measures=(
            "test_success",
            "test_gain",
            "best_validation",
            "last_validation",
            "kept_groups",
            "last_entropy",
            "mutual_correlation",
            "seconds",
        ),
        curves=("validation/success", "filter/kept_fraction", "rollout/entropy"),
        claims=(*better, *coarser),
        paper={"iterations": 400},
        diagnose=("--all", "--nogradients"),
        notes="PPO without a KL term. Mutual information is measured of the kept"
        " checkpoints after training. The paper lets a turn have two actions. The"
        " learning rate falls to 0 over the most updates that an arm can make (the"
        " paper's is constant), and top-p makes fewer where it keeps few prompts: the"
        " arm of prompts on Sokoban makes 225 to 240 of 400 and ends at 36 to 41 % of"
        " the highest rate, on Bandit 391 to 399 of 400, and the other arms end at 0."
        " So the claims about prompts on Sokoban compare rates as well.",
    )
