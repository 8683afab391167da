"""Evaluates and writes every episode as a line of JSON; returns some for people."""

import contextlib
import json
import time
from pathlib import Path

from ragen_jax.envs.base import SPLITS
from ragen_jax.evaluation import evaluator as evaluator_lib
from ragen_jax.evaluation import transcripts
from ragen_jax.evaluation.evaluator import Evaluator, Score
from ragen_jax.evaluation.report import Played
from ragen_jax.evaluation.transcripts import Reader
from ragen_jax.models.parameters import Parameters
from ragen_jax.reporting.console import Console, duration
from ragen_jax.utils.atomic_files import new_file

_LOG_SECONDS = 60  # between lines of progress where no terminal shows a status


def play(
    evaluator: Evaluator,
    actor: Parameters,
    reader: Reader,
    played: Played,
    console: Console,
    *,
    out: Path | None,
    show: int,
) -> tuple[Score, list[str]]:
    """Plays the levels and writes every episode, batch by batch.

    Args:
      evaluator: of the environment.
      actor: the policy's parameters, adapters merged.
      reader: of the episodes' tokens.
      played: how many levels of which split, by which seed and temperature.
      console: for progress.
      out: file for the trajectories, in a folder that exists, or None.
      show: how many episodes to return as texts.

    Returns:
      The score, and the first episodes as `transcripts.readable` texts.
    """
    shown: list[str] = []
    progress = _Progress(console, played.prompts)
    writing = contextlib.nullcontext() if out is None else new_file(out)
    with writing as file:

        def on_batch(first: int, rows, episodes) -> None:
            for transcript in transcripts.read(
                reader, rows, episodes, first_episode=first * played.rollouts
            ):
                if file is not None:
                    line = json.dumps(transcript.to_dict(), ensure_ascii=False)
                    file.write(line + "\n")
                if len(shown) < show:
                    shown.append(transcripts.readable(transcript))
            progress.report(first + len(episodes.turns) // played.rollouts)

        progress.report(0)
        score = evaluator_lib.evaluate(
            evaluator,
            actor,
            prompts=played.prompts,
            split=SPLITS.index(played.split),
            seed=played.settings.seed,
            temperature=played.temperature,
            on_batch=on_batch,
        )
    return score, shown


class _Progress:
    """Shows how many levels are done, and how long the others will take."""

    def __init__(self, console: Console, levels: int):
        self._console, self._levels = console, levels
        self._started = self._logged = time.monotonic()

    def report(self, done: int) -> None:
        now = time.monotonic()
        text = f"{done}/{self._levels} levels"
        if done:
            left = (now - self._started) / done * (self._levels - done)
            text += f", {duration(left)} left"
        self._console.status(f"{text} ...")
        if now - self._logged > _LOG_SECONDS:
            self._logged = now
            self._console.line(text)
