"""Tokens a second of 8 to 512 cards, predicted against the table of github mosaicml/llm-foundry.

Run: `python -m experiments.ranks.foundry run [--half even|odd|both] [--only TEXT]`, then `... table`. Goes on where it
stopped; a row takes 1 to 15 s of one core.

Published (foundry.csv): `scripts/train/benchmarking/README.md` of January 2024 (commit 5e85bd62d), MPT models of 125M
to 70B with FSDP, torch 2.1 and CUDA 12.1. Their program wants Composer and flash-attention's wheels, so a short one of
ours has the same shapes: blocks of a norm, one product of q, k and v, attention, a product, a norm, and two products
with GELU, without biases; tied head, learned positions; FSDP1 with `limit_all_gathers`, a unit a block, bfloat16 with
gradients reduced in float32 (DEFAULT) or bfloat16 (PURE); checkpoints of whole blocks, AdamW of single tensors,
gradients clipped. Nothing is fitted. Rows with an even CRC-32 of their name are to work with, odd ones are only
reported.
"""

import argparse
import csv
import json
import statistics
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.rates.collectives import fake_ranks
from autofit.fakegpu.specs import GpuSpec, gpu_spec

HERE = Path(__file__).parent
MEASURED, RESULTS = HERE / "foundry.csv", HERE / "foundry.json"
WORDS = 50_368
SHAPES = {  # hidden size, heads, layers: scripts/train/yamls/pretrain/mpt-*.yaml
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24), "3b": (2560, 20, 32),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48), "70b": (8192, 64, 80),
}  # fmt: skip
_KINDS: dict[str, Callable[[str], Any]] = {  # of the table's columns; the others are words
    **dict.fromkeys(("length", "gpus", "micro_batch", "accumulation"), int),
    "tokens_s_gpu": float, "checkpointing": "True".__eq__,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A published row: tokens a second and card of a training on `gpus` cards."""

    gpu: str
    model: str
    length: int
    gpus: int
    micro_batch: int
    accumulation: int
    tokens_s_gpu: float
    precision: str
    mixed_precision: str
    sharding: str
    checkpointing: bool

    @property
    def name(self) -> str:
        return f"{self.gpu}/{self.model}/{self.length}/{self.gpus}/{self.micro_batch}x{self.accumulation}"

    @property
    def half(self) -> str:
        return ("even", "odd")[zlib.crc32(self.name.encode()) % 2]

    @property
    def step_s(self) -> float:
        """Measured seconds of a step."""
        return self.micro_batch * self.accumulation * self.length / self.tokens_s_gpu

    @property
    def card(self) -> GpuSpec:
        return gpu_spec({"h100_80gb": "h100", "a100_80gb": "a100-80gb", "a100_40gb": "a100-40gb"}[self.gpu])


def rows() -> list[Row]:
    """The published rows of today's precision, in the table's order."""
    with MEASURED.open(encoding="utf-8") as file:
        return [Row(**{key: _KINDS.get(key, str)(word) for key, word in line.items()}) for line in csv.DictReader(file)]


class Norm(nn.LayerNorm):
    """A norm that is computed in bfloat16 under autocast too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            normed: torch.Tensor = F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), None, self.eps)
            return normed


class Block(nn.Module):
    """A layer of MPT."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = Norm(hidden, bias=False), Norm(hidden, bias=False)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, hidden = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(samples, length, 3, self.heads, -1).transpose(1, 3).unbind(2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # their kernels were of its first versions
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, length, hidden))
        widened: torch.Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + widened


class Loss(torch.autograd.Function):
    """Cross entropy as flash-attention's kernel has it: logits read once, their gradient written in their place."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return torch.logsumexp(logits, -1).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (logits,) = ctx.saved_tensors
        written: torch.Tensor = logits.mul_(gradients[0])
        return written


