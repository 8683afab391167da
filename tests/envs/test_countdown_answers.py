"""Countdown's answers: read on device, in plain Python, by Python and reasoning-gym."""

import ast
import collections
import fractions
import functools
import itertools
import json
import random
import re

import jax
import numpy as np
import pytest
from helpers.paths import GOLDEN

from ragen_jax.envs.base import NO_ACTION
from ragen_jax.envs.countdown.expression import (
    ANSWER_BYTES,
    LIMIT,
    OTHER,
    REFUSED,
    TARGET,
    read_bytes,
    read_text,
)

FUZZED = 24_000


# Texts and what they come to where 21 is to be made from GIVEN.
GIVEN = [3, 8, 1, 4]
CASES = [
    ("3 * (8 - 1)", TARGET),
    ("3*8-3", REFUSED),  # There is one 3.
    ("3*8-1", OTHER),
    ("(1+3*8)-(4)", TARGET),
    ("(3*8)+1-4 = 21", TARGET),
    ("3*8+1-4 = 22", REFUSED),  # That is false.
    ("3*8-1 = 21", REFUSED),
    ("8 - 4 = 4", OTHER),
    ("4 - 8 = -4", OTHER),
    ("4 - 8 = - 4", OTHER),
    ("-4 + 8 * 3 + 1", TARGET),
    ("-(4 - 1 - 8 * 3)", TARGET),
    ("21", REFUSED),
    ("8", OTHER),
    ("008", OTHER),
    ("8 / 4 / 1", OTHER),
    ("8 / (4 * 1)", OTHER),
    ("8 / 3", REFUSED),
    ("8 / 3 * 3", REFUSED),
    ("1 / (4 - 3 - 1)", REFUSED),
    ("8 / (3 - 3)", REFUSED),
    ("((((3)))*(8-1))", TARGET),
    ("(" * 31 + "8" + ")" * 31, OTHER),
    ("99999999999999999999", REFUSED),
    (" \t\r\n\v\f3\f*\v(8\n-\r1\t) ", TARGET),
    ("", NO_ACTION),
    ("3 *", NO_ACTION),
    ("* 3", NO_ACTION),
    ("+3", NO_ACTION),
    ("3 - -1", NO_ACTION),  # A minus sign without parentheses stands first.
    ("3 * -1", NO_ACTION),
    ("3 * (-1)", OTHER),
    ("- - 3", NO_ACTION),
    ("3 8", NO_ACTION),
    ("3(8 - 1)", NO_ACTION),
    ("(3 + 8", NO_ACTION),
    ("3 + 8)", NO_ACTION),
    ("()", NO_ACTION),
    ("21 = 3 * (8 - 1)", NO_ACTION),
    ("3 = 3 = 3", NO_ACTION),
    ("(3 = 3)", NO_ACTION),
    ("3 =", NO_ACTION),
    ("= 3", NO_ACTION),
    ("3 = (3)", NO_ACTION),
    ("3 = 3 -", NO_ACTION),
    ("3 ** 8", NO_ACTION),
    ("3 // 1", NO_ACTION),
    ("3.0", NO_ACTION),
    ("1e1", NO_ACTION),
    ("three", NO_ACTION),
    ("3 × 8", NO_ACTION),
    ("3\0", NO_ACTION),
]
# With numbers, a target, and what they come to there.
LIMIT_CASES = [
    ("999 * 998 - 999 * 1", [999, 998, 999, 1], 0, OTHER),
    ("999 * 998 * 997", [999, 998, 997, 1], 1, REFUSED),
    ("1 * 999 * 998 * 997 / 997", [999, 998, 997, 997, 1], 1, REFUSED),
    ("1 - 999 * 998 * 997 / 997 + 998", [999, 998, 997, 997, 1, 998], 1, REFUSED),
    ("1000 * 1000", [1000, 1000], LIMIT, TARGET),
    ("1000 * 1000 + 1", [1000, 1000, 1], LIMIT + 1, REFUSED),
    ("1000 * 1000 + 1 - 2", [1000, 1000, 1, 2], LIMIT - 1, REFUSED),
    ("1 - 1000 * 1000 - 2", [1000, 1000, 1, 2], 5, REFUSED),
]
# From GIVEN: what they come to where numbers may be left over, and where not.
LEFT_OVER_CASES = [
    ("3 * (8 - 1)", TARGET, REFUSED),
    ("3 * 8 + 1 - 4", TARGET, TARGET),
    ("3 * 8 * 1 - 4", OTHER, OTHER),
    ("8 + 4 - 1 - 3 = 8", OTHER, OTHER),
    ("8 - 4 - 1 = 3", OTHER, REFUSED),
]


@pytest.mark.parametrize(("text", "meaning"), CASES)
def test_an_answer_means_what_the_rules_say(text, meaning):
    assert read_text(text.encode(), GIVEN, 21) == meaning


