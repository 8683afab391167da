"""Writes countdown.json: what reasoning-gym's Countdown says of expressions.

  pip install reasoning-gym
  python tests/golden/make_countdown.py

The stored file was made with the reasoning-gym version that it names. It holds puzzles
with the solution that reasoning-gym generated, and for each puzzle expressions with the
score that its checker gives: the solution, and random expressions of random numbers.
"""

import importlib.metadata
import json
import random
from pathlib import Path

FILE = Path(__file__).with_name("countdown.json")
PUZZLES, TRIES = 100, 5  # tries of each kind, beside the solution
SEED = 7


def main() -> None:
    """Asks reasoning-gym."""
    import reasoning_gym

    rng = random.Random(SEED)
    tasks = reasoning_gym.create_dataset("countdown", size=PUZZLES, seed=SEED)
    puzzles = []
    for task in tasks:
        numbers = task["metadata"]["numbers"]
        texts = [task["answer"], *(_try(numbers, rng) for _ in range(TRIES))]
        texts += [_swapped(task["answer"], rng) for _ in range(TRIES)]
        puzzles.append(
            {
                "numbers": numbers,
                "target": task["metadata"]["target"],
                "tries": {text: tasks.score_answer(text, task) for text in texts},
            }
        )
    origin = f"reasoning-gym {importlib.metadata.version('reasoning-gym')}"
    lines = ",\n".join(json.dumps(puzzle) for puzzle in puzzles)
    FILE.write_text(f'{{"origin": "{origin}", "puzzles": [\n{lines}\n]}}\n')


def _try(numbers: list[int], rng: random.Random) -> str:
    """An expression of the numbers, now and then with one exchanged or left out."""
    terms = [str(number) for number in numbers]
    if rng.random() < 0.2:
        terms[0] = str(rng.randint(1, 100))
    if rng.random() < 0.2:
        terms.pop()
    while len(terms) > 1:
        rng.shuffle(terms)
        right, left = terms.pop(), terms.pop()
        joined = f"{left} {rng.choice('+-*/')} {right}"
        terms.append(f"({joined})" if terms else joined)
    return terms[0]


def _swapped(solution: str, rng: random.Random) -> str:
    """The solution with two of its characters exchanged, if that is still a text."""
    letters = list(solution)
    one, two = rng.sample(range(len(letters)), 2)
    letters[one], letters[two] = letters[two], letters[one]
    return "".join(letters)


if __name__ == "__main__":
    main()
