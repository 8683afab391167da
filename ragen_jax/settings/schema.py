"""The tree of settings: one frozen dataclass a section, each leaf beside its limits.

A leaf has no default here: a config file says everything, except what it leaves to
the algorithm (None), which the two tables of presets decide. A leaf that is younger
than saved runs has one, namely what was done before it, so that they can be read.
"""

import dataclasses
from pathlib import Path
from typing import Any

from ragen_jax.settings import limits
from ragen_jax.settings.choices import (
    AGGREGATIONS,
    EARLY_STOPS,
    ESTIMATORS,
    FILTER_METRICS,
    FILTER_STRATEGIES,
    KL_KINDS,
    ON_COLLAPSE,
    REMEDIES,
)

SCHEDULES = ("constant", "linear", "cosine")
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
# Of an episode: more is a slip of the hand, which would end in a hang.
_MOST_TURNS, _MOST_ACTIONS, _MOST_EACH = 10_000, 100_000, 1_000
PER_ESTIMATOR = {name: facts.presets for name, facts in ESTIMATORS.items()}


MIX = "mix"  # The `env.name` of several environments in one batch.
LIMITS = ("turns", "actions_per_turn", "actions")  # that an environment may have


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """One of several environments; its limits are rollout's where they are 0."""

    label: str  # its key, by which metrics and messages call it
    name: str = limits.name()
    # Of rollout.prompts; 0 where only evaluated.
    prompts: int = limits.at_least(0, default=0)
    turns: int = limits.between(0, _MOST_TURNS, default=0)
    actions_per_turn: int = limits.between(0, _MOST_EACH, default=0)
    actions: int = limits.between(0, _MOST_ACTIONS, default=0)
    options: tuple[tuple[str, Any], ...] = ()  # the environment's own, sorted by key


@dataclasses.dataclass(frozen=True)
class EnvironmentSettings:
    """The environment to play in, whose own dataclass reads and checks `options`."""

    name: str = limits.name()
    thinking: bool  # replies begin with <think>, else with <answer>
    options: tuple[tuple[str, Any], ...]  # the environment's own, sorted by key
    mix: tuple[TaskSettings, ...] = ()  # the environments of a batch, if `name` is MIX
    evaluate: tuple[TaskSettings, ...] = ()  # to evaluate on; (): those above


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The policy's weights and how they are computed with."""

    path: str = limits.name()  # "tiny", a folder, a hub id or a GGUF file
    # auto: bfloat16, but float32 on a CPU
    compute_dtype: str = limits.one_of("auto", "float32", "bfloat16")
    remat: bool  # recompute each block's activations in the backward pass
    # The kernel of whole rows, in the update and of prompts.
    attention: str = limits.one_of("auto", "xla", "cudnn", default="auto")


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters instead of training every weight."""

    rank: int = limits.at_least(0)  # 0: no adapters
    alpha: float = limits.above(0)  # adapters are added times alpha / rank
    targets: str = limits.name()  # "all", "attention", "mlp" or as "query,value"


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Devices along each axis; at most one is -1: every device the others leave."""

    data: int = limits.axis()
    fsdp: int = limits.axis()
    tensor: int = limits.axis()


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """How episodes are sampled in training."""

    prompts: int = limits.at_least(1)  # P, distinct initial states of one iteration
    group_size: int = limits.at_least(1)  # N, episodes from each of them
    slots: int = limits.at_least(0)  # episodes decoded at a time; 0: as suits CPU, GPU
    turns: int = limits.between(1, _MOST_TURNS)  # K, most turns of an episode
    # A, actions of one reply that count
    actions_per_turn: int = limits.between(1, _MOST_EACH)
    actions: int = limits.between(1, _MOST_ACTIONS)  # most actions of an episode
    reply_tokens: int = limits.at_least(1)  # most tokens sampled in one turn
    # What a reply is sampled from.
    history: str = limits.one_of("full", "window", "single")
    window: int = limits.at_least(1)  # k, most turns of a row; read by "window" alone
    context: int = limits.at_least(0)  # T; 0: exactly what prompt and turns can need
    temperature: float = limits.above(0)
    stop_at_answer: bool  # a reply ends at </answer>
    layout: str = limits.one_of("replicated", "tensor")  # of the weights while sampling
    # Of these two, 0: what suits the backend.
    decode_chunk: int = limits.at_least(0)  # tokens between looks at the predicate
    buckets: int = limits.between(0, 64)  # lengths of the cache to choose from
    # The kernel of decoding.
    decode_attention: str = limits.one_of("auto", "xla", "cudnn")
    cuda_graph: bool  # one CUDA graph holds the whole rollout; on NVIDIA GPUs
    # What is sampled with; less than the update's precision makes it off-policy.
    decode_weights: str = limits.one_of("same", "int8", "float8", default="same")

    @property
    def window_turns(self) -> int:
        """Most turns of a row, of which each turn has one; 0: an episode is a row."""
        return {"full": 0, "window": self.window, "single": 1}[self.history]


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """What is added to the environment's reward."""

    # Reward units, on a turn with an invalid reply.
    format_penalty: float = limits.leaf(
        lambda value: value <= 0, "0 or a negative number, for it is added"
    )
    length_bonus: float = limits.at_least(0)  # on a turn whose thought has a length
    length_low: int = limits.at_least(0)  # from so many tokens
    length_high: int = limits.at_least(0)  # to so many
    grounding: float = limits.at_least(0)  # times the share of landmarks that it names
    hook: str  # path of a Python file with a function turn_rewards(episodes), or ""
    # The return, within these sets.
    normalize: str = limits.one_of("none", "mean", "mean_std", "asym_clip")
    normalize_by: str = limits.one_of("state", "batch", "environment")
    # Grounding; episode: divided by the turns played, so that more do not earn more.
    grounding_by: str = limits.one_of("turn", "episode", default="turn")


