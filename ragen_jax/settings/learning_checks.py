"""Checks of filter, estimator and loss settings that depend on one another.

Called by checks.py. Each raises SettingsError with one sentence: the keys, the numbers,
and a remedy computed from these numbers.
"""

from ragen_jax.errors import SettingsError
from ragen_jax.settings.choices import (
    ESTIMATORS,
    FILTER_METRICS,
    FILTER_STRATEGIES,
)
from ragen_jax.settings.schema import Settings
from ragen_jax.settings.update_counts import (
    actor_share,
    least_schedule,
    updates_expected,
)


def check_learning(settings: Settings) -> None:
    """Raises SettingsError for the first combination that cannot be used."""
    _check_filter(settings)
    _check_estimator(settings)
    _check_schedule(settings)
    _check_loss(settings)


def _check_filter(settings: Settings) -> None:
    chosen, rollout = settings.filter, settings.rollout
    if chosen.strategy != "none" and rollout.group_size == 1:
        if FILTER_METRICS[chosen.metric].is_spread or chosen.strategy == "within_group":
            raise SettingsError(
                f"rollout.group_size = 1 has no spread for filter.metric ="
                f" {chosen.metric!r}: raise rollout.group_size to 2 or more or set"
                " filter.strategy to 'none'"
            )
    if chosen.reweight and rollout.group_size == 1:
        raise SettingsError(
            "rollout.group_size = 1 has no standard deviation for filter.reweight ="
            " True: raise rollout.group_size to 2 or more or set it to False"
        )
    if chosen.strategy == "percentile_range" and chosen.low >= chosen.high:
        raise SettingsError(
            f"filter.low = {chosen.low:g} is not below filter.high = {chosen.high:g},"
            " so no rank lies between them: swap them or raise filter.high"
        )
    if chosen.strategy == "top_count":
        _check_count(settings)
    if chosen.strategy == "within_group" and chosen.fraction * rollout.group_size < 1.5:
        raise SettingsError(
            f"filter.fraction = {chosen.fraction:g} of rollout.group_size ="
            f" {rollout.group_size} members leaves fewer than 2, which have no"
            f" variance: raise filter.fraction to {2 / rollout.group_size:g} or more"
        )
    # within_group keeps a static number of members, so its fraction cannot change.
    reads_fraction = FILTER_STRATEGIES[chosen.strategy].reads_fraction
    can_move = reads_fraction and chosen.strategy != "within_group"
    if chosen.fraction_end != -1 and not can_move:
        raise SettingsError(
            f"filter.fraction_end = {chosen.fraction_end:g} does nothing with"
            f" filter.strategy = {chosen.strategy!r}: set it to -1 or choose a strategy"
            " whose share of groups is filter.fraction, such as 'top_fraction'"
        )


def _check_count(settings: Settings) -> None:
    count, prompts = settings.filter.count, settings.rollout.prompts
    if count > prompts:
        raise SettingsError(
            f"filter.count = {count} is more than rollout.prompts = {prompts}: lower"
            " it, or set filter.strategy to 'none'"
        )
    least = min(settings.tasks(), key=lambda task: task.prompts)
    if settings.filter.scope == "environment" and count > least.prompts:
        raise SettingsError(
            f"filter.count = {count} is more than env.mix.{least.label}.prompts ="
            f" {least.prompts}, though filter.scope = 'environment' keeps so many of"
            f" each environment: lower filter.count to {least.prompts} or set"
            " filter.scope to 'batch'"
        )


def _check_estimator(settings: Settings) -> None:
    optimizer = settings.optimizer
    name, facts = settings.estimator, ESTIMATORS[settings.estimator]
    if facts.compares and settings.rollout.group_size == 1:
        raise SettingsError(
            f"rollout.group_size = 1 gives estimator = {name!r} nothing to compare an"
            " episode with: raise rollout.group_size to 2 or more or set estimator"
            " to 'ppo'"
        )
    if optimizer.critic_warmup and not facts.has_critic:
        raise SettingsError(
            f"optimizer.critic_warmup = {optimizer.critic_warmup} cannot be used"
            f" with estimator = {name!r}, which has no critic: set it to 0"
        )
    if settings.advantage.divide_by_std and not facts.divide_by_std:
        other = "grpo" if name == "dr_grpo" else "grpo' or 'turn_grpo"
        raise SettingsError(
            f"advantage.divide_by_std = True does not belong to estimator = {name!r}:"
            f" set it to False or estimator to '{other}'"
        )
    has_turns = facts.by_turn and not settings.rollout.window_turns
    if settings.advantage.length_weight and (facts.by_token or has_turns):
        raise SettingsError(
            f"advantage.length_weight = True divides one advantage of a whole row, but"
            f" estimator = {name!r} gives each {'turn' if has_turns else 'token'} its"
            " own: set it to False or estimator to 'grpo'"
        )
    if optimizer.critic_warmup >= settings.iterations:
        raise SettingsError(
            f"optimizer.critic_warmup = {optimizer.critic_warmup} leaves none of the"
            f" iterations = {settings.iterations} to the actor: set"
            f" optimizer.critic_warmup to at most {settings.iterations - 1}"
        )


