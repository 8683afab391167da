"""The tree of settings: one frozen dataclass a section, each leaf beside its limits.

No leaf has a default here: a config file says everything, except what it leaves to
the algorithm (None), which the two tables of presets decide.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any


class UserError(Exception):
    """A mistake that its user can mend: one sentence with the key and the remedy."""


class SettingsError(UserError, ValueError):
    """A setting, or a combination of settings, that cannot be used."""


PER_ALGORITHM = {
    # arXiv:2504.20073. Vanilla StarPO: symmetric clipping and a small KL penalty.
    "starpo": {"filter.strategy": "none", "loss.clip_high": 0.2, "loss.kl": 0.001},
    # StarPO-S: filter prompts by uncertainty, clip higher, no KL term.
    "starpo_s": {
        "filter.strategy": "top_fraction",
        "loss.clip_high": 0.28,
        "loss.kl": 0.0,
    },
}
PER_ESTIMATOR = {
    # RAGEN puts the k1 estimate into the reward: as a loss its mean gradient is 0.
    "ppo": {"advantage.whiten": True, "loss.kl_kind": "k1", "loss.kl_in": "reward"},
    # GRPO, arXiv:2402.03300, section 4.1: k3 in the loss, and no second whitening.
    "grpo": {"advantage.whiten": False, "loss.kl_kind": "k3", "loss.kl_in": "loss"},
}
FILTER_STRATEGIES = ("none", "top_fraction", "top_p")
FILTER_METRICS = ("return_std",)
KL_KINDS = ("k1", "k2", "k3")
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum")


@dataclasses.dataclass(frozen=True)
class Limit:
    """Which values a leaf may take, and how to say so."""

    allows: Callable[[Any], bool]
    remedy: str  # completes "choose ..."


def _leaf(
    allows: Callable[[Any], bool], remedy: str, default: Any = dataclasses.MISSING
) -> Any:
    metadata = {"limit": Limit(allows, remedy)}
    return dataclasses.field(default=default, metadata=metadata)


def _at_least(low: float, default: Any = dataclasses.MISSING) -> Any:
    return _leaf(lambda value: value >= low, f"{low} or more", default)


def _above(low: float) -> Any:
    return _leaf(lambda value: value > low, f"a number above {low}")


def _up_to_one() -> Any:
    return _leaf(lambda value: 0 < value <= 1, "a number above 0 and at most 1")


def _from_zero_to_one() -> Any:
    return _leaf(lambda value: 0 <= value <= 1, "a number from 0 to 1")


def _below_one() -> Any:
    return _leaf(lambda value: 0 <= value < 1, "a number from 0 to below 1")


def _one_of(*names: str) -> Any:
    return _leaf(lambda value: value in names, f"one of {', '.join(names)}")


def _name() -> Any:
    return _leaf(lambda value: value.strip() != "", "a name that is not empty")


def _axis() -> Any:
    return _leaf(
        lambda value: value == -1 or value >= 1,
        "1 or more, or -1 for every device that the other axes leave",
    )


MIX = "mix"  # The `env.name` of several worlds in one batch.


@dataclasses.dataclass(frozen=True)
class WorldSettings:
    """One of several worlds; its limits are rollout's where they are 0."""

    label: str  # its key, by which metrics and messages call it
    name: str = _name()
    prompts: int = _at_least(0, default=0)  # of rollout.prompts; 0 where only evaluated
    turns: int = _at_least(0, default=0)
    actions_per_turn: int = _at_least(0, default=0)
    actions: int = _at_least(0, default=0)
    options: tuple[tuple[str, Any], ...] = ()  # the world's own, sorted by key


