"""The table of estimators: from rewards and values to advantages and returns.

Each is a pure function of `Evidence`. Whether an estimator needs a critic, or groups of
several, is in `settings.ESTIMATORS`, which has the same names. `starpo.score` calls
one.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.learning import advantages, turn_advantages
from ragen_jax.learning.advantages import Estimate, Replies
from ragen_jax.learning.groups import Grouping
from ragen_jax.settings import ESTIMATORS as _DECLARED
from ragen_jax.settings import Settings
from ragen_jax.trajectory import Episodes, Rows


@struct.dataclass
class Evidence:
    """What an estimator may read."""

    rows: Rows  # C kept rows of T tokens
    episodes: Episodes  # all B
    keep: jax.Array  # bool[B], the episodes that are trained on
    turn_rewards: jax.Array  # float32[B, K], units of reward
    # float32[C, T], units of reward, less the KL penalty if loss.kl_in = "reward".
    token_rewards: jax.Array
    old_values: jax.Array  # float32[C, T], units of reward; 0 without a critic


def ppo(settings: Settings, evidence: Evidence) -> Estimate:
    """GAE along the reply tokens of each episode, across its rows if it has several."""
    values, lam = evidence.old_values, settings.advantage.lam
    return _gae(settings, evidence, values, lam)


def reinforce_pp(settings: Settings, evidence: Evidence) -> Estimate:
    """REINFORCE++: each token's discounted reward-to-go, which is GAE without values.

    Source: Hu et al. 2025, arXiv:2501.03262. verl starts again after each turn; here
    what later turns earn reaches the earlier ones.
    """
    estimate = _gae(settings, evidence, jnp.zeros_like(evidence.old_values), 1.0)
    return estimate.replace(returns=jnp.zeros_like(estimate.returns))


def _gae(
    settings: Settings, evidence: Evidence, values: jax.Array, lam: float
) -> Estimate:
    """GAE along each episode, whether a row holds all of it or a turn.

    Args:
      settings: of the run.
      evidence: what there is to read.
      values: float32[C, T], units of reward, before each token.
      lam: in [0, 1].
    """
    rows, earned = evidence.rows, evidence.token_rewards
    gamma = settings.advantage.gamma
    if not settings.rollout.window_turns:
        return advantages.gae(earned, values, rows.is_reply, gamma=gamma, lam=lam)
    shape = _reply_shape(settings, evidence)
    return advantages.gae_across_rows(earned, values, rows, shape, gamma=gamma, lam=lam)


def bi_level_gae(settings: Settings, evidence: Evidence) -> Estimate:
    """GAE over turns, then over the tokens of each turn."""
    options = settings.advantage
    compute = functools.partial(
        turn_advantages.bi_level_gae,
        gamma=options.gamma,
        lam=options.lam,
        turn_gamma=options.turn_gamma,
        turn_value=options.turn_value,
    )
    return _by_reply(settings, evidence, compute)


def turn_wise_gae(settings: Settings, evidence: Evidence) -> Estimate:
    """GAE over turns, the same advantage on all tokens of a turn."""
    options = settings.advantage
    compute = functools.partial(
        turn_advantages.turn_wise_gae,
        lam=options.lam,
        turn_gamma=options.turn_gamma,
        turn_value=options.turn_value,
    )
    return _by_reply(settings, evidence, compute)


def _by_reply(settings: Settings, evidence: Evidence, compute: Callable) -> Estimate:
    """The estimate that `compute` makes of replies [B, K, M], on tokens [C, T]."""
    shape = _reply_shape(settings, evidence)
    replies: Replies = advantages.find_replies(evidence.rows, shape)
    estimate = compute(
        replies.gather(evidence.token_rewards),
        replies.gather(evidence.old_values),
        replies.gather(replies.is_reply),
    )
    return jax.tree.map(replies.spread, estimate)


def _reply_shape(settings: Settings, evidence: Evidence) -> tuple[int, int, int]:
    """(B, K, M): episodes, turns, and the most tokens of a reply."""
    episodes, turns = evidence.turn_rewards.shape
    return episodes, turns, settings.rollout.reply_tokens


def grpo(settings: Settings, evidence: Evidence) -> Estimate:
    """GRPO, and Dr. GRPO without the division: one advantage an episode."""
    compare = functools.partial(
        advantages.group_advantages, divide_by_std=settings.advantage.divide_by_std
    )
    return _by_episode(settings, evidence, compare)


def reinforce_pp_baseline(settings: Settings, evidence: Evidence) -> Estimate:
    """REINFORCE++ with the group's mean as baseline; whitened over the batch later.

    Source: Hu et al. 2025, arXiv:2501.03262, section on the baseline variant.
    """
    compare = functools.partial(advantages.group_advantages, divide_by_std=False)
    return _by_episode(settings, evidence, compare)


def rloo(settings: Settings, evidence: Evidence) -> Estimate:
    """RLOO: an episode's return against the others of its group."""
    return _by_episode(settings, evidence, advantages.leave_one_out)


