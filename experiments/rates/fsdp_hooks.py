"""Host seconds of FSDP's Python around one sharded module, in launches of an eager decode step on the same host.

Run: python experiments/rates/fsdp_hooks.py. No GPU: tiny modules on the CPU, each a unit of its own, over a fake
process group of 8 ranks, with half-precision computing as verl and accelerate set it. What a hook takes is its own time
with all that it calls, less its operations, each of which counts as a launch (the simulated card charges them itself).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils, fully_sharded_data_parallel
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

Points = dict[str, tuple[tuple[Any, str], ...]]  # {point: functions, by their owners, whose time it has}

UNITS, REPEATS = 100, 15
FORWARD = "forward"
FLAT: Points = {
    FORWARD: ((fully_sharded_data_parallel, "_pre_forward"), (fully_sharded_data_parallel, "_post_forward")),
    "before backward": ((_runtime_utils, "_pre_backward_hook"),),
    "after backward": ((_runtime_utils, "_post_backward_hook"),),
}  # fmt: skip
FULLY: Points = {
    FORWARD: ((_fsdp_state.FSDPState, "_pre_forward"), (_fsdp_state.FSDPState, "_post_forward")),
    "before backward": ((_fsdp_param_group.FSDPParamGroup, "pre_backward"),),
    "after backward": ((_fsdp_param_group.FSDPParamGroup, "post_backward"),),
}  # fmt: skip


class Kernels(TorchDispatchMode):
    """The operations that a card would launch a kernel for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func._schema.name[6:] in ("empty", "empty_like", "detach", "resize_"))
        return func(*args, **(kwargs or {}))


def launch_s() -> float:
    """Seconds of one operation of an eager decode step of a tiny Llama, with its share of the modules' Python."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model("llama", **sizes, num_hidden_layers=32, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        past = model(torch.zeros((1, 8), dtype=torch.long), use_cache=True).past_key_values
        token = torch.zeros((1, 1), dtype=torch.long)

        def step() -> None:
            model(token, past_key_values=past, use_cache=True)

        with Kernels() as kernels:
            step()
        return best(step) / int(kernels.count)


def best(run: Callable[[], object]) -> float:
    """The fewest processor seconds of several runs."""
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return min(found)


class Hooks:
    """Seconds and operations inside of functions, by point; they are patched before a model registers them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.operations: dict[str, int] = {}
        self.counting = False

    def of(self, run: Callable[[], object]) -> dict[str, tuple[float, float]]:
        """{point: (fewest seconds, operations)} of one unit while `run` runs."""
        run()
        self.operations, self.counting = {}, True
        run()
        self.counting = False
        found = []
        for _ in range(REPEATS):
            self.seconds = {}
            run()
            found.append(self.seconds)
        counts = self.operations
        return {name: (min(each[name] for each in found) / UNITS, counts[name] / UNITS) for name in self.seconds}

    @contextmanager
    def patched(self, points: Points) -> Iterator[None]:
        with ExitStack() as stack:
            for point, functions in points.items():
                for owner, name in functions:
                    new = self._around(point, getattr(owner, name))
                    stack.enter_context(mock.patch.object(owner, name, new))
            yield

    def _around(self, point: str, original: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            began = time.process_time()
            if self.counting:
                with Kernels() as kernels:
                    found = original(*args, **options)
                self.operations[point] = self.operations.get(point, 0) + kernels.count
            else:
                found = original(*args, **options)
            self.seconds[point] = self.seconds.get(point, 0.0) + time.process_time() - began
            return found

        return run


class Unit(nn.Module):
    """A module with so many weights, each of which is used."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(weights))

    def forward(self, found: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            found = part(found)
        return found


def flat(model: nn.Module) -> nn.Module:
    half = fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or isinstance(module, Unit)

    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), mixed_precision=half, use_orig_params=False
    )


def fully(model: nn.Module) -> nn.Module:
    mesh = distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.children(), model):
        fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def hooks(shard: Callable[[nn.Module], nn.Module], points: Points, weights: int) -> dict[str, tuple[float, float]]:
    """{point: (seconds, operations)} of one unit of so many weights."""
    inputs = torch.randn(4, 8, requires_grad=True)
    told = Hooks()
    with told.patched(points):
        model = shard(nn.Sequential(*[Unit(weights) for _ in range(UNITS)]))

        def recorded() -> None:
            model(inputs).sum().backward()

        found = told.of(recorded)
        with torch.no_grad():
            alone = told.of(lambda: model(inputs))
    return {f"{FORWARD} without gradients": alone[FORWARD], **found}


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    launch = launch_s()
    print(f"torch {torch.__version__}; a launch takes {launch * 1e6:.1f} us here\n")
    print(
        "| sharding | weights of a unit | point | us | operations | launches beside these |\n|---|---|---|---|---|---|"
    )
    for name, shard, points in (("FSDP1", flat, FLAT), ("FSDP2", fully, FULLY)):
        for weights in (1, 9):
            for point, (seconds, operations) in hooks(shard, points, weights).items():
                more = seconds / launch - operations
                print(f"| {name} | {weights} | {point} | {seconds * 1e6:.0f} | {operations:.1f} | {more:.0f} |")


if __name__ == "__main__":
    main()
