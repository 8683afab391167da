"""Refuses changes that do nothing: leaves that neither estimator nor filter reads."""

from collections.abc import Collection, Mapping

from ragen_jax.errors import SettingsError
from ragen_jax.settings.choices import ESTIMATORS, FILTER_METRICS, FILTER_STRATEGIES
from ragen_jax.settings.reader import flatten, to_dict
from ragen_jax.settings.schema import PER_ESTIMATOR, Settings

# Read by `filter.reweight`, whatever strategy and metric are.
_BY_REWEIGHT = frozenset(["filter.scope", "filter.with_penalty"])


def check_changed(settings: Settings, changed: Collection[str]) -> None:
    """Refuses a leaf that the user has changed and that nothing reads.

    For runs that begin: what was saved before is read whatever it holds.

    Args:
      settings: of the run.
      changed: dotted keys of the leaves that do not have their config's value. What an
        estimator presets anyhow counts as left alone.

    Raises:
      SettingsError: in one sentence, which names a choice that reads the leaf.
    """
    leaves = flatten(to_dict(settings))
    presets = PER_ESTIMATOR[settings.estimator]
    for key in changed:
        if key in presets and leaves[key] == presets[key]:
            continue
        if key in _BY_REWEIGHT and settings.filter.reweight:
            continue
        _check_read(key, leaves, "estimator", ESTIMATORS)
        _check_read(key, leaves, "filter.strategy", FILTER_STRATEGIES)
        _check_read(key, leaves, "filter.metric", FILTER_METRICS)


def _check_read(key: str, leaves: Mapping, chooser: str, table: Mapping) -> None:
    """Raises SettingsError if other choices of a table read the leaf, not the one."""
    name = leaves[chooser]
    others = [other for other, facts in table.items() if key in facts.reads]
    if others and name not in others:
        raise SettingsError(
            f"{key} = {leaves[key]!r} does nothing with {chooser} = {name!r}: leave it"
            f" out or set {chooser} to {others[0]!r}"
        )
