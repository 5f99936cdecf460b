"""QLoRA as one rank of two: real gloo ranks of the CPU beside simulated ones, through the same trainer.

Also the program of a rank: `four_bit_ranks.py REQUEST RANK [PORT]` prints its bytes; with a PORT it is a real one.
Those of FSDP are forks of the fork server, which has the imports; DeepSpeed patches torch, so ZeRO's are processes.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import tiny
import torch
from fakegpu.zero_rank import COLLECTIVES, on_copies

from autofit.plugin.protocol import Control, Report, Task, WorstCase
from autofit.probing.fork_server import ForkServer, call_ranks
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.supervise import free_port
from autofit.recipe.launch import Launch, Sharding

RANKS, PATIENCE_S = 2, 300
CUBLAS = 8_519_680  # bytes of a workspace on an A100; forward and backward have one each
BUCKETS = 1_000_000_000  # bytes that DeepSpeed's buckets of 500 million elements take, in bfloat16
QLORA: dict[str, object] = {
    "dtype": "bfloat16", "bf16": True, "use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": True, "gradient_accumulation_steps": 2, "max_length": 64,
}  # fmt: skip
Read = Callable[[], tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of a rank's tensors at one moment: live ones, and the most since the moment before."""

    moment: str
    live_bytes: int
    peak_bytes: int


