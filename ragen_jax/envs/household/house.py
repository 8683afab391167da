"""The house: its furniture, kinds of objects and tasks."""

import numpy as np

# Room -> its receptacles; those with * can be opened and closed, and begin closed.
ROOMS = {
    "kitchen": ("countertop 1", "countertop 2", "sink 1", "*fridge 1", "*microwave 1")
    + ("*cabinet 1", "*cabinet 2"),
    "living room": ("sofa 1", "table 1", "shelf 1", "shelf 2"),
    "bedroom": ("bed 1", "desk 1", "*drawer 1", "*drawer 2"),
}
_MARKED = tuple(name for names in ROOMS.values() for name in names)
RECEPTACLES = tuple(name.removeprefix("*") for name in _MARKED)  # R
HELD = len(RECEPTACLES)  # the place of an object that the person carries
CAN_OPEN = np.array([name.startswith("*") for name in _MARKED])  # bool[R]
SINK, MICROWAVE, FRIDGE, DESK, COUNTER = (
    RECEPTACLES.index(name)
    for name in ("sink 1", "microwave 1", "fridge 1", "desk 1", "countertop 1")
)
# Kinds of receptacles (their names without number), and int32[R], the kind of each.
KINDS = tuple(dict.fromkeys(name.rsplit(" ", 1)[0] for name in RECEPTACLES))
KIND_OF = np.array([KINDS.index(n.rsplit(" ", 1)[0]) for n in RECEPTACLES], np.int32)
# Types of objects; those that tasks may ask to clean, heat or cool come first.
TYPES = tuple(
    "apple potato tomato egg mug cup plate bowl book pencil watch key".split()
)
WASHABLE = 8  # how many these are
# int32, kinds of receptacles that tasks name as the target: no appliance, no sink.
TARGETS = np.array(
    [KINDS.index(k) for k in ("countertop", "cabinet", "table", "shelf", "desk")]
    + [KINDS.index(k) for k in ("drawer", "sofa", "bed")],
    np.int32,
)
TASKS = ("put", "look", "clean", "heat", "cool", "two")
PUT, LOOK, CLEAN, HEAT, COOL, TWO = range(len(TASKS))
TASK_TEXTS = (
    "Task: put one",
    "Task: look under the desklamp at one",
    "Task: put one clean",
    "Task: put one hot",
    "Task: put one cold",
    "Task: put two of",
)
PLAIN, HOT, COLD = range(3)  # an object's warmth
# By warmth + 3 * is_clean.
CONDITIONS = ("", " (hot)", " (cold)", " (clean)", " (clean, hot)", " (clean, cold)")


def description() -> str:
    """The rooms and what is in them, in one sentence each."""
    rooms = (
        f"In the {room} are {', '.join(name.removeprefix('*') for name in names)}."
        for room, names in ROOMS.items()
    )
    return " ".join(rooms)
