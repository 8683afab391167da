"""Refuses a setting that the user changed but the chosen estimator or filter ignores.

launch/train.py calls it before a new run.
"""

from collections.abc import Collection, Mapping

from ragen_jax.errors import SettingsError
from ragen_jax.settings.choices import ESTIMATORS, FILTER_STRATEGIES
from ragen_jax.settings.reader import flatten, to_dict
from ragen_jax.settings.schema import PER_ESTIMATOR, Settings


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
    presets = PER_ESTIMATOR[settings.estimator]
    for key in changed:
        if key in presets and leaves[key] == presets[key]:
            continue
        if key == "filter.scope" and settings.filter.reweight:
            continue  # With any strategy.
        _check_read(key, leaves, "estimator", ESTIMATORS)
        _check_read(key, leaves, "filter.strategy", FILTER_STRATEGIES)


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
