"""Why a run stops itself, with a saved state; `loop` asks `problem`."""

import math
from collections.abc import Sequence

from ragen_jax.learning.shaping import bonuses
from ragen_jax.learning.train_state import TrainState
from ragen_jax.settings import Settings
from ragen_jax.utils.words import listed

# loss.logprob_gap_limit is for the mean over so many iterations; a single one may reach
# so many times the limit.
GAP_ITERATIONS, GROSS_GAP = 5, 10


def recent_gaps(gaps: Sequence[float], state: TrainState, gap: float) -> list[float]:
    """The gaps of the last iterations, nats, for `problem`.

    Args:
      gaps: of the iterations before this one.
      state: after this one.
      gap: this one's `update/logprob_gap`. Ignored if no group was kept, and if it is
        NaN, which would turn the mean into NaN.
    """
    measured = [] if int(state.empty_in_row) or math.isnan(gap) else [gap]
    return [*gaps, *measured][-GAP_ITERATIONS:]


def problem(
    settings: Settings,
    state: TrainState,
    gaps: Sequence[float],
    spread: float,
    valid: float = math.nan,
    cut: float = math.nan,
) -> str:
    """Why the run has to stop, in one sentence, or an empty string.

    Args:
      settings: of the run.
      state: after the last iteration.
      gaps: nats, `update/logprob_gap` of the last iterations, at most GAP_ITERATIONS.
        Rounding in bfloat16 makes it jump: the limit is for their mean, once there are
        so many, and a single one may be GROSS_GAP times as large.
      spread: units of reward, `filter/reward_std` of the last iteration; not finite
        where returns were not.
      valid, cut: `rollout/valid_reply_rate` and `rollout/cut_replies` of the last
        iteration; nan: not known.
    """
    safety = settings.safety
    if 0 < safety.max_bad_updates <= int(state.bad_in_row):
        return (
            f"gradients were not finite in {int(state.bad_in_row)} iterations in a row"
            f" (safety.max_bad_updates = {safety.max_bad_updates})"
            f"{_cause_of_bad_gradients(settings, spread)}; the state was saved: start"
            f" in another --workdir with {_finite_gradients(settings, spread)}, or"
            " raise the limit and start the same command again"
        )
    if 0 < safety.max_empty_updates <= int(state.empty_in_row):
        return (
            f"no group was kept in {int(state.empty_in_row)} iterations in a row"
            f" (safety.max_empty_updates = {safety.max_empty_updates}), for"
            f" {why_nothing_is_kept(settings, spread, valid, cut)}; the state was"
            " saved: raise the limit and start the same command again, or begin with"
            f" {_what_would_be_kept(settings, spread, valid, cut)} in another --workdir"
        )
    gap, limit = sum(gaps) / max(1, len(gaps)), settings.loss.logprob_gap_limit
    lasting = len(gaps) >= GAP_ITERATIONS and gap > limit
    if lasting or (gaps and gaps[-1] > GROSS_GAP * limit):
        gap = gap if lasting else gaps[-1]
        over = (
            f"in the mean of {len(gaps)} iterations" if lasting else "in an iteration"
        )
        return (
            f"sampler and update disagree by {gap:.3g} nats a token {over}, more than"
            f" {'' if lasting else f'{GROSS_GAP} times '}"
            f"loss.logprob_gap_limit = {limit}; the state was saved: raise the limit"
            " and start the same command again if that is rounding, else try"
            " model.compute_dtype = 'float32' in another --workdir"
        )
    return ""


def unsound_rewards(settings: Settings, spread: float) -> str:
    """What to know of an iteration whose rewards were no numbers, or an empty string.

    Args:
      settings: of the run.
      spread: units of reward, `filter/reward_std` of the iteration.
    """
    if math.isfinite(spread):
        return ""
    return (
        f"warning: {_not_finite(settings)}: groups with them teach nothing, and means"
        f" are nan; begin with {_sound(settings)} in another --workdir"
    )


