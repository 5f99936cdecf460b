"""Activations on the host: TRL's own offloading, transformers' checkpoints in pinned memory, and their seconds."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from trl.models.activation_offloading import OffloadActivations, get_act_offloading_ctx_manager

from autofit.fakegpu import FakeGpu, fake_gpu
from autofit.fakegpu.depth.expand import Mark, expanded, run_of
from autofit.fakegpu.depth.layers import LayerClock
from autofit.fakegpu.depth.stack import shrink
from autofit.fakegpu.formula.kernel_log import KernelKinds, KernelLog
from autofit.fakegpu.formula.order import Order
from autofit.fakegpu.formula.polynomials import Symbols
from autofit.fakegpu.formula.seconds import KernelRows

from .tiny_trainers import config

ROWS, WIDTH, MIB = 512, 256, 1 << 20


class Layer(torch.nn.Module):
    """Saves views, inputs used twice, small tensors, broadcasts and what is no contiguous tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.down = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = self.up(self.norm(x)).chunk(3, dim=-1)
        mixed = one.t() @ (two * three.sigmoid()) / ROWS
        scale: torch.Tensor = torch.ones(1, device=x.device).expand_as(x)
        return torch.add(x, self.down(x @ mixed) * scale)


def kept_and_moved(hooks: OffloadActivations) -> list[tuple[tuple[int, ...], str, bool]]:
    """What became of each saved tensor, in order: its shape, its type, and whether it went to the host."""
    return [
        (tuple(entry[4] if entry[1] else entry[0].shape), str(entry[0].dtype), entry[1])
        for entry in hooks.tracker.values()
    ]


def decisions(device: str, prepare: Callable[[OffloadActivations], None]) -> list[tuple[tuple[int, ...], str, bool]]:
    model = torch.nn.Sequential(*(Layer() for _ in range(3))).to(device)
    hooks = OffloadActivations(use_pin_memory=device == "cuda")
    prepare(hooks)
    with hooks:
        out = model(torch.zeros(ROWS, WIDTH, device=device, requires_grad=True)).sum()
        found = kept_and_moved(hooks)
        out.backward()
    return found


def test_trl_moves_the_same_tensors_as_on_real_memory() -> None:
    """The real class on real tensors: the CPU in the place of the card, with streams that do nothing."""

    def as_card(hooks: OffloadActivations) -> None:
        nothing = SimpleNamespace(
            wait_event=lambda event: None, wait_stream=lambda stream: None, record_event=lambda: None,
            synchronize=lambda: None,
        )  # fmt: skip
        cpu: Any = hooks
        cpu.accelerator_type, cpu.s1 = "cpu", nothing
        cpu.device_module = SimpleNamespace(
            current_stream=lambda: nothing, stream=lambda stream: nullcontext(), empty_cache=lambda: None
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))
        patch.setattr("torch.get_device_module", lambda *_: SimpleNamespace(Stream=lambda: None))
        real = decisions("cpu", as_card)
    with fake_gpu("a100-40gb"):
        assert decisions("cuda", lambda hooks: None) == real
    moved = [entry for entry in real if entry[2]]
    assert 0 < len(moved) < len(real)


TOKENS = 8 * 2048


def train(model: torch.nn.Module, offloading: bool) -> tuple[int, float, int]:
    """(bytes alive between forward and backward beyond those before, seconds, bytes on the host) of a second step."""
    ids = torch.randint(0, 3000, (8, 2048), device="cuda")
    hooks = get_act_offloading_ctx_manager(model) if offloading else nullcontext()
    held, seconds, on_host = 0, 0.0, 0
    for _ in range(2):
        start, before = torch.cuda.Event(), torch.cuda.memory_allocated()
        start.record()
        with hooks:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            held = torch.cuda.memory_allocated() - before
            if isinstance(hooks, OffloadActivations):
                on_host = sum(entry[0].nbytes for entry in hooks.tracker.values() if entry[1])
            loss.backward()
        model.zero_grad()
        end = torch.cuda.Event()
        end.record()
        seconds = start.elapsed_time(end) / 1e3
    return held, seconds, on_host


def llama_like(layers: int, **checkpointing: object) -> Any:
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8, "num_key_value_heads": 4}
    model: Any = AutoModelForCausalLM.from_config(
        config(num_hidden_layers=layers, head_dim=128, **sizes), dtype=torch.bfloat16
    ).cuda()
    if checkpointing:
        model.activation_checkpointing_enable(**checkpointing)
    return model.train()


def test_checkpoints_in_pinned_memory_free_layers_times_tokens_times_width_and_their_copies_take_time() -> None:
    """As transformers' pull request 48444 says of `offload`: 2 bytes for each layer, token and column."""
    layers, width = 4, 1024
    with fake_gpu("a100-40gb") as gpu:
        plain, plain_s, _ = train(llama_like(layers, every_n_layers=1), offloading=False)
        gc.collect()
        moved, moved_s, _ = train(llama_like(layers, every_n_layers=1, offload=True), offloading=False)
    checkpoints = layers * TOKENS * width * 2
    assert plain - moved == checkpoints
    there_and_back = 2 * checkpoints / gpu.spec.host_link_bytes_per_s
    assert moved_s - plain_s >= 0.9 * there_and_back


