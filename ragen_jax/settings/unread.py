"""Refuses a setting that the user changed but that nothing in the run would read.

launch/train.py calls it before a new run.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping

from ragen_jax.errors import SettingsError
from ragen_jax.settings.choices import ESTIMATORS, FILTER_STRATEGIES
from ragen_jax.settings.environment import LIMITS
from ragen_jax.settings.reader import flatten, to_dict
from ragen_jax.settings.schema import PER_ESTIMATOR, Settings


@dataclasses.dataclass(frozen=True)
class _Reader:
    """What has to be so for a leaf to be read."""

    reads: Callable[[Settings], bool]
    chooser: str  # the dotted key that decides it
    remedy: str  # what to set that to


def _has_entropy_bonus(settings: Settings) -> bool:
    return settings.loss.entropy > 0 or settings.loss.entropy_end > 0


def _decays(settings: Settings) -> bool:
    """Whether a learning rate ends at 0, of the actor or of a critic."""
    optimizer = settings.optimizer
    kinds = {optimizer.schedule}
    if settings.has_critic and optimizer.critic_schedule != "same":
        kinds.add(optimizer.critic_schedule)
    return kinds != {"constant"}


def _normalizing_shows(settings: Settings) -> bool:
    """Whether normalized returns give other advantages than returns as they are.

    A group lies within one set that is normalized. Where its mean is taken off anyway,
    that of the set makes no difference; nor does the std, where the group's divides, or
    where whitening divides by that of the whole batch and the batch is the set.
    """
    method, facts = settings.reward.normalize, ESTIMATORS[settings.estimator]
    # One that reads no discount compares returns of whole episodes.
    if not facts.compares or facts.reads or method == "asym_clip":
        return True
    # A KL term in the reward is added after, so that it counts more or less.
    has_kl = settings.has_reference and settings.loss.kl_in == "reward"
    is_batch = settings.reward.normalize_by == "batch" or (
        settings.reward.normalize_by == "environment" and len(settings.env.mix) < 2
    )
    is_divided = settings.advantage.divide_by_std or (
        settings.advantage.whiten and is_batch
    )
    return method == "mean_std" and (has_kl or not is_divided)


_ADAPTERS = _Reader(lambda s: s.lora.rank > 0, "lora.rank", "above 0")
_REFERENCE = _Reader(lambda s: s.has_reference, "loss.kl", "above 0")
_BONUS = _Reader(lambda s: s.reward.length_bonus > 0, "reward.length_bonus", "above 0")
_VALIDATION = _Reader(lambda s: s.every.evaluate > 0, "every.evaluate", "above 0")
# By what the leaf belongs to, whatever estimator and filter are chosen.
_READERS = {
    "lora.alpha": _ADAPTERS,
    "lora.targets": _ADAPTERS,
    "rollout.window": _Reader(
        lambda s: s.rollout.history == "window", "rollout.history", "to 'window'"
    ),
    "reward.length_low": _BONUS,
    "reward.length_high": _BONUS,
    "reward.grounding_by": _Reader(
        lambda s: s.reward.grounding > 0, "reward.grounding", "above 0"
    ),
    "reward.normalize_by": _Reader(
        lambda s: s.reward.normalize != "none", "reward.normalize", "to 'mean_std'"
    ),
    "reward.normalize": _Reader(
        lambda s: s.reward.normalize == "none" or _normalizing_shows(s),
        "estimator",
        "to 'ppo'",
    ),
    "evaluation.prompts": _VALIDATION,
    "evaluation.rollouts": _VALIDATION,
    "checkpoint.keep_best": _Reader(
        lambda s: s.every.evaluate > 0 or s.checkpoint.keep_best == 0,
        "every.evaluate",
        "above 0",
    ),
    "health.record_episodes": _Reader(
        lambda s: s.health.record_every > 0, "health.record_every", "above 0"
    ),
    "loss.entropy_on": _Reader(_has_entropy_bonus, "loss.entropy", "above 0"),
    "loss.kl_kind": _REFERENCE,
    "loss.kl_in": _REFERENCE,
    "optimizer.schedule_updates": _Reader(
        _decays, "optimizer.schedule", "to 'linear' or 'cosine'"
    ),
    "filter.zero": _Reader(
        lambda s: not s.filter.keep_zero, "filter.keep_zero", "to False"
    ),
    # A rollback goes back to a checkpoint.
    "health.on_collapse": _Reader(
        lambda s: s.health.on_collapse != "rollback" or s.every.checkpoint > 0,
        "every.checkpoint",
        "above 0",
    ),
    "health.remedy": _Reader(
        lambda s: s.health.on_collapse == "rollback",
        "health.on_collapse",
        "to 'rollback'",
    ),
}


def check_changed(settings: Settings, changed: Collection[str]) -> None:
    """Refuses a changed leaf that nothing in this run would read.

    Only for new runs: a saved run resumes whatever its settings are.

    Args:
      settings: of the run.
      changed: dotted keys of the leaves that the command line changed. One that was
        set to the estimator's own preset counts as unchanged.

    Raises:
      SettingsError: naming a choice that would read the leaf.
    """
    leaves = flatten(to_dict(settings))
    _check_limits(settings, changed)
    presets = PER_ESTIMATOR[settings.estimator]
    for key in changed:
        if key in presets and leaves[key] == presets[key]:
            continue
        if key == "filter.scope" and settings.filter.reweight:
            continue  # With any strategy.
        reader = _READERS.get(key)
        if reader and not reader.reads(settings):
            raise SettingsError(
                f"{key} = {leaves[key]!r} does nothing with {reader.chooser} ="
                f" {leaves[reader.chooser]!r}: leave it out or set {reader.chooser}"
                f" {reader.remedy}"
            )
        _check_read(key, leaves, "estimator", ESTIMATORS)
        _check_read(key, leaves, "filter.strategy", FILTER_STRATEGIES)


def _check_limits(settings: Settings, changed: Collection[str]) -> None:
    """Raises SettingsError for a limit of which every environment has its own."""
    played = (*settings.env.mix, *settings.env.evaluate)
    for name in LIMITS:
        is_own = settings.env.mix and all(getattr(task, name) for task in played)
        if f"rollout.{name}" in changed and is_own:
            raise SettingsError(
                f"rollout.{name} = {getattr(settings.rollout, name)} does nothing, as"
                f" every environment of env.mix and env.evaluate has {name} of its own:"
                " leave it out"
            )


def _check_read(key: str, leaves: Mapping, chooser: str, table: Mapping) -> None:
    """Raises SettingsError if the chosen entry ignores the leaf but another reads it.

    Args:
      key: dotted, of the leaf.
      leaves: of the settings, by dotted key.
      chooser: the dotted key that chooses an entry of `table`.
      table: of choices.py; its entries have `reads`.
    """
    name = leaves[chooser]
    others = [other for other, facts in table.items() if key in facts.reads]
    if others and name not in others:
        raise SettingsError(
            f"{key} = {leaves[key]!r} does nothing with {chooser} = {name!r}: leave it"
            f" out or set {chooser} to {others[0]!r}"
        )
