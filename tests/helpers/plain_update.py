"""One iteration of learning written out plainly: whole logits, loops over tokens.

`starpo.update` must agree with this where a minibatch holds all kept rows. Only
the transformer itself is shared with the library.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from helpers import updates
from ragen_jax.models import transformer
from ragen_jax.settings import Settings


@dataclasses.dataclass
class Adam:
    """Parameters with their moments; optax's AdamW behind a clip, written out."""

    parameters: dict
    first: dict
    second: dict
    steps: int = 0

    @classmethod
    def start(cls, parameters: dict) -> "Adam":
        zeros = jax.tree.map(np.zeros_like, parameters)
        return cls(parameters, zeros, zeros)

    def step(self, gradient: dict, peak: float, chosen) -> float:
        """Applies a gradient in place; returns its norm before it is clipped."""
        gradient = jax.tree.map(lambda g: np.asarray(g, np.float64), gradient)
        norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
        shrink = min(1.0, chosen.clip_norm / norm)
        self.steps += 1
        rate = peak * min(1.0, self.steps / max(1, chosen.warmup))
        b1, b2, n = chosen.beta1, chosen.beta2, self.steps

        def move(p, m, v):
            change = (m / (1 - b1**n)) / (np.sqrt(v / (1 - b2**n)) + chosen.epsilon)
            return p - rate * (change + chosen.weight_decay * p)

        self.first = jax.tree.map(
            lambda m, g: b1 * m + (1 - b1) * shrink * g, self.first, gradient
        )
        self.second = jax.tree.map(
            lambda v, g: b2 * v + (1 - b2) * (shrink * g) ** 2, self.second, gradient
        )
        self.parameters = jax.tree.map(move, self.parameters, self.first, self.second)
        return norm


@dataclasses.dataclass
class Result:
    """What an iteration leaves behind."""

    actor: Adam
    critic: Adam | None
    figures: dict[str, float]


def learn(chosen: Settings, rows, episodes) -> Result:
    """All epochs over the kept rows, each one update of all of them together."""
    rows, episodes = jax.device_get((rows, episodes))
    actor, critic = (Adam.start(p) for p in jax.device_get(updates.parameters()))
    with_critic = chosen.has_critic
    totals, groups = _returns(episodes, 0.0), updates.PROMPTS
    std = [np.std(totals[episodes.group == g], ddof=1) for g in range(groups)]
    kept = _kept_groups(chosen, std)
    counted = rows.is_reply & np.isin(episodes.group, kept)[:, None]
    frozen = updates.reference(chosen) or actor.parameters
    old_values, ref_logprobs = jax.device_get(
        _before(critic.parameters, frozen, rows.tokens, chosen.rollout.temperature)
    )
    earned = _token_rewards(chosen, rows, episodes, ref_logprobs)
    if with_critic:
        gains, returns = _gae(chosen, earned, old_values, counted)
    else:
        gains = _group_gains(chosen, rows, earned, episodes, counted)
        returns = old_values = np.zeros(rows.tokens.shape)
    if chosen.advantage.whiten:
        of_counted = gains[counted]
        gains = (gains - of_counted.mean()) / of_counted.std()
    data = dict(
        tokens=rows.tokens,
        mask=counted,
        old=rows.logprobs,
        ref=ref_logprobs,
        gains=np.where(counted, gains, 0).astype(np.float32),
        returns=returns.astype(np.float32),
        old_values=old_values,
    )
    by_update = []
    for _ in range(chosen.optimizer.epochs):
        gradients, figures = _gradients(
            actor.parameters, critic.parameters, data, _weights(chosen)
        )
        rates = chosen.optimizer.actor_lr, chosen.optimizer.critic_lr
        figures["actor_grad_norm"] = actor.step(
            gradients[0], rates[0], chosen.optimizer
        )
        figures["critic_grad_norm"] = 0.0
        if with_critic:
            figures["critic_grad_norm"] = critic.step(
                gradients[1], rates[1], chosen.optimizer
            )
        by_update.append({name: float(x) for name, x in figures.items()})
    means = {name: np.mean([one[name] for one in by_update]) for name in by_update[0]}
    for name in ("logprob_gap", "logprob_gap_max"):  # before the policy has moved
        means[name] = by_update[0][name]
    means["ratio_max"] = max(one["ratio_max"] for one in by_update)
    if not with_critic:
        means["value_loss"] = 0.0
    rest = dict(
        reward_std=np.mean(std),
        kept_fraction=len(kept) / groups,
        explained_variance=_explained(returns[counted], old_values[counted]),
        made=chosen.optimizer.epochs,
    )
    return Result(actor, critic if with_critic else None, means | rest)


# On the host -------------------------------------------------------------------------


def _returns(episodes, penalty: float) -> np.ndarray:
    totals = np.zeros(len(episodes.turns))
    for i in range(len(totals)):
        for k in range(episodes.turns[i]):
            totals[i] += episodes.reward[i, k]
            totals[i] += 0.0 if episodes.is_valid[i, k] else penalty
    return totals


def _kept_groups(chosen: Settings, std: list[float]) -> list[int]:
    if chosen.filter.strategy == "none":
        return list(range(len(std)))
    best_first = sorted(range(len(std)), key=lambda g: -std[g])
    count = round(chosen.filter.fraction * len(std))
    return [g for g in best_first[:count] if std[g] > 0]