def test_offloading_frees_memory_and_its_copies_overlap_with_kernels() -> None:
    with fake_gpu("a100-40gb") as gpu:
        plain, plain_s, _ = train(llama_like(4), offloading=False)
        gc.collect()
        moved, moved_s, on_host = train(llama_like(4), offloading=True)
    link_s = 2 * on_host / gpu.spec.host_link_bytes_per_s
    assert moved < 0.6 * plain
    assert link_s < moved_s < 0.95 * (link_s + plain_s)


def offloaded(layers: int, rows: int) -> tuple[KernelKinds, float, FakeGpu]:
    """Kernels, seconds and card of a micro-batch whose copies take as long as its kernels: each waits for the other."""
    width, log = 8192, KernelLog()
    with fake_gpu("a100-80gb") as gpu:
        parts = [part for _ in range(2 * layers) for part in (torch.nn.Linear(width, width), torch.nn.GELU())]
        model = torch.nn.Sequential(*parts).cuda().bfloat16()
        x = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16)
        gpu.clock.synchronize()
        began_s = gpu.clock.now_s
        gpu.clock.log, log.on, log.phase = log, True, "update"
        with get_act_offloading_ctx_manager(model, warn_if_no_head=False):
            model(x).sum().backward()
    return log.kinds({"update": 1}), gpu.clock.now_s - began_s, gpu


def test_a_forecast_has_the_waits_of_kernels_and_copies_for_each_other() -> None:
    """Where the longer of both was taken, the micro-batch was forecast 14 % too short."""
    (low, low_s, gpu), (high, high_s, _), (wide, *_) = offloaded(4, 2048), offloaded(5, 2048), offloaded(4, 3072)
    symbols = Symbols(("B", "T"), (2048.0, 0.0), rounds=False)
    symbols.start({**low.per_segment, **high.per_segment})
    symbols.vary("B", 3072.0, low.per_segment, wide.per_segment)
    rows = KernelRows.of(low, high, symbols, layers=(4, 5), kernels=gpu.clock.kernels)

    def told(layers: int, rows_: int, of: KernelRows = rows) -> float:
        return float(of.seconds(np.array([[float(rows_)]]), layers, np.zeros(1))["update"][0])

    assert [told(4, 2048), told(5, 2048)] == pytest.approx([low_s, high_s], rel=1e-9)
    for order in rows.orders["update"]:
        assert Order.from_json(json.loads(json.dumps(order.to_json()))) == order
    folded = rows.folded(np.array([[1024.0, 0.0], [8192.0, 0.0]]))
    assert told(12, 4096, folded) == pytest.approx(offloaded(12, 4096)[1], rel=0.005)


def followed(*, shallow: bool, **checkpointing: object) -> tuple[FakeGpu, list[Mark], list[float]]:
    with fake_gpu("a100-40gb", enforce_capacity=False, follow_layers=True, record_places=False) as gpu:
        assert isinstance(gpu.clock, LayerClock)
        shape = config(num_hidden_layers=9)
        if shallow:
            shrink(shape)
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).cuda()
        if checkpointing:
            model.activation_checkpointing_enable(**checkpointing)
        marks, seconds = [Mark(name="start", event=len(gpu.memory.log), stretch=gpu.clock.cut())], [gpu.elapsed_s]
        train(model.train(), offloading=not checkpointing)
        marks.append(Mark(name="end", event=len(gpu.memory.log), stretch=gpu.clock.cut()))
        seconds.append(gpu.elapsed_s)
    return gpu, marks, seconds


@pytest.mark.parametrize(
    "checkpointing", [{}, {"every_n_layers": 1, "offload": True}], ids=["activations", "checkpoints"]
)
def test_a_few_layers_stand_for_many_in_bytes_and_seconds(checkpointing: dict[str, object]) -> None:
    gpu, marks, _ = followed(shallow=True, **checkpointing)
    short = expanded(gpu, marks)
    gpu, marks, seconds = followed(shallow=False, **checkpointing)
    deep = run_of(gpu, marks)
    assert sorted(short.nbytes.tolist()) == sorted(deep.nbytes.tolist())
    assert deep.seconds() == pytest.approx(seconds, rel=1e-6)  # segments put together, and the clock itself
    assert short.seconds() == pytest.approx(seconds, rel=0.01)


def test_checkpointing_of_some_layers_is_not_told_by_a_stack_of_other_layers() -> None:
    from autofit.fakegpu.depth.stack import NotRepeatingError, plan_stack

    gpu, marks, _ = followed(shallow=True, every_n_layers=3)
    with pytest.raises(NotRepeatingError, match="checkpointing is on in some layers only"):
        expanded(gpu, marks)
    stack = plan_stack(config(num_hidden_layers=28), pattern=3)
    assert stack.period % 3 == 0
    assert [layer % 3 for layer in stack.kept] == [i % 3 for i in range(len(stack.kept))]
