"""A reward for thoughts that name places correctly, over 200 iterations.

python launch/study.py --study=configs/studies/grounding.py --jobs=2
"""

from collections.abc import Iterator

from ragen_jax.studies.definition import Claim, Study


def _claims(arm: str, what: str) -> Iterator[Claim]:
    yield Claim(
        text=f"With {what} thoughts name more places correctly in the end.",
        left=arm,
        right="without",
        measure="last_grounded",
    )
    yield Claim(
        text=f"With {what} agents are not inferior: they lose less than 5 points of"
        " success.",
        left=arm,
        right="without",
        margin=-0.05,
    )


def get_study() -> Study:
    """The study."""
    return Study(
        name="grounding",
        question="Does a reward for right facts in thoughts keep thoughts grounded, at"
        " no loss of success?",
        source="an open question of arXiv:2504.20073: rewards that see the reasoning",
        config="configs/frozenlake.py",
        changes={
            "iterations": 200,
            "every.evaluate": 20,
            "optimizer.schedule": "constant",
        },
        arms={
            # Too little to be learned from; a reward of 0 would not be measured.
            "without": {"reward.grounding": 1e-9},
            "with": {"reward.grounding": 0.1},
            "with more": {"reward.grounding": 0.5},
            "shared": {"reward.grounding": 0.5, "reward.grounding_by": "episode"},
        },
        measures=(
            "last_grounded",
            "test_success",
            "last_success",
            "last_valid",
            "last_entropy",
        ),
        curves=("rollout/grounded", "train/success", "rollout/entropy"),
        claims=tuple(_claims("with", "the reward"))
        + tuple(_claims("with more", "five times the reward"))
        + tuple(_claims("shared", "that reward shared by an episode's turns")),
        paper={"iterations": 200},
        notes="StarPO-S with PPO at a constant learning rate. On each turn the share of"
        " the player's and the goal's places that the thought names where they truly"
        " are, times 0.1, is added to the reward. Times 0.5 was asked after three seeds"
        " of 0.1 had left it open; shared by the turns of an episode, after three of"
        ' 0.5 had shown agents that take more turns. "At no loss" is judged as'
        " non-inferiority: a loss of less than 5 points, a margin of this project's,"
        " counts as none.",
    )
