"""What runs in children of the fork server: the `cuda` device over the simulated card and a fake driver."""

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from drivers import Card, Driver

MIB = 1 << 20
CONTEXT_MIB = 600  # what the fake driver calls used before torch holds anything


@contextmanager
def on_a_card(argument: str) -> Iterator[dict[str, Any]]:
    """The asked fields; inside, torch has a simulated H200, and the driver says what it holds and `outside_mib`."""
    from autofit.fakegpu import fake_gpu
    from autofit.hardware import nvml as nvml_module
    from autofit.probing import memory

    asked: dict[str, Any] = json.loads(argument)
    driver = Driver(libraries=Path(asked["libraries"]), cards=Path(asked["folder"]) / "cards")
    driver.load()
    driver.has(Card(used_mib=CONTEXT_MIB))
    asked["driver"] = driver
    with fake_gpu("h200"):
        import torch

        def used_bytes(nvml: Any, handle: Any) -> int:
            return nvml_module.used_bytes(nvml, handle) + torch.cuda.memory_reserved()

        few_steps = patch.object(memory.CudaMemory, "least_measured_s", 1e-9)
        with patch.object(memory, "used_bytes", used_bytes), few_steps:
            yield asked


def answer(asked: dict[str, Any], found: object) -> int:
    Path(asked["folder"], "answer.json").write_text(json.dumps(found))
    return 0


def cap(argument: str) -> int:
    """Whether 10 GiB more are given under a limit of 20 GB before and after 5 GiB of kernels were loaded."""
    with on_a_card(argument) as asked:
        import torch

        from autofit.probing.memory import CudaMemory

        def gives(nbytes: int) -> bool:
            try:
                torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                return False
            finally:
                torch.cuda.empty_cache()
            return True

        memory = CudaMemory(20 * 10**9)
        found = {"context": memory.context_bytes, "before": [gives(14 << 30), gives(20 << 30)]}
        asked["driver"].has(Card(used_mib=CONTEXT_MIB + 5 * 1024))
        peak = memory.switch("load", "update")
        found |= {"used": peak.device_used_bytes, "reserved": peak.peak_reserved_bytes,
                  "after": [gives(12 << 30), gives(14 << 30)]}  # fmt: skip
        asked["driver"].has(Card(used_mib=30 * 1024))  # more than the limit: no error here, but nothing is given
        memory.switch("update", "optimizer")
        found["beyond"] = [gives(1 << 30)]
        return answer(asked, found)


def too_small(argument: str) -> int:
    with on_a_card(argument) as asked:
        import torch

        from autofit.probing.memory import CudaMemory

        try:
            CudaMemory(500 * 10**6)
        except torch.OutOfMemoryError as error:
            return answer(asked, str(error))
        return answer(asked, "no error")


def probe(argument: str) -> int:
    """The whole probe of `request.json` on the `cuda` device, without resuming: a simulated card keeps no values."""
    with on_a_card(argument) as asked:
        from autofit.plugin.protocol import Report
        from autofit.plugin.transformers_run import TransformersRun
        from autofit.probing import worker

        train = TransformersRun.train

        def from_the_start(run: TransformersRun, report: Report, *, resume_from: object = None) -> None:
            train(run, report)

        with patch.object(TransformersRun, "train", from_the_start):
            return worker.run(str(Path(asked["folder"], "request.json")))


def capability(argument: str) -> int:
    """What torch says of the card's capability inside the fork server's imports; no CUDA may start for it."""
    asked: dict[str, Any] = json.loads(argument)
    driver = Driver(libraries=Path(asked["libraries"]), cards=Path(asked["folder"]) / "cards")
    driver.has(Card(uuid="GPU-1", capability=(9, 0)), Card(uuid="GPU-2", capability=(9, 0)))
    driver.load()
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    import torch

    from autofit.probing.fork_server import _cards_from_the_driver, _cuda_started

    before = torch.cuda.get_device_capability
    with _cards_from_the_driver(torch.cuda):
        devices: tuple[Any, ...] = (None, 1, torch.cuda.device(0))
        found = [torch.cuda.get_device_capability(device) for device in devices]
        count, available = torch.cuda.device_count(), torch.cuda.is_available()
    assert torch.cuda.get_device_capability is before
    started = [_cuda_started(torch.cuda)]
    os.environ["FAKE_CUDA_ORDER"] = "0"
    ctypes.CDLL("libcuda.so.1").cuInit(0)  # by a library, without torch's knowledge
    started.append(_cuda_started(torch.cuda))
    return answer(asked, {"found": found, "count": count, "available": available, "started": started})


def imported(argument: str) -> int:
    """Whether torch was imported before this child began."""
    return answer(json.loads(argument), "torch" in sys.modules)


def campaign(argument: str) -> int:
    """One configuration of the campaign in experiments/gpu: `request.json`, on the `cuda` device."""
    with on_a_card(argument) as asked:
        from gpu import probe as one

        return one.run(str(Path(asked["folder"], "request.json")))


def prepared(argument: str) -> int:
    """The campaign's folder with the tiny configurations named."""
    asked: dict[str, Any] = json.loads(argument)
    from gpu import configs, folder, prepare

    home = folder.Folder(home=Path(asked["folder"]))
    prepare.prepare(home, configs.chosen(tiny=True, only=tuple(asked["only"])))
    return answer(asked, sorted(path.name for path in home.home.iterdir()))
