"""One episode stepped and worded in plain Python: what a record must agree with.

Replies are read with the regex reference, the environment is stepped one action at a
time, and messages are put together by string formatting, without text/prompts.py.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp

from helpers.models import Task
from ragen_jax.envs.base import text_of
from ragen_jax.rollout import prng
from ragen_jax.text import reference_parser, token_bytes
from ragen_jax.trajectory import (
    ANSWER_CLOSED,
    END_OF_TURN,
    ENV_DONE,
    NO_REPLY,
    OTHER_STOP,
    OUT_OF_ACTIONS,
    OUT_OF_TURNS,
    REPLY_BUDGET,
    UNFINISHED,
)

WARNING = "Your last reply had no valid answer or an unknown action.\n"


class Host:
    """Compiled environment functions and bytes of tokens, shared by a task's games."""

    def __init__(self, task: Task):
        self.task = task
        self.limits = task.dialogue.limits
        self.reset = jax.jit(task.env.reset)
        self.step = jax.jit(task.env.step)
        self.observe = jax.jit(task.env.observe)
        known = token_bytes.token_bytes(task.tokenizer)
        unknown = task.config.vocabulary - len(known)
        self.bytes_of = known + (b"",) * unknown
        self.encode = functools.cache(
            lambda text: task.tokenizer.encode(text, add_special_tokens=False)
        )

    def tokens(self, pieces: list[str]) -> list[int]:
        """The tokens of a message, each piece tokenized by itself."""
        return [token for piece in pieces for token in self.encode(piece)]

    def raw(self, reply: list[int]) -> bytes:
        """The bytes of a reply as a decoder that keeps control tokens shows them."""
        control = self.task.tokenizer.all_special_ids
        name = self.task.tokenizer.convert_ids_to_tokens
        return b"".join(
            name(token).encode() if token in control else self.bytes_of[token]
            for token in reply
        )

    def read(self, reply: list[int]) -> reference_parser.ParsedReply:
        """What a reply's tokens mean."""
        return reference_parser.parse_reply(
            self.task.dialogue.reply_prefix.encode(),
            b"".join(self.bytes_of[token] for token in reply),
            self.task.env.action_names,
            self.limits.actions_per_turn,
            thinking=self.task.dialogue.reply_prefix == "<think>",
        )

    def thought_tokens(self, reply: list[int]) -> int:
        """How many tokens come before the one that the answer's text begins in."""
        if self.task.dialogue.reply_prefix == "<answer>":
            return 0
        said = [self.bytes_of[token] for token in reply]
        begun = re.search(rb"</think>\s*<answer>", b"".join(said))
        ends = itertools.accumulate(map(len, said))
        return sum(begun is None or end < begun.end() for end in ends)

    def reply_end(self, reply: list[int], stop_at_answer: bool) -> int:
        """Why sampling stops after these tokens, NO_REPLY if it continues."""
        pieces = self.task.pieces
        if reply[-1] in pieces.stop_tokens:
            return END_OF_TURN if reply[-1] == pieces.end_token else OTHER_STOP
        if stop_at_answer and self.read(reply).is_closed:
            return ANSWER_CLOSED
        is_full = len(reply) == self.limits.reply_tokens
        return REPLY_BUDGET if is_full else NO_REPLY


class HostGame:
    """One episode.

    Args:
      host: of the task.
      key: from `keys.iteration_key`.
      split: of the level.
      group, episode: indices in the whole batch.
    """

    def __init__(self, host: Host, key, split: int, group: int, episode: int):
        self.host, self.key = host, key
        self.group, self.episode = group, episode
        self.state = host.reset(prng.level_key(key, group), jnp.int32(split))
        self.turn = self.used = 0
        self.success, self.end = False, UNFINISHED

    def first_message(self) -> list[str]:
        """The first prompt in pieces, joined its text."""
        pieces = self.host.task.pieces
        system = self.host.task.dialogue.system
        opening = pieces.before_system + system + pieces.before_user
        return [opening, *self._observation()]

    def play(self, reply: list[int]) -> tuple[float, bool, int]:
        """Carries a reply out: reward, whether the reply was valid, actions taken."""
        limits, read = self.host.limits, self.host.read(reply)
        rng = prng.env_key(self.key, self.episode, self.turn)
        reward, taken, is_done = 0.0, 0, False
        for index, action in enumerate(read.actions):
            if is_done or self.used == limits.actions:
                break
            self.state, outcome = self.host.step(
                jax.random.fold_in(rng, index), self.state, jnp.int32(action)
            )
            self.used, taken = self.used + 1, taken + 1
            reward += float(outcome.reward)
            is_done = bool(outcome.done)
            self.success |= bool(outcome.success)
        self.turn += 1
        if is_done:
            self.end = ENV_DONE
        elif self.used == limits.actions:
            self.end = OUT_OF_ACTIONS
        elif self.turn == limits.turns:
            self.end = OUT_OF_TURNS
        return reward, read.is_valid, taken

    def next_message(self, reply: list[int], reward: float) -> list[str]:
        """What follows a reply that did not end the episode, in pieces."""
        pieces = self.host.task.pieces
        closing = pieces.after_reply
        if reply[-1] == pieces.end_token:
            closing = closing[len(pieces.end_of_turn) :]
        warning = [] if self.host.read(reply).is_valid else [WARNING]
        return [closing, f"Reward: {reward:.1f}\n", *warning, *self._observation()]

    def _observation(self) -> list[str]:
        task, limits = self.host.task, self.host.limits
        seen = self.host.observe(self.state).tolist()
        return [
            *(text_of(task.env.phrases, [phrase]) for phrase in seen),
            f"Turn {self.turn + 1} of {limits.turns}.",
            f" Actions left: {limits.actions - self.used}.",
            task.pieces.before_reply + task.dialogue.reply_prefix,
        ]
