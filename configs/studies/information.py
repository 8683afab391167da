"""Mutual information, entropy and success (arXiv:2604.06268, Figure 8).

python launch/study.py --study=configs/studies/information.py --jobs=2
"""

from ragen_jax.studies.definition import Claim, Study

_ENVIRONMENTS = {"FrozenLake": "configs/frozenlake.py", "Sokoban": "configs/sokoban.py"}
_FILTERS = {
    "all": {"filter.strategy": "none"},
    "filtered": {"filter.strategy": "top_p", "filter.fraction": 0.9},
}


def get_study() -> Study:
    """The study."""
    arms = {
        f"{name}, {title}": {"config": config, **chosen}
        for name, config in _ENVIRONMENTS.items()
        for title, chosen in _FILTERS.items()
    }
    claims = tuple(
        claim
        for arm in arms
        for claim in (
            Claim(
                text=f"{arm}: checkpoints whose thoughts tell more of their prompts"
                " succeed more.",
                left=arm,
                measure="zscore_correlation",
            ),
            Claim(
                text=f"{arm}: checkpoints with more entropy succeed less.",
                left=arm,
                measure="entropy_correlation",
                relation="less",
            ),
        )
    )
    return Study(
        name="information",
        question="Does mutual information of prompts and thoughts go with success,"
        " where entropy does not?",
        source="arXiv:2604.06268, Figure 8",
        config="configs/frozenlake.py",
        changes={
            "iterations": 200,
            "every.evaluate": 20,
            "every.checkpoint": 10,
            "checkpoint.keep_last": 20,
        },
        arms=arms,
        measures=(
            "test_success",
            "mutual_correlation",
            "zscore_correlation",
            "entropy_correlation",
        ),
        curves=("validation/success", "rollout/entropy"),
        claims=claims,
        paper={"iterations": 400, "rollout.actions_per_turn": 2},
        diagnose=(
            "--all",
            "--nogradients",
            "--same_prompts",
            "--prompts=32",
            "--group_size=4",
        ),
        notes="PPO without a KL term; every tenth iteration's checkpoint is measured on"
        " the same 32 prompts, four episodes of each. Where FrozenLake was measured,"
        " they were those of the eleventh iteration, and later checkpoints had trained"
        " on 9 to 14 of these lakes; now they are of an iteration that is never"
        " trained. The source pools all of its runs"
        " and reports +0.39 for the z-score and -0.14 for the entropy given the prompt;"
        " here each run has its own correlation, over 20 checkpoints of rising"
        " training: what merely moves with time correlates too. The learning rate falls"
        " to 0 over the most updates that an arm can make (the paper's is constant),"
        " and filtered arms make fewer: they end at a higher rate than the arms of all."
        " Filtered Sokoban makes 481 of 800 and ends at 35 % of the highest rate; the"
        " data of FrozenLake do not say how many prompts were kept.",
    )