@dataclasses.dataclass(frozen=True)
class EnvironmentSettings:
    """The world to play in; the world's own dataclass reads and checks `options`."""

    name: str = _name()
    thinking: bool  # replies begin with <think>, else with <answer>
    options: tuple[tuple[str, Any], ...]  # the world's own settings, sorted by key
    mix: tuple[WorldSettings, ...] = ()  # the worlds of a batch, if `name` is MIX
    evaluate: tuple[WorldSettings, ...] = ()  # worlds to evaluate on; (): those above


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The policy's weights and how they are computed with."""

    path: str = _name()  # "tiny", a folder, a hub id or a GGUF file
    compute_dtype: str = _one_of("auto", "float32", "bfloat16")  # auto: bf16 off CPU
    remat: bool  # recompute each block's activations in the backward pass


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters instead of training every weight."""

    rank: int = _at_least(0)  # 0: no adapters
    alpha: float = _above(0)  # adapters are added times alpha / rank
    targets: str = _name()  # "all", "attention", "mlp" or names such as "query,value"


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Devices along each axis; at most one is -1: every device the others leave."""

    data: int = _axis()
    fsdp: int = _axis()
    tensor: int = _axis()


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """How episodes are sampled in training."""

    prompts: int = _at_least(1)  # P, distinct initial states of one iteration
    group_size: int = _at_least(1)  # N, episodes from each of them
    slots: int = _at_least(0)  # episodes decoded at a time; 0: all of them
    turns: int = _at_least(1)  # K, most turns of an episode
    actions_per_turn: int = _at_least(1)  # A, actions of one reply that count
    actions: int = _at_least(1)  # most actions of an episode
    reply_tokens: int = _at_least(1)  # most tokens sampled in one turn
    history: str = _one_of("full", "window", "single")  # what a reply is sampled from
    window: int = _at_least(1)  # k, most turns of a row; read by "window" alone
    context: int = _at_least(0)  # T; 0: exactly what prompt and turns can need
    temperature: float = _above(0)
    stop_at_answer: bool  # a reply ends at </answer>
    layout: str = _one_of("replicated", "tensor")  # of the weights while sampling
    decode_chunk: int = _at_least(1)  # tokens between looks at the loop's predicate
    buckets: int = _at_least(1)  # lengths of the cache that decoding chooses from

    @property
    def window_turns(self) -> int:
        """Most turns of a row, of which each turn has one; 0: an episode is a row."""
        return {"full": 0, "window": self.window, "single": 1}[self.history]


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """What is added to the world's reward."""

    format_penalty: float = _leaf(  # reward units, on a turn with an invalid reply
        lambda value: value <= 0, "0 or a negative number, for it is added"
    )
    length_bonus: float = _at_least(0)  # on a turn whose thought is neither short nor
    length_low: int = _at_least(0)  # long: from so many tokens
    length_high: int = _at_least(0)  # to so many
    grounding: float = _at_least(0)  # times the share of the landmarks that it names
    hook: str  # path of a Python file with a function turn_rewards(episodes), or ""
    normalize: str = _one_of("none", "mean", "mean_std", "asym_clip")  # the return
    normalize_by: str = _one_of("state", "batch", "environment")  # within these


@dataclasses.dataclass(frozen=True)
class FilterSettings:
    """Which prompts of an iteration are trained on."""

    strategy: str = _one_of(*FILTER_STRATEGIES)
    fraction: float = _up_to_one()  # of prompts (top_fraction) or of scores (top_p)
    metric: str = _one_of(*FILTER_METRICS)
    with_penalty: bool  # the metric sees the format penalty too
    keep_zero: bool  # groups whose metric is 0 may be kept