class Model(nn.Module):
    """MPT with its tied head."""

    def __init__(self, hidden: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = Norm(hidden, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        loss: torch.Tensor = Loss.apply(logits.view(-1, WORDS))  # type: ignore[no-untyped-call]
        return loss


def _allocate(module: nn.Module) -> None:
    module.to_empty(device="cuda", recurse=False)


def _sharded(row: Row) -> FullyShardedDataParallel:
    pure = row.mixed_precision == "PURE"
    with torch.device("meta"):
        model = Model(*SHAPES[row.model], row.length)
    sharded = FullyShardedDataParallel(
        model, sharding_strategy=ShardingStrategy[row.sharding], auto_wrap_policy=ModuleWrapPolicy({Block}),
        limit_all_gathers=True, use_orig_params=True, device_id=torch.device("cuda", 0),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16 if pure else torch.float32, torch.bfloat16),
        param_init_fn=_allocate,
    )  # fmt: skip
    if row.checkpointing:
        apply_activation_checkpointing(sharded, check_fn=lambda module: isinstance(module, Block))
    return sharded


def step_s(row: Row, accumulation: int) -> tuple[float, float]:
    """(predicted seconds of a step of so many micro-batches, its peak in GiB)."""
    with fake_ranks(row.gpus), fake_gpu(row.card, enforce_capacity=False, record_places=False) as gpu:
        model = _sharded(row)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        ids = torch.zeros(row.micro_batch, row.length, dtype=torch.long).cuda()
        before = 0.0
        for _ in range(2):
            torch.cuda.synchronize()
            before = gpu.elapsed_s
            for _ in range(accumulation):
                with torch.autocast("cuda", torch.bfloat16, enabled=row.precision.startswith("amp")):
                    loss = model(ids)
                loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return gpu.elapsed_s - before, gpu.peak_allocated_bytes / 2**30


def predicted(row: Row) -> dict[str, Any]:
    """Seconds of a step; of more than two micro-batches from steps of one and two."""
    seconds, peak = step_s(row, min(row.accumulation, 2))
    if row.accumulation > 2:
        seconds += (row.accumulation - 2) * (seconds - step_s(row, 1)[0])
    return {"step_s": seconds, "peak_gib": peak}


def _run(half: str, only: str) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for row in rows():
        if half in (row.half, "both") and only in row.name and row.name not in results:
            results[row.name] = predicted(row)
            print(f"{row.name}: {results[row.name]['step_s'] / row.step_s:.3f} of {row.step_s:.3f} s", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def _lengths(row: Row) -> str:
    return "to 1,024" if row.length <= 1024 else "2,048" if row.length == 2048 else "from 4,096"


def _cards(row: Row) -> str:
    return "8" if row.gpus == 8 else "16 to 64" if row.gpus <= 64 else "128 to 512"


def table(half: str) -> list[str]:
    """Predicted over measured seconds of a step, by card, number of cards and length."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows():
        if row.half == half and row.name in results:
            ratio = results[row.name]["step_s"] / row.step_s
            groups.setdefault((row.gpu, _cards(row), _lengths(row)), []).append(ratio)
    lines = ["| card | cards | tokens | rows | median | from, to |", "|---|---|---|---|---|---|"]
    for (gpu, cards, lengths), ratios in groups.items():
        median, least, most = statistics.median(ratios), min(ratios), max(ratios)
        lines.append(f"| {gpu} | {cards} | {lengths} | {len(ratios)} | {median:.2f} | {least:.2f}, {most:.2f} |")
    return lines


def scaling() -> list[str]:
    """A card's share of its own speed on the fewest cards, of rows that differ in the number of cards alone."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    same: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows():
        if row.name in results:
            key = (row.gpu, row.model, row.length, row.micro_batch, row.accumulation, row.sharding, row.checkpointing)
            same.setdefault(key, []).append(row)
    lines = ["| card, model, micro-batch | cards | measured | predicted |", "|---|---|---|---|"]
    for of in same.values():
        least, *more = sorted(of, key=lambda row: row.gpus)
        for row in more:
            told = results[least.name]["step_s"] / results[row.name]["step_s"]
            name = f"{row.gpu}, {row.model}, {row.micro_batch} x {row.accumulation}"
            lines.append(
                f"| {name} | {row.gpus} over {least.gpus} | {row.tokens_s_gpu / least.tokens_s_gpu:.3f} | {told:.3f} |"
            )
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--half", choices=("even", "odd", "both"), default="even")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    if options.what == "run":
        _run(options.half, options.only)
    print(*table("even"), "", *table("odd"), "", *scaling(), sep="\n")
