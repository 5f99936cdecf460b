"""Seconds of kernels that memory bounds, against Liger-Kernel's measurements of plain torch.

Run: `python experiments/rates/bandwidth.py [--learn]`

The rates of `autofit/fakegpu/rates/kernels.py` are learned here. `measured/liger_torch.csv` has 276 figures of
torch's own kernels on an A100 and two H100. Each is simulated as it was measured: the cache is emptied, then the
operation runs, timed by events, with gradients that add up where theirs did.
Half of the rows, those whose CRC-32 of "card/kernel/mode/sizes" is even, are learned from; the other half is told.
"""

import csv
import json
import sys
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

from autofit.fakegpu import HostCosts, fake_gpu, gpu_spec
from autofit.fakegpu.rates.kernels import PER_MULTIPROCESSOR, KernelSeconds, Work

CSV = Path(__file__).parent / "measured" / "liger_torch.csv"
LONG_MS = 0.15  # shorter figures are in part those of the host that launches
EMPTIED = 256 << 20  # bytes that triton's do_bench writes before each run
Run = Callable[[], object]


class Row(NamedTuple):
    """One measured figure."""

    card: str
    kernel: str
    mode: str
    sizes: str
    liger: str
    ms: float

    @property
    def learned(self) -> bool:
        return zlib.crc32(f"{self.card}/{self.kernel}/{self.mode}/{self.sizes}".encode()) % 2 == 0


class Launch(NamedTuple):
    """One kernel: when the host had launched it, its work, and its seconds by FLOPs."""

    host_s: float
    work: Work
    fixed_s: float | None  # of products and attention


