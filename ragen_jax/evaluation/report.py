"""The results of an evaluation: a table for people and a record for programs."""

import dataclasses
import math
from typing import Any

from ragen_jax import settings as settings_lib
from ragen_jax.evaluation.evaluator import Score, reported_k
from ragen_jax.reporting import console as console_lib
from ragen_jax.settings import Settings
from ragen_jax.utils.words import counted


@dataclasses.dataclass(frozen=True)
class Played:
    """What was evaluated: the player, the levels and how often each was played."""

    who: str  # checkpoint, model or baseline, in words
    policy: str  # "model", or a baseline's name
    settings: Settings  # environment and limits; the seed
    split: str  # one of base.SPLITS
    prompts: int  # P, levels
    rollouts: int  # n, episodes of each
    temperature: float  # not read for a baseline

    @property
    def is_model(self) -> bool:
        return self.policy == "model"


def figures(score: Score, played: Played, seconds: float) -> dict[str, Any]:
    """The results and what was evaluated, for JSON. Unknown values are None.

    Args:
      score: of `evaluator.score`, under the names of metrics.EVALUATION.
      played: what was evaluated.
      seconds: wall time.
    """
    values = score.metrics()
    if not played.is_model:  # A baseline has no replies, and its turns are actions.
        for name in ("turns", "reply_tokens", "valid_reply_rate"):
            del values[name]
    settings = settings_lib.to_dict(played.settings)
    limits = ["turns", "actions_per_turn", "actions", "reply_tokens"]
    if played.is_model:
        limits += ["history", "window", "context"]
    return {
        "who": played.who,
        "policy": played.policy,
        "split": played.split,
        "seed": played.settings.seed,
        "prompts": played.prompts,
        "rollouts": played.rollouts,
        "temperature": played.temperature if played.is_model else None,
        **{k: v if math.isfinite(v) else None for k, v in values.items()},
        "seconds": round(seconds, 1),
        "env": settings["env"],
        "limits": {key: settings["rollout"][key] for key in limits},
    }


def table(score: Score, played: Played) -> str:
    """The results for the terminal; ± is one standard error over levels."""
    env, limits = played.settings.env, played.settings.rollout
    each = f"{counted(played.rollouts, 'episode')} each"
    rows = [
        ("played by", played.who),
        (
            "levels",
            f"{played.prompts} {played.split} levels of {env.name}, {each},"
            f" seed {played.settings.seed}",
        ),
        ("settings", settings_lib.described(env)),
    ]
    if played.is_model:
        text = f"{limits.turns} turns, {limits.actions} actions"
        if limits.window_turns:
            text += f", {limits.window_turns} turns in sight"
        rows.append(("at most", text))
        is_greedy = played.temperature == 0
        text = "0 (the likeliest token)" if is_greedy else f"{played.temperature:g}"
        rows.append(("temperature", text))
    else:
        text = f"{limits.actions} actions, one after the other, turns not counted"
        rows.append(("at most", text))
    success = _with_error(score.success, score.success_standard_error, ".1%")
    rows.append(("success", f"{success} (standard error)"))
    for k in reported_k(played.rollouts):
        error = score.pass_at_k_standard_error[k - 1]
        rows.append((f"pass@{k}", _with_error(score.pass_at_k[k - 1], error, ".1%")))
    error = score.mean_return_standard_error
    rows.append(("return", _with_error(score.mean_return, error, ".3f")))
    rows.append(("actions", f"{score.actions:.2f} an episode"))
    if played.is_model:
        rows.append(("turns", f"{score.turns:.2f} an episode"))
        rows.append(("reply", f"{score.reply_tokens:.1f} tokens"))
        rows.append(("valid replies", f"{score.valid_reply_rate:.1%}"))
    return console_lib.banner("evaluation", rows)


def _with_error(value: float, error: float, kind: str) -> str:
    text = "unknown" if math.isnan(error) else format(error, kind)
    return f"{value:{kind}} ± {text}"