class _Moments(Report):
    """Notes the bytes of the rank where a step begins, its gradient is whole, and it ends."""

    def __init__(self, read: Read, reset: Callable[[], None]) -> None:
        self._read, self._reset = read, reset
        self.found: list[tuple[str, int, int]] = []

    def note(self, moment: str) -> None:
        gc.collect()
        self.found.append((moment, *self._read()))
        self._reset()

    def step_begins(self, step: int) -> None:
        self.note("step begins")

    def gradient_is_whole(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.note("gradient is whole")

    def step_ends(self, step: int) -> Control:
        self.note("step ends")
        return Control()


@contextmanager
def _zero_on_cpu() -> Iterator[None]:
    """Context in which accelerate takes DeepSpeed on gloo ranks: as FSDP, it does where each rank has a card."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    begin = PartialState.__init__

    def begun(state: Any, *args: Any, **kwargs: Any) -> None:
        begin(state, *args, **kwargs)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type, state._cpu = DistributedType.DEEPSPEED, False
            os.environ.pop("ACCELERATE_USE_CPU", None)

    for name in COLLECTIVES:
        setattr(torch.distributed, name, on_copies(getattr(torch.distributed, name)))
    with mock.patch.object(PartialState, "__init__", begun):
        yield


@contextmanager
def _real(launch: Launch, rank: int, port: int) -> Iterator[tuple[Read, Callable[[], None]]]:
    from autofit.plugin import ranks
    from autofit.probing.memory import _StorageTracker

    os.environ["DS_ACCELERATOR"] = "cpu"
    tracker = _StorageTracker("cpu", None)

    def reset() -> None:
        tracker.peak_bytes = tracker.current_bytes

    with (
        mock.patch.object(ranks, "check_on_cpu", return_value=None),
        ranks.as_rank(launch, rank=rank, port=port, device="cpu"),
        _zero_on_cpu() if launch.sharding.startswith("zero") else nullcontext(),
        tracker,
    ):
        tracker.see_resizes()
        yield lambda: (tracker.current_bytes, tracker.peak_bytes), reset


@contextmanager
def _simulated(launch: Launch, rank: int) -> Iterator[tuple[Read, Callable[[], None]]]:
    from autofit.fakegpu import fake_gpu
    from autofit.plugin.ranks import simulated_rank

    with simulated_rank(launch, rank):
        if launch.sharding.startswith("zero"):
            os.environ["LOCAL_RANK"] = "0"  # a card of its own
        with fake_gpu("a100-80gb") as gpu:
            allocator = gpu.memory.allocator  # asked for the bytes of tensors: a card's blocks may be larger
            yield (
                lambda: (allocator.requested_bytes, allocator.peak_requested_bytes),
                torch.cuda.reset_peak_memory_stats,
            )


def main(request: str, rank: str, port: str = "0") -> None:
    from autofit.plugin.registry import load

    asked = json.loads(Path(request).read_text())
    launch, real = Launch(ranks=RANKS, sharding=asked["sharding"]), port != "0"
    task = Task(
        device="cpu" if real else "cuda", output=Path(request).parent / "out", steps=2,
        worst_case=WorstCase(path=Path(asked["worst_case"])),
    )  # fmt: skip
    with _real(launch, int(rank), int(port)) if real else _simulated(launch, int(rank)) as (read, reset):
        moments = _Moments(read, reset)
        run = load("hf").build(asked["values"], task)
        moments.note("loaded")
        run.train(moments)
    print("BYTES", json.dumps(moments.found), flush=True)


def held(
    folder: Path, sharding: Sharding, server: ForkServer, **changes: object
) -> list[tuple[list[Held], list[Held]]]:
    """Of each rank, what the real one held, and the simulated one without the workspaces of cuBLAS."""
    model = tiny.write_model(folder / "model", hidden=256, layers=4)
    path = tiny.write_offline_recipe("hf", folder, model, **{**QLORA, **changes})
    recipe = prepare(path, trainer="hf", device="cpu", folder=folder, server=server)
    request = folder / "request.json"
    values = {key: value for key, value in recipe.values.items() if key != "launch"}
    asked = {"sharding": sharding, "values": values, "worst_case": str(worst_case_path(folder))}
    request.write_text(json.dumps(asked))
    run = partial(_run, request, folder) if sharding.startswith("zero") else partial(_fork, server, request, folder)
    simulated = [_less_workspaces(found) for found in run()]
    real = run(str(free_port()))
    return list(zip(real, simulated, strict=True))


def _fork(server: ForkServer, request: Path, folder: Path, *port: str) -> list[list[Held]]:
    logs = [folder / f"{rank}{'-real' * len(port)}.log" for rank in range(RANKS)]  # a log is appended to
    ranks = [
        {"argument": json.dumps([str(request), str(rank), *port]), "log": str(log)} for rank, log in enumerate(logs)
    ]
    message = {"entry": "four_bit_ranks:as_fork", "cwd": str(folder), "env": {}, "ranks": ranks}
    ended = call_ranks(server.socket_path, {**message, "deadline_s": PATIENCE_S})
    assert ended.first is None, logs[ended.first].read_text()[-3000:]
    return [_read(log.read_text()) for log in logs]


def as_fork(argument: str) -> int:
    """In a child of the fork server: `main`."""
    main(*json.loads(argument))
    return 0


def _run(request: Path, folder: Path, *port: str) -> list[list[Held]]:
    started = []
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    for rank in range(RANKS):
        command = [sys.executable, "-W", "ignore", __file__, str(request), str(rank), *port]
        with (folder / f"{rank}.log").open("w") as log:
            started.append(subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment))
    try:
        for process in started:
            process.wait(PATIENCE_S)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [_read((folder / f"{rank}.log").read_text()) for rank in range(RANKS)]


def _read(log: str) -> list[Held]:
    lines = [line for line in log.splitlines() if line.startswith("BYTES ")]
    assert lines, log[-3000:]
    rows = json.loads(lines[-1].removeprefix("BYTES "))
    return [Held(moment=moment, live_bytes=live, peak_bytes=peak) for moment, live, peak in rows]


def _less_workspaces(found: list[Held]) -> list[Held]:
    """From the first gradient on, the card holds a workspace of each of forward and backward."""
    first = next(number for number, one in enumerate(found) if one.moment == "gradient is whole")
    return found[:first] + [
        replace(one, live_bytes=one.live_bytes - 2 * CUBLAS, peak_bytes=one.peak_bytes - 2 * CUBLAS)
        for one in found[first:]
    ]


def error_frac(real: Held, simulated: Held, *, buckets_bytes: int = 0) -> float:
    """Error of the simulated peak, without buckets of DeepSpeed beside which any error would be small."""
    return (simulated.peak_bytes - real.peak_bytes) / (real.peak_bytes - buckets_bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