@dataclasses.dataclass(frozen=True)
class FilterSettings:
    """Which prompts of an iteration are trained on."""

    strategy: str = limits.one_of(*FILTER_STRATEGIES)
    fraction: float = limits.up_to_one()  # of prompts, scores or members, by strategy
    fraction_end: float = limits.or_constant(  # at the last iteration, linearly
        lambda value: 0 < value <= 1, "a number above 0 and at most 1"
    )
    count: int = limits.at_least(1)  # groups; read by top_count
    low: float = limits.from_zero_to_one()  # ranks from the best, 0, to the last, 1;
    high: float = limits.from_zero_to_one()  # read by percentile_range
    prefer: str = limits.one_of("largest", "smallest")  # which scores are the best
    metric: str = limits.one_of(*FILTER_METRICS)
    with_penalty: bool  # the metric sees the format penalty too
    keep_zero: bool  # groups whose metric is 0 may be kept
    zero: float = limits.at_least(0)  # in the metric's unit: a lower one counts as 0
    margin: float = limits.at_least(0)  # in the metric's unit: top_p may miss so much
    rounding: str = limits.one_of("nearest", "down")  # of what a fraction means
    scope: str = limits.one_of("environment", "batch")  # within which groups are ranked
    loss_scale: str = limits.one_of("none", "linear", "sqrt")  # by the kept share
    reweight: bool  # advantages times the group's std over the largest


