"""bisect: the least target under which a configuration runs, by the hard cap with which a search emulates a card."""

from collections.abc import Callable, Sequence
from pathlib import Path

from autofit.probing.fork_server import ForkServer
from gpu.allowance import Allowance
from gpu.configs import Config
from gpu.folder import Folder, Row, append, by_name, rows
from gpu.measure import FINAL, facts, measured
from gpu.measure import RESULTS as MEASURED
from gpu.versions import versions

RESULTS = "bisected.jsonl"
CLOSE_BYTES = 64 << 20


def bisect(
    fork_server: ForkServer, folder: Folder, configs: Sequence[Config], out: Path, *, device: str, allowance: Allowance,
    after_each: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """A line for each attempt in bisected.jsonl; later commands go on where it ends."""
    path, open_ones = out / RESULTS, unfinished(out / RESULTS, configs)
    if open_ones and allowance.in_time():
        append(path, facts(device))
    for config in open_ones:

        def attempt(limit_bytes: int | None, config: Config = config) -> Row:
            row = measured(fork_server, folder, config, device=device, limit_bytes=limit_bytes,
                           deadline_s=allowance.deadline_s())  # fmt: skip
            row.pop("uncapped", None)
            row = row | {"name": config.name, "limit_bytes": limit_bytes, "versions": versions()}
            append(path, row)
            print(row["name"], row["limit_bytes"], row["status"], str(row.get("reason", ""))[:80], flush=True)
            after_each()
            return row

        least_capacity(tried(path, config.name), attempt, in_time=allowance.in_time)


def tried(path: Path, name: str) -> list[Row]:
    """The attempts at a configuration with these versions; the first is its measurement, where there is one."""
    now = versions()
    first = {"limit_bytes": None, **by_name(path.with_name(MEASURED)).get(name, {})}
    found = [first] if first.get("status") in FINAL else []
    found += [row for row in rows(path) if row["name"] == name]
    return [row for row in found if row.get("versions") == now]


def unfinished(path: Path, configs: Sequence[Config]) -> list[Config]:
    """Those of the tag "bisect" that more attempts would tell more of."""
    found = []
    for config in (config for config in configs if "bisect" in config.tags):
        asked: list[int | None] = []

        def attempt(limit_bytes: int | None, asked: list[int | None] = asked) -> Row:
            asked.append(limit_bytes)
            return {"status": "not run", "limit_bytes": limit_bytes}

        least_capacity(tried(path, config.name), attempt, in_time=lambda: True)
        found += [config] if asked else []
    return found


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
