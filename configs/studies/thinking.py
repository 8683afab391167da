"""With and without thinking (arXiv:2504.20073, Table 4), on Bandit and BanditRev.

python launch/study.py --study=configs/studies/thinking.py --jobs=2
"""

from ragen_jax.studies.definition import Claim, Study

_ENVIRONMENTS = {"Bandit": {}, "BanditRev": {"env.reverse": True}}
_THINKING = {"thinking": {}, "no thinking": {"env.thinking": False}}


def get_study() -> Study:
    """The study."""
    arms = {
        f"{name}, {title}": {**own, **thinking}
        for name, own in _ENVIRONMENTS.items()
        for title, thinking in _THINKING.items()
    }
    claims = tuple(
        Claim(
            text=f"On {name} an agent that thinks before it answers ends above one that"
            " does not.",
            left=f"{name}, thinking",
            right=f"{name}, no thinking",
        )
        for name in _ENVIRONMENTS
    )
    # The two kinds of agent do not begin alike.
    gains = tuple(
        Claim(
            text=f"On {name} training adds more to an agent that thinks than to one"
            " that does not.",
            left=f"{name}, thinking",
            right=f"{name}, no thinking",
            measure="test_gain",
        )
        for name in _ENVIRONMENTS
    )
    harder = Claim(
        text="With thinking, names that mislead (BanditRev) are harder than names that"
        " do not.",
        left="BanditRev, thinking",
        right="Bandit, thinking",
        relation="less",
    )
    return Study(
        name="thinking",
        question="Does an agent that writes a thought before its answer end better, and"
        " carry more over to names that it never saw, than one that answers at once?",
        source="arXiv:2504.20073, Table 4",
        config="configs/bandit.py",
        changes={"iterations": 60, "every.evaluate": 20, "health.record_every": 20},
        arms=arms,
        measures=(
            "test_success",
            "test_before",
            "test_gain",
            "last_validation",
            "last_reply_tokens",
        ),
        curves=("train/success", "rollout/entropy", "rollout/reply_tokens"),
        claims=(*claims, *gains, harder),
        paper={"iterations": 200},
        notes="StarPO-S. The embedded model's supervised start saw six demonstrations"
        " with a thought for each without one, and both kinds of name equally often. So"
        " the agents do not begin alike: before training all replies with a thought are"
        " valid on the test levels, and 70 to 74 % of those without; of the difference"
        " in the end 14.8 points on Bandit and 13.8 on BanditRev were there before."
        " Hence the claims on the gain, which were added after the runs had been seen."
        " The 256 test levels are eight pairs of names in two orders, so that levels"
        " of one pair resemble each other and the interval over levels is too narrow;"
        " the paper reports one run each: 100 against 81.3 % on Bandit, 67.6 against"
        " 56.3 % on BanditRev.",
    )
