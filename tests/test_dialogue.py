"""What the policy reads: the same on device, on the host and by the whole text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs import base, demonstrations, frozen_lake
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.text import chat, dialogue, tiny_tokenizer
from ragen_jax.text.dialogue import TurnLimits

LIMITS = TurnLimits(turns=5, actions_per_turn=3, actions=11, reply_tokens=47)
WARNING = "Your last reply had no valid answer or an unknown action.\n"
CASES = {
    "grid": (FrozenLake(), True),
    "grid, no thoughts": (FrozenLake(), False),
    "coordinates": (FrozenLake(5, 0.4, observation="coordinates"), True),
    "both": (FrozenLake(3, 0.2, observation="both"), True),
}
MESSAGES = 250


class Scene:
    """A world's dialogue, tokenized, and random messages of it."""

    def __init__(self, settings: FrozenLake, thinking: bool, tokenizer):
        self.settings, self.tokenizer = settings, tokenizer
        self.world = frozen_lake.world(settings)
        self.pieces = chat.cut_pieces(tokenizer, "tiny")
        self.texts = dialogue.make_dialogue(
            self.world, LIMITS, self.pieces, thinking=thinking
        )
        self.tokens = dialogue.tokenize_dialogue(
            self.texts, self.world, self.pieces, tokenizer, tiny_tokenizer.VOCABULARY
        )

        self.states, self.first, self.following = self._messages()

    def _messages(self):
        """States, and (observations, ..., phrase ids, tokens, lengths) of messages."""
        chance = np.random.default_rng(1)
        given = dict(
            turn=chance.integers(1, LIMITS.turns, MESSAGES),
            actions_left=chance.integers(0, LIMITS.actions + 1, MESSAGES),
            reward=chance.uniform(-25, 25, MESSAGES).astype(np.float32),
            is_valid=chance.random(MESSAGES) < 0.5,
            stopped_itself=chance.random(MESSAGES) < 0.5,
        )

        def one(key, given):
            before = frozen_lake.draw(key, self.settings)
            after, _ = self.world.step(key, before, jnp.int32(2))
            seen, later = self.world.observe(before), self.world.observe(after)
            ids = dialogue.first_message(self.texts, seen)
            tokens = dialogue.message_tokens(self.tokens, ids, is_first=True)
            next_ids = dialogue.next_message(self.texts, later, **given)
            next_tokens = dialogue.message_tokens(self.tokens, next_ids, is_first=False)
            return before, (seen, ids, *tokens), (later, next_ids, *next_tokens)

        keys = jax.random.split(jax.random.key(0), MESSAGES)
        states, first, (later, *following) = jax.tree.map(
            np.asarray, jax.jit(jax.vmap(one))(keys, given)
        )
        return states, first, (later, given, *following)


@pytest.fixture(scope="module")
def tokenizer():
    worlds = [frozen_lake.world(settings) for settings, _ in CASES.values()]
    texts = [dialogue.system_prompt(world, LIMITS, True) for world in worlds]
    texts += ["".join(world.phrases) for world in worlds]
    return tiny_tokenizer.train_tokenizer(texts)


@pytest.fixture(scope="module")
def scenes(tokenizer):
    return {name: Scene(*case, tokenizer) for name, case in CASES.items()}


@pytest.fixture(params=CASES)
def scene(request, scenes):
    return scenes[request.param]


@pytest.fixture
def grid(scenes):
    return scenes["grid"]


# The system prompt ----------------------------------------------------------------


@pytest.mark.parametrize("thinking", [True, False])
def test_the_system_prompt_names_every_limit_and_the_format(thinking):
    world = frozen_lake.world(FrozenLake(size=6, success_probability=0.75))
    prompt = dialogue.system_prompt(world, TurnLimits(3, 2, 13, 97), thinking)
    assert prompt.startswith(world.instruction)
    for part in (
        "6 x 6 tiles",
        "probability 75%",
        "3 turns",
        "13 actions in all",
        "up to 2 actions, separated by ||",
        "at most 97 tokens",
        *world.action_names,
        "<answer>Down || Right</answer>",
    ):
        assert part in prompt, part
    assert ("<think>" in prompt) == thinking


def test_the_example_keeps_to_the_actions_of_a_turn():
    world = frozen_lake.world(FrozenLake())
    prompt = dialogue.system_prompt(world, TurnLimits(3, 1, 13, 97), True)
    assert prompt.endswith("<think>your thoughts</think><answer>Down</answer>")


# Messages --------------------------------------------------------------------------


