"""Settings: frozen dataclasses made from a config, with every preset resolved.

`from_dict` is the only reader of configs, and checks everything that can be checked
without devices, a model or an environment. The modules:

  schema.py           the tree of dataclasses, each leaf with its limits (limits.py)
  environment.py      the part of it for environments, and several of them
  choices.py          tables of named choices: estimators, filters, aggregations, KL
  meanings.py         one line a leaf, for --help
  reader.py           config to tree, and back
  checks.py           combinations of settings, and settings against devices
  learning_checks.py  combinations of filter, estimator and loss settings
  update_counts.py    how many groups a filter keeps and updates a run makes at most
  unread.py           refuses a changed setting that nothing would read
  record_sizes.py     keys that limit episodes, and records too large for int32
  main_task.py        which of several evaluated environments represents the run
"""

from ragen_jax.settings.checks import (
    check_devices,
    check_even_split,
    fit_mesh,
)
from ragen_jax.settings.choices import (
    AGGREGATIONS,
    ESTIMATORS,
    FILTER_METRICS,
    FILTER_STRATEGIES,
    KL_KINDS,
)
from ragen_jax.settings.environment import (
    TEXTS,
    EnvironmentSettings,
    TaskSettings,
    described,
)
from ragen_jax.settings.main_task import main_task
from ragen_jax.settings.reader import (
    check_same_run,
    differences,
    env_settings,
    flatten,
    from_dict,
    known_keys,
    nearest,
    to_dict,
    type_remedy,
)
from ragen_jax.settings.record_sizes import check_record, limit_key, turn_sizes
from ragen_jax.settings.schema import (
    EvaluationSettings,
    FilterSettings,
    LoraSettings,
    MeshSettings,
    OptimizerSettings,
    RewardSettings,
    Settings,
)
from ragen_jax.settings.unread import check_changed

__all__ = [
    "AGGREGATIONS",
    "ESTIMATORS",
    "FILTER_METRICS",
    "FILTER_STRATEGIES",
    "KL_KINDS",
    "TEXTS",
    "EnvironmentSettings",
    "EvaluationSettings",
    "FilterSettings",
    "LoraSettings",
    "MeshSettings",
    "OptimizerSettings",
    "RewardSettings",
    "Settings",
    "TaskSettings",
    "check_changed",
    "check_devices",
    "check_record",
    "check_same_run",
    "check_even_split",
    "described",
    "differences",
    "flatten",
    "from_dict",
    "known_keys",
    "limit_key",
    "main_task",
    "nearest",
    "to_dict",
    "type_remedy",
    "env_settings",
    "fit_mesh",
    "turn_sizes",
]
