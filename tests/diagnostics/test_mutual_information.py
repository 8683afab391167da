"""Mutual information against closed forms, plain NumPy and the plain forward pass."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models, records

from ragen_jax.diagnostics import mutual_information as mi
from ragen_jax.diagnostics import thought_samples
from ragen_jax.errors import UserError
from ragen_jax.learning import token_scores
from ragen_jax.models import parameters as model_parameters
from ragen_jax.models.config import ModelConfig
from ragen_jax.text import token_bytes


def pairs_of(own, columns, lengths, is_same=None) -> mi.Pairs:
    """Pairs of which only the estimates' inputs matter."""
    own, lengths = np.array(own), np.array(lengths)
    if is_same is None:
        is_same = own[:, None] == np.arange(columns)[None]
    return mi.Pairs(
        prompts=jnp.zeros((columns, 1), jnp.int32),
        prompt_lengths=jnp.ones(columns, jnp.int32),
        thoughts=jnp.zeros((len(own), int(lengths.max())), jnp.int32),
        thought_lengths=jnp.asarray(lengths, jnp.int32),
        own=jnp.asarray(own, jnp.int32),
        is_same=jnp.asarray(is_same),
    )


# A channel: 4 equally likely inputs, 4 outputs, each in eighths.
CHANNEL = np.array([[5, 1, 1, 1], [1, 5, 1, 1], [2, 2, 2, 2], [1, 1, 1, 5]]) / 8


def channel_information() -> tuple[float, float, float]:
    """(I, H(Z|X), H(Z)) in nats from the definitions."""
    output = CHANNEL.mean(axis=0)
    entropy = -(output * np.log(output)).sum()
    conditional = -(CHANNEL * np.log(CHANNEL)).sum(axis=1).mean()
    return entropy - conditional, conditional, entropy


def channel_samples():
    """(x, z) in exactly the frequencies of the joint distribution."""
    return np.array(
        [
            (x, z)
            for x in range(4)
            for z in range(4)
            for _ in range(round(8 * CHANNEL[x, z]))
        ]
    )


def test_the_estimate_of_a_known_channel_is_its_information():
    x, z = channel_samples().T
    scores = jnp.asarray(np.log(CHANNEL[:, z]).T, jnp.float32)
    found = mi.estimate(scores, pairs_of(x, 4, np.ones(len(x), int)))
    for kind in ("sequence", "token", "ragen"):  # all one where thoughts are one token
        got = found[kind]
        np.testing.assert_allclose(
            [got.mutual, got.conditional_entropy, got.entropy],
            channel_information(),
            rtol=1e-6,
        )
        assert float(got.bound) == pytest.approx(math.log(4))


def test_thoughts_that_name_their_prompt_reach_the_bound_and_others_reach_zero():
    own = [0, 1, 2, 3]
    lengths = [2, 4, 2, 4]
    certain = jnp.where(jnp.eye(4) > 0, 0.0, -1e4)
    found = mi.estimate(certain, pairs_of(own, 4, lengths))
    assert float(found["sequence"].mutual) == pytest.approx(math.log(4))
    assert float(found["ragen"].mutual) == pytest.approx(math.log(4))
    # The paper's normalization: the bound falls with the length.
    bound = math.log(4) * (1 / 2 + 1 / 4) / 2
    assert float(found["token"].mutual) == pytest.approx(bound)
    assert float(found["token"].bound) == pytest.approx(bound)
    deaf = jnp.broadcast_to(jnp.array([-1.0, -5.0, -2.0, -8.0])[:, None], (4, 4))
    found = mi.estimate(deaf, pairs_of(own, 4, lengths))
    for kind in found.values():
        assert float(kind.mutual) == pytest.approx(0, abs=1e-6)
    assert float(found["sequence"].entropy) == pytest.approx(4.0)


def plain_estimates(scores, own, lengths):
    """The three normalizations in float64, one thought after the other."""
    rows = {"sequence": [], "token": [], "ragen": []}
    for line, column, length in zip(scores.astype(float), own, lengths, strict=True):
        count = len(line)
        marginal = math.log(sum(math.exp(s) for s in line) / count)
        rows["sequence"].append((line[column], marginal))
        rows["token"].append((line[column] / length, marginal / length))
        each = line / length
        rows["ragen"].append(
            (each[column], math.log(sum(math.exp(s) for s in each) / count))
        )
    found = {}
    for kind, values in rows.items():
        matched, marginal = np.array(values).T
        std = marginal.std()
        gap = matched - marginal
        found[kind] = (
            gap.mean(),
            -matched.mean(),
            -marginal.mean(),
            std,
            (gap / (std + 1e-3)).mean(),
        )
    return found