def _token_rewards(chosen: Settings, rows, episodes, ref_logprobs) -> np.ndarray:
    earned = np.zeros(rows.tokens.shape)
    for i, t in np.argwhere(rows.turn_end):
        k = rows.turn[i, t]
        earned[i, t] = episodes.reward[i, k]
        if not episodes.is_valid[i, k]:
            earned[i, t] += chosen.reward.format_penalty
    if chosen.loss.kl_in == "reward":  # k1
        earned -= chosen.loss.kl * (rows.logprobs - ref_logprobs) * rows.is_reply
    return earned


def _gae(chosen: Settings, earned, values, counted):
    gamma, lam = chosen.advantage.gamma, chosen.advantage.lam
    gains, returns = np.zeros(earned.shape), np.zeros(earned.shape)
    for i in range(len(earned)):
        next_gain = next_value = 0.0
        for t in reversed(np.flatnonzero(counted[i])):
            delta = earned[i, t] + gamma * next_value - values[i, t]
            next_gain = delta + gamma * lam * next_gain
            next_value = values[i, t]
            gains[i, t], returns[i, t] = next_gain, next_gain + next_value
    return gains, returns


def _group_gains(chosen: Settings, rows, earned, episodes, counted) -> np.ndarray:
    totals = np.where(rows.is_reply, earned, 0).sum(axis=1)  # row i is episode i
    gains = np.zeros(counted.shape)
    for i, group in enumerate(episodes.group):
        others = totals[episodes.group == group]
        spread = np.std(others, ddof=1)
        if spread > 0:
            gains[i] = (totals[i] - others.mean()) / spread
    return gains


def _explained(returns, old_values) -> float:
    if returns.var() == 0:
        return 0.0
    return 1 - (returns - old_values).var() / returns.var()


# Through the model -------------------------------------------------------------------


def _scores(actor, tokens, temperature):
    """Log-probability and entropy of every token, from whole logits."""
    log_policy = updates.log_policy(actor, tokens, temperature)
    chosen = jnp.take_along_axis(log_policy, tokens[..., None], axis=-1)[..., 0]
    return chosen, -(jnp.exp(log_policy) * log_policy).sum(axis=-1)


def _values(critic, tokens):
    hidden = transformer.hidden_states(critic, tokens, updates.CONFIG)
    return jnp.pad((hidden @ critic["value_head"])[:, :-1], ((0, 0), (1, 0)))


@functools.partial(jax.jit, compiler_options=updates.QUICK_TO_COMPILE)
def _before(critic, frozen, tokens, temperature):
    """What is known before the first update: old values, the reference's log-probs."""
    return _values(critic, tokens), _scores(frozen, tokens, temperature)[0]


def _weights(chosen: Settings) -> dict:
    loss = chosen.loss
    return dict(
        temperature=chosen.rollout.temperature,
        low=1 - loss.clip_low,
        high=1 + loss.clip_high,
        value_clip=loss.value_clip,
        entropy=loss.entropy,
        kl=loss.kl if loss.kl_in == "loss" else 0.0,
        shown_kl=[float(loss.kl > 0 and loss.kl_kind == kind) for kind in ("k1", "k3")],
    )


@functools.partial(jax.jit, compiler_options=updates.QUICK_TO_COMPILE)
def _gradients(actor, critic, data, w):
    """Gradients of one loss over all rows at once, and the figures of the update."""
    mask = data["mask"]
    mean = lambda x: jnp.where(mask, x, 0).sum() / mask.sum()

    def actor_loss(actor):
        new, entropy = _scores(actor, data["tokens"], w["temperature"])
        new = jnp.where(mask, new, 0)
        old, ref = (jnp.where(mask, data[name], 0) for name in ("old", "ref"))
        ratio, gains = jnp.exp(new - old), data["gains"]
        held = jnp.clip(ratio, w["low"], w["high"])
        policy_loss = -jnp.minimum(ratio * gains, held * gains)
        k1, k3 = new - ref, jnp.exp(ref - new) - 1 - (ref - new)
        loss = mean(policy_loss - w["entropy"] * entropy + w["kl"] * k3)
        is_clipped = jnp.where(gains > 0, ratio > w["high"], ratio < w["low"])
        gap = jnp.abs(new - old)
        return loss, dict(
            policy_loss=mean(policy_loss),
            entropy=mean(entropy),
            kl=w["shown_kl"][0] * mean(k1) + w["shown_kl"][1] * mean(k3),
            approx_kl=mean(ratio - 1 - (new - old)),
            clip_fraction=mean(is_clipped & (gains != 0)),
            ratio=mean(ratio),
            ratio_max=jnp.where(mask, ratio, 0).max(),
            logprob_gap=mean(gap),
            logprob_gap_max=jnp.where(mask, gap, 0).max(),
        )

    def critic_loss(critic):
        values, old = _values(critic, data["tokens"]), data["old_values"]
        held = old + jnp.clip(values - old, -w["value_clip"], w["value_clip"])
        errors = [(x - data["returns"]) ** 2 for x in (values, held)]
        return mean(0.5 * jnp.maximum(*errors))

    (_, figures), actor_gradient = jax.value_and_grad(actor_loss, has_aux=True)(actor)
    value_loss, critic_gradient = jax.value_and_grad(critic_loss)(critic)
    return (actor_gradient, critic_gradient), figures | {"value_loss": value_loss}
