"""What the policy reads: the same on device, on the host and by the whole text."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from helpers import models
from transformers import PreTrainedTokenizerFast

from ragen_jax.envs import base
from ragen_jax.envs.frozen_lake import demonstrations, generator
from ragen_jax.envs.frozen_lake import env as frozen_lake
from ragen_jax.envs.frozen_lake.env import FrozenLake
from ragen_jax.envs.frozen_lake.types import HOLE, ICE
from ragen_jax.errors import UserError
from ragen_jax.text import chat_template, tiny_tokenizer
from ragen_jax.text import prompts as prompts_lib
from ragen_jax.text.prompts import TurnLimits
from ragen_jax.trajectory import END_OF_TURN, OTHER_STOP

LIMITS = TurnLimits(turns=5, actions_per_turn=3, actions=11, reply_tokens=47)
WARNING = "Your last reply had no valid answer or an unknown action.\n"
CASES = {
    "grid": (FrozenLake(), True),
    "grid, no thoughts": (FrozenLake(), False),
    "coordinates": (FrozenLake(5, 0.4, observation="coordinates"), True),
    "both": (FrozenLake(3, 0.2, observation="both"), True),
}
MESSAGES = 250


class Task:
    """An environment's dialogue, tokenized, and random messages of it."""

    def __init__(self, settings: FrozenLake, thinking: bool, tokenizer):
        self.settings, self.tokenizer = settings, tokenizer
        self.env = frozen_lake.make(settings)
        self.pieces = chat_template.cut_pieces(tokenizer, "tiny")
        self.texts = prompts_lib.make_dialogue(
            self.env, LIMITS, self.pieces, thinking=thinking
        )
        self.tokens = prompts_lib.tokenize_dialogue(
            self.texts, self.env, self.pieces, tokenizer, tiny_tokenizer.VOCABULARY
        )

        self.states, self.first, self.following = self._messages()

    def _messages(self):
        """States, and (observations, ..., phrase ids, tokens, lengths) of messages."""
        rng = np.random.default_rng(1)
        given = dict(
            turn=rng.integers(1, LIMITS.turns, MESSAGES),
            actions_left=rng.integers(0, LIMITS.actions + 1, MESSAGES),
            reward=rng.uniform(-25, 25, MESSAGES).astype(np.float32),
            is_valid=rng.random(MESSAGES) < 0.5,
            stopped_itself=rng.random(MESSAGES) < 0.5,
        )

        def one(key, given):
            before = generator.random_lake(key, self.settings)
            after, _ = self.env.step(key, before, jnp.int32(2))
            seen, later = self.env.observe(before), self.env.observe(after)
            ids = prompts_lib.first_message(self.texts, seen)
            tokens = prompts_lib.message_tokens(self.tokens, ids, is_first=True)
            next_ids = prompts_lib.next_message(self.texts, later, **given)
            next_tokens = prompts_lib.message_tokens(
                self.tokens, next_ids, is_first=False
            )
            return before, (seen, ids, *tokens), (later, next_ids, *next_tokens)

        keys = jax.random.split(jax.random.key(0), MESSAGES)
        states, first, (later, *following) = jax.tree.map(
            np.asarray, jax.jit(jax.vmap(one))(keys, given)
        )
        return states, first, (later, given, *following)


@pytest.fixture(scope="module")
def tokenizer():
    environments = [frozen_lake.make(settings) for settings, _ in CASES.values()]
    texts = [prompts_lib.system_prompt(env, LIMITS, True) for env in environments]
    texts += ["".join(env.phrases) for env in environments]
    return tiny_tokenizer.train_tokenizer(texts)


@pytest.fixture(scope="module")
def tasks(tokenizer):
    return {name: Task(*case, tokenizer) for name, case in CASES.items()}


@pytest.fixture(params=CASES)
def task(request, tasks):
    return tasks[request.param]


@pytest.fixture
def grid(tasks):
    return tasks["grid"]


# The system prompt ----------------------------------------------------------------


