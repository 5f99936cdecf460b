"""Training loops as people write them, each a function of the device, run on a fake card and on the real CPU alike."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 1203
Loop = Callable[[str], None]
MakeOptimizer = Callable[..., torch.optim.Optimizer]


def language_model(kind: str = "qwen3", **changes: object) -> PreTrainedModel:
    sizes: dict[str, object] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 256,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | changes)))


def tokens(device: str, length: int = 32) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (2, length), device=device)


def steps(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor], count: int = 2) -> None:
    for _ in range(count):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------------- images
def cnn_with_sgd(device: str) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d(2), nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(2):
        x, y = torch.randn(8, 3, 64, 64, device=device), torch.randint(0, 10, (8,), device=device)
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


class Residual(nn.Module):
    """torchvision's BasicBlock."""

    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inside, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(inside, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.norm1(self.first(x)), inplace=True)
        return F.relu(self.norm2(self.second(out)) + self.short(x), inplace=True)


def resnet(device: str) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        Residual(16, 32, 2), Residual(32, 64, 2), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(1), nn.Linear(64, 100),
    ).to(device)  # fmt: skip
    labels = torch.randint(0, 100, (4,)).to(device)
    steps(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
          lambda: F.cross_entropy(net(torch.randn(4, 3, 64, 64).to(device)), labels))  # fmt: skip


def channels_last(device: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.ConvTranspose2d(16, 8, 2, 2))
    net = net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    steps(torch.optim.AdamW(net.parameters()), lambda: net(
        torch.randn(2, 3, 32, 32, device=device).to(memory_format=torch.channels_last)).pow(2).mean())  # fmt: skip


def gan_with_gradient_penalty(device: str) -> None:
    maker, judge = nn.Linear(16, 64).to(device), nn.Linear(64, 1).to(device)
    optimizers = [torch.optim.Adam(net.parameters(), betas=(0.5, 0.9)) for net in (maker, judge)]
    for _ in range(2):
        made, real = maker(torch.randn(256, 16, device=device)), torch.randn(256, 64, device=device, requires_grad=True)
        (judge(made.detach()).mean() - judge(real).mean()).backward()
        (slope,) = torch.autograd.grad(judge(real).sum(), real, create_graph=True)
        slope.norm(2, dim=1).sub(1).pow(2).mean().backward()
        optimizers[1].step()
        (-judge(made).mean()).backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


# ---------------------------------------------------------------------- sequences
def transformer_encoder(device: str) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    mask = nn.Transformer.generate_square_subsequent_mask(32, device=torch.device(device))
    steps(torch.optim.Adam(net.parameters()),
          lambda: net(torch.randn(4, 32, 64, device=device), mask=mask, is_causal=True).mean())  # fmt: skip


def padded_encoder_in_evaluation(device: str) -> None:
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).to(device).eval()
    padding = torch.zeros(4, 32, dtype=torch.bool)
    padding[0, 20:] = True
    with torch.no_grad():
        net(torch.randn(4, 32, 64, device=device), src_key_padding_mask=padding.to(device))


def encoder_and_decoder(device: str) -> None:
    net = nn.Transformer(64, 4, 2, 2, 128, batch_first=True).to(device)
    steps(torch.optim.RAdam(net.parameters()), lambda: net(
        torch.randn(4, 16, 64, device=device), torch.randn(4, 12, 64, device=device)).mean())  # fmt: skip


