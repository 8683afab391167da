"""Rewards as the settings shape them: penalties, bonuses, hooks and normalization.

Each hook is a pure function of the record that gives float32[B, K], one number a turn;
`turn_rewards` adds those that the settings ask for and then normalizes; `token_rewards`
puts the result on tokens.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from ragen_jax.errors import SettingsError
from ragen_jax.learning import rewards
from ragen_jax.learning.batch import OldScores
from ragen_jax.learning.groups import (
    SMALLEST_STD,
    Grouping,
    deviations,
    group_statistics,
)
from ragen_jax.learning.schedules import over_the_run
from ragen_jax.settings import RewardSettings, Settings
from ragen_jax.trajectory import Episodes, Rows, blank_episodes, is_played
from ragen_jax.utils import tracing, user_modules

Hook = Callable[[Episodes], jax.Array]  # gives float32[B, K]

_ASYMMETRIC = (-1.0, 3.0)  # of asym_clip, RAGEN's bounds


def turn_rewards(settings: RewardSettings, episodes: Episodes, groups: int):
    """float32[B, K], units of reward: all that each turn earns; 0 where never played.

    Args:
      settings: penalty, bonuses and normalization.
      episodes: B episodes.
      groups: P, groups in `episodes.group`; static.
    """
    earned = shaped_rewards(settings, episodes)
    if settings.normalize == "none":
        return earned
    return normalize(
        earned, episodes, method=settings.normalize, by=settings.normalize_by,
        groups=groups,
    )  # fmt: skip


def shaped_rewards(settings: RewardSettings, episodes: Episodes) -> jax.Array:
    """float32[B, K], units of reward: penalty, bonuses and hook added; 0 if not played.

    Bonuses for thoughts, by length or named landmarks, are paid for valid replies only.

    Args:
      settings: penalty and bonuses.
      episodes: B episodes.
    """
    earned = rewards.played_rewards(episodes, settings.format_penalty)
    played = is_played(episodes)
    # Valid replies only: else a thought could earn its bonus without any answer.
    has_thought = played & episodes.is_valid
    if settings.length_bonus > 0:
        band = length_band(episodes, settings.length_low, settings.length_high)
        earned += settings.length_bonus * jnp.where(has_thought, band, 0.0)
    if settings.grounding > 0:
        bonus = jnp.where(has_thought, episodes.grounded, 0.0)
        if settings.grounding_by == "episode":
            bonus /= jnp.maximum(episodes.turns, 1)[:, None]
        earned += settings.grounding * bonus
    if settings.hook:
        earned += jnp.where(played, load_hook(settings.hook)(episodes), 0.0)
    return earned


def bonuses(settings: RewardSettings) -> dict[str, float | str]:
    """Those in use that are paid beside environment and format penalty, by setting."""
    values: dict[str, float | str] = {
        "reward.length_bonus": settings.length_bonus,
        "reward.grounding": settings.grounding,
        "reward.hook": settings.hook,
    }
    return {name: value for name, value in values.items() if value}


def token_rewards(
    settings: Settings,
    rows: Rows,
    earned: jax.Array,
    scores: OldScores,
    iteration: jax.Array,
) -> jax.Array:
    """float32[R, T], units of reward: turns' rewards at their ends, less a KL penalty.

    Args:
      settings: of the run.
      rows: R rows of T tokens.
      earned: float32[B, K], units of reward, as `turn_rewards` gives it.
      scores: log-probs of the rows before the first step; read only if the KL term is
        in the reward. With loss.sampler_correction the policy's come, like the
        reference's, from the update's forward pass, so that a sampler with rounded
        weights adds no KL between equal policies.
      iteration: int32[], iterations finished, by which the KL coefficient may move.
    """
    by_token, loss = rewards.at_turn_ends(rows, earned), settings.loss
    if not settings.has_reference or loss.kl_in != "reward":
        return by_token
    coefficient = over_the_run(settings, loss.kl, loss.kl_end, iteration)
    logprobs, ref_logprobs = scores.old_logprobs, scores.ref_logprobs
    return rewards.penalize_kl(
        by_token, logprobs, ref_logprobs, rows.is_reply, coefficient, loss.kl_kind
    )


def load_hook(path: str) -> Hook:
    """The function `turn_rewards` of the user's file.

    Raises:
      SettingsError: if there is no such file, or no such function in it.
    """
    hook = getattr(user_modules.load(path, "reward.hook"), "turn_rewards", None)
    if not callable(hook):
        raise SettingsError(
            f"reward.hook = {path!r} defines no turn_rewards: add a function"
            " turn_rewards(episodes) that returns a number for each episode and turn"
        )
    return hook


def check_hook(path: str, count: int, turns: int) -> None:
    """Traces the user's function, so that a fault is reported before compiling.

    Args:
      path: of the file.
      count: B, episodes.
      turns: K.

    Raises:
      SettingsError: if it fails, gives anything but B x K real numbers, or keeps what
        it computes from call to call.
    """
    hook = load_hook(path)
    episodes = jax.eval_shape(lambda: blank_episodes(count, turns))
    try:
        with user_modules.warn_if_slow(f"reward.hook = {path!r}: tracing turn_rewards"):
            result = jax.eval_shape(hook, episodes)
            keeps_state = tracing.keeps_traced_values(hook, episodes)
    except Exception as error:
        line = user_modules.in_one_line(error, Path(path).expanduser().resolve())
        raise SettingsError(
            f"reward.hook = {path!r}: turn_rewards(episodes) fails: {line}"
        ) from error
    shape, kind = getattr(result, "shape", None), getattr(result, "dtype", None)
    numbers = (jnp.bool_, jnp.integer, jnp.floating)
    is_real = kind is not None and any(jnp.issubdtype(kind, of) for of in numbers)
    if shape != (count, turns) or not is_real:
        sizes = ", ".join(map(str, shape or ()))
        given = result if kind is None else f"{kind}[{sizes}]"
        raise SettingsError(
            f"reward.hook = {path!r}: turn_rewards(episodes) gives {given}: let it"
            f" give float32[{count}, {turns}], one number for each episode and turn"
        )
    if keeps_state:
        raise SettingsError(
            f"reward.hook = {path!r}: turn_rewards(episodes) depends on earlier"
            " calls, through a variable outside it such as a running mean: compute it"
            " from the episodes alone"
        )


def length_band(episodes: Episodes, low: int, high: int) -> jax.Array:
    """float32[B, K], 1 where a thought has from `low` to `high` tokens, else 0.

    Thoughts shrink in training unless something holds against it (arXiv:2504.20073,
    section 4.3); a band, since more is not better.
    """
    length = episodes.thought_tokens
    return ((length >= low) & (length <= high)).astype(jnp.float32)


def normalize(
    earned: jax.Array, episodes: Episodes, *, method: str, by: str, groups: int
) -> jax.Array:
    """Rescales returns within sets of episodes; their turns share the change.

    An episode's return R becomes R - mean ("mean"), (R - mean) / std ("mean_std"), or
    the latter within [-1, 3] ("asym_clip"), as in RAGEN. Each turn is divided by std;
    the last one played carries what is left, so that the turns still sum to the return.

    Args:
      earned: float32[B, K], reward units; 0 where no turn was played.
      episodes: B episodes, each counted once.
      method: mean, mean_std or asym_clip.
      by: the sets: state (a group), batch (all), or environment.
      groups: P.

    Returns:
      float32[B, K].
    """
    count = earned.shape[0]
    set_of = {
        "state": episodes.group,
        "batch": jnp.zeros(count, jnp.int32),
        # There are no more environments than groups.
        "environment": episodes.environment,
    }[by]
    total = earned.sum(axis=1)
    # One that is not finite would spoil its whole set.
    sets = Grouping(set_of, groups, jnp.isfinite(total))
    terms = jnp.abs(earned).sum(axis=1)
    statistics = group_statistics(total, sets, terms)
    std = statistics.std[set_of]
    is_spread = std > SMALLEST_STD
    scale = jnp.ones_like(std) if method == "mean" else jnp.where(is_spread, std, 1.0)
    target = deviations(total, sets, statistics) / scale
    if method == "asym_clip":
        target = jnp.clip(target, *_ASYMMETRIC)
    scaled = earned / scale[:, None]
    rest = target - scaled.sum(axis=1)
    is_last = jnp.arange(earned.shape[1])[None] == episodes.turns[:, None] - 1
    return scaled + jnp.where(is_last, rest[:, None], 0.0)
