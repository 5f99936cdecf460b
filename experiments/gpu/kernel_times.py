"""Seconds of single operations on a card, or on a simulated one: `python -m gpu.kernel_times OUT [sim:CARD]`.

Each operation is repeated on the same tensors, which are larger than the card's cache unless the name says small. On
the card CUDA's events time the repetitions together; on the simulated card its clock does.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

Operation = Callable[[], object]
_REPEATS = 10
_BF16, _FP32 = torch.bfloat16, torch.float32


def operations() -> Iterator[tuple[str, Callable[[], Operation]]]:
    """Names, and functions that make the tensors on the card and return the operation on them."""
    yield from _pointwise()
    yield from _rows()
    yield from _vocabulary()
    yield from _products()
    yield from _attention()
    yield from _optimizer()


def _of(*shape: int, dtype: torch.dtype = _BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _pointwise() -> Iterator[tuple[str, Callable[[], Operation]]]:
    big = (4, 2048, 6144)
    for dtype, other in ((_BF16, _FP32), (_FP32, _BF16)):
        word = str(dtype).removeprefix("torch.")
        yield f"cast of {word}", lambda d=dtype, o=other: (lambda x: lambda: x.to(o))(_of(*big, dtype=d))
        yield f"add {word}", lambda d=dtype: (lambda x, y: lambda: x + y)(_of(*big, dtype=d), _of(*big, dtype=d))
        yield f"times a number {word}", lambda d=dtype: (lambda x: lambda: x * 0.5)(_of(*big, dtype=d))
        yield f"silu {word}", lambda d=dtype: (lambda x: lambda: F.silu(x))(_of(*big, dtype=d))
        yield f"dropout {word}", lambda d=dtype: (lambda x: lambda: F.dropout(x, 0.05))(_of(*big, dtype=d))
        yield (
            f"times a column {word}",
            lambda d=dtype: (lambda x, y: lambda: x * y)(_of(*big, dtype=d), _of(4, 2048, 1, dtype=d)),
        )
        yield (
            f"times a row {word}",
            lambda d=dtype: (lambda x, y: lambda: x * y)(_of(*big, dtype=d), _of(6144, dtype=d)),
        )
        yield f"clone {word}", lambda d=dtype: (lambda x: lambda: x.clone())(_of(*big, dtype=d))
        yield f"pow {word}", lambda d=dtype: (lambda x: lambda: x.pow(2))(_of(*big, dtype=d))
        yield f"fill {word}", lambda d=dtype: (lambda x: lambda: x.zero_())(_of(*big, dtype=d))
    yield "silu's gradient", lambda: (lambda x, y: lambda: torch.ops.aten.silu_backward(x, y))(_of(*big), _of(*big))
    yield (
        "dropout's gradient",
        lambda: (lambda x, m: lambda: torch.ops.aten.native_dropout_backward(x, m, 1.05))(
            _of(*big, dtype=_FP32), _of(*big) > 0
        ),
    )
    yield "transposed copy of heads", lambda: (lambda x: lambda: x.transpose(1, 2).contiguous())(_of(8, 2048, 16, 128))
    yield (
        "rotation: halves joined",
        lambda: (lambda x: lambda: torch.cat((-x[..., 64:], x[..., :64]), -1))(_of(8, 16, 2048, 128)),
    )
    yield "times cos", lambda: (lambda x, c: lambda: x * c)(_of(8, 16, 2048, 128), _of(1, 1, 2048, 128))
    yield (
        "a cache grows",
        lambda: (lambda x, y: lambda: torch.cat((x, y), 2))(_of(16, 8, 2048, 128), _of(16, 8, 1, 128)),
    )
    yield "small: add", lambda: (lambda x, y: lambda: x + y)(_of(8, 1, 896), _of(8, 1, 896))
    yield "small: cast", lambda: (lambda x: lambda: x.float())(_of(8, 1, 896))


def _rows() -> Iterator[tuple[str, Callable[[], Operation]]]:
    yield "mean of rows", lambda: (lambda x: lambda: x.mean(-1, keepdim=True))(_of(16384, 4096, dtype=_FP32))
    yield "sum of all", lambda: (lambda x: lambda: x.sum())(_of(16384, 4096, dtype=_FP32))
    yield "layer norm", lambda: (lambda x, w: lambda: F.layer_norm(x, (4096,), w))(_of(16384, 4096), _of(4096))
    yield "rms norm, fused", lambda: (lambda x, w: lambda: F.rms_norm(x, (4096,), w))(_of(16384, 4096), _of(4096))
    yield "softmax of scores", lambda: (lambda x: lambda: x.softmax(-1))(_of(4, 16, 2048, 2048))


def _vocabulary() -> Iterator[tuple[str, Callable[[], Operation]]]:
    words, tokens = 151936, 4096

    def index(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, device="cuda")

    yield "embedding", lambda: (lambda w, i: lambda: F.embedding(i, w))(_of(words, 2048), index(words, 4, 8192))
    yield "embedding's gradient", lambda: (
        lambda g, i: lambda: torch.ops.aten.embedding_dense_backward(g, i, words, -1, False)
    )(_of(8192, 2048), index(words, 8192))  # fmt: skip
    for dtype in (_BF16, _FP32):
        word = str(dtype).removeprefix("torch.")
        yield (
            f"log softmax of words {word}",
            lambda d=dtype: (lambda x: lambda: x.log_softmax(-1))(_of(tokens // 2, words, dtype=d)),
        )
        yield (
            f"its gradient {word}",
            lambda d=dtype: (lambda g, y: lambda: torch.ops.aten._log_softmax_backward_data(g, y, 1, g.dtype))(
                _of(tokens // 2, words, dtype=d), _of(tokens // 2, words, dtype=d)
            ),
        )
        yield (
            f"logsumexp of words {word}",
            lambda d=dtype: (lambda x: lambda: x.logsumexp(-1))(_of(tokens // 2, words, dtype=d)),
        )
    yield "loss of targets", lambda: (lambda x, i: lambda: F.nll_loss(x, i))(_of(tokens, words), index(words, tokens))
    yield (
        "loss's gradient",
        lambda: (lambda g, x, i, t: lambda: torch.ops.aten.nll_loss_backward(g, x, i, None, 1, -100, t))(
            torch.ones((), device="cuda", dtype=_BF16),
            _of(tokens, words),
            index(words, tokens),
            torch.ones((), device="cuda", dtype=_BF16),
        ),
    )
    yield (
        "gather of targets",
        lambda: (lambda x, i: lambda: x.gather(-1, i))(_of(tokens, words), index(words, tokens, 1)),
    )
    yield "gather of rows", lambda: (lambda x, i: lambda: x[i])(_of(words, 2048), index(words, 32768))
    yield (
        "rows added",
        lambda: (lambda x, i, y: lambda: x.index_add_(0, i, y))(
            _of(32768, 2048), index(32768, 32768), _of(32768, 2048)
        ),
    )
    yield (
        "scatter of rows",
        lambda: (lambda x, i, y: lambda: x.index_put_((i,), y))(
            _of(32768, 2048), index(32768, 32768), _of(32768, 2048)
        ),
    )
    yield (
        "a draw of words",
        lambda: (lambda x: lambda: torch.multinomial(x, 1))(_of(16, words, dtype=_FP32).softmax(-1)),
    )
    yield "the highest words", lambda: (lambda x: lambda: x.topk(50))(_of(16, words, dtype=_FP32))
    yield "sorted words", lambda: (lambda x: lambda: x.sort(-1))(_of(16, words, dtype=_FP32))
    yield "running sum of words", lambda: (lambda x: lambda: x.cumsum(-1))(_of(16, words, dtype=_FP32))
    yield "argmax of words", lambda: (lambda x: lambda: x.argmax(-1))(_of(16, words, dtype=_FP32))


def _products() -> Iterator[tuple[str, Callable[[], Operation]]]:
    for dtype, m, n, k in (
        (_BF16, 8192, 2048, 2048), (_BF16, 8192, 6144, 2048), (_BF16, 4096, 32768, 2048), (_BF16, 8192, 16, 2048),
        (_BF16, 8192, 2048, 16), (_BF16, 16, 8192, 2048), (_BF16, 8, 151936, 896), (_BF16, 8, 2048, 2048),
        (_FP32, 8192, 16, 2048), (_FP32, 8192, 2048, 16), (_FP32, 8192, 2048, 2048), (_FP32, 8, 16, 896),
        (_FP32, 8, 896, 16), (_FP32, 8, 4864, 896),
    ):  # fmt: skip
        word = str(dtype).removeprefix("torch.")
        yield (
            f"product {word} {m} x {n} x {k}",
            lambda d=dtype, m=m, n=n, k=k: (lambda a, b: lambda: a @ b.t())(_of(m, k, dtype=d), _of(n, k, dtype=d)),
        )
    yield (
        "product of 16 bits added to 32",
        lambda: (lambda c, a, b: lambda: torch.addmm(c, a, b, out_dtype=_FP32, out=c))(
            _of(4096, 2048, dtype=_FP32), _of(4096, 32768), _of(32768, 2048)
        ),
    )
    yield "batch of products", lambda: (lambda a, b: lambda: a @ b)(_of(64, 2048, 128), _of(64, 128, 2048))


def _attention() -> Iterator[tuple[str, Callable[[], Operation]]]:
    from torch.nn.attention import SDPBackend

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
                "efficient": SDPBackend.EFFICIENT_ATTENTION}  # fmt: skip
    for batch, heads, length, dim in ((4, 16, 2048, 128), (4, 14, 2048, 64), (16, 16, 512, 128), (16, 14, 512, 64),
                                      (1, 32, 8192, 128), (8, 32, 1024, 128), (2, 8, 2048, 256)):  # fmt: skip
        for name, backend in backends.items():
            for gradient in (False, True):
                words = (
                    f"attention {name} {batch} x {heads} x {length} x {dim}{' and its gradient' if gradient else ''}"
                )
                yield words, partial(_attended, (batch, heads, length, dim), backend, gradient)
    shape = 4, 16, 2048, 128
    yield "attention cudnn, whole", partial(_attended, shape, backends["cudnn"], True, causal=False)
    yield "attention efficient, whole", partial(_attended, shape, backends["efficient"], True, causal=False)
    yield "attention as torch chooses", partial(_attended, shape, None, True)
    yield "attention as torch chooses, a mask", partial(_attended, shape, None, True, causal=False, masked=True)
    yield "attention cudnn, a mask", partial(_attended, shape, backends["cudnn"], True, causal=False, masked=True)
    yield (
        "attention efficient, a mask",
        partial(_attended, shape, backends["efficient"], True, causal=False, masked=True),
    )


def _attended(
    shape: tuple[int, int, int, int], backend: Any, gradient: bool, *, causal: bool = True, masked: bool = False
) -> Operation:
    from torch.nn.attention import sdpa_kernel

    q, k, v = (_of(*shape).requires_grad_(gradient) for _ in range(3))
    mask = torch.ones(shape[0], 1, shape[2], shape[2], device="cuda", dtype=torch.bool).tril() if masked else None

    def run() -> object:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return torch.autograd.grad(out, (q, k, v), out) if gradient else out

    return run


def _optimizer() -> Iterator[tuple[str, Callable[[], Operation]]]:
    for fused in (True, False):

        def made(fused: bool = fused) -> Operation:
            weights = [_of(4096, 2048).requires_grad_() for _ in range(32)]
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            return torch.optim.AdamW(weights, fused=fused).step

        yield f"AdamW{', fused' if fused else ', one operation after the other'}", made
    yield "norm of gradients", lambda: (lambda w: lambda: torch._foreach_norm(w))([_of(4096, 2048) for _ in range(32)])


def on_card(operation: Operation) -> float:
    """Median seconds of one call, over five groups of calls."""
    for _ in range(3):
        operation()
    found = []
    for _ in range(5):
        begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begins.record()
        for _ in range(_REPEATS):
            operation()
        ends.record()
        torch.cuda.synchronize()
        found.append(float(begins.elapsed_time(ends)) / 1000 / _REPEATS)
    return sorted(found)[2]


def launches() -> dict[str, float]:
    """Host seconds of a kernel that Python launches, of one that autograd launches, and of a view."""
    x, w = _of(1, 1, 64), _of(1, 1, 64).requires_grad_()

    def many(operation: Operation) -> float:
        operation()
        torch.cuda.synchronize()
        began = time.perf_counter()
        operation()
        took = time.perf_counter() - began
        torch.cuda.synchronize()
        return took / 500

    def chain() -> torch.Tensor:
        out = w
        for _ in range(500):
            out = out * x
        return out

    def backward() -> float:
        out = chain()
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.autograd.grad(out, w, torch.ones_like(out))
        took = time.perf_counter() - began
        torch.cuda.synchronize()
        return took / 500

    backward()
    return {"python": many(lambda: [x + x for _ in range(500)]), "recorded": many(chain), "autograd": backward(),
            "view": many(lambda: [x.view(64) for _ in range(500)])}  # fmt: skip


def queued() -> dict[str, float]:
    """Seconds of one kernel of many that are queued, by its elements: what a kernel takes beside its own work."""
    found = {}
    for elements in (64, 1 << 16, 1 << 20, 1 << 22):
        x = _of(elements)
        begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda._sleep(100_000_000)  # 50 ms, in which the host queues all
            begins.record()
            for _ in range(500):
                x.mul_(1.0)
            ends.record()
            torch.cuda.synchronize()
        found[str(elements)] = begins.elapsed_time(ends) / 1000 / 500
    return found


def passes() -> Iterator[dict[str, object]]:
    """Host seconds and launches of a forward, a backward and an optimizer step of a model with almost no work."""
    for lora, keeps, autocast in (
        (False, True, False), (False, False, False), (True, True, False), (True, False, False), (False, True, True),
    ):  # fmt: skip
        step = _pass(lora=lora, keeps=keeps, autocast=autocast)
        step()
        found = [step() for _ in range(7)]
        row: dict[str, object] = {"lora": lora, "keeps activations": keeps, "autocast": autocast}
        row |= {what: sorted(times[what] for times in found)[3] for what in found[0]}
        yield row | _launches(step)


def _pass(*, lora: bool, keeps: bool, autocast: bool) -> Callable[[], dict[str, float]]:
    """A step of training, which tells the host's seconds of each part."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = Qwen2Config(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=24,
                        num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model: Any = Qwen2ForCausalLM(shape).to("cuda", _FP32 if autocast else _BF16)
    if lora:
        adapter = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
        model = get_peft_model(model, adapter)
    model.train()
    if not keeps:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    words = torch.randint(0, 1000, (1, 16), device="cuda")

    def forward() -> Any:
        with torch.autocast("cuda", _BF16, enabled=autocast):
            return model(input_ids=words, labels=words).loss

    def step() -> dict[str, float]:
        forward_s, loss = _host_s(forward)
        backward_s, _ = _host_s(loss.backward)
        optimizer_s, _ = _host_s(optimizer.step)
        optimizer.zero_grad()
        return {"forward": forward_s, "backward": backward_s, "optimizer": optimizer_s}

    return step


def _host_s(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the host has launched the work, and what it returns."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    done = work()
    return time.perf_counter() - began, done


def _launches(step: Callable[[], object]) -> dict[str, object]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
    kernels = [event for event in seen.events() if str(event.device_type).endswith("CUDA")]
    return {"launches": len(kernels)}


def main() -> None:
    out = Path(sys.argv[1])
    simulated = next((a.removeprefix("sim:") for a in sys.argv[2:] if a.startswith("sim:")), None)
    rows: dict[str, object] = {}
    if simulated is None:
        rows["host"], rows["queued"], rows["passes"] = launches(), queued(), list(passes())
        for name, make in operations():
            try:
                rows[name] = on_card(make())
            except Exception as error:  # one operation must not end the others
                rows[name] = f"{type(error).__name__}: {error}"[:200]
            torch.cuda.empty_cache()
    else:
        from autofit.fakegpu import fake_gpu

        with fake_gpu(simulated) as card:
            for name, make in operations():
                operation = make()
                operation()
                before = sum(card.clock.busy_s.values())
                operation()
                rows[name] = sum(card.clock.busy_s.values()) - before
    out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
