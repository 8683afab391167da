"""Without the KL term and with clip-higher (arXiv:2504.20073, Figure 8).

python launch/study.py --study=configs/studies/kl_and_clip.py --jobs=2
"""

from ragen_jax.studies.definition import Claim, Study


def get_study() -> Study:
    """The study."""
    arms = {
        "KL 0.001, clip 0.2": {},
        "no KL, clip 0.2": {"loss.kl": 0.0},
        "KL 0.001, clip 0.28": {"loss.clip_high": 0.28},
        "no KL, clip 0.28": {"loss.kl": 0.0, "loss.clip_high": 0.28},
    }
    claims = (
        Claim(
            text="Without the KL term training ends above training with it.",
            left="no KL, clip 0.2",
            right="KL 0.001, clip 0.2",
        ),
        Claim(
            text="With clip-higher training ends above training without it.",
            left="KL 0.001, clip 0.28",
            right="KL 0.001, clip 0.2",
        ),
        Claim(
            text="Both together end above neither.",
            left="no KL, clip 0.28",
            right="KL 0.001, clip 0.2",
        ),
    )
    return Study(
        name="kl_and_clip",
        question="Do removing the KL term and clipping gains later each help PPO?",
        source="arXiv:2504.20073, Figure 8",
        config="configs/frozenlake.py",
        changes={
            "algorithm": "starpo",
            "iterations": 200,
            "optimizer.schedule": "constant",
        },
        arms=arms,
        measures=(
            "test_success",
            "peak_success",
            "lost_success",
            "collapsed",
            "last_entropy",
        ),
        curves=("train/success", "rollout/entropy", "update/clip_fraction"),
        claims=claims,
        paper={"iterations": 200},
        notes="Plain StarPO with PPO but for the two; constant learning rate.",
    )