def turn_grpo(settings: Settings, evidence: Evidence) -> Estimate:
    """GRPO turn by turn: one advantage a turn."""
    episodes, rows = evidence.episodes, evidence.rows
    by_turn = turn_advantages.turn_group_advantages(
        _rewards_with_kl(settings, evidence),
        episodes.turns,
        _compared_groups(settings, evidence),
        turn_gamma=settings.advantage.turn_gamma,
        divide_by_std=settings.advantage.divide_by_std,
    )
    tokens = advantages.broadcast_turns(by_turn, rows)
    return Estimate(advantages=tokens, returns=jnp.zeros_like(tokens))


def _by_episode(settings: Settings, evidence: Evidence, compare: Callable) -> Estimate:
    """The same advantage on all reply tokens of an episode.

    Args:
      settings: of the run.
      evidence: what there is to read.
      compare: of the arguments of `advantages.group_advantages`; gives float32[B].
    """
    turn_rewards = _rewards_with_kl(settings, evidence)
    by_episode = compare(
        turn_rewards.sum(axis=1),
        _compared_groups(settings, evidence),
        terms=jnp.abs(turn_rewards).sum(axis=1),
    )
    tokens = advantages.broadcast_to_tokens(by_episode, evidence.rows)
    return Estimate(advantages=tokens, returns=jnp.zeros_like(tokens))


def _rewards_with_kl(settings: Settings, evidence: Evidence) -> jax.Array:
    """float32[B, K], units of reward, of each turn of the kept episodes.

    Includes a KL penalty in the reward, summed over the turn's tokens: the return is
    then R - coefficient * sum of the KL estimate, as RLOO has it (Ahmadian et al.
    2024, arXiv:2402.14740) and verl computes it for every estimator.
    """
    if not settings.has_reference or settings.loss.kl_in != "reward":
        return evidence.turn_rewards
    rows, shape = evidence.rows, evidence.turn_rewards.shape
    is_reply = rows.real_replies
    # Episode B is out of range, so dropped.
    place = jnp.where(is_reply, rows.episode, shape[0]), jnp.maximum(rows.turn, 0)
    blank = jnp.zeros(shape, jnp.float32)
    return blank.at[place].add(evidence.token_rewards, mode="drop")


def _compared_groups(settings: Settings, evidence: Evidence) -> Grouping:
    """The groups, and which of their episodes are compared: all, or those kept."""
    keeps_members = settings.filter.strategy == "within_group"
    return Grouping(
        evidence.episodes.group,
        settings.rollout.prompts,
        evidence.keep if keeps_members else None,
    )


ESTIMATORS: dict[str, Callable[[Settings, Evidence], Estimate]] = {
    "ppo": ppo,
    "grpo": grpo,
    "dr_grpo": grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "bi_level_gae": bi_level_gae,
    "turn_wise_gae": turn_wise_gae,
    "turn_grpo": turn_grpo,
}
assert ESTIMATORS.keys() == _DECLARED.keys()