@dataclasses.dataclass(frozen=True)
class AdvantageSettings:
    """From rewards to advantages."""

    gamma: float = _from_zero_to_one()  # discount from one reply token to the next
    lam: float = _from_zero_to_one()  # GAE's lambda
    whiten: bool  # to mean 0 and standard deviation 1 over the reply tokens
    divide_by_std: bool  # GRPO: divide by the group's standard deviation


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """The terms of the loss."""

    clip_low: float = _below_one()  # the ratio may fall to 1 - clip_low
    clip_high: float = _at_least(0)  # the ratio may rise to 1 + clip_high
    value_clip: float = _at_least(0)  # how far a value may move; 0: anywhere
    entropy: float = _at_least(0)  # coefficient of the entropy bonus
    kl: float = _at_least(0)  # coefficient of the KL term to the reference
    kl_kind: str = _one_of(*KL_KINDS)  # estimator
    kl_in: str = _one_of("loss", "reward")
    aggregation: str = _one_of(*AGGREGATIONS)  # a sequence is a row
    logprob_gap_limit: float = _above(0)  # nats, mean |sampler - update|


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """Adam for actor and critic, and how rows become updates."""

    actor_lr: float = _at_least(0)
    critic_lr: float = _at_least(0)
    beta1: float = _below_one()
    beta2: float = _below_one()
    weight_decay: float = _at_least(0)
    warmup: int = _at_least(0)  # real updates
    schedule: str = _one_of("constant", "linear", "cosine")
    clip_norm: float = _above(0)  # global norm of the gradient
    minibatch: int = _at_least(1)  # E, rows of one update: episodes, or turns
    microbatch: int = _at_least(1)  # rows of one gradient accumulation step
    epochs: int = _at_least(1)  # passes over the kept rows
    critic_warmup: int = _at_least(0)  # iterations in which only the critic learns


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Success is measured on validation levels, at the end of a run on test levels."""

    prompts: int = _at_least(1)  # validation levels
    rollouts: int = _at_least(1)  # episodes of each
    temperature: float = _at_least(0)  # 0: the likeliest token
    test_prompts: int = _at_least(1)
    test_rollouts: int = _at_least(1)
    slots: int = _at_least(0)  # episodes decoded at a time; 0: all of them


@dataclasses.dataclass(frozen=True)
class EverySettings:
    """How often, in iterations; 0: never."""

    log: int = _at_least(0)
    evaluate: int = _at_least(0)
    checkpoint: int = _at_least(0)


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """Which checkpoints stay on disk."""

    keep_last: int = _at_least(1)
    keep_best: int = _at_least(0)  # by success on validation levels


@dataclasses.dataclass(frozen=True)
class SafetySettings:
    """When a run stops by itself, with a saved state; 0: never."""

    max_bad_updates: int = _at_least(0)  # in a row with a gradient that is not finite
    max_empty_updates: int = _at_least(0)  # in a row in which no prompt was kept


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides a run."""

    seed: int = _leaf(lambda value: 0 <= value < 2**32, "0 to 2**32 - 1")
    iterations: int = _at_least(1)
    algorithm: str = _one_of(*PER_ALGORITHM)
    estimator: str = _one_of(*PER_ESTIMATOR)
    deterministic: bool  # the same numbers on every run on GPU too; slower
    env: EnvironmentSettings
    model: ModelSettings
    lora: LoraSettings
    mesh: MeshSettings
    rollout: RolloutSettings
    reward: RewardSettings
    filter: FilterSettings
    advantage: AdvantageSettings
    loss: LossSettings
    optimizer: OptimizerSettings
    evaluation: EvaluationSettings
    every: EverySettings
    checkpoint: CheckpointSettings
    safety: SafetySettings

    def worlds(self) -> tuple[WorldSettings, ...]:
        """The worlds of a batch, one or several, with all limits filled in."""
        env = self.env
        alone = WorldSettings(
            label=Path(env.name).stem,
            name=env.name,
            prompts=self.rollout.prompts,
            options=env.options,
        )
        return tuple(map(self._with_limits, env.mix or (alone,)))

    def most_turns(self) -> int:
        """K, most turns of an episode of any world of a batch."""
        return max(world.turns for world in self.worlds())

    def evaluated_worlds(self) -> tuple[WorldSettings, ...]:
        """The worlds that validation and test play, with all limits filled in."""
        return tuple(map(self._with_limits, self.env.evaluate)) or self.worlds()

    def alone(self, world: WorldSettings) -> "Settings":
        """These settings with one world only, such as one of `evaluated_worlds`."""
        limits = ("turns", "actions_per_turn", "actions")
        own = {name: getattr(world, name) for name in limits}
        env = EnvironmentSettings(world.name, self.env.thinking, world.options)
        rollout = dataclasses.replace(self.rollout, **own)
        return dataclasses.replace(self, env=env, rollout=rollout)

    def _with_limits(self, world: WorldSettings) -> WorldSettings:
        rollout = self.rollout
        actions = world.actions or rollout.actions
        each = rollout.actions_per_turn
        if world.actions:
            each = min(each, actions)
        return dataclasses.replace(
            world,
            turns=world.turns or rollout.turns,
            actions_per_turn=world.actions_per_turn or each,
            actions=actions,
        )
