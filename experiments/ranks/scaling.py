"""How much faster two cards train than one, predicted against published throughputs.

Run: `python experiments/ranks/scaling.py` (about 3 minutes)

Published: github foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv and l40_40gb.csv: the
samples per second of Mistral-7B in bfloat16 with full sharding (FSDP) on two cards and alone, sequences of 4096 tokens,
gradient checkpointing, the same samples per step. Their step is a forward and a backward pass and an update.

Simulated: the model of transformers with FSDP2 instead of FSDP1, whose collectives move the same bytes. Nothing was
fitted. Seconds of a step alone are told by the kernel tables; what this study is about is the ratio of both.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.depth.delay import LayerClock
from autofit.fakegpu.depth.expand import Mark, expanded
from autofit.fakegpu.depth.stack import shrink
from autofit.fakegpu.rates.collectives import fake_ranks
from autofit.fakegpu.specs import GpuSpec, gpu_spec

TOKENS = 4096
# An L40 has the chip of an L40S at half of its rate for matrices (data sheet: 181 TFLOP/s of bfloat16).
L40 = replace(
    gpu_spec("l40s"), name="l40", full_name="NVIDIA L40", half_flops_per_s=181.05e12, tf32_flops_per_s=90.5e12
)


class Row(NamedTuple):
    """Published samples per second of one card and of two, which have `samples` a step together."""

    card: GpuSpec
    lora: bool
    samples: int
    alone: float | None
    two: float


ROWS = (
    Row(gpu_spec("a100-80gb"), False, 4, 0.678, 1.317), Row(gpu_spec("a100-80gb"), False, 8, 0.744, 1.431),
    Row(gpu_spec("a100-80gb"), True, 4, 0.878, 1.463), Row(gpu_spec("a100-80gb"), True, 8, 0.887, 1.669),
    Row(L40, True, 4, 0.665, 1.018), Row(L40, True, 8, 0.663, 1.201),
    Row(L40, False, 4, None, 0.781), Row(L40, False, 8, None, 0.937),
)  # fmt: skip


@contextlib.contextmanager
def _ranks(count: int) -> Iterator[None]:
    with fake_ranks(count) if count > 1 else contextlib.nullcontext():
        yield


def _model(*, lora: bool, ranks: int) -> Any:
    config = AutoConfig.for_model(
        "mistral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, sliding_window=None,
    )  # fmt: skip
    shrink(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    if lora:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = get_peft_model(model, LoraConfig(r=16, target_modules=targets), autocast_adapter_dtype=False)
    if ranks > 1:
        from torch.distributed.fsdp import fully_shard

        layers = model.get_submodule("base_model.model.model.layers" if lora else "model.layers")
        for module in (*layers.children(), model):
            fully_shard(module)
    return model.train()


def step_s(row: Row, ranks: int) -> tuple[float, float]:
    """(predicted seconds of a step, seconds of them in which kernels of the few layers wait for collectives)."""
    marks: list[Mark] = []
    with _ranks(ranks), fake_gpu(row.card, enforce_capacity=False, follow_layers=True, record_places=False) as gpu:
        clock = gpu.clock
        assert isinstance(clock, LayerClock)
        model = _model(lora=row.lora, ranks=ranks)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        ids = torch.randint(0, 3000, (row.samples // ranks, TOKENS), device="cuda")
        for _ in range(2):
            marks.append(Mark(name="step", event=len(gpu.memory.log), stretch=clock.cut()))
            exposed_s = clock.exposed_s
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        marks.append(Mark(name="end", event=len(gpu.memory.log), stretch=clock.cut()))
        exposed_s = clock.exposed_s - exposed_s
        kept = (model, optimizer, loss)
    seconds = expanded(gpu, marks).seconds()
    del kept
    return seconds[2] - seconds[1], exposed_s


def main() -> None:
    print(
        "| card | method | samples a step | samples/s alone: published, predicted | on two cards | two cards over one |"
    )
    print("|---|---|---|---|---|---|")
    for row in ROWS:
        (alone_s, _), (two_s, _) = step_s(row, 1), step_s(row, 2)
        alone, two = row.samples / alone_s, row.samples / two_s
        known = "-" if row.alone is None else f"{row.alone:.3f}, {alone:.3f} ({alone / row.alone:.2f})"
        ratio = "-" if row.alone is None else f"{row.two / row.alone:.2f}, {two / alone:.2f}"
        print(
            f"| {row.card.name} | {'LoRA' if row.lora else 'full'} | {row.samples} | {known} | "
            f"{row.two:.3f}, {two:.3f} ({two / row.two:.2f}) | {ratio} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
