"""torch's own tools on a row, under FakeTensorMode: MemTracker's peak, RuntimeEstimator's seconds.

On several cards it is FSDP2 on a fake process group, which is what the tools' own examples use.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator

if TYPE_CHECKING:
    from experiments.peers.programs.loop import built, stepper, told
else:  # a program beside this one, which is started by its path
    from loop import built, stepper, told

DEVICE = "cpu"  # torch here is a CPU build; sizes of tensors are the same


def sharded(model: torch.nn.Module, ranks: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh(DEVICE, (ranks,))
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main() -> None:
    folder = Path(sys.argv[1])
    row = told(folder)
    if row.method == "qlora":
        raise SystemExit("MemTracker: weights in 4 bits are not torch's own; no example shows them")
    with FakeTensorMode():
        with torch.device(DEVICE):
            model = built(row, folder)
        if row.ranks > 1:
            sharded(model, row.ranks)
        optimizer, step = stepper(row, model, DEVICE)
        tracker = FSDPMemTracker(model, optimizer) if row.ranks > 1 else MemTracker()
        if row.ranks == 1:
            tracker.track_external(model, optimizer)
        with tracker:
            for number in range(2):
                step()
                if number == 0:
                    tracker.reset_mod_stats()
        peaks = {str(device): int(values["Total"]) for device, values in tracker.get_tracker_snapshot("peak").items()}
        print(json.dumps({"peaks": peaks, "seconds": seconds(step)}))


def seconds(step: object) -> float | str:
    """Seconds of a step by the roofline mode, or why not."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            estimator = RuntimeEstimator()
            with estimator(estimate_mode_type="operator-level-cost-model"):
                step()  # type: ignore[operator]
        except Exception as error:  # whatever it needs of a card
            return f"{type(error).__name__}: {error}"[:200]
        return estimator.total_runtime / 1000


if __name__ == "__main__":
    main()
