"""The tree of settings: one frozen dataclass per section, each leaf with its limits.

Leaves have no defaults here: the config file sets every one, or sets it to None, and
then PER_ALGORITHM or PER_ESTIMATOR decides. The exceptions are leaves that were added
later: their default is the behavior before they existed, so that older saved runs can
still be read.
"""

import dataclasses
from pathlib import Path

from ragen_jax.settings import limits
from ragen_jax.settings.choices import (
    AGGREGATIONS,
    CUT_REPLIES,
    EARLY_STOPS,
    ESTIMATORS,
    FILTER_METRICS,
    FILTER_STRATEGIES,
    KL_KINDS,
    ON_COLLAPSE,
    REMEDIES,
    SURROGATES,
)
from ragen_jax.settings.environment import LIMITS, EnvironmentSettings, TaskSettings
from ragen_jax.utils.user_modules import is_path

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
PER_ESTIMATOR = {name: facts.presets for name, facts in ESTIMATORS.items()}


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The policy's weights, and the dtype and kernels of the forward pass."""

    path: str = limits.name()  # "tiny", a folder, a hub id or a GGUF file
    # "auto" is float32 on a CPU and bfloat16 elsewhere.
    compute_dtype: str = limits.one_of("auto", "float32", "bfloat16")
    remat: bool  # recompute each block's activations in the backward pass
    # The attention kernel for whole rows: in the update, and in prefilling prompts.
    attention: str = limits.one_of("auto", "xla", "cudnn", "splash", default="auto")


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters instead of training every weight."""

    rank: int = limits.at_least(0)  # 0: no adapters
    alpha: float = limits.above(0)  # adapters are added times alpha / rank
    targets: str = limits.name()  # "all", "attention", "mlp", or e.g. "query,value"


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Devices along each mesh axis; one may be -1: all devices the others leave."""

    data: int = limits.axis()
    fsdp: int = limits.axis()
    tensor: int = limits.axis()


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """How episodes are sampled in training."""

    prompts: int = limits.at_least(1)  # P, initial states of one iteration
    group_size: int = limits.at_least(1)  # N, episodes from each of them
    slots: int = limits.at_least(0)  # episodes decoded at a time; 0: by the backend
    turns: int = limits.between(1, limits.MOST_TURNS)  # K, most turns of an episode
    actions_per_turn: int = limits.between(1, limits.MOST_EACH)  # A, read of a reply
    actions: int = limits.between(1, limits.MOST_ACTIONS)  # most actions of an episode
    reply_tokens: int = limits.at_least(1)  # most tokens sampled in one turn
    # What a reply is conditioned on: the episode so far, its last turns, or this turn.
    history: str = limits.one_of("full", "window", "single")
    window: int = limits.at_least(1)  # k, most turns in a row; only for "window"
    # T, tokens of a row; 0: as many as the prompt and all turns can need.
    context: int = limits.at_least(0)
    temperature: float = limits.at_least(limits.LEAST_TEMPERATURE)
    stop_at_answer: bool  # a reply ends at </answer>
    layout: str = limits.one_of("replicated", "tensor")  # of the weights while sampling
    # In these two, 0 is chosen for the backend (parallel/backend_choices.py).
    decode_chunk: int = limits.between(0, 1024)  # steps between checks for the end
    buckets: int = limits.between(0, 64)  # how many cache lengths decoding can pick
    decode_attention: str = limits.one_of("auto", "xla", "cudnn")  # kernel
    cuda_graph: bool  # run the whole rollout as one CUDA graph; NVIDIA GPUs only
    # The sampler's weights; a lower precision than the update's makes it off-policy.
    decode_weights: str = limits.one_of("same", "int8", "float8", default="same")

    @property
    def window_turns(self) -> int:
        """Most turns in a row, if each turn has a row; 0: a row is a whole episode."""
        return {"full": 0, "window": self.window, "single": 1}[self.history]


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """What is added to the environment's reward, and how returns are normalized."""

    # Added on each turn with an invalid reply.
    format_penalty: float = limits.leaf(
        lambda value: value <= 0, "0 or a negative number, for it is added"
    )
    # The two bonuses are paid only for valid replies.
    length_bonus: float = limits.at_least(0)  # if before the one that ends <answer>
    length_low: int = limits.at_least(0)  # there are from this many tokens
    length_high: int = limits.at_least(0)  # to this many
    grounding: float = limits.at_least(0)  # times the landmarks' share named correctly
    hook: str  # path of a Python file with a function turn_rewards(episodes), or ""
    # How an episode's return is normalized, and over which set of episodes: its group
    # ("state"), the batch, or those of its environment.
    normalize: str = limits.one_of("none", "mean", "mean_std", "asym_clip")
    normalize_by: str = limits.one_of("state", "batch", "environment")
    # "episode" divides the grounding bonus by the turns played, so that longer
    # episodes do not earn more.
    grounding_by: str = limits.one_of("turn", "episode", default="turn")


