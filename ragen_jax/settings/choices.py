"""The tables of named choices: estimators, filters, aggregations, KL estimates.

Here each name has the facts that settings, checks and --help need. The function behind
it is in the table of the same title in `ragen_jax.learning`, which imports this module.
Formulas, sources and departures: docs/algorithms.md.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Estimator:
    """Facts about an estimator of advantages."""

    meaning: str
    has_critic: bool = False  # a second model, trained to predict returns
    compares: bool = False  # each episode with its group, which then needs two or more
    by_token: bool = False  # the tokens of a row differ in their advantages
    by_turn: bool = False  # so do turns alone, where a row holds several
    reads: frozenset[str] = frozenset()  # the leaves it reads that others ignore
    # Its presets, for leaves that the config sets to None.
    whiten: bool = False
    divide_by_std: bool = False
    kl_kind: str = "k3"  # in the loss: GRPO, arXiv:2402.03300, section 4.1
    kl_in: str = "loss"
    turn_gamma: float = 1.0
    turn_value: str = "first"

    @property
    def presets(self) -> dict[str, Any]:
        """The presets by dotted key."""
        return {
            "advantage.whiten": self.whiten,
            "advantage.divide_by_std": self.divide_by_std,
            "advantage.turn_gamma": self.turn_gamma,
            "advantage.turn_value": self.turn_value,
            "loss.kl_kind": self.kl_kind,
            "loss.kl_in": self.kl_in,
        }


# As in RAGEN, the k1 estimate goes into the reward: a k1 loss has a mean gradient of 0.
_BY_TOKEN: dict[str, Any] = dict(
    by_token=True, whiten=True, kl_kind="k1", kl_in="reward"
)
_GAMMA, _LAM = "advantage.gamma", "advantage.lam"
_OF_TURNS = ("advantage.turn_gamma", "advantage.turn_value")
# Without optimizer.critic_warmup, which learning_checks.py refuses without a critic.
_OF_CRITIC = ("optimizer.critic_lr", "optimizer.critic_schedule", "loss.value_clip")

ESTIMATORS = {
    "ppo": Estimator(
        "generalized advantage estimation along an episode's reply tokens",
        has_critic=True,
        reads=frozenset([_GAMMA, _LAM, *_OF_CRITIC]),
        **_BY_TOKEN,
    ),
    "grpo": Estimator(
        "return against its group's mean, in the group's standard deviations",
        compares=True,
        divide_by_std=True,
    ),
    "dr_grpo": Estimator(
        "return against its group's mean, in units of reward", compares=True
    ),
    "rloo": Estimator("return against the others of its group", compares=True),
    "reinforce_pp": Estimator(
        "discounted reward-to-go of each token", reads=frozenset([_GAMMA]), **_BY_TOKEN
    ),
    "reinforce_pp_baseline": Estimator(
        "return against its group's mean, whitened over the batch",
        compares=True,
        whiten=True,
        kl_kind="k2",
    ),
    "bi_level_gae": Estimator(
        "GAE over turns, then over the tokens of each turn",
        has_critic=True,
        reads=frozenset([_GAMMA, _LAM, *_OF_TURNS, *_OF_CRITIC]),
        turn_gamma=0.95,
        turn_value="last",
        **_BY_TOKEN,
    ),
    "turn_wise_gae": Estimator(
        "GAE over turns, one advantage for all tokens of a turn",
        has_critic=True,
        reads=frozenset([_LAM, *_OF_TURNS, *_OF_CRITIC]),
        turn_gamma=0.95,
        **_BY_TOKEN,
    ),
    "turn_grpo": Estimator(
        "a turn's return-to-go against that turn's in the group",
        compares=True,
        by_turn=True,
        reads=frozenset(["advantage.turn_gamma"]),
        divide_by_std=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Facts about a filter strategy."""

    meaning: str
    reads: frozenset[str] = frozenset()  # the leaves it reads that others ignore

    @property
    def reads_fraction(self) -> bool:
        return "filter.fraction" in self.reads


def _reads(*names: str) -> frozenset[str]:
    """The dotted keys of these `filter` leaves and of those every real filter reads."""
    always = ("metric", "keep_zero", "zero", "loss_scale")
    return frozenset(f"filter.{name}" for name in (*always, *names))