@pytest.mark.parametrize(("text", "numbers", "target", "meaning"), LIMIT_CASES)
def test_results_may_not_lie_beyond_the_limit_even_on_the_way(
    text, numbers, target, meaning
):
    assert read_text(text.encode(), numbers, target) == meaning


@pytest.mark.parametrize(("text", "some", "every"), LEFT_OVER_CASES)
def test_all_numbers_have_to_be_used_only_where_the_settings_say_so(text, some, every):
    given = [*GIVEN, 0, 0]
    assert read_text(text.encode(), given, 21, use_all=False) == some
    assert read_text(text.encode(), given, 21, use_all=True) == every


@functools.cache
def _fuzz():
    """(texts, int32[n, 6] numbers, int32[n] targets): the cases and all short texts,
    then random ones."""
    known = [(text, GIVEN, 21) for text, *_ in (*CASES, *LEFT_OVER_CASES)]
    known += [case[:3] for case in LIMIT_CASES]
    texts = [text.encode() for text, _, _ in known]
    numbers = [given + [0] * (6 - len(given)) for _, given, _ in known]
    targets = [target for _, _, target in known]
    for length in range(1, 5):
        texts += map(bytes, itertools.product(b"12+*/-(=)", repeat=length))
    numbers += [[1, 2, 0, 0, 0, 0]] * (len(texts) - len(known))
    targets += [3] * (len(texts) - len(known))
    rng = random.Random(6)
    for index in range(FUZZED - len(texts)):
        # Of the sizes that puzzles have, or with products beyond 32 bits.
        count, highest = rng.choice([(3, 99), (4, 99), (6, 1000)])
        given = [rng.randint(1, highest) for _ in range(count)]
        text = _random_text(rng, given)
        texts.append(text[:ANSWER_BYTES])
        numbers.append(given + [0] * (6 - count))
        # A third of the targets is what the text makes, if it makes anything.
        value = _meant(texts[-1]) if index % 3 == 0 else None
        targets.append(rng.randint(1, 999) if value is None else value)
    return texts, np.array(numbers, np.int32), np.array(targets, np.int32)


def _random_text(rng, given):
    """At least one byte: an expression, a damaged one, a deep nest, symbols, bytes."""
    match rng.randrange(8):
        case 0:
            return rng.randbytes(rng.randint(1, ANSWER_BYTES))
        case 1:
            symbols = b"1234567890+-*/()= \t" + str(given[0]).encode()
            return bytes(rng.choices(symbols, k=rng.randint(1, ANSWER_BYTES)))
        case 2:
            depth = rng.randint(1, 33)
            inner = _expression(rng, given[: rng.randint(1, len(given))])
            signs = rng.choice([b"(", b"(", b"(-", b"-("])
            text = signs * depth + inner + b")" * (depth - (rng.random() < 0.1))
        case _:
            count = rng.choice([len(given), rng.randint(1, len(given))])
            used = rng.sample(given, count)
            if rng.random() < 0.1:
                used[-1] = rng.choice([*given, 0, 1, 10**6, 10**6 + 1, 10**12])
            text = _expression(rng, used)
    if rng.random() < 0.2:
        value = _meant(text)
        claimed = value if value is not None else rng.randint(-9, 99)
        text += b" = %d" % (claimed + (rng.random() < 0.1))
    edited = bytearray(text)
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        place = rng.randrange(len(edited) + 1)
        added = bytes([rng.choice(b"0123456789+-*/()= \n\0x")])
        edited[place : place + rng.randint(0, 1)] = rng.choice([b"", added])
    return bytes(edited) or b"="


def _expression(rng, used):
    """The numbers joined at random, some parentheses missing."""
    terms = [b"%d" % number for number in used]
    while len(terms) > 1:
        rng.shuffle(terms)
        right, left = terms.pop(), terms.pop()
        sign = rng.choice(b"+-*/+-*")
        joined = left + (b" %c " if rng.random() < 0.5 else b"%c") % sign + right
        terms.append(b"(" + joined + b")" if rng.random() < 0.6 else joined)
    return terms[0]


