"""Without the KL term and with clip-higher (arXiv:2504.20073, Figure 8).

python launch/study.py --study=configs/studies/kl_and_clip.py --jobs=2 --only=Bandit
"""

from ragen_jax.studies.definition import Claim, Study

# The paper's figure is of FrozenLake; episodes of Bandit, one turn each, cost far less.
_ENVIRONMENTS = {"FrozenLake": "configs/frozenlake.py", "Bandit": "configs/bandit.py"}
_USUAL = "KL 0.001, clip 0.2"
_LOSSES = {
    _USUAL: {},  # The runs of `baseline`.
    "no KL, clip 0.2": {"loss.kl": 0.0},
    "KL 0.001, clip 0.28": {"loss.clip_high": 0.28},
    "no KL, clip 0.28": {"loss.kl": 0.0, "loss.clip_high": 0.28},
}
_CLAIMS = {
    "without the KL term training ends above training with it": "no KL, clip 0.2",
    "with clip-higher training ends above training without it": "KL 0.001, clip 0.28",
    "both together end above neither": "no KL, clip 0.28",
}


def get_study() -> Study:
    """The study."""
    arms = {
        f"{name}, {title}": {"config": config, "estimator": "ppo", **chosen}
        for name, config in _ENVIRONMENTS.items()
        for title, chosen in _LOSSES.items()
    }
    claims = tuple(
        Claim(text=f"On {name} {text}.", left=f"{name}, {left}", right=right)
        for name in _ENVIRONMENTS
        for right in [f"{name}, {_USUAL}"]
        for text, left in _CLAIMS.items()
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
            "last_validation",
            "last_entropy",
        ),
        curves=("train/success", "rollout/entropy", "update/clip_fraction"),
        claims=claims,
        paper={"iterations": 200},
        notes="Plain StarPO with PPO but for the two; constant learning rate.",
    )
