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
SEARCH = ("search", "--target-vram", "40GB", "--json")


def main() -> None:
    """Search twice in one new folder, with a cache of its own, and write first_search.json."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "AUTOFIT_CACHE": f"{folder}/cache", "AUTOFIT_SERVER": "0"}
        cold_s, first = searched(Path(folder) / "first", environment)
        warm_s, _ = searched(Path(folder) / "second", environment)
    speed_up = first["winner"]["completions_per_s"] / first["baseline"]["completions_per_s"]
    kept = {"cold_s": round(cold_s, 1), "warm_s": round(warm_s, 1), "speed_up": round(speed_up, 3)}
    (HERE / "first_search.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(kept)


def searched(folder: Path, environment: dict[str, str]) -> tuple[float, dict[str, Any]]:
    """(wall seconds, the answer) of the search in a new `folder`."""
    folder.mkdir()
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "autofit", *SEARCH],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return time.monotonic() - began, json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
