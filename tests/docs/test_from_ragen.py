"""What docs/from_ragen.md tells readers to write, executed."""

import dataclasses
import re
from pathlib import Path

import numpy as np
from helpers import runs, updates
from helpers.records import episodes_of, rows_of

from ragen_jax.learning import advantages, rewards, shaping

DOC = (Path(runs.ROOT) / "docs" / "from_ragen.md").read_text()


def test_the_hook_pays_the_whole_return_on_the_last_token_as_ragen_does(tmp_path):
    (text,) = re.findall(r"```python\n# my_rewards.py\n(.*?)```", DOC, re.DOTALL)
    path = tmp_path / "my_rewards.py"
    path.write_text(text)
    shaping.check_hook(str(path), 2, 3)
    usual = updates.settings(reward__format_penalty=-0.1).reward
    moved = dataclasses.replace(usual, hook=str(path))
    episodes = episodes_of(
        [[1.0, 2.0, 0.0], [0.0, 5.0, 9.0]],
        is_valid=[[False, True, False], [True, False, True]],
        turns=[2, 3],
        group=[0, 0],
    )
    # Turns earn 0.9 and 2, of which the third is never played; and 0, 4.9 and 9.
    expected = {
        usual: [[2.9, 2, 0], [13.9, 13.9, 9]],
        moved: [[2.9] * 2 + [0], [13.9] * 3],
    }
    rows = rows_of("orRorR...", "oRoRorR..", episode=[0, 1])
    nothing = np.zeros(rows.tokens.shape, np.float32)
    for settings, by_turn in expected.items():
        earned = shaping.turn_rewards(settings, episodes, 1)
        paid = rewards.at_turn_ends(rows, earned)
        found = advantages.gae(paid, nothing, rows.is_reply, gamma=1.0, lam=1.0)
        for row, turn in np.argwhere(np.asarray(rows.turn_end)):
            own = np.asarray(
                rows.is_reply[row] & (rows.turn[row] == rows.turn[row, turn])
            )
            gain = np.asarray(found.advantages)[row][own]
            wanted = by_turn[row][int(rows.turn[row, turn])]
            np.testing.assert_allclose(gain, wanted, rtol=1e-6)