def test_a_first_prompt_is_the_templates_text(scene):
    seen, ids, tokens, lengths = scene.first
    prefix = scene.texts.reply_prefix
    for seen_, ids_, tokens_, length in zip(seen, ids, tokens, lengths, strict=True):
        message = (
            f"{base.text_of(scene.world.phrases, seen_)}Turn 1 of 5. Actions left: 11."
        )
        expected = scene.tokenizer.apply_chat_template(
            [
                {"role": "system", "content": scene.texts.system},
                {"role": "user", "content": message},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        _same(scene, expected + prefix, ids_, tokens_[:length])
        assert not tokens_[length:].any()


def test_later_messages_tell_reward_warning_state_turn_and_actions_left(scene):
    seen, given, ids, tokens, lengths = scene.following
    for i in range(MESSAGES):
        told = {name: values[i] for name, values in given.items()}
        tenths = np.round(np.clip(told["reward"], -20, 20) * np.float32(10))
        expected = (
            ("" if told["stopped_itself"] else "<|im_end|>")
            + "\n<|im_start|>user\n"
            + f"Reward: {tenths / 10 + 0.0:.1f}\n"
            + ("" if told["is_valid"] else WARNING)
            + base.text_of(scene.world.phrases, seen[i])
            + f"Turn {told['turn'] + 1} of 5. Actions left: {told['actions_left']}."
            + "<|im_end|>\n<|im_start|>assistant\n"
            + scene.texts.reply_prefix
        )
        _same(scene, expected, ids[i], tokens[i, : lengths[i]])


def _same(scene, expected: str, ids, tokens):
    """Text from ids, text of the tokens, and the whole text's tokens: all agree."""
    assert scene.texts.text(ids) == expected
    assert scene.tokenizer.decode(tokens) == expected
    whole = scene.tokenizer.encode(expected, add_special_tokens=False)
    assert whole == tokens.tolist()


def test_no_message_is_longer_than_its_capacity(scene):
    *_, first = scene.first
    *_, later = scene.following
    assert 0 < first.min() and first.max() <= scene.tokens.first_capacity
    assert 0 < later.min() and later.max() <= scene.tokens.next_capacity


def test_a_board_full_of_holes_fits_the_capacities(scenes):
    scene = scenes["both"]
    tiles = jnp.full((3, 3), frozen_lake.HOLE).at[0, 0].set(frozen_lake.ICE)
    state = frozen_lake.State(
        tiles=tiles.at[0, 1].set(frozen_lake.GOAL),
        player=jnp.zeros(2, jnp.int32),
        done=jnp.zeros((), bool),
    )

    @jax.jit
    def messages(state):
        seen = scene.world.observe(state)
        first = dialogue.first_message(scene.texts, seen)
        worst = _next(scene, seen, is_valid=False, stopped_itself=False, reward=-20.0)
        return (
            (first, *dialogue.message_tokens(scene.tokens, first, is_first=True)),
            (worst, *dialogue.message_tokens(scene.tokens, worst, is_first=False)),
        )

    first, worst = jax.device_get(messages(state))
    for ids, tokens, length in (first, worst):
        assert length <= len(tokens)  # One slot for each token of the capacity.
        assert scene.tokenizer.decode(tokens[:length]) == scene.texts.text(ids)


def test_a_conversation_tokenized_as_a_whole_gives_the_recorded_tokens(grid):
    """Prompts joined from phrases and replies by themselves are the whole text's."""
    player = demonstrations.Demonstrator(noise=0.5)
    world = demonstrations.with_demonstrations(
        grid.world, grid.settings, player, thinking=True
    )
    keys = jax.random.split(jax.random.key(5), MESSAGES)
    said = np.asarray(jax.jit(jax.vmap(world.demonstrate))(keys, grid.states))
    _, _, first, first_lengths = grid.first
    _, given, _, later, lengths = grid.following
    for i in range(MESSAGES):
        end = "<|im_end|>" if given["stopped_itself"][i] else ""
        reply = base.text_of(world.reply_phrases, said[i]) + end
        tokens = [
            *first[i, : first_lengths[i]].tolist(),
            *grid.tokenizer.encode(reply, add_special_tokens=False),
            *later[i, : lengths[i]].tolist(),
        ]
        whole = grid.tokenizer.decode(tokens)
        assert grid.tokenizer.encode(whole, add_special_tokens=False) == tokens


# One thing at a time ---------------------------------------------------------------


def _next(scene, seen, **changes):
    usual = dict(turn=1, actions_left=4, reward=0.0, is_valid=True, stopped_itself=True)
    given = {name: jnp.asarray(value) for name, value in (usual | changes).items()}
    return dialogue.next_message(scene.texts, seen, **given)


@pytest.fixture(scope="module")
def message(scenes):
    """The text of a later message with given changes to the usual one."""
    scene = scenes["grid"]
    seen = jnp.asarray(scene.first[0][0])
    ids = jax.jit(
        lambda reward, is_valid, stopped_itself: _next(
            scene, seen, reward=reward, is_valid=is_valid, stopped_itself=stopped_itself
        )
    )

    def text(reward=0.0, is_valid=True, stopped_itself=True):
        return scene.texts.text(np.asarray(ids(reward, is_valid, stopped_itself)))

    return text


@pytest.mark.parametrize(
    ("reward", "told"),
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
def test_a_reward_is_told_to_one_decimal_place_within_bounds(message, reward, told):
    assert message(reward=reward).startswith(f"\n<|im_start|>user\nReward: {told}\n")


def test_an_invalid_reply_is_followed_by_a_warning(message):
    assert WARNING not in message()
    assert message(is_valid=False) == message().replace("State:", f"{WARNING}State:")


def test_a_reply_that_did_not_stop_itself_is_closed_for_it(message):
    assert message(stopped_itself=False) == "<|im_end|>" + message()


def test_the_end_of_turn_alone_stops_a_reply(grid):
    (stops,) = np.nonzero(grid.tokens.is_stop)
    assert grid.tokenizer.convert_ids_to_tokens(stops) == ["<|im_end|>"]
    assert grid.tokens.is_stop.shape == (tiny_tokenizer.VOCABULARY,)