@pytest.mark.parametrize("thinking", [True, False])
def test_the_system_prompt_names_every_limit_and_the_format(thinking):
    env = frozen_lake.make(FrozenLake(size=6, success_probability=0.75))
    prompt = prompts_lib.system_prompt(env, TurnLimits(3, 2, 13, 97), thinking)
    assert prompt.startswith(env.instruction)
    for part in (
        "6 x 6 tiles",
        "probability 75%",
        "3 turns",
        "13 actions in all",
        "up to 2 actions, separated by ||",
        "at most 97 tokens",
        *env.action_names,
        "<answer>Down || Right</answer>",
    ):
        assert part in prompt, part
    assert ("<think>" in prompt) == thinking


def test_the_example_keeps_to_the_actions_of_a_turn():
    env = frozen_lake.make(FrozenLake())
    prompt = prompts_lib.system_prompt(env, TurnLimits(3, 1, 13, 97), True)
    assert prompt.endswith("<think>your thoughts</think><answer>Down</answer>")


# Messages --------------------------------------------------------------------------


def test_a_first_prompt_is_the_templates_text(task):
    seen, ids, tokens, lengths = task.first
    prefix = task.texts.reply_prefix
    for seen_, ids_, tokens_, length in zip(seen, ids, tokens, lengths, strict=True):
        message = (
            f"{base.text_of(task.env.phrases, seen_)}Turn 1 of 5. Actions left: 11."
        )
        expected = task.tokenizer.apply_chat_template(
            [
                {"role": "system", "content": task.texts.system},
                {"role": "user", "content": message},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        _same(task, expected + prefix, ids_, tokens_[:length])
        assert not tokens_[length:].any()


def test_later_messages_give_reward_warning_state_turn_and_actions_left(task):
    seen, given, ids, tokens, lengths = task.following
    for i in range(MESSAGES):
        turn = {name: values[i] for name, values in given.items()}
        tenths = np.round(np.clip(turn["reward"], -20, 20) * np.float32(10))
        expected = (
            ("" if turn["stopped_itself"] else "<|im_end|>")
            + "\n<|im_start|>user\n"
            + f"Reward: {tenths / 10 + 0.0:.1f}\n"
            + ("" if turn["is_valid"] else WARNING)
            + base.text_of(task.env.phrases, seen[i])
            + f"Turn {turn['turn'] + 1} of 5. Actions left: {turn['actions_left']}."
            + "<|im_end|>\n<|im_start|>assistant\n"
            + task.texts.reply_prefix
        )
        _same(task, expected, ids[i], tokens[i, : lengths[i]])


def _same(task, expected: str, ids, tokens):
    """Text from ids, text of the tokens, and the whole text's tokens: all agree."""
    assert base.text_of(task.texts.phrases, ids) == expected
    assert task.tokenizer.decode(tokens) == expected
    whole = task.tokenizer.encode(expected, add_special_tokens=False)
    assert whole == tokens.tolist()


def test_no_message_is_longer_than_its_capacity(task):
    *_, first = task.first
    *_, later = task.following
    assert 0 < first.min() and first.max() <= task.tokens.first_capacity
    assert 0 < later.min() and later.max() <= task.tokens.next_capacity


def test_capacities_add_up_the_longest_of_each_kind_of_phrase(grid):
    """Of phrases without tokens but the template's and the warning."""
    opening, closing, after_stop, hand_over, warning = 1000, 7, 3, 20, 100
    lengths = np.zeros(len(grid.texts.phrases), int)
    lengths[:5] = opening, closing, after_stop, hand_over, warning
    found = prompts_lib._capacities(grid.texts, grid.env, lengths)
    later = warning + hand_over
    assert found == (opening + hand_over, closing + later, opening + later)


def test_a_loose_bound_of_the_observation_takes_no_more_room_than_its_phrases(grid):
    lengths = np.ones(len(grid.texts.phrases), int)
    loose = dataclasses.replace(grid.env, longest_observation=lambda _: 10**30)
    none = dataclasses.replace(grid.env, longest_observation=None)
    found, wanted = (
        prompts_lib._capacities(grid.texts, env, lengths) for env in (loose, none)
    )
    assert found == wanted


def test_a_message_closes_the_reply_with_the_end_of_turn_where_it_has_none(grid):
    closing = prompts_lib.closing_lengths(grid.tokens).tolist()
    text = "\n<|im_start|>user\n"
    written = [grid.tokenizer.encode(end + text) for end in ("<|im_end|>", "")]
    assert closing == [len(tokens) for tokens in written]
    assert prompts_lib.opening_length(grid.tokens) == len(
        prompts_lib.opening_tokens(grid.tokens)
    )


def test_a_board_full_of_holes_fits_the_capacities(tasks):
    task = tasks["both"]
    tiles = jnp.full((3, 3), HOLE).at[0, 0].set(ICE)
    state = frozen_lake.State(
        tiles=tiles.at[0, 1].set(frozen_lake.GOAL),
        player=jnp.zeros(2, jnp.int32),
        done=jnp.zeros((), bool),
    )

    @jax.jit
    def messages(state):
        seen = task.env.observe(state)
        first = prompts_lib.first_message(task.texts, seen)
        worst = _next(task, seen, is_valid=False, stopped_itself=False, reward=-20.0)
        return (
            (first, *prompts_lib.message_tokens(task.tokens, first, is_first=True)),
            (worst, *prompts_lib.message_tokens(task.tokens, worst, is_first=False)),
        )

    first, worst = jax.device_get(messages(state))
    for ids, tokens, length in (first, worst):
        assert length <= len(tokens)  # One slot for each token of the capacity.
        assert task.tokenizer.decode(tokens[:length]) == base.text_of(
            task.texts.phrases, ids
        )


def test_a_conversation_tokenized_as_a_whole_gives_the_recorded_tokens(grid):
    """Prompts joined from phrases and replies by themselves are the whole text's."""
    player = demonstrations.Demonstrator(noise=0.5)
    env = demonstrations.with_demonstrations(
        grid.env, grid.settings, player, thinking=True
    )
    keys = jax.random.split(jax.random.key(5), MESSAGES)
    said = np.asarray(jax.jit(jax.vmap(env.demonstrate))(keys, grid.states))
    _, _, first, first_lengths = grid.first
    _, given, _, later, lengths = grid.following
    for i in range(MESSAGES):
        end = "<|im_end|>" if given["stopped_itself"][i] else ""
        reply = base.text_of(env.reply_phrases, said[i]) + end
        tokens = [
            *first[i, : first_lengths[i]].tolist(),
            *grid.tokenizer.encode(reply, add_special_tokens=False),
            *later[i, : lengths[i]].tolist(),
        ]
        whole = grid.tokenizer.decode(tokens)
        assert grid.tokenizer.encode(whole, add_special_tokens=False) == tokens


# One thing at a time ---------------------------------------------------------------


def _next(task, seen, **changes):
    usual = dict(turn=1, actions_left=4, reward=0.0, is_valid=True, stopped_itself=True)
    given = {name: jnp.asarray(value) for name, value in (usual | changes).items()}
    return prompts_lib.next_message(task.texts, seen, **given)


@pytest.fixture(scope="module")
def message(tasks):
    """The text of a later message with given changes to the usual one."""
    task = tasks["grid"]
    seen = jnp.asarray(task.first[0][0])
    ids = jax.jit(
        lambda reward, is_valid, stopped_itself: _next(
            task, seen, reward=reward, is_valid=is_valid, stopped_itself=stopped_itself
        )
    )

    def text(reward=0.0, is_valid=True, stopped_itself=True):
        return base.text_of(
            task.texts.phrases, np.asarray(ids(reward, is_valid, stopped_itself))
        )

    return text


@pytest.mark.parametrize(
    ("reward", "written"),
    [
        (0.0, "0.0"),
        (1.0, "1.0"),
        (-0.1, "-0.1"),
        (10.9, "10.9"),
        (-0.04, "0.0"),  # and not -0.0
        (0.26, "0.3"),
        (20.0, "20.0"),
        (20.06, "20.0"),
        (1e9, "20.0"),
        (-1e9, "-20.0"),
        (float("inf"), "20.0"),
    ],
)
def test_a_reward_is_written_to_one_decimal_within_bounds(message, reward, written):
    assert message(reward=reward).startswith(f"\n<|im_start|>user\nReward: {written}\n")


def test_an_invalid_reply_is_followed_by_a_warning(message):
    assert WARNING not in message()
    assert message(is_valid=False) == message().replace("State:", f"{WARNING}State:")


def test_a_reply_that_did_not_stop_itself_is_closed_for_it(message):
    assert message(stopped_itself=False) == "<|im_end|>" + message()


def test_the_end_of_turn_alone_stops_a_reply(grid):
    stops = np.asarray(grid.tokens.stops)
    (ids,) = np.nonzero(stops)
    assert grid.tokenizer.convert_ids_to_tokens(ids) == ["<|im_end|>"]
    assert stops.shape == (tiny_tokenizer.VOCABULARY,)
    assert stops[ids].tolist() == [END_OF_TURN]


def test_another_stop_token_ends_a_reply_without_closing_its_turn():
    task = models.make_task(more_stops=(0,))
    end = task.tokenizer.convert_tokens_to_ids("<|im_end|>")
    stops = np.asarray(task.tokens.stops)
    assert stops[[0, end]].tolist() == [OTHER_STOP, END_OF_TURN]
    assert np.flatnonzero(stops).tolist() == sorted([0, end])


def test_of_free_form_answers_the_text_is_found_too(grid):
    free = dataclasses.replace(grid.env, read_action=lambda *given: jnp.int32(0))
    found = prompts_lib.tokenize_dialogue(
        grid.texts, free, grid.pieces, grid.tokenizer, tiny_tokenizer.VOCABULARY
    )
    assert grid.tokens.replies.text is None and found.replies.text is not None


def _space_first(written: dict) -> None:
    written["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True


def _lower_case(written: dict) -> None:
    written["normalizer"] = {"type": "Lowercase"}


def _composed(written: dict) -> None:
    written["normalizer"] = {"type": "NFC"}


def _tokenized(grid, change, phrases=()) -> prompts_lib.DialogueTokens:
    """The grid's dialogue and further phrases by a changed tokenizer.json."""
    written = json.loads(grid.tokenizer.backend_tokenizer.to_str())
    change(written)
    inner = tokenizers.Tokenizer.from_str(json.dumps(written))
    changed = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    texts = dataclasses.replace(grid.texts, phrases=(*grid.texts.phrases, *phrases))
    return prompts_lib.tokenize_dialogue(
        texts, grid.env, grid.pieces, changed, tiny_tokenizer.VOCABULARY
    )


@pytest.mark.parametrize(
    ("change", "said"), [(_space_first, " Your last"), (_lower_case, "your last")]
)
def test_a_tokenizer_that_alters_what_the_model_is_to_read_is_refused(
    grid, change, said
):
    with pytest.raises(UserError) as caught:
        _tokenized(grid, change)
    text = str(caught.value)
    assert "the tokenizer writes 'Your last reply had no" in text
    assert f" as '{said} reply had no" in text and "\n" not in text
    assert text.endswith("; choose a model whose tokenizer keeps texts as they are")


def test_a_sign_that_the_tokenizer_leaves_out_is_shown_where_it_stood(grid):
    def forget(written: dict) -> None:
        del written["model"]["vocab"]["\u0100"]  # The byte 0.

    phrase = "a long text that goes on and on \0 and on"
    with pytest.raises(UserError, match=r"that goes on and on \\x00 and on' as '.* a"):
        _tokenized(grid, forget, (phrase,))


def test_a_system_prompt_in_letters_that_the_tokenizer_lacks_is_refused(grid):
    def forget(written: dict) -> None:
        del written["model"]["vocab"]["Ã"]  # The byte 0xc3, the first of ö and ß.

    grid = SimpleNamespace(**vars(grid))
    _tokenized(grid, forget)
    grid.texts = dataclasses.replace(grid.texts, system="Geh um die Löcher herum.")
    with pytest.raises(UserError, match=r"writes 'Geh um die Löcher herum.' as '.*mod"):
        _tokenized(grid, forget)


def test_a_tokenizer_may_write_letters_and_their_accents_as_one_character(grid):
    _tokenized(grid, _composed, ("caf\u0065\u0301",))
