"""measure: each configuration on the card, in order of value; what is measured already is not measured again."""

import os
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from autofit.probing.fork_server import ForkServer
from gpu.allowance import Allowance
from gpu.children import answered, scratch
from gpu.configs import Config
from gpu.folder import Folder, Row, append, by_name
from gpu.versions import versions

RESULTS = "measured.jsonl"
PROBE, PROFILED = "gpu.probe:run", "gpu.probe:run_profiled"
AGAIN = "-again"  # ends the name of a second measurement
FINAL = ("fit", "oom")  # a failed or lost one is tried again by the next command


def measure(
    fork_server: ForkServer, folder: Folder, configs: Sequence[Config], out: Path, *, device: str,
    allowance: Allowance, limit_bytes: int | None = None, profiles: bool = False, again: bool = False,
    after_each: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """A line for each configuration in measured.jsonl, while there is time.

    `profiles`: with the kernel times of one more step. `again`: measured a second time, under a name of its own.
    """
    path, suffix = out / RESULTS, AGAIN if again else ""
    left = [config for config in configs if f"{config.name}{suffix}" not in measured_already(path)]
    if not left:
        return
    append(path, facts(device))
    for config in left:
        if not allowance.in_time():
            print("out of time before", config.name, flush=True)
            break
        at, entry = time.monotonic(), PROFILED if profiles else PROBE
        row = measured(fork_server, folder, config, device=device, limit_bytes=limit_bytes,
                       deadline_s=allowance.deadline_s(), entry=entry)  # fmt: skip
        seconds = {"at": time.time(), "s": round(time.monotonic() - at, 2)}
        row = {"name": f"{config.name}{suffix}", **seconds, **row, "versions": versions()}
        append(path, row)
        print(_line(row), flush=True)
        after_each()


def measured_already(path: Path) -> set[str]:
    """Names that the file `path` has as a fit or an OOM with these versions."""
    now = versions()
    return {n for n, row in by_name(path).items() if row.get("status") in FINAL and row.get("versions") == now}


def measured(
    fork_server: ForkServer, folder: Folder, config: Config, *, device: str, limit_bytes: int | None, deadline_s: float,
    entry: str = PROBE,
) -> Row:  # fmt: skip
    """One configuration. After an OOM under a limit it runs again without, which tells by how much it is over."""
    with scratch() as place:
        request = folder.request(config, place, device, limit_bytes=limit_bytes, deadline_s=deadline_s)
        row = answered(fork_server, entry, request)
    if row["status"] != "oom" or limit_bytes is None:
        return row
    with scratch() as place:
        free = answered(fork_server, PROBE, folder.request(config, place, device, deadline_s=deadline_s))
    return row | {"uncapped": free}


def facts(device: str) -> Row:
    """The machine, as a line of its own."""
    packages = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "autofit")
    row: Row = {"name": "facts", "device": device, "kernel": os.uname().release, "time": time.time()}
    for name in packages:
        try:
            row[name] = version(name)
        except ModuleNotFoundError:
            row[name] = None
    if device == "cuda":
        row |= _of_driver()
    return row


def _of_driver() -> Row:
    import pynvml

    from autofit.hardware.hardware import gpus

    pynvml.nvmlInit()
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        driver = None
    finally:
        pynvml.nvmlShutdown()
    found = [{"name": g.name, "uuid": g.uuid, "capacity_bytes": g.capacity_bytes} for g in gpus()]
    return {"driver": driver if driver is None else str(driver), "cards": found}


def _line(row: Row) -> str:
    used = row.get("device_used_bytes")
    size = f"{used / 1e9:.2f} GB" if isinstance(used, int) else "-"
    steps = row.get("step_s") or ()
    times = " ".join(f"{s:.3f}" for s in steps) if isinstance(steps, list) else ""
    return f"{row['name']:>14} {row['status']:>6} {size:>10} {times} {str(row.get('reason', ''))[:100]} ({row['s']} s)"