class RMSNorm(nn.Module):
    """As a Llama model's, in single precision."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device="cuda"))

    def forward(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        if added is not None:
            x = x + added.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


def randn(*shape: int, dtype: str = "float32", grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=getattr(torch, dtype), requires_grad=grad)


def program(row: Row) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """The forward pass of a row, and the tensors whose gradients are dropped before each run."""
    s = json.loads(row.sizes)
    tokens = s.get("B", 1) * s.get("T", 1)
    name, dtype = row.kernel, s.get("dtype", "float32")
    if name == "cross_entropy":
        x, target = randn(tokens, s["V"]), torch.zeros(tokens, dtype=torch.long, device="cuda")
        return lambda: F.cross_entropy(x, target), []
    if name == "embedding":
        table = nn.Embedding(s["V"], s["D"], device="cuda")
        ids = torch.zeros(s["B"], s["T"], dtype=torch.long, device="cuda")
        return lambda: table(ids), []
    if name in ("layer_norm", "rms_norm"):
        size = s.get("N", s.get("H"))
        x = randn(s["M"], size, dtype=dtype)
        norm = nn.LayerNorm(size, device="cuda") if name == "layer_norm" else RMSNorm(size)
        return lambda: norm(x), [x]
    if name == "fused_add_rms_norm":
        x, added, norm = randn(s["M"], s["H"], dtype=dtype), randn(s["M"], s["H"], dtype=dtype), RMSNorm(s["H"])
        return lambda: norm(x, added), [x]
    if name == "megatron_rms_norm":
        x = randn(s["S"], s["B"], s["H"], dtype="bfloat16")
        native = nn.RMSNorm(s["H"], eps=1e-6, device="cuda", dtype=torch.bfloat16)
        return lambda: native(x), [x] if row.mode == "backward" else []
    if name == "megatron_swiglu":
        x = randn(s["S"], s["B"], 2 * s["ffn_local"], dtype="bfloat16")

        def swiglu() -> torch.Tensor:
            gate, up = torch.chunk(x, 2, -1)
            return F.silu(gate) * up

        return swiglu, [x]
    if name == "relu_squared":
        x = randn(s["M"], s["N"], dtype=dtype)
        return lambda: torch.square(F.relu(x)), [x]
    if name in ("rope", "llama4_rope"):
        length, size = s.get("seq_len", s.get("T")), s.get("hidden_size", s.get("H"))
        head = size // s["num_q_heads"]
        q, k = (randn(1, length, heads, head, dtype=dtype) for heads in (s["num_q_heads"], s["num_kv_heads"]))
        if name == "llama4_rope":
            freqs = torch.zeros(1, length, head // 2, dtype=torch.complex64, device="cuda")
            return lambda: apply_rotary_emb(q, k, freqs)[0], [q]
        cos, sin = (randn(1, length, head, dtype=dtype, grad=False) for _ in range(2))
        turned = q.detach().transpose(1, 2).requires_grad_(), k.detach().transpose(1, 2).requires_grad_()
        return lambda: apply_rotary_pos_emb(*turned, cos, sin), list(turned)
    if name in ("kl_div", "tvd", "jsd"):
        leaves = randn(tokens, s["V"]), randn(tokens, s["V"], grad=False)
        if name == "tvd":
            p, q = (leaf.softmax(-1) for leaf in leaves)
            return lambda: torch.sum(torch.abs(p - q) / 2.0) / p.size(0), []
        p = leaves[0].log_softmax(-1)
        if name == "kl_div":
            q = leaves[1].softmax(-1)
            return lambda: F.kl_div(p, q, reduction="batchmean"), []
        q = leaves[1].log_softmax(-1)

        def jsd() -> torch.Tensor:
            m = torch.lerp(torch.exp(p), torch.exp(q), 0.5)
            each = (F.kl_div(torch.log(m), x, reduction="none", log_target=True).sum(-1) for x in (q, p))
            return torch.as_tensor(sum(0.5 * loss for loss in each) / p.shape[0]).sum()

        return jsd, []
    if name in ("geglu", "swiglu"):
        config = LlamaConfig(
            hidden_size=s["hidden_size"], intermediate_size=s["intermediate_size"],
            hidden_act="silu" if name == "swiglu" else "gelu_pytorch_tanh",
        )  # fmt: skip
        layer = LlamaMLP(config).to("cuda").to(getattr(torch, dtype))
        x = randn(s.get("bsz", s.get("B")), s["T"], s["hidden_size"], dtype=dtype)
        return lambda: layer(x), [x]
    assert name == "fused_linear_cross_entropy", name
    x = randn(s["BT"], s["H"], dtype=dtype)
    head_ = nn.Linear(s["H"], s["V"], bias=False, device="cuda", dtype=getattr(torch, dtype))
    target = torch.zeros(s["BT"], dtype=torch.long, device="cuda")
    return lambda: F.cross_entropy(head_(x), target), [x]


def timed(row: Row, forward: Callable[[], torch.Tensor], dropped: list[torch.Tensor]) -> Run:
    """What is between the two events of a row."""
    megatron = row.kernel.startswith("megatron")
    if row.mode == "forward":
        return forward
    if row.mode == "backward" and not megatron:
        out = forward()
        if row.kernel == "rope":
            grads = tuple(torch.randn_like(part) for part in out)
            return lambda: torch.autograd.grad(out, dropped, grads, retain_graph=True)
        grad = torch.randn_like(out)
        return lambda: out.backward(grad, retain_graph=True)

    def full() -> None:
        result = forward()
        if row.kernel == "rope":
            torch.autograd.grad(result, dropped, tuple(torch.empty_like(part) for part in result))
        elif megatron:
            result.sum().backward()
        elif row.kernel == "cross_entropy":
            result.backward(retain_graph=True)
        elif row.kernel == "embedding" or int(row.liger.split(".")[1]) >= 5:
            result.backward(torch.randn_like(result), retain_graph=True)
        else:
            result.backward(torch.empty_like(result), retain_graph=True)

    return full


def launches(row: Row) -> list[Launch]:
    """The kernels of a row, with host times after the emptying of the cache."""
    found: list[Launch] = []
    with fake_gpu(row.card, enforce_capacity=False, record_places=False) as gpu:
        run = timed(row, *(made := program(row)))
        kernels = gpu.clock.kernels

        class Listener:
            aside = False

            def view(self) -> None: ...

            def moment(self, lanes: object) -> int:
                return 0

            def wait(self, lanes: object, number: int) -> None: ...

            def kernel(self, func: object, args: object, out: object, *, work: Work, **_: object) -> None:
                seconds, kind = kernels.seconds(work)
                found.append(Launch(gpu.clock.host_s, work, None if kind == "others" else seconds))

        for _ in range(2):
            for tensor in made[1]:
                tensor.grad = None
            found.clear()
            torch.cuda.synchronize()
            gpu.clock.log = Listener()  # type: ignore[assignment]
            start = gpu.clock.host_s
            run()
            gpu.clock.log = None
    return [launch._replace(host_s=launch.host_s - start) for launch in found]


def simulated_s(found: list[Launch], kernels: KernelSeconds) -> float:
    """Seconds between the events: the host launches while the cache is being emptied."""
    start = end = EMPTIED / kernels.bandwidth_bytes_per_s
    for launch in found:
        seconds = kernels.seconds(launch.work)[0] if launch.fixed_s is None else launch.fixed_s
        end = max(end, launch.host_s + kernels.costs.launch_s) + seconds
    return end - start


def read() -> list[Row]:
    with CSV.open() as file:
        lines = csv.reader(line for line in file if not line.startswith("#"))
        next(lines)
        return [Row(card, kernel, mode, sizes, liger, float(ms)) for card, kernel, mode, sizes, liger, ms, *_ in lines]


def errors(ratios: list[float]) -> str:
    """Median and 95th percentile of the error, share within 25 %, all in percent, and the median ratio."""
    wrong = np.abs(np.array(ratios) - 1)
    within = 100 * np.mean(wrong <= 0.25)
    return (
        f"{100 * np.median(wrong):.1f} / {100 * np.quantile(wrong, 0.95):.0f} / {within:.0f} / {np.median(ratios):.2f}"
    )


def learn(runs: list[tuple[Row, list[Launch]]]) -> None:
    """Print the rates with the least mean distance, in logarithms, over the learned rows of each card."""
    for card, name in (("a100-80gb", "a100_sxm"), ("h100", "h100_sxm")):
        mine = [(row, found) for row, found in runs if row.card == card and row.learned and row.ms >= LONG_MS]
        table = PER_MULTIPROCESSOR[name]

        def distance(of: list[tuple[Row, list[Launch]]] = mine) -> float:
            return float(np.mean([abs(np.log(ratio(row, found))) for row, found in of]))

        for width in (0.5, 0.25, 0.12, 0.06, 0.03):
            for pattern in table:
                tried = {}
                for factor in np.exp(np.linspace(-width, width, 21)):
                    before, table[pattern] = table[pattern], table[pattern] * factor
                    tried[distance()] = table[pattern]
                    table[pattern] = before
                table[pattern] = tried[min(tried)]
        print(name, {pattern: round(float(rate), 2) for pattern, rate in table.items()})


def ratio(row: Row, found: list[Launch]) -> float:
    """Simulated over measured."""
    return 1e3 * simulated_s(found, KernelSeconds(gpu_spec(row.card), HostCosts())) / row.ms


def main() -> None:
    warnings.simplefilter("ignore")
    runs = [(row, launches(row)) for row in read()]
    if "--learn" in sys.argv:
        learn(runs)
    for said, least in ((f"{LONG_MS} ms and longer", LONG_MS), ("all", 0.0)):
        for half, learned in (("learned", True), ("held out", False)):
            chosen = [ratio(row, found) for row, found in runs if row.learned == learned and row.ms >= least]
            print(f"| {said} | {half} | {len(chosen)} | {errors(chosen)} |")
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row, found in runs:
        if not row.learned and row.ms >= LONG_MS:
            groups[row.card, row.kernel, row.mode].append(ratio(row, found))
    for group, ratios in groups.items():
        print(f"| {' | '.join(group)} | {len(ratios)} | {min(ratios):.2f} to {max(ratios):.2f} |")


if __name__ == "__main__":
    main()