@pytest.mark.parametrize("seed", range(3))
def test_estimates_equal_plain_numpy_on_random_scores(seed):
    rng = np.random.default_rng(seed)
    scores = rng.normal(-8, 3, (13, 5)).astype(np.float32)
    own, lengths = rng.integers(0, 5, 13), rng.integers(1, 9, 13)
    found = mi.estimate(jnp.asarray(scores), pairs_of(own, 5, lengths))
    for kind, wanted in plain_estimates(scores, own, lengths).items():
        got = found[kind]
        np.testing.assert_allclose(
            [
                got.mutual,
                got.conditional_entropy,
                got.entropy,
                got.marginal_std,
                got.zscore,
            ],
            wanted,
            rtol=2e-4,
            atol=1e-5,
        )


def test_retrieval_is_counted_by_hand():
    scores = jnp.array([[3.0, 2, 1, 0], [3.0, 2, 1, 0], [3.0, 2, 1, 0], [3.0, 2, 1, 0]])
    found = mi.retrieval(scores, pairs_of([0, 1, 2, 3], 4, [1] * 4))
    np.testing.assert_allclose(found.accuracy, [1 / 4, 2 / 4, 1, 1])
    np.testing.assert_allclose(found.chance, [1 / 4, 2 / 4, 1, 1])
    # Prompts 0 and 3 are the same text: either counts for both.
    is_same = np.eye(4, dtype=bool)
    is_same[0, 3] = is_same[3, 0] = True
    found = mi.retrieval(scores, pairs_of([0, 1, 2, 3], 4, [1] * 4, is_same))
    np.testing.assert_allclose(found.accuracy, [2 / 4, 3 / 4, 1, 1])
    np.testing.assert_allclose(found.chance, [1.5 / 4, 3 / 4, 1, 1])


def test_the_smoothed_std_begins_with_the_first_and_then_moves_a_tenth():
    state, first = mi.SmoothedStd().update("a", 2.0)
    assert first == 2.0
    state, second = state.update("a", 1.0)
    assert second == pytest.approx(1.9)
    state, other = state.update("b", 5.0)
    assert other == 5.0
    assert dict(state.values) == {"a": pytest.approx(1.9), "b": 5.0}


def test_a_reported_z_score_has_the_smoothed_std():
    scores = jnp.array([[9.0, 1, 2, 3], [9, 1, 2, 3], [3, 0, 2, 1], [3, 2, 1, 0]])
    before = mi.SmoothedStd((("x/sequence", 2.0),))
    pairs = pairs_of([0, 1, 2, 3], 4, [1] * 4)
    values, after = mi.report(scores, pairs, "x", before)
    std = 0.9 * 2 + 0.1 * values["x/sequence/marginal_std"]
    assert dict(after.values)["x/sequence"] == pytest.approx(std)
    z = values["x/sequence/mutual"] / (std + 1e-3)
    assert values["x/sequence/zscore_ema"] == pytest.approx(z)
    assert values["x/sequence/marginal_std_ema"] == pytest.approx(std)


def test_a_reported_retrieval_stands_beside_its_chance():
    scores = jnp.array([[3.0, 2, 1, 0]] * 4)
    is_same = np.eye(4, dtype=bool)
    is_same[0, 3] = is_same[3, 0] = True
    pairs = pairs_of([0, 1, 2, 3], 4, [1] * 4, is_same)
    values, _ = mi.report(scores, pairs, "x", mi.SmoothedStd())
    assert values["x/retrieval_at_1"] == pytest.approx(2 / 4)
    assert values["x/retrieval_at_1_chance"] == pytest.approx(1.5 / 4)


# The model's side ---------------------------------------------------------------------


def markov_model() -> tuple[ModelConfig, dict]:
    """A model whose next token depends on the last one alone, by a table: tokens 0 to
    3 are the channel's inputs, 4 to 7 its outputs, and the layers add nothing."""
    width = 8
    config = models.small_config(width, width=width, heads=2, kv_heads=1, head_dim=4)
    parameters = model_parameters.initialize(
        jax.random.key(0), model_parameters.declare(config)
    )
    layers = dict(parameters["layers"])
    for name in ("output", "down"):
        layers[name] = jnp.zeros_like(layers[name])
    table = np.full((width, width), -30.0)
    table[:4, 4:] = np.log(CHANNEL)
    table[4:] = 0.0
    return config, {
        **parameters,
        "layers": layers,
        "embedding": jnp.eye(width),
        "final_norm": jnp.ones(width),
        # The final norm makes each one-hot sqrt(width) long.
        "head": jnp.asarray(table / math.sqrt(width), jnp.float32),
    }


