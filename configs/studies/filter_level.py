"""Filtering prompts or single episodes (arXiv:2604.06268, Table 7).

python launch/study.py --study=configs/studies/filter_level.py --jobs=2
"""

from ragen_jax.studies.definition import Claim, Study


def get_study() -> Study:
    """The study."""
    arms = {
        "all": {"filter.strategy": "none"},
        "prompts": {"filter.strategy": "top_p", "filter.fraction": 0.9},
        "episodes": {"filter.strategy": "within_group", "filter.fraction": 0.5},
    }
    claims = (
        Claim(
            text="Keeping the prompts that vary most ends above keeping all.",
            left="prompts",
            right="all",
        ),
        Claim(
            text="It ends above keeping of each prompt the half of the episodes that"
            " varies most.",
            left="prompts",
            right="episodes",
        ),
    )
    return Study(
        name="filter_level",
        question="Should whole prompts be dropped, or single episodes of each?",
        source="arXiv:2604.06268, Table 7",
        config="configs/sokoban.py",
        changes={
            "iterations": 200,
            "every.evaluate": 20,
            "every.checkpoint": 20,
            "checkpoint.keep_last": 10,
        },
        arms=arms,
        measures=(
            "test_success",
            "test_gain",
            "best_validation",
            "last_entropy",
            "mutual_correlation",
            "seconds",
        ),
        curves=("validation/success", "filter/kept_fraction", "rollout/entropy"),
        claims=claims,
        paper={"iterations": 400, "rollout.actions_per_turn": 2},
        diagnose=("--all", "--nogradients"),
        notes="PPO without a KL term. Mutual information is measured of the kept"
        " checkpoints after training.",
    )
