"""The cache's three passes against the full forward pass, position by position."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import models

from ragen_jax.models import transformer
from ragen_jax.rollout import cache_attention, decode_step
from ragen_jax.rollout import kv_cache as kv
from ragen_jax.rollout.token_sampling import Sampled
from ragen_jax.rollout.types import RowBuffers

VOCABULARY, SLOTS, CONTEXT = 50, 3, 40
PROMPT, MESSAGE = 8, 6  # capacities
# Each slot has a prompt, then decodes 4, gets a message, and decodes to the end.
PROMPTS, MESSAGES = np.array([8, 3, 5]), np.array([1, 6, 4])
FIRST = 4
FUSED = cache_attention.fused("xla")
# Of cuDNN's path all but its kernel, which needs a GPU; and a TPU's.
ATTENTIONS = {
    "plain": lambda config: cache_attention.XLA,
    "fused": lambda config: FUSED,
    "merged": lambda config: cache_attention.by_name("merged", config),
}
CASES = {
    "grouped heads, short bucket": [{}, 28],
    "grouped heads, whole cache": [{}, CONTEXT],
    "a key head each, tied, without biases": [
        dict(kv_heads=4, tied=True, qkv_bias=False),
        CONTEXT,
    ],
    "normalized queries and keys, wide heads": [models.QWEN3, CONTEXT],
    "scaled rotations": [models.LLAMA3, CONTEXT],
}
QUICK = "grouped heads, short bucket"
EACH = [
    pytest.param(case, id=name, marks=[] if name == QUICK else pytest.mark.slow)
    for name, case in CASES.items()
]


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
@pytest.mark.parametrize("case", EACH)
def test_cached_passes_give_the_logits_of_the_full_forward_pass(case, attention):
    changes, bucket = case
    config = models.small_config(VOCABULARY, **changes)
    parameters = models.random_parameters(config)
    tokens = _tokens()
    expected = _full_logits(parameters, tokens, config)
    cached = _cached_logits(parameters, config, tokens, bucket, attention(config))
    assert np.abs(expected).max() > 1
    for at, logits in cached:
        here = expected[np.arange(SLOTS), at]
        np.testing.assert_allclose(logits, here, rtol=0, atol=2e-5)


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_what_stands_behind_a_slots_length_is_never_attended_to(attention):
    config = models.small_config(VOCABULARY)
    parameters = models.random_parameters(config)
    tokens = _tokens()
    given = (parameters, config, tokens, CONTEXT, attention(config))
    clean, dirty = _cached_logits(*given), _cached_logits(*given, behind=1e3)
    for (_, one), (_, other) in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_a_slot_of_full_length_writes_nothing(attention):
    config = models.small_config(VOCABULARY)
    attention = attention(config)
    weights = kv.to_decode_layout(models.random_parameters(config), jnp.float32)
    empty = jnp.zeros((SLOTS, CONTEXT, config.kv_heads, config.head_dim))
    blank = attention.to_entry(empty)
    filled = tuple(blank + 0.5 + i for i in range(config.layers))
    lengths = jnp.array([7, CONTEXT, 20])
    decode = jax.jit(kv.decode, static_argnums=(1, 5))
    cache = kv.Cache(filled, filled)
    model = kv.ShardedModel(config, jnp.float32, attention=attention)
    _, after = decode(weights, model, cache, jnp.arange(SLOTS), lengths, 28)
    axes = tuple({1, 2, 3} - {attention.context_axis})
    for old, new in zip(filled * 2, after.keys + after.values, strict=True):
        changed = np.argwhere((np.asarray(new) != old).all(axis=axes))
        assert changed.tolist() == [[0, 7], [2, 20]]
        features = new.size // (SLOTS * CONTEXT)
        assert np.count_nonzero(new != old) == 2 * features


def test_merged_heads_fill_whole_lanes_with_zeros():
    attention = cache_attention.merged(4)
    entry = attention.to_entry(jnp.ones((2, 5, 3, 48)))
    assert entry.shape == (2, 1, 5, 256)
    assert entry[..., :144].all() and not entry[..., 144:].any()
    assert attention.to_entry(jnp.ones((2, 5, 2, 64))).shape == (2, 1, 5, 128)


@pytest.mark.parametrize(
    "buckets",
    [
        (5, 18, CONTEXT),
        pytest.param((17, CONTEXT), marks=pytest.mark.slow),
        pytest.param((16, CONTEXT), marks=pytest.mark.slow),
    ],
)
def test_what_a_message_leaves_in_the_cache_does_not_depend_on_the_bucket(buckets):
    """The longest slot reads 17 positions."""
    config = models.small_config(VOCABULARY)
    weights = kv.to_decode_layout(models.random_parameters(config), jnp.float32)
    model = kv.ShardedModel(config, jnp.float32)
    tokens, lengths = _tokens(), jnp.array([11, 0, 7])
    start = kv.prefill_prompts(weights, model, tokens)
    extend = jax.jit(kv.extend, static_argnums=(1, 5))
    message = tokens[:, -MESSAGE:]
    whole = extend(weights, model, start, message, lengths, (CONTEXT,))
    other = extend(weights, model, start, message, lengths, buckets)
    for old, one, two in zip(*map(jax.tree.leaves, (start, whole, other)), strict=True):
        assert np.abs(one - old).max() > 0.1
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-6)


def test_laid_out_weights_are_the_stacked_ones_layer_by_layer_in_the_given_type():
    config = models.small_config(VOCABULARY)
    parameters = models.random_parameters(config)
    laid_out = kv.to_decode_layout(parameters, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(laid_out)} == {jnp.dtype("bfloat16")}
    assert len(laid_out["layers"]) == config.layers
    for index, layer in enumerate(laid_out["layers"]):
        for name, weight in layer.items():
            expected = parameters["layers"][name][index].astype(jnp.bfloat16)
            np.testing.assert_array_equal(weight, expected)


@pytest.mark.slow
@pytest.mark.parametrize("has_head", [False, True])
def test_weights_in_8_bits_are_all_matrices_and_score_tokens_a_little_off(has_head):
    config = dataclasses.replace(models.small_config(VOCABULARY), tied=not has_head)
    parameters = models.random_parameters(config)
    exact = kv.to_decode_layout(parameters, jnp.float32)
    rough = kv.in_eight_bits(exact, "int8")
    wide = {leaf.size for leaf in jax.tree.leaves(rough) if leaf.dtype != jnp.int8}
    vectors = {leaf.size for leaf in jax.tree.leaves(exact) if leaf.ndim == 1}
    assert max(wide - {exact["embedding"].size}) <= max(*vectors, VOCABULARY)
    model = kv.ShardedModel(config, jnp.float32)
    decode = jax.jit(kv.decode, static_argnums=(1, 5))
    start = kv.prefill_prompts(exact, model, _tokens())
    given = (model, start, jnp.arange(SLOTS), jnp.array([7, 9, 20]), CONTEXT)
    one, _ = decode(exact, *given)
    two, _ = decode(rough, *given)
    error = np.abs(one - two).mean() / np.abs(one).mean()
    assert 1e-4 < error < 0.03


def _tokens():
    """int32[SLOTS, CONTEXT], all of them real in the full forward pass."""
    rng = np.random.default_rng(1)
    return rng.integers(0, VOCABULARY, (SLOTS, CONTEXT)).astype(np.int32)


def _full_logits(parameters, tokens, config):
    hidden = jax.jit(transformer.hidden_states, static_argnums=2)
    states = hidden(parameters, tokens, config)
    return np.asarray(transformer.vocabulary_logits(parameters, states))


@functools.partial(jax.jit, static_argnums=(1, 3, 4, 6))
def _run(parameters, config, tokens, bucket, counts, behind, attention):
    """Prompt, `counts[0]` decoded, a message, `counts[1]` decoded: logits and where."""
    model = kv.ShardedModel(config, jnp.float32, attention=attention)
    weights = kv.to_decode_layout(parameters, jnp.float32)
    slot = jnp.arange(SLOTS)
    prompt = jnp.where(
        jnp.arange(PROMPT)[None] < PROMPTS[:, None], tokens[:, :PROMPT], 9
    )
    cache = kv.prefill_prompts(weights, model, prompt)
    longer = [(0, 0)] * 4
    longer[attention.context_axis] = (0, CONTEXT - PROMPT)
    cache = jax.tree.map(lambda x: jnp.pad(x, longer, constant_values=behind), cache)

    def decode(carry, _):
        cache, lengths = carry
        token = tokens[slot, lengths]
        logits, cache = kv.decode(weights, model, cache, token, lengths, bucket)
        return (cache, lengths + 1), (lengths, logits)

    # The prompt's last token is decoded again: rewriting it must change nothing.
    carry = (cache, jnp.asarray(PROMPTS) - 1)
    (cache, lengths), first = jax.lax.scan(decode, carry, length=counts[0])
    at = lengths[:, None] + jnp.arange(MESSAGE)[None]
    message = jnp.where(
        jnp.arange(MESSAGE)[None] < MESSAGES[:, None], tokens[slot[:, None], at], 9
    )
    # They are gathered in another order, as when only some of them wait.
    order = jnp.array([2, 0, 1])
    gathered = jax.tree.map(lambda x: x[order], cache)
    extended = kv.extend(
        weights, model, gathered, message[order], lengths[order], (bucket, CONTEXT)
    )
    cache = jax.tree.map(lambda x, part: x.at[order].set(part), cache, extended)
    carry = (cache, lengths + MESSAGES)
    _, second = jax.lax.scan(decode, carry, length=counts[1])
    return jax.tree.map(lambda *x: jnp.concatenate(x), first, second)


def _cached_logits(parameters, config, tokens, bucket, attention, behind=0.0):
    """Pairs of int[SLOTS] positions and float[SLOTS, V] logits after them."""
    # As many as the longest slot has room for in the bucket.
    rest = bucket - int((PROMPTS - 1 + FIRST + MESSAGES).max())
    counts = (FIRST, rest)
    run = _run(parameters, config, tokens, bucket, counts, behind, attention)
    assert int(run[0].max()) == bucket - 1
    return [
        (np.asarray(at), np.asarray(logits)) for at, logits in zip(*run, strict=True)
    ]


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_a_token_is_written_as_to_places_of_its_own_and_out_of_range_nowhere(attention):
    """Else a deterministic program on a GPU sorts before each write."""
    config = models.small_config(VOCABULARY)
    layout = attention(config)
    new = jnp.ones((SLOTS, config.kv_heads, config.head_dim))
    entry = layout.with_context(layout.to_entry(new[:, None] * 0), CONTEXT)
    where = jnp.array([0, CONTEXT, 7])
    jaxpr = str(jax.make_jaxpr(layout.write_token)(entry, new, where))
    assert jaxpr.count("scatter[") == jaxpr.count("unique_indices=True") == 1
    written = layout.write_token(entry, new, where).any(
        axis=[axis for axis in (1, 2, 3) if axis != layout.context_axis]
    )
    assert np.argwhere(written).tolist() == [[0, 0], [2, 7]]


def test_sampled_tokens_are_written_as_to_places_of_their_own():
    whole, real = jnp.zeros((2, 5), int), jnp.zeros((2, 5))
    rows = RowBuffers(whole, real, real, whole, whole > 0)
    ones = jnp.ones(3)
    drawn = Sampled(token=jnp.array([7, 8, 9]), logprob=ones, entropy=ones)
    given = jnp.array([1, 2, 3]), jnp.array([4, 0, 0]), jnp.zeros(3, int), drawn
    write = decode_step._write_reply_tokens
    jaxpr = str(jax.make_jaxpr(write)(rows, *given))
    assert jaxpr.count("scatter[") == jaxpr.count("unique_indices=True") == 5
    tokens = write(rows, *given).tokens
    assert np.argwhere(tokens).tolist() == [[1, 4]] and tokens[1, 4] == 7
