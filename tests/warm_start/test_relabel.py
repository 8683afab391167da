"""What is imitated in place of what was done, against rooms read from their text."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.room_rows import tokenize, tokenizer, words

from ragen_jax import cli
from ragen_jax.envs.sokoban import demonstrations, distances
from ragen_jax.envs.sokoban.texts import ACTION_NAMES
from ragen_jax.errors import SettingsError
from ragen_jax.text import chat_template
from ragen_jax.warm_start import batches, checks, drawings, relabel, walls
from ragen_jax.warm_start.recipe import KINDS, make_variant

_MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
_ROWS = 32


def _config():
    return cli.load_config(f"{ROOT / 'configs' / 'warm_start.py'}:rooms")


def _batch(kind: int, **player):
    """Short rows of one or two rooms each, as demonstrated, and relabelled."""
    config = _config()
    stage = config.rooms_planned
    stage.rows, stage.turns = _ROWS, 2
    pieces = chat_template.cut_pieces(tokenizer(), config.model)
    variant = make_variant(config, KINDS[stage.kinds][kind], **player)
    made = batches.make(pieces, tokenizer(), variant, stage, 1024)
    named = words()  # Its arrays would not outlive the tracing.

    def both(key):
        batch = made(key)
        return batch, relabel.with_best_actions(key, batch, named, 2)

    return jax.tree.map(np.asarray, jax.jit(both)(jax.random.key(4)))


def _board(cells: list[list[str]], box, target):
    """The cells that are open, and the fewest actions from (player, box); by sets."""
    floor = {
        (r, c)
        for r, line in enumerate(cells)
        for c, cell in enumerate(line)
        if cell != "#" and (cell not in "X√" or (r, c) == box)
    }

    def after(player, box, move):
        ahead = player[0] + move[0], player[1] + move[1]
        beyond = ahead[0] + move[0], ahead[1] + move[1]
        if ahead not in floor or (ahead == box and beyond not in floor):
            return player, box
        return ahead, beyond if ahead == box else box

    every = [(p, b) for p in floor for b in floor if p != b]
    left = {(p, b): 0 for p, b in every if b == target}
    came_from = {}
    for state in every:
        if state not in left:
            for move in _MOVES.values():
                came_from.setdefault(after(*state, move), []).append(state)
    front = list(left)
    while front:
        front, last = [], front
        for state in last:
            for earlier in came_from.get(state, ()):
                if earlier not in left:
                    left[earlier] = left[state] + 1
                    front.append(earlier)
    return after, left


def _wanted(text: str):
    """For each action of each thought: it, the best ones, and what each one loses."""
    for turn in text.split("State:\n")[1:]:
        drawing, _, reply = turn.partition("Turn ")
        if "<think>" not in reply:
            continue
        thought = reply.split("<think>")[1].split("</think>")[0]
        places = re.findall(r" \((\d), (\d)\)", thought)
        places = [(int(r), int(c)) for r, c in places]
        if len(places) < 3:
            continue
        player, box, target, *walked = places
        cells = [line.split() for line in drawing.splitlines()]
        after, left = _board(cells, box, target)
        named = box
        actions = re.findall(r"(Up|Down|Left|Right)", thought)
        for action, place in zip(actions, walked, strict=False):
            costs, lost = {}, {}
            for name, move in _MOVES.items():
                state = after(player, box, move)
                if state != (player, box) and state in left:
                    costs[name] = left[state]
                row, column = player[0] + move[0], player[1] + move[1]
                is_against = cells[row][column] in "X√" and (row, column) != named
                lost[name] = 4 if state == (player, box) and not is_against else 10
            fewest = min(costs.values(), default=0)
            lost |= {name: min(cost - fewest, 10) for name, cost in costs.items()}
            best = {name for name, cost in costs.items() if cost == fewest}
            yield action, best, lost if best else dict.fromkeys(_MOVES, -1)
            player, box = after(player, box, _MOVES[action])
            assert player == place


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 3, 6])
def test_after_any_action_the_best_next_ones_are_imitated(kind):
    batch, relabelled = _batch(kind, noise=0.4, midway=8)
    np.testing.assert_array_equal(relabelled.is_reply, batch.is_reply)
    names = {int(token): ACTION_NAMES[k] for k, token in enumerate(words().actions)}
    seen = changed = 0
    for row in range(_ROWS):
        tokens, imitated = batch.tokens[row], relabelled.imitated[row]
        walked = batch.is_reply[row] & np.isin(tokens, list(names))
        # Answers begin without a space, and go on behind "||".
        before = tokenizer().convert_ids_to_tokens(np.roll(tokens, 1).tolist())
        walked &= np.array([token in (":", ",") for token in before])
        found = np.flatnonzero(walked)
        wanted = list(_wanted(tokenizer().decode(tokens)))
        regret = relabelled.regret[row]
        for at, (action, best, lost) in zip(found, wanted, strict=False):
            assert names[int(tokens[at])] == action
            assert names.get(int(imitated[at])) in (best or {None})
            told = [*(lost[name] for name in ACTION_NAMES), *[-1] * 20]
            assert regret[at].tolist() == told
            seen += 1
            changed += imitated[at] != tokens[at]
        is_name = (regret[:, 4:] >= 0).any(1) | (imitated != tokens)
        others = ~walked & ~is_name
        np.testing.assert_array_equal(imitated[others], tokens[others])
        assert (regret[others] == -1).all()
    assert seen > 60 and changed > 10


def _wanted_names(text: str):
    """For each thought: what naming each box, and each target of the box, loses.

    A pair of lists of (place, lost), empty where no box and target solve the room.
    """
    for turn in text.split("State:\n")[1:]:
        drawing, _, reply = turn.partition("Turn ")
        if "<think>" not in reply:
            continue
        thought = reply.split("<think>")[1].split("</think>")[0]
        player, named = [
            (int(r), int(c)) for r, c in re.findall(r" \((\d), (\d)\)", thought)[:2]
        ]
        cells = [line.split() for line in drawing.splitlines()]
        places = [(r, c) for r, line in enumerate(cells) for c, _ in enumerate(line)]
        boxes = [at for at in places if cells[at[0]][at[1]] in "X√"]
        targets = [at for at in places if cells[at[0]][at[1]] in "O√S"]
        left = {
            (box, target): _pair_left(cells, player, box, target, boxes, targets)
            for box in boxes
            for target in targets
        }
        if min(left.values()) == np.inf:
            yield [], []
            continue
        of_box = [min(left[box, target] for target in targets) for box in boxes]
        yield _lost(boxes, of_box), _lost(targets, [left[named, t] for t in targets])


def _pair_left(cells, player, box, target, boxes, targets) -> float:
    """Actions until the box is on the target and then the other one on the other."""
    (other,) = set(boxes) - {box}
    (rest,) = set(targets) - {target}
    if box == target:
        return np.inf
    first = _board(cells, box, target)[1].get((player, box), np.inf)
    if other == rest:
        return first
    later = [list(line) for line in cells]
    later[box[0]][box[1]], later[target[0]][target[1]] = "_", "#"
    left = _board(later, other, rest)[1]
    beside = [(target[0] + r, target[1] + c) for r, c in _MOVES.values()]
    return first + min(left.get((at, other), np.inf) for at in beside)


def _lost(places, costs) -> list[tuple[tuple[int, int], float]]:
    return [
        (place, min(cost - min(costs), 10))
        for place, cost in zip(places, costs, strict=True)
    ]


@pytest.mark.slow
def test_naming_a_box_or_a_target_loses_what_the_worse_order_of_pushes_costs():
    batch, relabelled = _batch(6, noise=0.4, midway=8)
    chosen = 0
    for row in range(_ROWS):
        tokens, is_reply = batch.tokens[row], batch.is_reply[row]
        is_row = is_reply & (np.asarray(words().row)[tokens] >= 0)
        starts = np.flatnonzero(is_reply & ~np.roll(is_reply, 1))
        wanted = list(_wanted_names(tokenizer().decode(tokens)))
        for start, lost in zip(starts, wanted, strict=True):
            _, box, target = start + np.flatnonzero(is_row[start:])[:3]
            for at, choice in zip((box, target), lost, strict=True):
                its = slice(at, at + 2)
                regret = relabelled.regret[row, its, 4:]
                is_imitated = relabelled.imitated[row, its] == tokens[its]
                assert is_imitated.all() == is_imitated.any() == bool(choice)
                number = int(words().row[tokens[at]])
                assert regret[0].tolist() == _of_numbers(choice, 0)
                choice = [(place, x) for place, x in choice if place[0] == number]
                assert regret[1].tolist() == _of_numbers(choice, 1)
                chosen += (regret >= 0).sum()
    assert chosen > 100


def _of_numbers(choice, k: int) -> list[float]:
    """Of 10 rows, then of 10 columns, the least that is lost by naming each."""
    least = min((lost for _, lost in choice), default=0)
    told = [-1] * 20
    for place, lost in sorted(choice, key=lambda each: -each[1]):
        told[10 * k + place[k]] = lost - least
    return told


@pytest.mark.slow
@pytest.mark.parametrize(("corner", "midst"), ["X_", "_X"])
def test_where_no_box_and_target_solve_a_room_of_two_none_is_imitated(corner, midst):
    drawing = (
        f" # # # # # # #\n # {corner} _ _ _ O #\n # _ P X _ O #\n"
        f" # _ _ _ {midst} _ #\n # _ _ _ _ _ #\n # # # # # # #\nTurn 1.\n"
    )
    reply = (
        "<think> At (2, 2), box (2, 3), target (2, 5): Right (2, 3).</think>"
        "<answer>Right</answer>"
    )
    made, left_out = _relabelled(drawing, reply)
    # One box in a corner can go nowhere; the other's walk is imitated all the same.
    can_solve = midst == "X"
    assert left_out == ("" if can_solve else " (2, 3) (2, 5)")
    assert bool((made.regret[0, :, 4:] >= 0).any()) == can_solve
    assert (made.regret[0, :, :4] >= 0).any()


def _imitated(drawing: str, reply: str):
    """The tokens of a row of one reply, and it relabelled."""
    tokens, is_reply = tokenize(drawing, reply)
    batch = batches.Batch(jnp.array(tokens), jnp.array(is_reply), jnp.ones(1), None)
    return tokens, relabel.with_best_actions(jax.random.key(0), batch, words(), 1)


@pytest.mark.slow
def test_the_reply_behind_one_that_claims_a_step_which_was_none_is_imitated():
    drawing = " # # # # # #\n # _ P X O #\n # _ _ _ _ #\n # # # # # #\nTurn 1.\n"
    head = "<think> At (1, 2), box (1, 3), target (1, 4): "
    rest = " (0, 2).</think><answer>Up</answer>"
    good = f"{head}Right (1, 3).</think><answer>Right</answer>"
    tokens, is_reply = tokenize(drawing, f"{head}Up{rest}", drawing, good)
    batch = batches.Batch(jnp.array(tokens), jnp.array(is_reply), jnp.ones(1), None)
    made = relabel.with_best_actions(jax.random.key(0), batch, words(), 2)
    is_out = np.asarray(made.imitated) == -1
    assert tokenizer().decode(tokens[is_out]) == rest
    # In both an action is chosen, and going right is best.
    chosen = np.asarray(made.imitated)[(made.regret[..., :4] >= 0).any(-1)]
    right = int(words().actions[ACTION_NAMES.index("Right")])
    assert chosen.tolist() == [right, right]


def _relabelled(drawing: str, reply: str):
    """A row of one reply; and what of the reply is not imitated, as text."""
    tokens, made = _imitated(drawing, reply)
    imitated = np.asarray(made.imitated)
    assert (imitated[imitated != tokens] == -1).all()
    return made, tokenizer().decode(tokens[imitated == -1])


@pytest.mark.slow
def test_of_a_lost_box_no_action_is_imitated_but_all_else_is():
    drawing = " # # # # # #\n # _ P X _ #\n # _ _ _ O #\n # # # # # #\nTurn 1.\n"
    reply = (
        "<think> At (1, 2), box (1, 3), target (2, 4): Left (1, 1), Right (1, 2), Right"
        " (1, 3).</think><answer>Left || Right || Right</answer>"
    )
    made, left_out = _relabelled(drawing, reply)
    # Along the border it can be pushed nowhere but into the corner.
    assert left_out == " Left Right Right"
    assert (made.regret == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("walk", "left_out"),
    [
        ("Left (2, 1), Left (2, 0), Up (1, 0).", " (2, 0), Up (1, 0)."),
        ("Up (1, 2), Right (1, 3), Down (2, 3), Up (1, 3).", " (2, 3), Up (1, 3)."),
        ("Left (2, 1), Left (2, 1), Up (1, 1).", ""),
        ("Right (2, 3), Right (2, 4), Right (2, 5).", " (2, 5)."),
        ("Down (3, 2), Right (3, 3), Up (2, 3).", " (3, 3), Up (2, 3)."),
    ],
    ids=["a wall", "two boxes", "told as it is", "a box at a wall", "the other box"],
)
def test_behind_a_step_that_was_none_nothing_of_a_reply_is_imitated(walk, left_out):
    drawing = (
        " # # # # # # #\n # _ _ _ _ O #\n # _ P X _ _ #\n"
        " # _ _ X _ O #\n # _ _ _ _ _ #\n # # # # # # #\nTurn 1.\n"
    )
    head, answer = " At (2, 2), box (2, 3), target (1, 5): ", "<answer>Left</answer>"
    tokens, made = _imitated(drawing, f"<think>{head}{walk}</think>{answer}")
    is_out = np.asarray(made.imitated) == -1
    found = tokenizer().decode(tokens[is_out])
    assert found == (f"{left_out}</think>{answer}" if left_out else "")
    assert (made.regret[is_out] == -1).all()
    chosen = re.findall(r"(Up|Down|Left|Right)", walk.removesuffix(left_out))
    assert (made.regret[0, :, :4] >= 0).any(1).sum() == len(chosen)


@pytest.mark.slow
def test_a_perfect_demonstrators_actions_are_among_the_best():
    batch, _ = _batch(6, noise=0.0)
    named = words()

    def look(tokens, is_reply):
        seen = drawings.read_replies(tokens, is_reply, named, 2)
        return relabel.action_costs(tokens, is_reply, seen, named)

    found = jax.vmap(look)(batch.tokens, batch.is_reply)
    costs, is_choice = map(np.asarray, found)
    rows, at = np.nonzero(is_choice[:, :-1])
    taken = batch.tokens[rows, at + 1]
    of_actions = costs[rows, at]
    which = (taken[:, None] == np.asarray(named.actions)[None]).argmax(1)
    can_solve = of_actions.min(1) < distances.UNSOLVABLE
    assert can_solve.sum() > 60
    chosen = of_actions[np.arange(len(rows)), which]
    np.testing.assert_array_equal(chosen[can_solve], of_actions.min(1)[can_solve])


@pytest.mark.slow
def test_a_room_shown_midway_is_the_same_room_later_and_not_solved():
    config = _config()
    kind = KINDS["rooms_in_frames"][6]
    keys = jax.random.split(jax.random.key(0), 64)
    start, later = (
        jax.jit(jax.vmap(make_variant(config, kind, midway=n).env.reset, (0, None)))(
            keys, 0
        )
        for n in (0, 10)
    )
    np.testing.assert_array_equal(start.tiles, later.tiles)
    np.testing.assert_array_equal(start.shape, later.shape)
    assert not later.done.any()
    boxes = later.boxes.sum((1, 2))
    np.testing.assert_array_equal(boxes, start.boxes.sum((1, 2)))
    assert 0.5 < (start.boxes != later.boxes).any((1, 2)).mean() < 1
    assert (later.tiles[later.boxes] == demonstrations.TARGET).any()


def test_a_choice_is_expected_to_lose_what_its_likely_tokens_lose():
    # The third token is chosen with odds of 1 : 1 : 2 : 4, the fourth loses nothing.
    embedding = (
        jnp.zeros((1024, 2))
        .at[words().actions, 0]
        .set(jnp.log(jnp.array([1, 1, 2, 4.0])))
    )
    last = jnp.zeros((1, 5, 2)).at[0, 1, 0].set(1.0)
    regret = jnp.full((1, 5, 24), -1.0).at[0, 2, :4].set(jnp.array([10, 2, 1, 0.0]))
    rows = jnp.zeros((1, 5), jnp.int32)
    batch = batches.Batch(rows, rows > 0, jnp.ones(1), None, regret=regret)
    expected = lambda regret, last=last: walls.expected_regret(
        embedding, last, batch._replace(regret=regret), words()
    )
    np.testing.assert_allclose(expected(regret), (10 + 2 + 2) / 8, rtol=1e-6)
    # Another choice, of four equally likely actions of which each loses 2.
    of_two = regret.at[0, 4, :4].set(2.0)
    np.testing.assert_allclose(expected(of_two), (14 / 8 + 2) / 2, rtol=1e-6)
    # Or of two rows, one of which loses 6: the other words do not count.
    of_rows = regret.at[0, 4, 6].set(6.0).at[0, 4, 9].set(0.0)
    np.testing.assert_allclose(expected(of_rows), (14 / 8 + 3) / 2, rtol=1e-6)
    # Where nothing is lost whatever is chosen, there is no choice to count.
    of_none = regret.at[0, 4, :2].set(0.0)
    np.testing.assert_allclose(expected(of_none), 14 / 8, rtol=1e-6)
    assert jnp.isfinite(jax.grad(lambda last: expected(of_rows, last))(last)).all()


def test_stages_that_cannot_be_relabelled_are_refused():
    config = _config()
    config.rooms_planned.kinds, config.rooms_planned.relabel = "lakes", True
    config.rooms_planned.walls_weight = config.rooms_planned.random_places = 0.0
    with pytest.raises(SettingsError, match=r"rooms_planned\.relabel = True"):
        checks.check(config, ["rooms_planned"], 1024)
    config = _config()
    config.rooms_planned.kinds, config.rooms_planned.midway = "lakes", 3
    config.rooms_planned.walls_weight = config.rooms_planned.random_places = 0.0
    with pytest.raises(SettingsError, match=r"rooms_planned\.midway = 3 is of"):
        checks.check(config, ["rooms_planned"], 1024)
    config.rooms_planned.midway, config.rooms_planned.misread = 0, 0.5
    with pytest.raises(SettingsError, match=r"rooms_planned\.misread = 0\.5 is of"):
        checks.check(config, ["rooms_planned"], 1024)
    config = _config()
    config.two_boxes_dialogues.relabel = False
    config.two_boxes_dialogues.regret_weight = 0.0
    with pytest.raises(SettingsError, match=r"dialogues\.misread = 0\.9 shows walks"):
        checks.check(config, ["two_boxes_dialogues"], 1024)
    config = _config()
    config.two_boxes.random_plan = 0.2
    with pytest.raises(SettingsError, match=r"two_boxes\.random_plan = 0\.2 shows"):
        checks.check(config, ["two_boxes"], 1024)
    config = _config()
    config.two_boxes.relabel = False
    with pytest.raises(SettingsError, match=r"two_boxes\.regret_weight = 1\.0 counts"):
        checks.check(config, ["two_boxes"], 1024)
