"""Peaks of real ranks: what autofit's tracker sees of each, beside every event of its CPU allocator."""

import gc
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autofit.files import read_json, write_json
from autofit.plugin.protocol import Control, Report, Task, WorstCase
from autofit.probing.fork_server import ForkServer, call_ranks
from autofit.probing.prepare import worst_case_path
from autofit.probing.supervise import free_port
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import Recipe

_MOST_RECORDS = 60  # about every fifth one is whole
_LEFT_BYTES = 1024  # that caches and random states of a process may keep
STEPS = 2  # the second has the optimizer's state from its begin


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPeak:
    """The peak of one rank in bytes: of the allocator by the profiler, and as a probe's tracker counts it."""

    rank: int
    allocator_bytes: int
    tracker_bytes: int

    @property
    def error_frac(self) -> float:
        return self.tracker_bytes / self.allocator_bytes - 1


def real_peaks(
    recipe: Recipe, launch: Launch, folder: Path, server: ForkServer, changes: Mapping[str, object] | None = None,
    *, deadline_s: float = 300,
) -> list[RealPeak]:  # fmt: skip
    """Train the worst case of `recipe` (its files are in `recipe.folder`) on the gloo ranks of `launch`."""
    folder.mkdir(parents=True, exist_ok=True)
    common = {
        "launch": launch.to_values(), "port": free_port(), "trainer": recipe.trainer,
        "values": {**{key: value for key, value in recipe.values.items() if key != "launch"}, **(changes or {})},
        "worst_case": str(worst_case_path(recipe.folder or folder)), "output": str(folder / "out"),
    }  # fmt: skip
    ranks = []
    for rank in range(launch.ranks):
        path = folder / f"{rank}.request.json"
        write_json(path, {**common, "rank": rank, "answer": str(folder / f"{rank}.json")})
        ranks.append({"argument": str(path), "log": str(folder / f"{rank}.log")})
    message = {"entry": "rank_peaks:measure", "cwd": str(recipe.folder), "env": {}, "ranks": ranks}
    ended = call_ranks(server.socket_path, {**message, "deadline_s": deadline_s})
    if ended.first is not None:
        log = (folder / f"{ended.first}.log").read_text().strip()
        late = any(ending.deadline_passed for ending in ended.endings)
        why = f"was not done after {deadline_s:g} s" if late else "failed"
        raise AssertionError(f"rank {ended.first} {why}: {log[-2000:]}")
    return [RealPeak(**json.loads((folder / f"{rank}.json").read_text())) for rank in range(launch.ranks)]


def measure(request_path: str) -> int:
    """In a rank: train, and write the peaks of a further training (the first fills caches of one process).

    The profiler does not hear of what a thread of gloo frees, so a record that lacks a free is not used: the ranks
    train again until each has a whole one.
    """
    import torch
    from fakegpu.rank_training import collect_outside_of_the_record
    from torch.distributed import all_reduce

    from autofit.plugin.ranks import as_rank
    from autofit.plugin.registry import load

    asked = read_json(Path(request_path))
    assert asked is not None
    launch = Launch.of({"launch": asked["launch"]})
    trainer = load(str(asked["trainer"]))
    worst_case = WorstCase(path=Path(str(asked["worst_case"])))
    task = Task(device="cpu", output=Path(str(asked["output"])), worst_case=worst_case, steps=STEPS)
    values = asked["values"]
    assert isinstance(values, dict)

    def train() -> None:
        run = trainer.build(values, task)
        run.train(_Evaluating())
        del run
        gc.collect()

    rank, port = int(str(asked["rank"])), int(str(asked["port"]))
    found: RealPeak | None = None
    with as_rank(launch, rank=rank, port=port, device="cpu"):
        if launch.sharding == "fsdp2":
            collect_outside_of_the_record()
        train()
        for _ in range(_MOST_RECORDS):
            found = _recorded(train, rank) or found
            missing = torch.tensor(found is None, dtype=torch.int32)
            all_reduce(missing)
            if not missing:
                break
    assert found is not None, "the profiler missed a free in every record"
    write_json(Path(str(asked["answer"])), asdict(found))
    return 0


class _Evaluating(Report):
    """Asks for an evaluation after the last step, which there is if the recipe has one."""

    def step_ends(self, step: int) -> Control:
        return Control(evaluate=step == STEPS)


def _recorded(train: Callable[[], None], rank: int) -> RealPeak | None:
    """The peaks while `train` runs; None if the profiler's record has no end for something that was allocated."""
    from torch.profiler import ProfilerActivity, profile

    from autofit.probing.memory import CpuMemory

    memory = CpuMemory(None)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        memory.start()
        train()
        memory.stop()
    ours = memory.switch("all", "end").peak_allocated_bytes
    peak, held = allocator_bytes(profiled)
    return RealPeak(rank=rank, allocator_bytes=peak, tracker_bytes=ours) if held < _LEFT_BYTES else None


def allocator_bytes(profiled: Any) -> tuple[int, int]:
    """(most bytes at once, bytes at the end) of the allocator while `profiled` (a torch.profiler.profile) was on."""
    events = [(e.start_ns(), e.nbytes()) for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for _, count in sorted(events, key=lambda event: event[0]):
        held += count
        peak = max(peak, held)
    return peak, held