def _check_schedule(settings: Settings) -> None:
    optimizer = settings.optimizer
    total, kinds = optimizer.schedule_updates, [optimizer.schedule]
    if total == 0:
        return
    of_run = updates_expected(settings)  # as 0 is read
    if settings.has_critic and optimizer.critic_schedule != "same":
        kinds.append(optimizer.critic_schedule)
    decays = any(kind != "constant" for kind in kinds)
    if decays and total <= optimizer.warmup:
        raise SettingsError(
            f"optimizer.schedule_updates = {total} leaves no gradient step after"
            f" optimizer.warmup = {optimizer.warmup} for the learning rate to decay:"
            f" raise it above {optimizer.warmup}, or set"
            f" {'it to 0 or ' if of_run > optimizer.warmup else ''}optimizer.warmup to"
            f" at most {total - 1}"
        )
    share = actor_share(settings, total)
    is_enough = actor_share(settings, of_run) > optimizer.warmup
    if optimizer.schedule != "constant" and share <= optimizer.warmup:
        raise SettingsError(
            f"optimizer.schedule_updates = {total} leaves the actor {share} gradient"
            f" steps after optimizer.critic_warmup = {optimizer.critic_warmup} of"
            f" iterations = {settings.iterations}, none of them after optimizer.warmup"
            f" = {optimizer.warmup} for its learning rate to decay: raise"
            f" optimizer.schedule_updates to {least_schedule(settings)} or more, or"
            f" set {'it to 0 or ' if is_enough else ''}optimizer.warmup to at most"
            f" {share - 1}"
        )


def _check_loss(settings: Settings) -> None:
    loss = settings.loss
    chosen = "loss.kl_end" if loss.kl == 0 else "loss.kl"  # that makes the KL term
    kl = f"{chosen} = {loss.kl_end if loss.kl == 0 else loss.kl:g}"
    if settings.has_reference and loss.kl_in == "loss" and loss.kl_kind == "k1":
        raise SettingsError(
            f"{kl} with loss.kl_kind = 'k1' and loss.kl_in = 'loss' does nothing on"
            " average, as the k1 estimate's mean gradient is 0: set loss.kl_in to"
            " 'reward' or loss.kl_kind to 'k3'"
        )
    is_in_reward = settings.has_reference and loss.kl_in == "reward"
    if is_in_reward and loss.kl_kind.endswith("+"):
        raise SettingsError(
            f"loss.kl_kind = {loss.kl_kind!r} differs from"
            f" {loss.kl_kind.rstrip('+')!r} by its gradient alone, and loss.kl_in"
            f" = 'reward' uses no gradient of it: set it to"
            f" {loss.kl_kind.rstrip('+')!r} or loss.kl_in to 'loss'"
        )
    if is_in_reward and settings.advantage.zero_task:
        raise SettingsError(
            f"advantage.zero_task = True keeps only the entropy bonus and the KL term,"
            f" but {kl} with loss.kl_in = 'reward' is part of the advantages and"
            " becomes 0 with them: set loss.kl_in to 'loss' and loss.kl_kind to 'k3',"
            f" or {chosen} to 0"
        )
    if loss.surrogate == "cispo" and loss.dual_clip:
        raise SettingsError(
            f"loss.dual_clip = {loss.dual_clip:g} does nothing with loss.surrogate ="
            " 'cispo', which clips the ratio whatever the advantage: set loss.dual_clip"
            " to 0 or loss.surrogate to 'clip'"
        )
    if loss.entropy_on != "reply" and not settings.env.thinking:
        raise SettingsError(
            f"loss.entropy_on = {loss.entropy_on!r} tells thoughts from answers, but"
            " env.thinking = False: set it to 'reply' or env.thinking to True"
        )
