"""bisect: the least target under which a configuration runs, by the hard cap with which a search emulates a card."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu.children import server
from gpu.configs import Config
from gpu.folder import Folder, Row, append, rows
from gpu.measure import facts, measured

RESULTS = "bisected.jsonl"
CLOSE_BYTES = 64 << 20


def bisect(folder: Folder, configs: Sequence[Config], out: Path, *, device: str, until_s: float, each_s: float) -> None:
    """A line for each attempt in bisected.jsonl; later commands go on where it ends."""
    path, began = out / RESULTS, time.monotonic()
    append(path, facts(device))
    with server(out) as fork_server:
        for config in (config for config in configs if "bisect" in config.tags):

            def attempt(limit_bytes: int | None, config: Config = config) -> Row:
                row = measured_once(limit_bytes, config)
                append(path, row)
                print(row["name"], row["limit_bytes"], row["status"], str(row.get("reason", ""))[:80], flush=True)
                return row

            def measured_once(limit_bytes: int | None, config: Config) -> Row:
                row = measured(fork_server, folder, config, device=device, limit_bytes=limit_bytes, deadline_s=each_s)
                row.pop("uncapped", None)
                return row | {"name": config.name, "limit_bytes": limit_bytes}

            tried = [row for row in rows(path) if row["name"] == config.name]
            least_capacity(tried, attempt, in_time=lambda: time.monotonic() - began < until_s)


def least_capacity(
    tried: Sequence[Row], attempt: Callable[[int | None], Row], *, in_time: Callable[[], bool]
) -> tuple[int, int] | None:
    """(the largest target that was too small, the smallest that was enough), after attempts while `in_time()`.

    Between what was live (no target below it can be enough) and what is used without a limit. None if it does not run.
    """
    free = next((row for row in tried if row["limit_bytes"] is None), None)
    if free is None:
        if not in_time():
            return None
        free = attempt(None)
    used, allocated, reserved = (free.get(f"{key}_bytes") for key in ("device_used", "peak_allocated", "peak_reserved"))
    if free["status"] != "fit" or not isinstance(used, int):
        return None
    assert isinstance(allocated, int)
    assert isinstance(reserved, int)
    limits = [(row["limit_bytes"], row["status"]) for row in tried]
    low = max([used - reserved + allocated, *(b for b, status in limits if isinstance(b, int) and status == "oom")])
    high = min([used, *(b for b, status in limits if isinstance(b, int) and status == "fit")])
    while high - low > CLOSE_BYTES and in_time():
        middle = (low + high) // 2
        status = attempt(middle)["status"]
        if status not in ("fit", "oom"):
            break  # it died of something else, which says nothing about its memory
        low, high = (low, middle) if status == "fit" else (middle, high)
    return low, high
