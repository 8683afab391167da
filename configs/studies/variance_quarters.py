"""Training on one quarter of the prompts by spread (arXiv:2604.06268, Table 6).

python launch/study.py --study=configs/studies/variance_quarters.py --jobs=2
"""

from ragen_jax.studies.definition import Claim, Study


def get_study() -> Study:
    """The study."""
    arms = {
        f"quarter {number}": {
            "filter.low": (number - 1) / 4,
            "filter.high": number / 4,
        }
        for number in (1, 2, 3, 4)
    }
    claims = (
        Claim(
            text="The quarter that varies most teaches more than the one that varies"
            " least.",
            left="quarter 1",
            right="quarter 4",
        ),
        Claim(
            text="The second quarter teaches more than the third.",
            left="quarter 2",
            right="quarter 3",
        ),
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
        measures=("test_success", "test_gain", "best_validation", "last_entropy"),
        curves=("validation/success", "rollout/entropy", "filter/reward_std"),
        claims=claims,
        paper={"iterations": 400, "rollout.actions_per_turn": 2},
        notes="PPO without a KL term; quarter 1 varies most. Groups of equal returns"
        " count as prompts like the others.",
    )
