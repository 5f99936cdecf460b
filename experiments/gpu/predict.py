"""predict: what the simulated card says of each configuration, with the versions at hand."""

import time
from collections.abc import Sequence
from pathlib import Path

from autofit.fakegpu.specs import gpu_spec
from gpu.children import answered, scratch, server
from gpu.configs import Config
from gpu.folder import Folder, append, by_name

_TIMES = "step_s", "rollout_s", "update_s"


def predict(folder: Folder, configs: Sequence[Config], out: Path, *, card: str, until_s: float) -> None:
    """A line for each configuration in predicted-CARD.jsonl; those that it has are not predicted again."""
    path, began = out / f"predicted-{card}.jsonl", time.monotonic()
    done, whole_bytes = by_name(path), gpu_spec(card).capacity_bytes
    with server(out) as fork_server:
        for config in configs:
            if config.name in done or time.monotonic() - began > until_s:
                continue
            with scratch() as place:
                at = time.monotonic()
                request = folder.request(config, place, f"sim:{card}", limit_bytes=whole_bytes)
                row = answered(fork_server, "autofit.probing.worker:run", request)
            row = {"name": config.name, "s": round(time.monotonic() - at, 2), **row}
            append(path, row)
            print(config.name, row["status"], row.get("device_used_bytes"), *(row.get(key) for key in _TIMES),
                  str(row["reason"])[:120], flush=True)  # fmt: skip
