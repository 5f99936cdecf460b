"""Host costs of eager PyTorch, measured on the CPU in about a second and saved as JSON. Optional.

The host's share of a step is Python and dispatch. A model with tensors of a few elements measures it without a GPU,
since its kernels take almost no time. A training on a card takes the host more (a driver call for each launch, the
trainer's and adapters' Python), so the measured figure is this host's slowness against one whose trainings are known.
`fit_to_probe` corrects it from a real probe, together with the seconds of the kernels.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from math import sqrt
from pathlib import Path

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.fakegpu.clock import NO_KERNEL
from autofit.fakegpu.specs import FakeGpuError, HostCosts

WIDTH = 4
LAYERS = 8
RUNS = 30
# The most that a correction may be, either way: chosen, with room for a power cap or heat, and for a slow or busy host.
# What is beyond comes of something else, such as another program on the card.
_MOST_OF_CARD, _MOST_OF_HOST = 4.0, 10.0
# One host (a virtual machine with an Intel Xeon and an H100, torch 2.11.0, Python 3.12, 2026-11-26), and its seconds
# per kernel of the tiny model, forward and backward. A launch of a forward that is recorded takes 2.1 times as long as
# one of a rollout, and one of backward 1.1 times: SFT of Qwen3-1.7B with LoRA on the real CUDA build without a card,
# 3,328 and 4,985 launches in 66 and 51 ms, 9 us a launch (2026-11-27). With these ratios nine steps that the hosts of
# two H100s bound, with and without checkpointing, are told within 25 % (median 2); with those before, which were
# learned from checkpointed steps alone, within 35 % (median 5).
_KNOWN = HostCosts(launch_s=18.3e-6, recorded_launch_s=39.2e-6, backward_launch_s=20.3e-6, view_s=1.1e-6)
_RECORDED_S, _BACKWARD_S = 11.4e-6, 12.9e-6
_OF_HOST = ("launch_s", "recorded_launch_s", "backward_launch_s", "view_s")


def measure_host_costs() -> HostCosts:
    """The costs of this host, by its seconds per kernel of forward and backward of a tiny model (about a second)."""
    norms = [torch.nn.LayerNorm(WIDTH) for _ in range(LAYERS)]
    linears = [[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)] for _ in range(LAYERS)]
    everything = torch.nn.ModuleList([*norms, *(linear for four in linears for linear in four)])
    x = torch.randn(1, 2, WIDTH)

    def forward() -> torch.Tensor:
        hidden = x
        for norm, (query, key, value, out) in zip(norms, linears, strict=True):
            y = norm(hidden)
            scores = query(y) @ key(y).transpose(-1, -2)
            hidden = hidden + torch.nn.functional.silu(out(scores.softmax(-1) @ value(y)))
        return hidden.sum()

    def step() -> None:
        forward().backward()
        everything.zero_grad()

    with _Counter() as first:
        forward()
    with _Counter() as both:
        step()
    view_s = _fastest(lambda: [x.view(-1, WIDTH).transpose(0, 1) for _ in range(500)]) / 1000
    forward_s = _fastest(forward)
    recorded_s = (forward_s - first.views * view_s) / first.kernels
    later_s = _fastest(step) - forward_s - (both.views - first.views) * view_s
    backward_s = later_s / (both.kernels - first.kernels)
    slower = sqrt(max(recorded_s, view_s) / _RECORDED_S * max(backward_s, view_s) / _BACKWARD_S)
    return _slower(_KNOWN, slower)


def _slower(costs: HostCosts, times: float) -> HostCosts:
    """The costs of a host that is `times` slower."""
    return replace(costs, **{name: getattr(costs, name) * times for name in _OF_HOST})


def fit_to_probe(
    costs: HostCosts, *, predicted_rollout_s: float | None = None, measured_rollout_s: float | None = None,
    predicted_update_s: float | None = None, measured_update_s: float | None = None,
) -> HostCosts:  # fmt: skip
    """Costs corrected by one real probe: kernels by the update (GPU-bound), host costs by the rollout (host-bound).

    Each correction is the ratio of measured to predicted seconds, on top of `costs`, which the prediction used.
    """
    for given in (predicted_rollout_s, measured_rollout_s, predicted_update_s, measured_update_s):
        if given is not None and not given > 0:
            raise FakeGpuError(f"a probe's seconds must be above 0; got {given}")
    if measured_update_s and predicted_update_s:
        costs = replace(costs, gpu_slowdown=costs.gpu_slowdown * measured_update_s / predicted_update_s)
    if measured_rollout_s and predicted_rollout_s:
        slower = measured_rollout_s / predicted_rollout_s
        costs = _slower(costs, slower)
    return costs


def checked_correction(costs: HostCosts) -> HostCosts:
    """`costs`, fitted to a probe. Raises FakeGpuError for those beyond any card or host: their predictions are void."""
    usual = HostCosts()
    for name, most, what in (
        ("gpu_slowdown", _MOST_OF_CARD, "the card"), ("launch_s", _MOST_OF_HOST, "the host"),
    ):  # fmt: skip
        times = getattr(costs, name) / getattr(usual, name)
        if not 1 / most <= times <= most:
            raise FakeGpuError(
                f"{what} took {times:.3g} times the seconds of its model, and {1 / most:.3g} to {most:.3g} can be a "
                f"correction; look for other work on it"
            )
    return costs


def save_host_costs(costs: HostCosts, path: Path, *, source: str) -> None:
    """Write the costs and their source to `path` atomically."""
    record = {
        "host_costs": asdict(costs), "source": source,
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "torch": torch.__version__,
        "python": platform.python_version(), "machine": platform.machine(),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(partial, path)


def load_host_costs(path: Path) -> HostCosts | None:
    """Costs written by `save_host_costs`, if there is a file of this version. Raises FakeGpuError if it is damaged."""
    try:
        record = json.loads(path.read_text())
        held = record["host_costs"]
        if {field.name for field in fields(HostCosts)} - set(held) == {"recorded_launch_s"}:  # of an older version
            return None
        costs = HostCosts(**{field.name: float(held[field.name]) for field in fields(HostCosts)})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise FakeGpuError(f"{path} holds no host costs ({type(error).__name__}: {error}); delete it") from error
    wrong = [field.name for field in fields(HostCosts) if not 0 < getattr(costs, field.name) < 60]
    if wrong:
        raise FakeGpuError(f"{path} holds host costs that cannot be ({', '.join(wrong)}); delete it")
    return costs


class _Counter(TorchDispatchMode):
    """Counts views and kernels by the clock's rule."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.views = 0
        self.kernels = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:  # fmt: skip
        if func.is_view or func._schema.name[6:] in NO_KERNEL:
            self.views += 1
        else:
            self.kernels += 1
        return func(*args, **(kwargs or {}))


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs, the one with the least interference."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = []
        for _ in range(RUNS):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return min(seconds)
