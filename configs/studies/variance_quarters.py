"""Training on one quarter of the prompts by spread (arXiv:2604.06268, Table 6).

python launch/study.py --study=configs/studies/variance_quarters.py --only=Bandit
"""

from ragen_jax.studies.definition import Claim, Study

# The paper's table is of Sokoban; episodes of Bandit, one turn each, cost far less.
_ENVIRONMENTS = {
    "Sokoban": {"config": "configs/sokoban.py"},
    "Bandit": {"config": "configs/bandit.py", "iterations": 60, "every.evaluate": 10},
}


def get_study() -> Study:
    """The study."""
    arms = {
        f"{name}, quarter {number}": {
            **chosen,
            "filter.low": (number - 1) / 4,
            "filter.high": number / 4,
        }
        for name, chosen in _ENVIRONMENTS.items()
        for number in (1, 2, 3, 4)
    }
    claims = tuple(
        Claim(
            text=f"On {name} {text}.",
            left=f"{name}, quarter {more}",
            right=f"{name}, quarter {less}",
        )
        for name in _ENVIRONMENTS
        for text, more, less in (
            ("the quarter that varies most ends above the one that varies least", 1, 4),
            ("the second quarter ends above the third", 2, 3),
        )
    )
    return Study(
        name="variance_quarters",
        question="Which prompts teach: those whose episodes earn different returns, or"
        " those whose earn nearly the same?",
        source="arXiv:2604.06268, Table 6",
        config="configs/sokoban.py",
        changes={
            "iterations": 200,
            "every.evaluate": 20,
            "filter.strategy": "percentile_range",
            "filter.keep_zero": True,
        },
        arms=arms,
        measures=(
            "test_success",
            "test_gain",
            "best_validation",
            "last_validation",
            "last_entropy",
        ),
        curves=("validation/success", "rollout/entropy", "filter/reward_std"),
        claims=claims,
        paper={"iterations": 400},
        paper_arms={
            arm: {"rollout.actions_per_turn": 2} for arm in arms if "Sokoban" in arm
        },
        notes="PPO without a KL term; quarter 1 varies most. Groups of equal returns"
        " count as prompts like the others.",
    )