def recurrent(device: str, *, kind: Callable[..., nn.RNNBase]) -> None:
    """Truncated backpropagation: the state goes from step to step, detached."""
    embed, net, head = nn.Embedding(1200, 64), kind(64, 96, 2, batch_first=True, dropout=0.1), nn.Linear(96, 1200)
    everything = nn.ModuleList([embed, net, head]).to(device)
    optimizer, state = torch.optim.RMSprop(everything.parameters()), None
    for _ in range(2):
        x = torch.randint(0, 1200, (4, 32), device=device)
        out, state = net(embed(x), state)
        state = tuple(t.detach() for t in state) if isinstance(state, tuple) else state.detach()
        F.cross_entropy(head(out).flatten(0, 1), x.flatten()).backward()
        nn.utils.clip_grad_norm_(everything.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def packed_lstm(device: str) -> None:
    net, x = nn.LSTM(16, 32, batch_first=True, bidirectional=True).to(device), torch.randn(3, 10, 16, device=device)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([10, 7, 3]), batch_first=True)
    out, lengths = nn.utils.rnn.pad_packed_sequence(net(packed)[0], batch_first=True)
    assert (tuple(out.shape), lengths.tolist()) == ((3, 10, 64), [10, 7, 3])
    out.sum().backward()


def recurrent_cells(device: str) -> None:
    cells = nn.ModuleList([nn.LSTMCell(16, 16), nn.GRUCell(16, 16), nn.RNNCell(16, 16)]).to(device)
    h = c = torch.randn(4, 16, device=device)
    for _ in range(3):
        h, c = cells[0](h, (h, c))
        h = cells[2](cells[1](h, c), c)
    h.sum().backward()


# ---------------------------------------------------------------------- language models
def autocast(device: str, *, dtype: torch.dtype) -> None:
    model = language_model().to(device)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler(device)
    scaled = dtype is torch.float16
    for _ in range(2):
        with torch.autocast(device, dtype=dtype):
            loss = model(input_ids=(ids := tokens(device, 64)), labels=ids).loss
        (scaler.scale(loss) if scaled else loss).backward()
        if scaled:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert isinstance(loss.item(), float)


def accumulation(device: str) -> None:
    model = language_model(kind="llama").to(device)
    optimizer, total = torch.optim.AdamW(model.parameters()), 0.0
    for step in range(4):
        ids = tokens(device)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        labels = ids.masked_fill(mask == 0, -100)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss / 2
        loss.backward()
        total += loss.item()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def half_model(device: str) -> None:
    model = language_model().half().to(device)
    model(input_ids=(ids := tokens(device)), labels=ids).loss.backward()


def policy_and_reference(device: str) -> None:
    policy = language_model(kind="gemma3_text", sliding_window=16).to(device)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)

    def log_probabilities(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids).logits
        return logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)

    def divergence() -> torch.Tensor:
        ids = tokens(device)
        with torch.no_grad():
            away = log_probabilities(reference, ids)
        away = away - log_probabilities(policy, ids)
        return (torch.exp(away) - away - 1).mean()

    steps(torch.optim.AdamW(policy.parameters()), divergence)


def hugging_face_trainer(device: str) -> None:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    rows = Dataset.from_dict({"input_ids": [[5] * 32] * 8, "labels": [[5] * 32] * 8})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, max_steps=2, report_to=[], disable_tqdm=True,
            use_cpu=device == "cpu", gradient_accumulation_steps=2, save_steps=1, eval_strategy="steps", eval_steps=1,
        )  # fmt: skip
        Trainer(model=language_model(), args=arguments, train_dataset=rows, eval_dataset=rows).train()


def generation(device: str, **how: object) -> None:
    model = language_model().to(device).eval()
    out = model.generate(tokens(device, 16), max_new_tokens=12, pad_token_id=0, eos_token_id=None, **how)
    assert out.shape == (2, 28) or "num_beams" in how  # how many tokens the best beam has depends on its scores


def masked_classifier(device: str) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = BertForSequenceClassification(BertConfig(vocab_size=1200, **sizes)).to(device)
    mask, labels = torch.ones(2, 32, dtype=torch.long), torch.tensor([0, 1], device=device)
    mask[0, 20:] = 0
    ids = torch.randint(0, 1200, (2, 32), device=device)
    steps(torch.optim.AdamW(model.parameters()),
          lambda: model(input_ids=ids, attention_mask=mask.to(device), labels=labels).loss)  # fmt: skip


