"""Configurations on several ranks: simulated as `estimate` does, measured as those of one rank are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autofit.fakegpu.specs import gpu_spec
from autofit.hardware.hardware import slot_names
from autofit.probing.fork_server import ForkServer
from autofit.probing.launch import Launcher
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch, Offload, Sharding
from gpu.allowance import Allowance
from gpu.children import answered_by_ranks, scratch
from gpu.configs import TWO_RANKS, Config
from gpu.folder import Folder, Row, append, by_name
from gpu.measure import PROBE
from gpu.versions import versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """A configuration on several ranks."""

    config: Config
    ranks: int
    sharding: Sharding
    reshard_after_forward: bool = True
    offload: Offload = "none"

    @property
    def name(self) -> str:
        return f"{self.config.name}-{self.sharding}"

    @property
    def launch(self) -> Launch:
        return Launch(ranks=self.ranks, sharding=self.sharding, reshard_after_forward=self.reshard_after_forward,
                      offload=self.offload)  # fmt: skip


_SHARDINGS: tuple[Sharding, ...] = ("ddp", "fsdp2")
RANKS = tuple(Ranks(config=config, ranks=2, sharding=sharding) for config in TWO_RANKS for sharding in _SHARDINGS)


def of_ranks(
    fork_server: ForkServer, folder: Folder, configs: Sequence[Ranks], path: Path, *, card: str, device: str,
    allowance: Allowance, after_each: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """A line for each in the file `path`, of the rank that holds most; those that these versions have are kept."""
    now, done = versions(), by_name(path)
    kept = {n for n, row in done.items() if row.get("status") == "fit" and row.get("versions") == now}
    for one in (one for one in configs if one.name not in kept):
        if not allowance.in_time():
            break
        with scratch() as place:
            row = _probed(fork_server, folder, one, place, card, device, allowance.deadline_s())
        append(path, {"name": one.name, **row, "versions": now})
        print(one.name, row["status"], row.get("peak_allocated_bytes"), str(row["reason"])[:200], flush=True)
        after_each()


def _probed(
    fork_server: ForkServer, folder: Folder, one: Ranks, place: Path, card: str, device: str, deadline_s: float
) -> Row:
    limit_bytes = gpu_spec(card).capacity_bytes
    request = folder.request(one.config, place, device, limit_bytes=limit_bytes, deadline_s=deadline_s)
    values = {**request.values, LAUNCH: one.launch.to_values()}
    request = replace(request, values=values, server_socket=fork_server.socket_path)
    if device == "cuda":
        return answered_by_ranks(fork_server, PROBE, request, one.ranks)
    return Launcher().run(replace(request, slots=slot_names(device, one.ranks))).to_json()
