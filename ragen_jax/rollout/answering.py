"""What the worlds answer to the slots that wait: one feed pass over all of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ragen_jax.rollout import cache as kv
from ragen_jax.rollout import engine, keys, turns
from ragen_jax.rollout.scenes import Scene, SceneTokens
from ragen_jax.rollout.slots import Answer, Inputs, Plan, RolloutState
from ragen_jax.text import answers
from ragen_jax.text.dialogue import message_tokens
from ragen_jax.trajectory import END_OF_TURN


@dataclasses.dataclass(frozen=True)
class Worlds:
    """What answering needs and never changes, within one trace."""

    scenes: tuple[Scene, ...]
    plan: Plan
    policy: kv.Policy
    inputs: Inputs
    tokens: SceneTokens
    levels: tuple[Any, ...]  # the worlds' States, of each part's groups
    with_grounding: bool  # whether thoughts are searched for the landmarks they name


def answer_waiting(
    worlds: Worlds, state: RolloutState, games: tuple[turns.Game, ...]
) -> tuple[RolloutState, tuple[turns.Game, ...]]:
    """Steps the worlds for the slots that wait and feeds them what they say.

    Args:
      worlds: the rules, texts and levels.
      state: in which slots wait.
      games: of each part's slots.
    """
    plan, inputs = worlds.plan, worlds.inputs
    slot, is_used = engine.choose_waiting(plan, state)
    played = [
        _play_part(worlds, index, state, slot, is_used, games[index])
        for index in range(len(plan.parts))
    ]
    told = [answer for _, answer in played]
    told = jax.tree.map(lambda *x: jnp.concatenate(x), *told) if told[1:] else told[0]
    state, taken_up = engine.feed(plan, worlds.policy, inputs, state, told)
    after = tuple(
        _new_games(worlds, index, slot, is_used, taken_up, played[index][0], own)
        for index, own in enumerate(games)
    )
    return state, after


def _play_part(
    worlds: Worlds, index: int, state: RolloutState, slot, is_used, games: turns.Game
) -> tuple[turns.Game, Answer]:
    """One world's turn for those of its slots that wait."""
    scene, part = worlds.scenes[index], worlds.plan.parts[index]
    tokens, inputs = worlds.tokens[index], worlds.inputs
    own = slice(part.first_answer, part.first_answer + part.feed_width)
    slot, is_used = slot[own], is_used[own]
    slots = jax.tree.map(lambda x: x[slot], state.slots)
    chosen = jax.tree.map(lambda x: x[slot - part.first_slot], games)
    episode = jnp.minimum(slots.episode, worlds.plan.episodes - 1)
    chances = jax.vmap(keys.world_key, (None, 0, 0))(
        inputs.key, inputs.prompts.number[episode], slots.turn
    )
    width = max(part.next_capacity for part in worlds.tokens)

    def one(chance, game, reply, reply_end, *sampled):
        read = turns.read_reply(scene, tokens.replies, reply, game.state, *sampled)
        after, played = turns.play_turn(
            chance, scene.world, scene.dialogue.limits, game, read.actions
        )
        grounded = jnp.zeros((), jnp.float32)
        if worlds.with_grounding and scene.world.landmarks is not None:
            places = scene.world.landmarks(game.state)
            grounded = answers.grounded(tokens.replies, reply, *sampled, places)
        stopped = reply_end == END_OF_TURN
        ids = turns.answer_to_turn(
            scene.world, scene.dialogue, after, played, read.is_valid, stopped
        )
        message, length = message_tokens(tokens, ids, is_first=False)
        message = jnp.pad(message, (0, width - message.shape[0]))
        return after, played, read.is_valid, grounded, message, length

    sampled = ()
    if tokens.replies.text is not None:
        sampled = engine.reply_tokens(worlds.plan, state, slot)
    after, played, is_valid, grounded, message, length = jax.vmap(one)(
        chances, chosen, slots.reply, slots.reply_end, *sampled
    )
    return after, Answer(
        slot=slot,
        is_used=is_used,
        tokens=message,
        length=length,
        reward=played.reward,
        is_valid=is_valid,
        grounded=grounded,
        taken=played.taken,
        success=after.success,
        end=after.end,
    )


def _new_games(
    worlds: Worlds, index: int, slot, is_used, taken_up, after: turns.Game, games
) -> turns.Game:
    """The part's games after a feed pass: played on, or begun anew in a free slot."""
    part, prompts = worlds.plan.parts[index], worlds.inputs.prompts
    own = slice(part.first_answer, part.first_answer + part.feed_width)
    slot, is_used, taken_up = slot[own], is_used[own], taken_up[own]
    before = sum(earlier.groups for earlier in worlds.plan.parts[:index])
    # Clipped: what is not taken up is not used.
    group = jnp.clip(prompts.group[jnp.maximum(taken_up, 0)] - before, 0)
    fresh = jax.vmap(turns.new_game)(
        jax.tree.map(lambda x: x[group], worlds.levels[index])
    )
    after = jax.tree.map(
        lambda new, old: jnp.where(
            (taken_up >= 0).reshape((-1,) + (1,) * (new.ndim - 1)), new, old
        ),
        fresh,
        after,
    )
    where = jnp.where(is_used, slot - part.first_slot, part.slots)
    return jax.tree.map(
        lambda whole, new: whole.at[where].set(new, mode="drop"), games, after
    )