# ---------------------------------------------------------------------- memory savers and optimizers
def checkpointed(device: str, *, reentrant: bool) -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    blocks.to(device)

    def loss() -> torch.Tensor:
        x = torch.randn(16, 64, device=device, requires_grad=True)
        for block in blocks:
            x = x + checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=False)
        return x.pow(2).mean()

    steps(torch.optim.AdamW(blocks.parameters()), loss)


def activations_on_the_host(device: str) -> None:
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    with torch.autograd.graph.save_on_cpu():
        out = net(torch.randn(16, 64, device=device))
    out.sum().backward()


def optimizer(device: str, *, make: MakeOptimizer) -> None:
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    steps(make(net.parameters()), lambda: net(torch.randn(8, 64, device=device)).pow(2).mean())


def adafactor_of_transformers(device: str) -> None:
    from transformers.optimization import Adafactor

    model = language_model().to(device)
    steps(Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False),
          lambda: model(input_ids=(ids := tokens(device)), labels=ids).loss)  # fmt: skip


def branches_that_meet(device: str) -> None:
    """Gradients of several uses of one tensor are added in place where autograd may, and only there."""
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).to(device)
    kept: list[torch.Tensor] = []
    x = torch.randn(500, 64, device=device)
    for _ in range(2):
        y = F.layer_norm(x, (64,))
        a, b, c = (layer(y) for layer in list(layers)[:3])
        a.register_hook(kept.append)
        x = x + (a * b).softmax(-1) * c
        x = x + layers[3](x).relu() + (x + x).exp() * x
    x.sum().backward()


def saved_and_loaded(device: str) -> None:
    net = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    steps(optimizer, lambda: net(torch.randn(2, 64, device=device)).sum())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, path)
        held = torch.load(path, map_location=device)
    other = nn.Linear(64, 64).to(device)
    other.load_state_dict(held["model"])
    optimizer = torch.optim.AdamW(other.parameters())
    optimizer.load_state_dict(held["optimizer"])
    assert held["step"] == 3
    assert optimizer.state[other.weight]["step"].item() == 2
    steps(optimizer, lambda: other(torch.randn(2, 64, device=device)).sum())