@pytest.mark.slow  # Scores and estimates together; each is tested by itself.
def test_the_information_of_a_model_known_in_closed_form_is_found():
    config, parameters = markov_model()
    x, z = channel_samples().T
    prompts = np.array([[7, 7, i, 0] for i in range(4)], np.int32)
    pairs = pairs_of(x, 4, np.ones(len(x), int)).replace(
        prompts=jnp.asarray(prompts),
        prompt_lengths=jnp.full(4, 3, jnp.int32),
        thoughts=jnp.asarray(z[:, None] + 4, jnp.int32),
    )
    scores = jax.jit(lambda p: mi.score_pairs(parameters, p, config, 1.0))(pairs)
    found = mi.estimate(scores, pairs)["sequence"]
    np.testing.assert_allclose(
        [found.mutual, found.conditional_entropy, found.entropy],
        channel_information(),
        rtol=1e-4,
    )


def test_scores_equal_those_of_whole_rows():
    config = models.small_config(50)
    parameters = models.random_parameters(config)
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, 50, (3, 9)).astype(np.int32)
    thoughts = rng.integers(0, 50, (5, 6)).astype(np.int32)
    prompt_lengths, lengths = np.array([9, 4, 7]), np.array([6, 1, 3, 5, 6])
    pairs = pairs_of(np.zeros(5, int), 3, lengths).replace(
        prompts=jnp.asarray(prompts),
        prompt_lengths=jnp.asarray(prompt_lengths, jnp.int32),
        thoughts=jnp.asarray(thoughts),
    )
    found = jax.jit(lambda p: mi.score_pairs(parameters, p, config, 0.7))(pairs)
    rows, columns = np.mgrid[:5, :3]
    whole = np.zeros((15, 15), np.int32)
    for line, i, j in zip(whole, rows.flat, columns.flat, strict=True):
        text = [*prompts[j, : prompt_lengths[j]], *thoughts[i, : lengths[i]]]
        line[: len(text)] = text
    logprobs = np.asarray(
        token_scores.score_tokens(parameters, jnp.asarray(whole), config, 0.7).logprobs
    )
    wanted = [
        line[prompt_lengths[j] : prompt_lengths[j] + lengths[i]].sum()
        for line, i, j in zip(logprobs, rows.flat, columns.flat, strict=True)
    ]
    np.testing.assert_allclose(found, np.reshape(wanted, (5, 3)), rtol=2e-4, atol=2e-4)


# Samples ------------------------------------------------------------------------------

BYTES = (b"", b"ab", b"</th", b"ink>", b"x</think>", b"</think><answer>", b"c")


def sampled_record(replies: list[list[int]]):
    """One row an episode: a prompt of two tokens, then one reply."""
    lines = ["oo" + "r" * (len(reply) - 1) + "R" for reply in replies]
    width = max(map(len, lines))
    rows = records.rows_of(
        *(line.ljust(width, ".") for line in lines), episode=[*range(len(lines))]
    )
    tokens = np.zeros((len(lines), width), np.int32)
    for row, reply in enumerate(replies):
        tokens[row, : len(reply) + 2] = [1, 1, *reply]
    return jax.device_get(rows).replace(tokens=tokens)


def test_a_thought_is_what_lies_before_its_closing_tag():
    replies = [[1, 6, 5], [1, 2, 3, 6], [1, 4, 1], [1, 1, 2], [5, 1]]
    turns = thought_samples.find_turns(sampled_record(replies), BYTES)
    # The third: its tag begins within a token; the fourth never closes the tag.
    assert turns.thought.tolist() == [2, 1, 1, 0, 0]
    assert turns.start.tolist() == [2] * 5


def test_turns_are_found_in_the_order_of_their_episodes():
    rows = jax.device_get(records.rows_of("orRorR", "orRorR", episode=[1, 0]))
    turns = thought_samples.find_turns(rows, BYTES)
    assert turns.row.tolist() == [1, 1, 0, 0]
    assert turns.turn.tolist() == [0, 1, 0, 1]


def test_first_turns_have_a_column_for_each_prompt():
    replies = [[1, 5], [6, 5], [1, 1, 5], [2, 2]]
    rows = sampled_record(replies)
    turns = thought_samples.find_turns(rows, BYTES)
    group = np.array([5, 5, 8, 8])
    pairs = thought_samples.sample_first_turns(rows, turns, group, samples=0, seed=0)
    assert pairs.own.tolist() == [0, 0, 1]
    assert pairs.prompt_lengths.tolist() == [2, 2]
    assert pairs.thought_lengths.tolist() == [1, 1, 2]
    assert pairs.thoughts[:, :2].tolist() == [[1, 0], [6, 0], [1, 1]]
    assert pairs.is_same.all()  # The two prompts are the same tokens here.
    other = rows.replace(tokens=rows.tokens.copy())
    other.tokens[2:, 1] += 1  # As long, and another.
    pairs = thought_samples.sample_first_turns(other, turns, group, samples=0, seed=0)
    assert pairs.prompt_lengths.tolist() == [2, 2]
    assert pairs.is_same.tolist() == [[True, False], [True, False], [False, True]]
    for seed in range(9):  # No thought twice.
        few = thought_samples.sample_first_turns(
            rows, turns, group, samples=2, seed=seed
        )
        assert len(few.own) == len({*map(tuple, few.thoughts.tolist())}) == 2