FILTER_STRATEGIES = {
    # It keeps groups of score 0 anyway, so `keep_zero` may be set and is not refused.
    "none": Strategy("every group", frozenset(["filter.keep_zero"])),
    "top_fraction": Strategy(
        "a fraction of the groups, the best by score",
        _reads("scope", "prefer", "fraction", "rounding"),
    ),
    "top_count": Strategy(
        "so many groups, the best by score", _reads("scope", "prefer", "count")
    ),
    "top_p": Strategy(
        "the best groups, until they hold a fraction of the scores' sum",
        _reads("scope", "prefer", "fraction", "margin"),
    ),
    "top_p_softmax": Strategy(
        "the best groups, until they hold a fraction of the scores' softmax",
        _reads("scope", "prefer", "fraction"),
    ),
    "min_p": Strategy(
        "groups whose score is at least a fraction of the best",
        _reads("scope", "prefer", "fraction"),
    ),
    "percentile_range": Strategy(
        "the groups between two ranks by score",
        _reads("scope", "prefer", "low", "high"),
    ),
    "within_group": Strategy(
        "of each group the fraction of members that varies most",
        _reads("fraction", "rounding"),
    ),
}


@dataclasses.dataclass(frozen=True)
class FilterMetric:
    """Facts about a metric by which a filter scores groups."""

    meaning: str
    is_spread: bool = False  # within a group, which then needs two episodes or more


FILTER_METRICS = {
    "return_std": FilterMetric(
        "sample standard deviation of the returns", is_spread=True
    ),
    "return_variance": FilterMetric("sample variance of the returns", is_spread=True),
    "return_mean": FilterMetric("mean of the returns"),
    "return_sum": FilterMetric("sum of the returns"),
    "length": FilterMetric("mean of the episodes' reply tokens"),
    "entropy": FilterMetric("mean of the episodes' mean token entropies"),
    "entropy_std": FilterMetric(
        "sample standard deviation of the episodes' mean token entropies",
        is_spread=True,
    ),
}

AGGREGATIONS = {
    "token_mean": "mean over tokens",
    "sequence_mean_token_mean": "mean over rows of their token means",
    "sequence_mean_token_sum": "mean over rows of their token sums",
    "sequence_mean_token_sum_norm": "those sums over the most reply tokens of a row",
}

SURROGATES = {
    "clip": "PPO: no gradient where the clip holds the ratio",
    "cispo": "log p weighted by the clipped ratio; every token has a gradient",
}
CUT_REPLIES = ("learn", "mask")  # whether the policy's loss has their tokens

KL_KINDS = {
    "k1": "log-ratio; in the reward alone, for as a loss it does nothing on average",
    "k2": "half the square of the log-ratio",
    "k3": "ratio - 1 - log-ratio, never negative",
    "k1+": "k1 with the gradient of k2 (straight-through)",
    "k3+": "k3 with the gradient of k2 (straight-through)",
}

ON_COLLAPSE = ("watch", "warn", "stop", "rollback")
REMEDIES = ("learning_rate", "filter")  # what a rollback changes


@dataclasses.dataclass(frozen=True)
class EarlyStops:
    """Rules that end a run (diagnostics/health.py); a count of 0 turns a rule off."""

    # This many consecutive iterations with an in-group std of the return, with the
    # format penalty if filter.with_penalty, below
    # `spread_share` times its mean over the first `spread_baseline` iterations in which
    # the filter kept a group.
    spread_iterations: int = 0
    spread_share: float = 0.1
    spread_baseline: int = 10
    # This many consecutive validations with a success below `validation_success`.
    validation_times: int = 0
    validation_success: float = 0.01
    # This many consecutive iterations in which the filter kept no group.
    empty_iterations: int = 0


EARLY_STOPS = {
    "none": EarlyStops(),
    # RAGEN's code (2026-04) has 10 for the spread, its paper (arXiv:2604.06268) has 5.
    "ragen": EarlyStops(spread_iterations=10, validation_times=5, empty_iterations=5),
    "ragen_paper": EarlyStops(
        spread_iterations=5, validation_times=5, empty_iterations=5
    ),
}
