"""The table of launch/diagnose.py: a line for each checkpoint, and what it is of."""

import math
from typing import Any

# Heading, part of a diagnosis, name in it.
_COLUMNS = (
    ("success", "text", "success"),
    ("error", "text", "success_standard_error"),
    ("distinct", "text", "distinct_thoughts"),
    ("across", "text", "overlap_across"),
    ("I(X;Z)", "information", "first_turn/sequence/mutual"),
    ("H(Z|X)", "information", "first_turn/sequence/conditional_entropy"),
    ("z-score", "information", "trajectory/token/zscore"),
    ("found@1", "information", "first_turn/retrieval_at_1"),
    ("chance", "information", "first_turn/retrieval_at_1_chance"),
    ("task", "gradients", "all/task"),
    ("entropy", "gradients", "all/entropy"),
    ("KL", "gradients", "all/kl"),
)


def table(diagnoses: list[dict[str, Any]]) -> str:
    """The most telling numbers, "-" where one was not measured, and their units.

    Args:
      diagnoses: of one batch's shape, from `cli.diagnosis.diagnose`.
    """
    lines = [" ".join(f"{head:>9}" for head in ("step", *(c[0] for c in _COLUMNS)))]
    for diagnosis in diagnoses:
        cells = [f"{diagnosis['step']:>9}"]
        for _, part, name in _COLUMNS:
            value = diagnosis.get(part, {}).get(name)
            is_known = value is not None and math.isfinite(value)
            cells.append(f"{format(value, '.3g') if is_known else '-':>9}")
        lines.append(" ".join(cells))
    return "\n".join([*lines, "", *_legend(diagnoses)])


def _legend(diagnoses: list[dict[str, Any]]) -> list[str]:
    """Sizes, units and bounds, of what was measured of the last, where it had any."""
    text = diagnoses[-1]["text"]
    lines = [
        f"{text['episodes']} episodes on {text['prompts']} prompts; error: standard"
        " error of success over prompts; distinct: distinct thoughts / thoughts;"
        " across: share of their 4-grams also in another prompt's"
    ]
    measured = [known for each in diagnoses if (known := each.get("information"))]
    if measured := [known for known in measured if known.get("first_turn/prompts")]:
        known = measured[-1]
        prompts = known["first_turn/prompts"]
        lines.append(
            "I(X;Z), H(Z|X): nats per thought of a first turn"
            f" ({known['first_turn/thoughts']:g} thoughts, {prompts:g} prompts:"
            f" I(X;Z) is at most {math.log(prompts):.3g}); z-score: standard deviations"
        )
    if "gradients" in diagnoses[-1]:
        lines.append(
            "task, entropy, KL: gradient norms of the parts of the loss; a KL penalty"
            " in the reward is part of the task"
        )
    return lines