@pytest.mark.parametrize("samples", [0, 2, 9])
def test_trajectories_are_drawn_by_episode_and_at_most_as_often_as_there_are_turns(
    samples,
):
    """The first has two turns with a thought, the second one and the third none."""
    rows = jax.device_get(
        records.rows_of("orRorR", "oorR..", "oorR..", episode=[0, 1, 2])
    )
    tokens = np.array([[1, 1, 5, 1, 1, 5], [6, 6, 6, 5, 0, 0], [1, 1, 1, 1, 0, 0]])
    rows, of_second = rows.replace(tokens=tokens), []
    turns = thought_samples.find_turns(rows, BYTES)
    for seed in range(200):
        pairs = thought_samples.sample_trajectories(
            rows, turns, samples=samples, seed=seed
        )
        count = samples if samples == 2 else 3
        assert pairs.own.tolist() == list(range(count))
        is_second = pairs.thoughts[:, 0] == 6
        of_second += is_second.tolist()
        assert set(pairs.prompt_lengths[is_second].tolist()) <= {2}
        assert set(pairs.prompt_lengths[~is_second].tolist()) <= {1, 4}
    assert abs(np.mean(of_second) - 1 / 2) < 0.1


def two_episodes_of_two_turns():
    """Both second turns have a thought, of the first turns only the first one."""
    rows = jax.device_get(records.rows_of("orRorR", "orRorR", episode=[0, 1]))
    rows = rows.replace(tokens=np.array([[1, 1, 5, 1, 6, 5], [1, 2, 2, 1, 6, 5]]))
    turns = thought_samples.find_turns(rows, BYTES)
    assert turns.thought.tolist() == [1, 1, 0, 1]
    return rows, turns


def test_first_turns_are_sampled_without_the_later_ones():
    rows, turns = two_episodes_of_two_turns()
    group = np.array([0, 1])
    pairs = thought_samples.sample_first_turns(rows, turns, group, samples=0, seed=0)
    assert pairs.thoughts[:, 0].tolist() == [1]
    assert pairs.prompt_lengths.tolist() == [1]


def test_a_turn_without_a_thought_is_not_drawn_from_an_episode_that_has_one():
    rows, turns = two_episodes_of_two_turns()
    for seed in range(50):
        pairs = thought_samples.sample_trajectories(rows, turns, samples=2, seed=seed)
        assert pairs.thought_lengths.min() == 1


@pytest.mark.slow
def test_a_trajectory_sample_scores_each_draw_under_its_own_prompt():
    task, rollout = models.usual_task(), models.sample_usual()
    rows = jax.device_get(rollout.rows)
    turns = thought_samples.find_turns(rows, token_bytes.token_bytes(task.tokenizer))
    assert (turns.thought > 0).sum() > 4
    pairs = thought_samples.sample_trajectories(rows, turns, samples=4, seed=3)
    assert pairs.own.tolist() == [0, 1, 2, 3]
    assert np.diag(pairs.is_same).all()
    scores = jax.jit(lambda p: mi.score_pairs(task.parameters, p, task.config, 1.0))(
        mi.as_arrays(pairs)
    )
    # The sampler recorded the same log-probabilities.
    matched = np.diag(scores)
    for index in range(4):
        length, prompt = pairs.thought_lengths[index], pairs.prompt_lengths[index]
        wanted = {
            round(float(rows.logprobs[r, s : s + n].sum()), 3)
            for r, s, n in zip(turns.row, turns.start, turns.thought, strict=True)
            if n == length and s == prompt
        }
        assert min(abs(matched[index] - w) for w in wanted) < 2e-3
    values, smoothed = mi.report(
        scores, mi.as_arrays(pairs), "trajectory", mi.SmoothedStd()
    )
    assert values["trajectory/retrieval_at_4"] == 1.0
    assert len(smoothed.values) == 3


def test_without_any_thought_one_sentence_says_so():
    rows = sampled_record([[1, 1], [2, 2]])
    turns = thought_samples.find_turns(rows, BYTES)
    with pytest.raises(UserError, match="no first turn .* has a thought"):
        thought_samples.sample_first_turns(
            rows, turns, np.array([0, 1]), samples=0, seed=0
        )


def test_the_cost_counts_the_tokens_of_each_prompt_once():
    pairs = pairs_of([0, 1, 0], 2, [4, 4, 4]).replace(
        prompts=jnp.zeros((2, 10), jnp.int32)
    )
    assert mi.cost(pairs) == {
        "tokens": 2 * 10 + 3 * 2 * 4,
        "tokens_by_pair": 3 * 2 * 14,
    }