@dataclasses.dataclass(frozen=True)
class FilterSettings:
    """Which groups of an iteration are trained on (learning/filters.py)."""

    strategy: str = limits.one_of(*FILTER_STRATEGIES)
    # A share of the groups, of the scores' sum, of the best score, or of a group's
    # members: it depends on the strategy (choices.py).
    fraction: float = limits.up_to_one()
    fraction_end: float = limits.or_constant(  # reached linearly by the last iteration
        lambda value: 0 < value <= 1, "a number above 0 and at most 1"
    )
    count: int = limits.at_least(1)  # groups to keep; only for top_count
    # Relative ranks, from 0, the best group, to 1; only for percentile_range.
    low: float = limits.from_zero_to_one()
    high: float = limits.from_zero_to_one()
    prefer: str = limits.one_of("largest", "smallest")  # which scores are the best
    metric: str = limits.one_of(*FILTER_METRICS)  # a group's score
    # Whether the returns behind the metric, the recorded in-group std and the rules
    # about it include the format penalty.
    with_penalty: bool
    keep_zero: bool  # groups whose metric is 0 may be kept
    zero: float = limits.at_least(0)  # a metric of lower absolute value counts as 0
    # In the metric's unit: top_p is content with this much less than its share.
    margin: float = limits.at_least(0)
    rounding: str = limits.one_of("nearest", "down")  # of fraction * groups or members
    scope: str = limits.one_of("environment", "batch")  # within which groups are ranked
    loss_scale: str = limits.one_of("none", "linear", "sqrt")  # by the kept share
    reweight: bool  # advantages times the group's std over the largest of those kept


@dataclasses.dataclass(frozen=True)
class AdvantageSettings:
    """How rewards become advantages (learning/estimators.py, learning/rescale.py)."""

    gamma: float = limits.from_zero_to_one()  # discount from one token to the next
    lam: float = limits.from_zero_to_one()  # GAE's lambda
    whiten: bool  # to mean 0 and standard deviation 1 over the reply tokens
    divide_by_std: bool  # GRPO: divide by the group's standard deviation
    turn_gamma: float = limits.from_zero_to_one()  # discount from one turn to the next
    turn_value: str = limits.one_of("first", "last")  # token whose value is the turn's
    length_weight: bool  # divide by the row's reply tokens over the mean row's
    zero_task: bool  # all advantages are 0: only entropy bonus and KL term act


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """The terms of the loss (learning/losses.py)."""

    clip_low: float = limits.below_one()  # the ratio is clipped at 1 - clip_low
    clip_high: float = limits.at_least(0)  # the ratio is clipped at 1 + clip_high
    # c of dual-clip PPO: where A < 0 the loss is at most -c A; 0: no bound.
    dual_clip: float = limits.leaf(
        lambda value: value == 0 or value > 1, "a number above 1, or 0 for no bound"
    )
    # The probability ratio of each token, or of its whole row (GSPO).
    ratio: str = limits.one_of("token", "sequence")
    # Truncation of the importance weights update / sampler; 0: no such weights.
    sampler_correction: float = limits.at_least(0)
    value_clip: float = limits.at_least(0)  # most that a value may move; 0: no bound
    entropy: float = limits.at_least(0)  # coefficient of the entropy bonus
    # Reached linearly by the last iteration, as kl_end.
    entropy_end: float = limits.or_constant(lambda value: value >= 0, "0 or more")
    entropy_on: str = limits.one_of("reply", "thought", "answer")  # which tokens
    kl: float = limits.at_least(0)  # coefficient of the KL term to the reference
    kl_end: float = limits.or_constant(lambda value: value >= 0, "0 or more")
    kl_kind: str = limits.one_of(*KL_KINDS)  # its estimator
    kl_in: str = limits.one_of("loss", "reward")
    aggregation: str = limits.one_of(*AGGREGATIONS)  # a "sequence" is a row
    # Nats, mean |log p of the sampler - log p of the update|; more ends the run.
    logprob_gap_limit: float = limits.above(0)
    surrogate: str = limits.one_of(*SURROGATES, default="clip")  # of the clipped ratio
    # Whether the policy learns from replies that rollout.reply_tokens cut off.
    cut_replies: str = limits.one_of(*CUT_REPLIES, default="learn")


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """AdamW for actor and critic, and how rows are split into gradient steps."""

    actor_lr: float = limits.at_least(0)
    critic_lr: float = limits.at_least(0)
    beta1: float = limits.below_one()
    beta2: float = limits.below_one()
    weight_decay: float = limits.at_least(0)
    warmup: int = limits.at_least(0)  # optimizer steps until the highest learning rate
    schedule: str = limits.one_of(*SCHEDULES)
    critic_schedule: str = limits.one_of("same", *SCHEDULES)  # same: as the actor's
    clip_norm: float = limits.above(0)  # global norm to which gradients are clipped
    minibatch: int = limits.at_least(1)  # E, rows of one optimizer step
    microbatch: int = limits.at_least(1)  # rows of one gradient accumulation step
    epochs: int = limits.between(1, limits.MOST_EACH)  # passes over the kept rows
    # How often the program `update` runs on one batch of episodes; 1: on-policy.
    reuse: int = limits.between(1, limits.MOST_EACH)
    critic_warmup: int = limits.at_least(0)  # iterations that train the critic alone
    # Steps until the learning rate is 0, of the actor its iterations' share of them; 0:
    # as many as the run is expected to make.
    schedule_updates: int = limits.at_least(0, default=0)
    epsilon: float = limits.above(0, default=1e-8)  # added to the second moment's root


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """How success is measured: on validation levels, and at the end on test levels."""

    prompts: int = limits.at_least(1)  # validation levels
    rollouts: int = limits.at_least(1)  # episodes of each
    temperature: float = limits.temperature_or_zero()  # 0: greedy
    test_prompts: int = limits.at_least(1)
    test_rollouts: int = limits.at_least(1)
    slots: int = limits.at_least(0)  # most episodes decoded at a time; 0: all