def loader_and_accuracy(device: str) -> None:
    data = TensorDataset(torch.randn(32, 16), torch.randint(0, 4, (32,)))
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, pin_memory=True, drop_last=True)
    net, correct = nn.Linear(16, 4).to(device), 0
    optimizer = torch.optim.AdamW(net.parameters())
    for x, y in loader:
        out = net(x.to(device, non_blocking=True))
        y = y.to(device, non_blocking=True)
        F.cross_entropy(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        correct += (out.argmax(1) == y).sum().item()
    with torch.inference_mode():
        probabilities = [net(x.to(device)).softmax(-1).cpu().numpy() for x, _ in loader]
    assert probabilities[0].shape == (8, 4)


# ---------------------------------------------------------------------- only on a card
def numbers_on_the_card(device: str) -> None:
    x = torch.randn(4, 4, device="cuda")
    assert isinstance(x.mean().item(), float)
    assert len(x.tolist()) == 4
    assert f"{x.mean():.2f}"
    assert repr(x)
    assert x.detach().cpu().numpy().shape == (4, 4)
    with torch.inference_mode():
        assert isinstance(float(nn.functional.softmax(x, -1).sum()), float)
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    assert torch.randperm(8, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).shape == (8,)


def ways_to_the_card(device: str) -> None:
    with torch.device("cuda"):
        made = nn.Linear(32, 32)
    moved = (nn.Linear(32, 32).to("cuda:0"), nn.Linear(32, 32).cuda(0), nn.Linear(32, 32).to("cuda", torch.bfloat16))
    assert all(net.weight.device == torch.device("cuda", 0) for net in (made, *moved))
    assert not made.cpu().weight.is_cuda


def streams_graphs_and_markers(device: str) -> None:
    side, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    x = torch.randn(256, 256, device="cuda")
    start.record()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.nvtx.range_push("side")
    with torch.cuda.stream(side):
        y = x @ x
        y.record_stream(torch.cuda.current_stream())
    torch.cuda.nvtx.range_pop()
    torch.cuda.current_stream().wait_stream(side)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x @ x
    graph.replay()
    torch.cuda.memory_snapshot()


def one_of_one_cards(device: str) -> None:
    net = nn.DataParallel(nn.Linear(16, 4).cuda())
    net(torch.randn(4, 16).cuda()).sum().backward()


def accelerate_loop(device: str) -> None:
    from accelerate import Accelerator

    accelerator, net = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2), nn.Linear(16, 4)
    loader = DataLoader(TensorDataset(torch.randn(16, 16), torch.randint(0, 4, (16,))), batch_size=4)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
    for x, y in loader:
        with accelerator.accumulate(net):
            loss = F.cross_entropy(net(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.gather(loss.detach()).mean().item()


def compiled(device: str) -> None:
    net = torch.compile(nn.Linear(32, 32).to(device))

    @torch.compile
    def double(x: torch.Tensor) -> torch.Tensor:
        return x.relu() * 2

    double(net(torch.randn(4, 32, device=device))).sum().backward()


_OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd-fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam-amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "adamw-foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "adamw-loop": functools.partial(torch.optim.AdamW, foreach=False),
    "adamw-fused": functools.partial(torch.optim.AdamW, fused=True),
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "nadam": torch.optim.NAdam,
}

# Loops whose bytes the CPU allocator knows to the last (its own kernels take nothing beside their outputs).
EXACT: dict[str, Loop] = {
    "cnn": cnn_with_sgd,
    "channels-last": channels_last,
    "transformer-encoder": transformer_encoder,
    "rnn": functools.partial(recurrent, kind=nn.RNN),
    "autocast-bf16": functools.partial(autocast, dtype=torch.bfloat16),
    "autocast-fp16-scaler": functools.partial(autocast, dtype=torch.float16),
    "accumulation-padded": accumulation,
    "half": half_model,
    "policy-reference": policy_and_reference,
    "generate-greedy": functools.partial(generation, do_sample=False),
    "generate-static": functools.partial(generation, do_sample=False, cache_implementation="static"),
    "bert": masked_classifier,
    "checkpoint-reentrant": functools.partial(checkpointed, reentrant=True),
    "checkpoint": functools.partial(checkpointed, reentrant=False),
    "activations-on-host": activations_on_the_host,
    "branches": branches_that_meet,
    "saved-loaded": saved_and_loaded,
    "hf-adafactor": adafactor_of_transformers,
    **{name: functools.partial(optimizer, make=make) for name, make in _OPTIMIZERS.items()},
}
# The CPU's own kernels take scratch here (oneDNN's convolutions and LSTM), it is only for a card, or it is slow.
RUNNING: dict[str, Loop] = {
    "encoder-decoder": encoder_and_decoder,
    "gru": functools.partial(recurrent, kind=nn.GRU),
    "hf-trainer": hugging_face_trainer,
    "generate-beams": functools.partial(generation, num_beams=3),
    "resnet": resnet,
    "gan": gan_with_gradient_penalty,
    "lstm": functools.partial(recurrent, kind=nn.LSTM),
    "packed-lstm": packed_lstm,
    "cells": recurrent_cells,
    "encoder-eval": padded_encoder_in_evaluation,
    "loader": loader_and_accuracy,
    "compiled": compiled,
    "adamw-capturable": functools.partial(optimizer, make=functools.partial(torch.optim.AdamW, capturable=True)),
    "numbers": numbers_on_the_card,
    "ways": ways_to_the_card,
    "streams-graphs": streams_graphs_and_markers,
    "data-parallel": one_of_one_cards,
    "accelerate": accelerate_loop,
}
