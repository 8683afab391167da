"""Whether GRPO's division by a group's spread turns an agent from the risky arm.

python launch/study.py --study=configs/studies/risk.py --jobs=2

The better arm pays 1 in a quarter of its pulls, else 0; the other always 0.15. A group
without a win has a small spread, in which each loss weighs as much as a win does in a
group with one. Of 16 episodes, each of which pulls the better arm with probability h,
its expected advantage over the other, computed from the rewards alone, is -0.11 at h =
0.3, +0.04 at 0.44 and +0.14 at 0.7; of 8 episodes it is negative at any h, of 64 below
h = 0.08 alone; without the division it is +0.09 to +0.10 throughout.
"""

from ragen_jax.studies.definition import SMOKE, Claim, Study

_SMALL, _USUAL, _LARGE = "GRPO, 16 x 8", "GRPO, 8 x 16", "GRPO, 2 x 64"
_UNDIVIDED = "Dr. GRPO, 8 x 16"
_SMALL_UNDIVIDED, _SMALL_OTHERS = "Dr. GRPO, 16 x 8", "RLOO, 16 x 8"


def get_study() -> Study:
    """The study."""
    small = {"rollout.prompts": 16, "rollout.group_size": 8}
    arms = {
        _SMALL: small,
        _USUAL: {},
        _LARGE: {"rollout.prompts": 2, "rollout.group_size": 64},
        _UNDIVIDED: {"estimator": "dr_grpo"},
        _SMALL_UNDIVIDED: {**small, "estimator": "dr_grpo"},
        _SMALL_OTHERS: {**small, "estimator": "rloo"},
    }
    claims = (
        Claim(
            text="In groups of 8 GRPO ends below where it began.",
            left=_SMALL,
            measure="test_gain",
            relation="less",
        ),
        Claim(
            text="In groups of 64 it ends above where it began.",
            left=_LARGE,
            measure="test_gain",
        ),
        Claim(
            text="Without the division, in groups of 16, it ends above GRPO.",
            left=_UNDIVIDED,
            right=_USUAL,
        ),
        Claim(
            text="Without the division, in groups of 8, it ends above GRPO.",
            left=_SMALL_UNDIVIDED,
            right=_SMALL,
        ),
        Claim(
            text="So it does if each episode is compared with the others of its group.",
            left=_SMALL_OTHERS,
            right=_SMALL,
        ),
    )
    return Study(
        name="risk",
        question="Does dividing by the group's standard deviation keep an agent from a"
        " better arm that seldom pays, and does that depend on the size of the groups?",
        source="of this project; GRPO is arXiv:2402.03300, Dr. GRPO arXiv:2503.20783",
        config="configs/bandit.py",
        changes={
            "algorithm": "starpo",
            "estimator": "grpo",
            "iterations": 60,
            "every.evaluate": 20,
            "health.record_every": 20,
        },
        arms=arms,
        measures=(
            "test_success",
            "test_gain",
            "last_validation",
            "last_valid",
            "last_reward_std",
        ),
        curves=("train/success", "filter/reward_std", "rollout/entropy"),
        claims=claims,
        # The arms' own shapes, which are the question.
        smoke={key: SMOKE[key] for key in SMOKE if not key.startswith("rollout.")},
        paper={"iterations": 200},
        notes="128 episodes an iteration in every arm. Success is to pull the arm that"
        " pays more in the mean, whatever it paid.",
    )
