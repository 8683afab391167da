"""Searches for an expression that makes a Countdown target, on the host."""

from ragen_jax.envs.countdown.expression import LIMIT
from ragen_jax.envs.countdown.types import Countdown, State

_SUM, _PRODUCT, _ATOM = range(3)  # kinds of expressions, by how tightly they bind


def solution_text(state: State, settings: Countdown) -> str | None:
    """An expression that makes the target, or None if there is none. Host side.

    Args:
      state: NumPy arrays or numbers.
      settings: whether all numbers must be used.
    """
    terms = [(int(n), str(n), _ATOM) for n in state.numbers if n]
    return _search(terms, int(state.target), settings.use_all, set())


def _search(terms: list, target: int, use_all: bool, failed: set) -> str | None:
    """Joins two terms in every possible way, and searches on with the joined one.

    Args:
      terms: (value, text, kind) of each; kind is _SUM, _PRODUCT or _ATOM.
      target: the value to make.
      use_all: whether the expression must contain all terms.
      failed: tuples of values that have been searched without success; grows.
    """
    for value, text, _ in terms:
        if value == target and (len(terms) == 1 or not use_all):
            return text
    values = tuple(sorted(value for value, _, _ in terms))
    if values in failed:
        return None
    failed.add(values)
    for one in range(len(terms)):
        for two in range(one):
            others = [t for place, t in enumerate(terms) if place not in (one, two)]
            for joined in _joins(*sorted((terms[one], terms[two]), reverse=True)):
                if expression := _search([*others, joined], target, use_all, failed):
                    return expression
    return None


def _joins(high: tuple, low: tuple) -> list[tuple]:
    """The terms that two others make; `high` has the higher value, or the same."""
    (a, _, _), (b, _, _) = high, low
    results = [(a + b, " + ", _SUM), (a - b, " - ", _SUM), (a * b, " * ", _PRODUCT)]
    if b and a % b == 0:
        results.append((a // b, " / ", _PRODUCT))
    return [
        (value, _enclosed(high, kind) + operator + _enclosed(low, kind + 1), kind)
        for value, operator, kind in results
        if value <= LIMIT
    ]


def _enclosed(term: tuple, least: int) -> str:
    """The term's text, in parentheses if it binds less tightly than `least`."""
    _, text, kind = term
    return text if kind >= least else f"({text})"