def nothing_learned(
    settings: Settings,
    state: TrainState,
    spread: float,
    valid: float = math.nan,
    cut: float = math.nan,
) -> str:
    """What to know of a run in which no update was made; else an empty string.

    Args:
      settings: of the run.
      state: after its last iteration.
      spread: units of reward, the largest `filter/reward_std` of its iterations; not
        finite if one of them was not.
      valid: the largest `rollout/valid_reply_rate` of them; nan: not known.
      cut: the mean `rollout/cut_replies` of them; nan: not known.
    """
    if int(state.updates):
        return ""
    iterations, empty = int(state.iteration), int(state.skipped_empty)
    if empty < iterations:
        return (
            f"nothing was learned: no update was made in {iterations} iterations, for"
            f" {int(state.skipped_bad)} gradients were not finite"
            f"{_cause_of_bad_gradients(settings, spread)}"
            f", and in {empty} iterations no group was kept: try"
            f" {_finite_gradients(settings, spread)} in another --workdir"
        )
    return (
        f"nothing was learned: no group was kept in any of {iterations} iterations, for"
        f" {why_nothing_is_kept(settings, spread, valid, cut)}: begin with"
        f" {_what_would_be_kept(settings, spread, valid, cut)} in another --workdir"
    )


def why_nothing_is_kept(
    settings: Settings, spread: float, valid: float = math.nan, cut: float = math.nan
) -> str:
    """The cause of a filter that keeps no group, to follow upon "for".

    Args:
      settings: of the run.
      spread: units of reward, `filter/reward_std`.
      valid, cut: shares of replies that were valid, and that rollout.reply_tokens cut
        off; nan: not known.
    """
    options = settings.filter
    if not math.isfinite(spread):
        return _not_finite(settings)
    if _keeps_what_is_above_zero(settings):
        margin = f" and filter.margin = {options.margin:g}"
        return (
            f"filter.strategy = {options.strategy!r} keeps none where filter.metric ="
            f" {options.metric!r} is negative, or too small for filter.zero ="
            f" {options.zero:g}{margin if options.strategy == 'top_p' else ''}"
            f"{_uncounted(settings)}"
        )
    if spread == 0 and valid == 0:
        budget = (
            f", as rollout.reply_tokens = {settings.rollout.reply_tokens} cut off"
            f" {cut:.0%} of them"
        )
        return (
            f"no reply was valid{budget if _mostly_cut(cut) else ''}, so that no action"
            " reached the environment"
        )
    if spread == 0:
        return f"all episodes of each group earned the same{_uncounted(settings)}"
    return (
        f"filter.metric = {options.metric!r}, filter.zero = {options.zero:g} and"
        f" filter.margin = {options.margin:g} leave none, though returns differ within"
        f" groups, by a standard deviation of {spread:.3g} in the mean"
        f"{_uncounted(settings)}"
    )


def _mostly_cut(cut: float) -> bool:
    """Whether most replies were cut off; of none valid these are the invalid ones."""
    return cut > 0.5


def _uncounted(settings: Settings) -> str:
    """The rewards in use that the filter does not see, to follow upon a cause."""
    names = [*bonuses(settings.reward)]
    return f", not counting {listed(names)}" if names else ""


def _keeps_what_is_above_zero(settings: Settings) -> bool:
    """Whether the filter compares scores that may be negative with a share of them."""
    options = settings.filter
    by_fraction = options.strategy in ("top_p", "min_p")
    return by_fraction and options.metric in ("return_mean", "return_sum")


_LONGER = "more rollout.reply_tokens, or with a model that writes shorter replies,"
_READABLE = (
    "a model that writes the reply format of the example prompt, such as one that first"
    " imitated demonstrations (docs/environments.md), or with more rollout.reply_tokens"
    " where it is cut off before its answer,"
)


def _not_finite(settings: Settings) -> str:
    hook = " or of reward.hook" if settings.reward.hook else ""
    return f"rewards of the environment{hook} were not finite"


def _sound(settings: Settings) -> str:
    hook = " and finite rewards of reward.hook" if settings.reward.hook else ""
    return f"an environment that passes python -m ragen_jax.testing.check_env{hook}"


def _cause_of_bad_gradients(settings: Settings, spread: float) -> str:
    return "" if math.isfinite(spread) else f", for {_not_finite(settings)}"


def _finite_gradients(settings: Settings, spread: float) -> str:
    if not math.isfinite(spread):
        return _sound(settings)
    return "a lower optimizer.actor_lr"


def _what_would_be_kept(
    settings: Settings, spread: float, valid: float, cut: float
) -> str:
    if not math.isfinite(spread):
        return _sound(settings)
    if spread or _keeps_what_is_above_zero(settings):
        return "other values of those"
    # Where nothing acts, every environment is equally hard.
    if valid == 0:
        return _LONGER if _mostly_cut(cut) else _READABLE
    return "an easier environment"
