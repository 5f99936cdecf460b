"""The matrix of where and who over whole commands, in part; `nox -s storm` has more of it (--calls N)."""

import os
import random
import time
from pathlib import Path

import pytest
from storm.places import NAME, call_from_places, cases

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


def test_every_command_is_called_by_every_user_in_every_state_of_the_folder() -> None:
    found = {(case.command, case.who, case.state) for case in cases()}
    assert len(found) == 19 * 4 * 8
    assert len(set(cases())) == len(found) * 3 * 2 * 3


@as_root
@pytest.mark.slow
def test_whole_commands_end_in_an_answer_or_one_line_from_everywhere_and_for_everyone(tmp_path: Path) -> None:
    users_by_states = 4 * 8
    found = call_from_places(
        tmp_path, calls=users_by_states, dice=random.Random(17), until=time.monotonic() + 60, without=("sync",)
    )
    assert found.tried[NAME] == users_by_states
    assert not found.wrong