@dataclasses.dataclass(frozen=True)
class EverySettings:
    """How often, in iterations; 0: never (checkpoints: the last and improvements)."""

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
    """When a run ends early; it saves its state first, unless it has stalled."""

    # Consecutive iterations, however often each batch is reused; 0: no limit.
    max_bad_updates: int = limits.at_least(0)  # with a gradient that is not finite
    max_empty_updates: int = limits.at_least(0)  # in which the filter kept no group
    # End the process when an iteration takes far longer than those before it
    # (interrupts.stalled_after), or its start or a batch of the test above an hour,
    # instead of only printing its stacks.
    end_stalled: bool = False


@dataclasses.dataclass(frozen=True)
class HealthSettings:
    """How a run is watched for collapse, and what happens on one.

    The defaults are for settings that were saved before this section existed.
    """

    indicators: bool = True  # measure repetition and spread in each iteration
    on_collapse: str = limits.one_of(*ON_COLLAPSE, default="warn")
    remedy: str = limits.one_of(*REMEDIES, default="learning_rate")
    early_stops: str = limits.one_of(*EARLY_STOPS, default="none")
    record_every: int = limits.at_least(0, default=10)  # iterations; 0: never
    record_episodes: int = limits.at_least(1, default=4)  # episodes each time


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a run."""

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
        """Whether the estimator needs a value model."""
        return ESTIMATORS[self.estimator].has_critic

    @property
    def has_reference(self) -> bool:
        """Whether a KL term needs the frozen reference."""
        return self.loss.kl > 0 or self.loss.kl_end > 0

    def tasks(self) -> tuple[TaskSettings, ...]:
        """The environments that training plays, with limits filled in."""
        env = self.env
        alone = TaskSettings(
            label=Path(env.name).stem,
            name=env.name,
            prompts=self.rollout.prompts,
            options=env.options,
            instruction=env.instruction,
            note=env.note,
        )
        return tuple(map(self._with_limits, env.mix or (alone,)))

    def most_turns(self) -> int:
        """K, the most turns of an episode of any environment of a batch."""
        return max(task.turns for task in self.tasks())

    def evaluated_tasks(self) -> tuple[TaskSettings, ...]:
        """The environments that validation and test play, with limits filled in."""
        return tuple(map(self._with_limits, self.env.evaluate)) or self.tasks()

    def files(self) -> tuple[str, ...]:
        """The user's Python files, environments and hook, as the config names them."""
        names = [task.name for task in (*self.tasks(), *self.evaluated_tasks())]
        names = [*filter(is_path, names), *filter(None, [self.reward.hook])]
        return tuple(dict.fromkeys(names))

    def alone(self, task: TaskSettings) -> "Settings":
        """These settings reduced to one environment, such as one to be evaluated."""
        own = {name: getattr(task, name) for name in LIMITS}
        env = EnvironmentSettings(
            name=task.name,
            thinking=self.env.thinking,
            options=task.options,
            instruction=task.instruction,
            note=task.note,
        )
        rollout = dataclasses.replace(self.rollout, **own)
        return dataclasses.replace(self, env=env, rollout=rollout)

    def _with_limits(self, task: TaskSettings) -> TaskSettings:
        """The task with its limits of 0 replaced by those of `rollout`.

        A task with fewer actions an episode than `rollout.actions_per_turn` plays at
        most that many in a turn.
        """
        rollout = self.rollout
        actions = task.actions or rollout.actions
        most_per_turn = rollout.actions_per_turn
        if task.actions:
            most_per_turn = min(most_per_turn, actions)
        return dataclasses.replace(
            task,
            turns=task.turns or rollout.turns,
            actions_per_turn=task.actions_per_turn or most_per_turn,
            actions=actions,
        )
