"""The collapse, and what each part of StarPO-S and a rollback change about it.

python launch/study.py --study=configs/studies/collapse.py --jobs=2

docs/echo_trap.md tells what it shows.
"""

from ragen_jax.studies.definition import Claim, Study

_PLAIN, _HALF, _ROLLBACK = "plain GRPO", "half the rate", "rollback"
_UNDIVIDED = "no division"
_FILTER = {"filter.strategy": "top_fraction"}


def get_study() -> Study:
    """The study."""
    arms = {
        _PLAIN: {},
        "falling rate": {"optimizer.schedule": "cosine"},
        _HALF: {"optimizer.actor_lr": 1.5e-4},
        "filtered": _FILTER,
        "no KL": {"loss.kl": 0.0},
        "clip-higher": {"loss.clip_high": 0.28},
        "critic": {"estimator": "ppo"},
        "StarPO-S": {"algorithm": "starpo_s", "estimator": "ppo"},
        _ROLLBACK: {"health.on_collapse": "rollback"},
        _UNDIVIDED: {"estimator": "dr_grpo"},
    }
    falls = Claim(
        text="Plain GRPO at a high constant rate loses above 10 points of its peak.",
        left=_PLAIN,
        measure="lost_success",
        margin=0.1,
    )
    helps = tuple(
        Claim(
            text=f"{arm}: less of the peak is lost than by plain GRPO.",
            left=arm,
            right=_PLAIN,
            measure="lost_success",
            relation="less",
        )
        for arm in arms
        if arm != _PLAIN
    )
    ends = tuple(
        Claim(text=f"{arm}: ends above plain GRPO.", left=arm, right=_PLAIN)
        for arm in arms
        if arm != _PLAIN
    )
    # Asked after two of three seeds had shown it.
    echoes = tuple(
        Claim(
            text=f"{arm}: fewer thoughts differ in the end than by plain GRPO.",
            left=arm,
            right=_PLAIN,
            measure="last_distinct_thoughts",
            relation="less",
        )
        for arm in ("no KL", "critic")
    )
    returns = Claim(
        text="A rollback, which halves the rate, ends above half the rate throughout.",
        left=_ROLLBACK,
        right=_HALF,
    )
    # Asked after all seeds had been seen.
    contrasts = tuple(
        Claim(text=f"{where} ends above {arm}.", left=_HALF, right=arm, measure=measure)
        for where, measure, others in (
            ("Half the rate", "test_success", (_PLAIN, _ROLLBACK)),
            ("On validation half the rate", "last_validation", (_ROLLBACK,)),
        )
        for arm in arms
        if arm not in (_HALF, *others)
    )
    return Study(
        name="collapse",
        question="Where does the embedded model degenerate, what announces it, and what"
        " delays or prevents it?",
        source="arXiv:2504.20073, sections 4 and 5",
        config="configs/bandit.py",
        changes={
            "algorithm": "starpo",
            "estimator": "grpo",
            "iterations": 100,
            "optimizer.schedule": "constant",
            "optimizer.actor_lr": 3e-4,
            "loss.entropy": 0.0,
            "every.evaluate": 20,
            "every.checkpoint": 5,
            "checkpoint.keep_last": 6,
            "health.record_every": 5,
        },
        arms=arms,
        seeds=(0, 1, 2, 3, 4),
        measures=(
            "test_success",
            "best_validation",
            "last_validation",
            "drop",
            "peak_success",
            "lost_success",
            "collapsed",
            "last_valid",
            "last_entropy",
            "last_distinct_thoughts",
            "success_onset",
            "alarm_at",
            "std_lead",
            "entropy_lead",
            "gradient_lead",
            "thoughts_lead",
        ),
        curves=(
            "train/success",
            "validation/success",
            "filter/reward_std",
            "rollout/entropy",
            "health/distinct_thoughts",
        ),
        claims=(falls, *helps, *ends, *echoes, returns, *contrasts),
        paper={"iterations": 200, "optimizer.actor_lr": 1e-6},
        paper_arms={_HALF: {"optimizer.actor_lr": 5e-7}},
        notes="Each arm changes one thing of plain GRPO; the critic's is PPO, with GAE,"
        " whitened advantages, and the KL term among the rewards. StarPO-S changes"
        " four: filter, KL term, clipping, and the critic."
        " 100 iterations, half of the paper's: the first run seen fell within 11."
        " A rollback trains again what it has gone back over, which is not counted"
        " among the 100; those of seeds 0 and 4 go back to the beginning, and are then"
        " the runs of half the rate. `alarm_at` of seed 0 (but of a rollback and of"
        " half the rate) and of the first two arms of seed 1 is of an alarm that did"
        " not look at validation yet."
        " Seeds 3 and 4 were added after three had left most of it to the bootstrap."
        " The claims that set half the rate against the arms other than plain GRPO, and"
        " those on validation, were added after the data of all five seeds had been"
        " seen. The arm without GRPO's division by the group's standard deviation"
        " (Dr. GRPO) came last, after the study `risk` had shown what that does.",
    )
