"""Settings: frozen dataclasses made from a config, with every preset resolved.

`from_dict` is the only reader of configs and the only place where settings alone are
checked. choices.py holds the tables of named choices; schema.py the tree, each leaf
beside its limits (limits.py); meanings.py what --help says of each; reader.py reads it;
checks.py and learning_checks.py check combinations, unread.py what a command changes;
main_task.py chooses one of several environments.
"""

from ragen_jax.settings.checks import (
    check_devices,
    check_record,
    check_shares,
    fit_mesh,
    turn_sizes,
)
from ragen_jax.settings.choices import (
    AGGREGATIONS,
    ESTIMATORS,
    FILTER_METRICS,
    FILTER_STRATEGIES,
    KL_KINDS,
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
from ragen_jax.settings.schema import (
    AdvantageSettings,
    CheckpointSettings,
    EnvironmentSettings,
    EvaluationSettings,
    EverySettings,
    FilterSettings,
    LoraSettings,
    LossSettings,
    MeshSettings,
    ModelSettings,
    OptimizerSettings,
    RewardSettings,
    RolloutSettings,
    SafetySettings,
    Settings,
    TaskSettings,
)
from ragen_jax.settings.unread import check_changed

__all__ = [
    "AGGREGATIONS",
    "ESTIMATORS",
    "FILTER_METRICS",
    "FILTER_STRATEGIES",
    "KL_KINDS",
    "AdvantageSettings",
    "CheckpointSettings",
    "EnvironmentSettings",
    "EvaluationSettings",
    "EverySettings",
    "FilterSettings",
    "LoraSettings",
    "LossSettings",
    "MeshSettings",
    "ModelSettings",
    "OptimizerSettings",
    "RewardSettings",
    "RolloutSettings",
    "SafetySettings",
    "Settings",
    "TaskSettings",
    "check_changed",
    "check_devices",
    "check_record",
    "check_same_run",
    "check_shares",
    "differences",
    "flatten",
    "from_dict",
    "known_keys",
    "main_task",
    "nearest",
    "to_dict",
    "type_remedy",
    "env_settings",
    "fit_mesh",
    "turn_sizes",
]
