"""Wall seconds of README's search, with nothing cached and again: `python -m experiments.acceptance.first_search`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_BETWEEN_S = 2.0  # nobody types faster; a command that starts at once may find the first one's server on its move (5 s)
SEARCH = ("search", "--target-vram", "40GB", "--json")


def main() -> None:
    """Search as a user does: in a new folder, there again, and in another one; write first_search.json.

    The cache is new and no server is kept before the first search; it keeps one for the others.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "AUTOFIT_CACHE": f"{folder}/cache"}
        command("server", "stop", cwd=Path(folder), environment=environment)
        cold_s, first = searched(Path(folder) / "first", environment)
        time.sleep(_BETWEEN_S)
        warm_s, _ = searched(Path(folder) / "first", environment)
        time.sleep(_BETWEEN_S)
        elsewhere_s, _ = searched(Path(folder) / "second", environment)
        command("server", "stop", cwd=Path(folder), environment=environment)
    speed_up = first["winner"]["completions_per_s"] / first["baseline"]["completions_per_s"]
    kept = {
        "cold_s": round(cold_s, 1), "warm_s": round(warm_s, 1), "elsewhere_s": round(elsewhere_s, 1),
        "speed_up": round(speed_up, 3),
    }  # fmt: skip
    (HERE / "first_search.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(kept)


def searched(folder: Path, environment: dict[str, str]) -> tuple[float, dict[str, Any]]:
    """(wall seconds, the answer) of the search in `folder`, which is made where it is not there."""
    folder.mkdir(exist_ok=True)
    began = time.monotonic()
    said = command(*SEARCH, cwd=folder, environment=environment)
    return time.monotonic() - began, json.loads(said.splitlines()[-1])


def command(*words: str, cwd: Path, environment: dict[str, str]) -> str:
    """What `autofit` with these words prints."""
    done = subprocess.run(
        [sys.executable, "-m", "autofit", *words], cwd=cwd, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    main()
