"""predict: what the simulated card says of each configuration, with the versions at hand."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from autofit.fakegpu.specs import gpu_spec
from autofit.probing.fork_server import ForkServer
from gpu.allowance import Allowance
from gpu.children import answered, scratch
from gpu.configs import Config
from gpu.folder import Folder, append, by_name
from gpu.versions import versions

_TIMES = "step_s", "rollout_s", "update_s"


def predict(
    fork_server: ForkServer, folder: Folder, configs: Sequence[Config], out: Path, *, card: str, allowance: Allowance,
    after_each: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """A line for each configuration in predicted-CARD.jsonl, but for those that these versions have predicted."""
    path, whole_bytes = predictions(out, card), gpu_spec(card).capacity_bytes
    for config in not_predicted(path, configs):
        if not allowance.in_time():
            break
        with scratch() as place:
            at = time.monotonic()
            deadline_s = allowance.deadline_s()
            request = folder.request(config, place, f"sim:{card}", limit_bytes=whole_bytes, deadline_s=deadline_s)
            row = answered(fork_server, "autofit.probing.worker:run", request)
        row = {"name": config.name, "s": round(time.monotonic() - at, 2), **row, "versions": versions()}
        append(path, row)
        print(config.name, row["status"], row.get("device_used_bytes"), *(row.get(key) for key in _TIMES),
              str(row["reason"])[:120], flush=True)  # fmt: skip
        after_each()


def predictions(out: Path, card: str) -> Path:
    return out / f"predicted-{card}.jsonl"


def not_predicted(path: Path, configs: Sequence[Config]) -> list[Config]:
    """Those that the file `path` does not have, or only from other versions."""
    done, now = by_name(path), versions()
    return [config for config in configs if done.get(config.name, {}).get("versions") != now]