def _read_on_device(texts, numbers, targets, use_all):
    table = np.zeros((len(texts), ANSWER_BYTES), np.uint8)
    table[1::2] = ord("7")  # What stands behind the end of a text does not count.
    for row, text in zip(table, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    lengths = np.array([len(text) for text in texts], np.int32)
    read = functools.partial(read_bytes, use_all=use_all)
    return np.asarray(jax.jit(jax.vmap(read))(table, lengths, numbers, targets))


@pytest.mark.slow
@pytest.mark.parametrize("use_all", [False, True])
def test_reading_on_device_equals_plain_python_on_any_bytes(use_all):
    texts, numbers, targets = _fuzz()
    ours = _read_on_device(texts, numbers, targets, use_all)
    meant = [
        read_text(text, given, target, use_all)
        for text, given, target in zip(
            texts, numbers.tolist(), targets.tolist(), strict=True
        )
    ]
    assert ours.dtype == np.int32
    wrong = np.flatnonzero(ours != meant)[:5]
    assert not wrong.size, [(texts[i], numbers[i], ours[i], meant[i]) for i in wrong]
    counts = collections.Counter(meant)
    assert min(counts[m] for m in (NO_ACTION, REFUSED, OTHER, TARGET)) > 300, counts


def _tree(text):
    """Python's own reading of a text of plain arithmetic, or None."""
    if re.search(rb"[^-+*/() \t\n\r\v\f0-9]|\b0\d|\*\s*\*|/\s*/", text):
        return None
    try:
        tree = ast.parse(re.sub(rb"\s", b" ", text).strip().decode(), mode="eval").body
    except (SyntaxError, MemoryError):
        return None
    kinds = (ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
    return tree if all(isinstance(node, kinds) for node in ast.walk(tree)) else None


def _results(tree):
    """The value of a tree as a fraction; every result on the way, itself the last."""
    if isinstance(tree, ast.Constant):
        return [fractions.Fraction(tree.value)]
    if isinstance(tree, ast.UnaryOp):
        inner = _results(tree.operand)
        return [*inner, -inner[-1]]
    left, right = _results(tree.left), _results(tree.right)
    a, b = left[-1], right[-1]
    value = {
        ast.Add: lambda: a + b,
        ast.Sub: lambda: a - b,
        ast.Mult: lambda: a * b,
        ast.Div: lambda: a / b,
    }[type(tree.op)]()
    return [*left, *right, value]


def _meant(text):
    """The value of a text by Python's reading if it is whole, or else None."""
    tree = _tree(text)
    try:
        value = None if tree is None else _results(tree)[-1]
    except ZeroDivisionError:
        return None
    whole = value is not None and value.denominator == 1 and abs(value) <= LIMIT
    return int(value) if whole else None


def _verdict_by_python(tree, given, target):
    used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    if collections.Counter(used) - collections.Counter(n for n in given if n):
        return REFUSED
    try:
        results = _results(tree)
    except ZeroDivisionError:
        return REFUSED
    if any(result.denominator > 1 or abs(result) > LIMIT for result in results):
        return REFUSED
    return TARGET if results[-1] == target else OTHER


def test_what_can_be_read_is_worth_what_pythons_own_grammar_says():
    seen = collections.Counter()
    for text, given, target in zip(*_fuzz(), strict=True):
        tree, read = _tree(text), read_text(text, given.tolist(), int(target))
        if tree is not None and read != NO_ACTION:
            assert read == _verdict_by_python(tree, given.tolist(), target), text
            seen[read] += 1
        elif tree is not None:
            # Python also allows signs elsewhere than first in a sum.
            assert any(isinstance(node, ast.UnaryOp) for node in ast.walk(tree)), text
        elif read != NO_ACTION:
            # Beyond Python: what the expression equals, and zeros that lead a number.
            assert re.search(rb"=|\b0\d", text), text
    assert min(seen[m] for m in (REFUSED, OTHER, TARGET)) > 800, seen


def test_verdicts_are_those_of_reasoning_gym_wherever_divisions_come_out_even():
    record, counts = (
        json.loads((GOLDEN / "countdown.json").read_text()),
        collections.Counter(),
    )
    assert record["origin"].startswith("reasoning-gym 0.")
    for puzzle in record["puzzles"]:
        numbers, target = puzzle["numbers"], puzzle["target"]
        solution, *_ = puzzle["tries"]
        # It asks for all numbers; 1 is its score of the target.
        assert read_text(solution.encode(), numbers, target, use_all=True) == TARGET
        assert read_text(solution.encode(), numbers, target) == TARGET
        for text, score in puzzle["tries"].items():
            read = read_text(text.encode(), numbers, target, use_all=True)
            counts[read, score] += 1
            if (read == TARGET) != (score == 1):
                # Read only there: signs in the middle, remainders on the way.
                assert read != TARGET and _verdict_is_stricter(text), text
            # It gives 0.01 to what it cannot read or divides by zero.
            assert read != OTHER or score == 0.05, text
    assert len(record["puzzles"]) == 100 and counts[TARGET, 1.0] >= 100
    assert counts[OTHER, 0.05] > 100 and counts[NO_ACTION, 0.01] > 100


def _verdict_is_stricter(text):
    tree = _tree(text.encode())
    has_rest = any(result.denominator > 1 for result in _results(tree))
    return has_rest or read_text(text.encode(), [], 0) == NO_ACTION
