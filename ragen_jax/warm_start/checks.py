"""Checks of a supervised start's config, before anything is made."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from ragen_jax.errors import SettingsError
from ragen_jax.models.presets import SHAPES
from ragen_jax.settings import limits
from ragen_jax.warm_start import STAGES

_LARGEST, _SMALLEST = 3e38, 1e-37  # of float32; beyond, inf and 0
# The most logits of a batch, rows * context * vocabulary: 8 GiB.
_MOST_LOGITS = 2**31


class _Rule(NamedTuple):
    """The type and range of a value, and the words that name them in an error."""

    kind: type | tuple[type, ...]
    allows: Callable[[Any], bool]
    remedy: str


def _whole(low: int, high: int) -> _Rule:
    return _Rule(int, lambda x: low <= x <= high, f"a whole number, {low} to {high}")


def _real(low: float, high: float, remedy: str) -> _Rule:
    return _Rule((int, float), lambda x: math.isfinite(x) and low <= x <= high, remedy)


_FLAG = _Rule(bool, lambda x: True, "True or False")
_COUNT = _whole(1, 2**31 - 1)
_TOP = {"seed": _whole(0, 2**32 - 1), "log_every": _COUNT}
_OPTIMIZER = {
    "warmup": _whole(0, 2**31 - 1),
    "beta2": _real(0, limits.LARGEST_BELOW_ONE, limits.BELOW_ONE_REMEDY),
    "weight_decay": _real(0, _LARGEST, "0 or more, within float32"),
    "clip_norm": _real(_SMALLEST, _LARGEST, "a number above 0, within float32"),
}
_SIZE = _whole(1, 1000)  # Programs unroll dialogues by these limits.
_LIMITS = dict.fromkeys(("turns", "actions_per_turn", "actions", "reply_tokens"), _SIZE)
_ENV = {"context": _whole(1, 2**20), "short_context": _whole(1, 2**20)}
# These have defaults, and each demonstrator has some of them.
_SHARE = _real(0, 1, "a number from 0 to 1")
_SHARES = ("ignore_holes", "ignore_target", "random_plan", "noise", "misread", "risky")
_DEMONSTRATOR = dict.fromkeys(_SHARES, _SHARE) | {
    "longest": _SIZE,
    "midway": _whole(0, 1000),
}
_ROWS = {"rows_for_one": _whole(1, 100)}
_STAGE = {
    "steps": _COUNT,
    "rows": _COUNT,
    "context": _COUNT,
    "lr": _Rule(
        (int, float),
        lambda x: x == 0 or _SMALLEST <= x <= _LARGEST,
        f"0, or a finite number from {_SMALLEST:g}, within float32",
    ),
    "random_plan": _SHARE,
    "draws": _whole(0, 2**31 - 1),
    "short": _FLAG,
    "new_words": _FLAG,
    "read_layers": _whole(0, 1000),
    "turns": _whole(0, 1000),
    "noise": _Rule(
        (int, float, type(None)),
        lambda x: x is None or 0 <= x <= 1,
        "a number from 0 to 1, or None",
    ),
    "relabel": _FLAG,
    "midway": _whole(0, 1000),
    "misread": _SHARE,
    "places_weight": _real(1, 1000, "a number from 1 to 1,000"),
    "walls_weight": _real(0, 1000, "a number from 0 to 1,000"),
    "regret_weight": _real(0, 1000, "a number from 0 to 1,000"),
    "random_places": _SHARE,
}


def check_model(config: ConfigDict) -> str:
    """The model that a config asks for.

    Raises:
      SettingsError: if it is not in STAGES, or the config is of another command.
    """
    model = config.get("model")
    if not isinstance(model, str):
        raise SettingsError(
            "--config is of another command: it has no model = 'tiny'; pass one as"
            " configs/warm_start.py is"
        )
    if model not in STAGES:
        raise SettingsError(
            f"model = {model!r} is unknown: choose {' or '.join(STAGES)}"
        )
    return model


def check(config: ConfigDict, stages: Sequence[str], vocabulary: int) -> None:
    """Refuses values with which the stages cannot be trained.

    Args:
      config: whose model is known.
      stages: the ones to train; values of others are not checked.
      vocabulary: of the model.

    Raises:
      SettingsError: naming the first one.
    """
    from ragen_jax.warm_start.recipe import KINDS

    _check_section(config, "", _TOP)
    _check_section(config, "optimizer", _OPTIMIZER)
    for name in stages:
        _check_section(config, name, _STAGE)
        stage = config[name]
        if not isinstance(stage.get("kinds"), str) or stage.kinds not in KINDS:
            raise SettingsError(
                f"{name}.kinds = {stage.get('kinds')!r} is unknown: choose one of"
                f" {', '.join(KINDS)}"
            )
        envs = {kind.settings for kind in KINDS[stage.kinds]}
        if missing := sorted(envs - set(config)):
            raise SettingsError(
                f"{name}.kinds = {stage.kinds!r} needs the section {missing[0]}: copy"
                " it from configs/warm_start.py or configs/warm_start_words.py"
            )
        for env in sorted(envs):
            _check_section(config, env, _ENV)
            _check_section(config, f"{env}.limits", _LIMITS)
            _check_section(config, f"{env}.env", {})
            _check_section(config, f"{env}.demonstrator", _DEMONSTRATOR, optional=True)
            _check_section(config, env, _ROWS, optional=True)
        if stage.read_layers:
            _check_reading(config, name)
        _check_players(config, name)
        _check_drawings(config, name)
        if stage.rows * stage.context * vocabulary > _MOST_LOGITS:
            raise SettingsError(
                f"{name}.rows = {stage.rows} and {name}.context = {stage.context} make"
                f" {stage.rows * stage.context * vocabulary:,} logits a step, above"
                f" {_MOST_LOGITS:,}: lower {name}.rows"
            )


def _check_reading(config: ConfigDict, name: str) -> None:
    """Refuses `read_layers` where nothing is to be read, and what it leaves unread."""
    from ragen_jax.warm_start.recipe import KINDS

    stage, layers = config[name], SHAPES[config.model].layers
    if not all(kind.symbol_sets for kind in KINDS[stage.kinds]):
        raise SettingsError(
            f"{name}.read_layers = {stage.read_layers} trains layers to read"
            f" symbols drawn anew, and {name}.kinds = {stage.kinds!r} draws none:"
            f" choose 0, or {name}.kinds = 'sokoban_in_any_symbols'"
        )
    if stage.read_layers >= layers:
        raise SettingsError(
            f"{name}.read_layers = {stage.read_layers} leaves none of the model's"
            f" {layers} layers as it is, for which the others learn to read: choose a"
            f" number up to {layers - 1}"
        )
    if stage.places_weight != 1:
        raise SettingsError(
            f"{name}.places_weight = {stage.places_weight} weighs tokens of replies, of"
            f" which {name}.read_layers = {stage.read_layers} learns none: set it to 1"
        )


def _check_players(config: ConfigDict, name: str) -> None:
    """Refuses settings of demonstrators that no demonstrator of the stage has."""
    from ragen_jax.warm_start.recipe import KINDS

    stage = config[name]
    sections = {kind.settings for kind in KINDS[stage.kinds]}
    players = [config[section].get("demonstrator", {}) for section in sections]
    for key, unset, act in (
        ("noise", None, "act at random now and then"),
        ("midway", 0, "play on before a room is shown"),
        ("misread", 0, "take walls for floor now and then"),
    ):
        if stage[key] != unset and not any(key in player for player in players):
            raise SettingsError(
                f"{name}.{key} = {stage[key]} is of demonstrators that {act}, and"
                f" those of {name}.kinds = {stage.kinds!r} do not: choose {unset}"
            )


def _check_drawings(config: ConfigDict, name: str) -> None:
    """Refuses `walls_weight` and `relabel` for rows that drawings.py cannot read."""
    from ragen_jax.warm_start.recipe import KINDS

    stage = config[name]
    if stage.regret_weight and not stage.relabel:
        raise SettingsError(
            f"{name}.regret_weight = {stage.regret_weight} counts what actions lose"
            f" beside the best, which {name}.relabel = False does not search: set it to"
            " True, or regret_weight to 0"
        )
    if stage.misread and not stage.relabel:
        raise SettingsError(
            f"{name}.misread = {stage.misread} shows walks through walls, and"
            f" {name}.relabel = False imitates them: set it to True, or misread to 0"
        )
    if stage.random_plan and stage.relabel:
        raise SettingsError(
            f"{name}.random_plan = {stage.random_plan} shows walks without the box's"
            f" place, from which {name}.relabel = True reads it: set it to 0, or"
            " relabel to False"
        )
    if not stage.walls_weight:
        if stage.random_places:
            raise SettingsError(
                f"{name}.random_places = {stage.random_places} names places for walls"
                f" to be read at, and {name}.walls_weight = 0 reads none: set it to 1,"
                " or random_places to 0"
            )
        if not stage.relabel:
            return
    kinds = KINDS[stage.kinds]
    wanted = "walls_weight" if stage.walls_weight else "relabel"
    unset = 0 if stage.walls_weight else False
    if any(k.env != "sokoban" or k.symbol_sets or not k.thinking for k in kinds):
        raise SettingsError(
            f"{name}.{wanted} = {stage[wanted]} reads the drawings of Sokoban's rooms"
            f" in its own symbols, and {name}.kinds = {stage.kinds!r} has other boards"
            f" or replies without thoughts: choose {unset}, or kinds = 'rooms'"
        )
    for section in sorted({kind.settings for kind in kinds}):
        if (turns := config[section].limits.turns) > 16:
            raise SettingsError(
                f"{section}.limits.turns = {turns} is more than {name}.{wanted} ="
                f" {stage[wanted]} can read: choose 16 or fewer, or {wanted} = {unset}"
            )


def _check_section(
    config: ConfigDict, section: str, rules: dict[str, _Rule], *, optional: bool = False
) -> None:
    """Refuses a section that is absent, and values in it that `rules` do not allow.

    Args:
      config: whose section it is.
      section: its name, with dots; "" for the config itself.
      rules: by key.
      optional: whether the keys may be absent.
    """
    found = config
    for part in filter(None, section.split(".")):
        found = found.get(part) if isinstance(found, ConfigDict) else None
    if not isinstance(found, ConfigDict):
        raise SettingsError(
            f"the config has no section {section}: pass one as configs/warm_start.py is"
        )
    for key, rule in rules.items():
        name = f"{section}.{key}" if section else key
        if key not in found:
            if optional:
                continue
            raise SettingsError(f"the config lacks {name}: set it to {rule.remedy}")
        value = found[key]
        is_of_kind = isinstance(value, rule.kind) and (
            rule.kind is bool or not isinstance(value, bool)
        )
        if not is_of_kind or not rule.allows(value):
            raise SettingsError(
                f"{name} = {value!r} cannot be used: choose {rule.remedy}"
            )