@dataclasses.dataclass(frozen=True)
class AdvantageSettings:
    """From rewards to advantages."""

    gamma: float = limits.from_zero_to_one()  # discount from a token to the next
    lam: float = limits.from_zero_to_one()  # GAE's lambda
    whiten: bool  # to mean 0 and standard deviation 1 over the reply tokens
    divide_by_std: bool  # GRPO: divide by the group's standard deviation
    turn_gamma: float = limits.from_zero_to_one()  # discount from one turn to the next
    turn_value: str = limits.one_of("first", "last")  # token whose value is the turn's
    length_weight: bool  # divided by the row's reply tokens over their mean
    zero_task: bool  # all advantages 0: only entropy bonus and KL act


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """The terms of the loss."""

    clip_low: float = limits.below_one()  # the ratio may fall to 1 - clip_low
    clip_high: float = limits.at_least(0)  # the ratio may rise to 1 + clip_high
    # c: a loss of A < 0 is at most -c A; 0: not bounded.
    dual_clip: float = limits.leaf(
        lambda value: value == 0 or value > 1, "a number above 1, or 0 for no bound"
    )
    ratio: str = limits.one_of("token", "sequence")  # of probabilities; or of a row's
    sampler_correction: float = limits.at_least(0)  # bound of update / sampler weights
    value_clip: float = limits.at_least(0)  # how far a value may move; 0: anywhere
    entropy: float = limits.at_least(0)  # coefficient of the entropy bonus
    entropy_end: float = limits.or_constant(lambda value: value >= 0, "0 or more")
    # Tokens with the bonus.
    entropy_on: str = limits.one_of("reply", "thought", "answer")
    kl: float = limits.at_least(0)  # coefficient of the KL term to the reference
    kl_end: float = limits.or_constant(lambda value: value >= 0, "0 or more")
    kl_kind: str = limits.one_of(*KL_KINDS)  # estimator
    kl_in: str = limits.one_of("loss", "reward")
    aggregation: str = limits.one_of(*AGGREGATIONS)  # a sequence is a row
    logprob_gap_limit: float = limits.above(0)  # nats, mean |sampler - update|


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """Adam for actor and critic, and how rows become updates."""

    actor_lr: float = limits.at_least(0)
    critic_lr: float = limits.at_least(0)
    beta1: float = limits.below_one()
    beta2: float = limits.below_one()
    weight_decay: float = limits.at_least(0)
    warmup: int = limits.at_least(0)  # real updates
    schedule: str = limits.one_of(*SCHEDULES)
    critic_schedule: str = limits.one_of("same", *SCHEDULES)  # same: as the actor's
    clip_norm: float = limits.above(0)  # global norm of the gradient
    minibatch: int = limits.at_least(1)  # E, rows of one update: episodes, or turns
    microbatch: int = limits.at_least(1)  # rows of one gradient accumulation step
    epochs: int = limits.at_least(1)  # passes over the kept rows
    reuse: int = limits.at_least(1)  # k, whole updates from one batch of episodes
    critic_warmup: int = limits.at_least(0)  # iterations of the critic alone
    schedule_updates: int = limits.at_least(0, default=0)  # 0: as many as are expected
    epsilon: float = limits.above(0, default=1e-8)  # beside the second moment's root


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Success is measured on validation levels, at the end of a run on test levels."""

    prompts: int = limits.at_least(1)  # validation levels
    rollouts: int = limits.at_least(1)  # episodes of each
    temperature: float = limits.at_least(0)  # 0: the likeliest token
    test_prompts: int = limits.at_least(1)
    test_rollouts: int = limits.at_least(1)
    slots: int = limits.at_least(0)  # episodes decoded at a time, at most; 0: all


@dataclasses.dataclass(frozen=True)
class EverySettings:
    """How often, in iterations; 0: never."""

    log: int = limits.at_least(0)
    evaluate: int = limits.at_least(0)
    checkpoint: int = limits.at_least(0)


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """Which checkpoints stay on disk."""

    keep_last: int = limits.at_least(1)
    keep_best: int = limits.at_least(0)  # by success on validation levels


@dataclasses.dataclass(frozen=True)
class SafetySettings:
    """When a run ends by itself; with a saved state, but where it stands still."""

    # Iterations in a row, 0: any number, however often each batch of episodes is used:
    max_bad_updates: int = limits.at_least(0)  # with a gradient that is not finite
    max_empty_updates: int = limits.at_least(0)  # in which no prompt was kept
    end_stalled: bool = False  # once an iteration takes ten times the longest before it


@dataclasses.dataclass(frozen=True)
class HealthSettings:
    """What is watched for a collapse, and what happens then.

    Settings saved before there was this section have its defaults.
    """

    indicators: bool = True  # of repetition and spread, each iteration
    on_collapse: str = limits.one_of(*ON_COLLAPSE, default="warn")
    remedy: str = limits.one_of(*REMEDIES, default="learning_rate")
    early_stops: str = limits.one_of(*EARLY_STOPS, default="none")
    record_every: int = limits.at_least(0, default=10)  # iterations; 0: never
    record_episodes: int = limits.at_least(1, default=4)  # each time


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides a run."""

    seed: int = limits.leaf(lambda value: 0 <= value < 2**32, "0 to 2**32 - 1")
    iterations: int = limits.at_least(1)
    algorithm: str = limits.one_of(*PER_ALGORITHM)
    estimator: str = limits.one_of(*ESTIMATORS)
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
    health: HealthSettings = HealthSettings()

    @property
    def has_critic(self) -> bool:
        """Whether the estimator needs a second model, of values."""
        return ESTIMATORS[self.estimator].has_critic

    @property
    def has_reference(self) -> bool:
        """Whether a KL term needs the frozen reference."""
        return self.loss.kl > 0 or self.loss.kl_end > 0

    def tasks(self) -> tuple[TaskSettings, ...]:
        """The environments of a batch, one or several, with all limits filled in."""
        env = self.env
        alone = TaskSettings(
            label=Path(env.name).stem,
            name=env.name,
            prompts=self.rollout.prompts,
            options=env.options,
        )
        return tuple(map(self._with_limits, env.mix or (alone,)))

    def most_turns(self) -> int:
        """K, most turns of an episode of any environment of a batch."""
        return max(task.turns for task in self.tasks())

    def evaluated_tasks(self) -> tuple[TaskSettings, ...]:
        """The environments that validation and test play, with all limits filled in."""
        return tuple(map(self._with_limits, self.env.evaluate)) or self.tasks()

    def files(self) -> tuple[str, ...]:
        """The Python files that are named, as they are written: code of the user's."""
        names = [task.name for task in (*self.tasks(), *self.evaluated_tasks())]
        names = [name for name in names if name.endswith(".py") or "/" in name]
        return tuple(dict.fromkeys([*names, *filter(None, [self.reward.hook])]))

    def alone(self, task: TaskSettings) -> "Settings":
        """These settings with one environment only, as one of `evaluated_tasks`."""
        own = {name: getattr(task, name) for name in LIMITS}
        env = EnvironmentSettings(task.name, self.env.thinking, task.options)
        rollout = dataclasses.replace(self.rollout, **own)
        return dataclasses.replace(self, env=env, rollout=rollout)

    def _with_limits(self, task: TaskSettings) -> TaskSettings:
        rollout = self.rollout
        actions = task.actions or rollout.actions
        each = rollout.actions_per_turn
        if task.actions:
            each = min(each, actions)
        return dataclasses.replace(
            task,
            turns=task.turns or rollout.turns,
            actions_per_turn=task.actions_per_turn or each,
            actions=actions,
        )
