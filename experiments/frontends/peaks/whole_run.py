"""Reserved bytes over a whole run of LoRA: `python -m experiments.frontends.peaks.whole_run NAME --steps N`.

A row is predicted over 32 micro-batches; its figure is of a run of a thousand or more, in which each new longest sample
finds no cached block that is large enough. Here micro-batches of three lengths are traced. Their events are the same
but for sizes, which are linear in the tokens (the length between checks it), so those of any length follow, and a run
is played into the simulated allocator in minutes. The loss is that of transformers before 4.49 (a copy of the logits).

`--least` tells in place of it the least capacity in which such a run ends, and that of a run whose micro-batches all
have the longest sample, as a prediction's have; `--all-weights MODEL` trains a model of the catalogue without LoRA, and
`--expandable` has torch's expandable segments.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import autofit
from autofit.fakegpu.allocator import AllocatorSettings, Block, CachingAllocator
from autofit.fakegpu.replay import EventLog, Unlimited
from autofit.recipe import catalogue
from experiments.frontends.peaks.mixed import draw
from experiments.frontends.peaks.rows import HERE, Row, read_rows

GIB = 2**30
CATALOGUED = "Qwen/Qwen2.5-7B-Instruct"  # of the rows that name no shape; Qwen2-7B has the same
ACCUMULATED = 16  # micro-batches a step
SHOWN = (1, 5, 10, 25, 55)  # steps, besides the last
OUT = HERE / "whole_runs.jsonl"


class Event(NamedTuple):
    """An allocation of `constant + slope * tokens` bytes of storage `name`; a free has a slope of None."""

    name: int
    constant: float = 0.0
    slope: float | None = None


@dataclass(frozen=True, slots=True)
class Traced:
    """A training's events: before the first step of known lengths, and the three parts of a step.

    `parts` are the first micro-batch, which makes the gradients, any later one, and the optimizer's step.
    """

    before: tuple[Sequence[int], Sequence[int]]  # names and sizes, as the allocator plays them
    parts: tuple[tuple[Event, ...], ...]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.frontends.peaks.whole_run", description=__doc__)
    parser.add_argument("name", help="of a row of LoRA on one card whose datasets' lengths are known")
    parser.add_argument("--steps", type=int, default=60, help=f"optimizer steps, of {ACCUMULATED} micro-batches each")
    parser.add_argument("--seeds", type=int, default=2, help="orders of samples")
    parser.add_argument("--least", action="store_true", help="the least capacity, not the reserved bytes")
    parser.add_argument("--all-weights", metavar="MODEL", help="train all of this model, without checkpoints")
    parser.add_argument("--expandable", action="store_true", help="with --least: expandable segments")
    options = parser.parse_args()
    row = next(row for row in read_rows() if row.name == options.name)
    traced = trace(row, options.all_weights)
    told: dict[str, object] = {"row": row.name, "measured_gib": row.measured_gib}
    if options.all_weights:
        told = {"all_weights": options.all_weights, "lengths": row.name}
    settings = AllocatorSettings(expandable_segments=options.expandable)
    if options.least:
        told["expandable"] = options.expandable
        _keep({**told, "longest": least(traced, [_most(row)] * 2 * ACCUMULATED, settings)})
    for seed in range(options.seeds):
        lengths = draw(row.samples, count=options.steps * ACCUMULATED, most=_most(row), seed=seed)
        if options.least:
            _keep({**told, "seed": seed, "mixed": least(traced, _with_longest(lengths, _most(row), seed), settings)})
        else:
            _keep({**told, "seed": seed, "reserved_gib": dict(grown(traced, lengths))})


def _keep(told: Mapping[str, object]) -> None:
    print(json.dumps(told), flush=True)
    with OUT.open("a", encoding="utf-8") as file:
        file.write(json.dumps(told) + "\n")


def _most(row: Row) -> int:
    assert row.longest_tokens is not None
    return row.longest_tokens[1]


def _with_longest(lengths: Sequence[int], most: int, seed: int) -> list[int]:
    """The lengths with one in 40 replaced by the longest, at drawn places."""
    found = list(lengths)
    for place in random.Random(seed).sample(range(len(found)), max(1, len(found) // 40)):
        found[place] = most
    return found


def trace(row: Row, all_weights: str | None = None) -> Traced:
    """The events of a training as the row's, at three lengths. Raises ValueError where they are not linear in them."""
    most = _most(row)
    lengths = (most * 5 // 6, most * 11 // 12, most)  # near each other: kernels of fewer rows have other scratch
    ends: list[int] = []
    with autofit.fake_gpu(row.card) as gpu:
        model, parameters = _model(row) if all_weights is None else _whole_model(all_weights)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        for tokens in (lengths[0], *lengths):
            for _ in range(2):
                _micro_batch(model, tokens)
                ends.append(len(gpu.memory.log))
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ends.append(len(gpu.memory.log))
        log = gpu.memory.log
        ids, sizes = list(log.ids), list(log.nbytes)
    steps = [[(ids[a:b], sizes[a:b]) for a, b in zip(ends[at - 1 : at + 2], ends[at : at + 3], strict=True)]
             for at in (3, 6, 9)]  # fmt: skip
    parts = []
    names: tuple[dict[int, int], ...] = ({}, {}, {})
    for part in zip(*steps, strict=True):
        events = []
        for sized in zip(*(zip(*found, strict=True) for found in part), strict=True):
            number = {known.setdefault(storage, len(known)) for known, (storage, _) in zip(names, sized, strict=True)}
            if len(number) > 1:
                raise ValueError("micro-batches of different lengths have different events")
            events.append(_event(number.pop(), [nbytes for _, nbytes in sized], lengths))
        parts.append(tuple(events))
    return Traced((ids[: ends[2]], sizes[: ends[2]]), tuple(parts))


def _event(name: int, sizes: Sequence[int], lengths: Sequence[int]) -> Event:
    if sizes[0] < 0:
        return Event(name)
    slope = (sizes[2] - sizes[0]) / (lengths[2] - lengths[0])
    constant = sizes[0] - slope * lengths[0]
    if abs(constant + slope * lengths[1] - sizes[1]) > 2**20:
        raise ValueError(f"{sizes} bytes at {lengths} tokens are not linear")
    return Event(name, constant, slope)


def grown(traced: Traced, lengths: Sequence[int]) -> Iterator[tuple[int, float]]:
    """(step, GiB that the allocator holds) of a run whose samples have these lengths."""
    allocator = CachingAllocator()
    blocks: dict[int, Block] = {}
    steps = len(lengths) // ACCUMULATED
    for step, (ids, sizes) in enumerate(_played(traced, lengths)):
        allocator.play(ids, sizes, blocks, {})
        if step in (*SHOWN, steps):
            yield step, round(allocator.reserved_bytes / GIB, 2)


def least(traced: Traced, lengths: Sequence[int], settings: AllocatorSettings | None = None) -> dict[str, float]:
    """GiB: the most live bytes, the most reserved without a limit, and the least capacity, to within 16 MiB above."""
    log = EventLog()
    for ids, sizes in _played(traced, lengths):
        for storage, nbytes in zip(ids, sizes, strict=True):
            log.add(storage, nbytes)
    run = Unlimited(log, settings=settings)
    found = (*run.peaks, run.least_capacity(16 << 20))
    return {name: round(nbytes / GIB, 3) for name, nbytes in zip(("live", "reserved", "least"), found, strict=True)}


def _played(traced: Traced, lengths: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Names and sizes of the events before the first step, and then of each step."""
    yield traced.before
    fresh = itertools.count(1 << 40)
    for start in range(0, len(lengths), ACCUMULATED):
        live: dict[int, int] = {}
        ids: list[int] = []
        sizes: list[int] = []
        for at in range(ACCUMULATED + 1):
            part = traced.parts[0 if at == 0 else 1 if at < ACCUMULATED else 2]
            tokens = lengths[start + min(at, ACCUMULATED - 1)]
            for name, constant, slope in part:
                if slope is None:
                    ids.append(live.pop(name))
                    sizes.append(-1)
                else:
                    live[name] = next(fresh)
                    ids.append(live[name])
                    sizes.append(max(1, round(constant + slope * tokens)))
        yield ids, sizes


def _whole_model(name: str) -> tuple[Any, list[torch.nn.Parameter]]:
    model = _bare(dict(catalogue.text_config(name)))
    return model, list(model.parameters())


def _bare(config: dict[str, Any]) -> Any:
    kind = str(config.pop("model_type"))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.bfloat16)
    model.loss_function = _loss
    model.config.use_cache = False
    model.train()
    return model


def _model(row: Row) -> tuple[Any, list[torch.nn.Parameter]]:
    targets = cast("list[str]", row.recipe.get("lora_target_modules", ["all-linear"]))
    lora = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.05, task_type="CAUSAL_LM",
                      target_modules=targets[0] if targets == ["all-linear"] else targets)  # fmt: skip
    model = get_peft_model(_bare(dict(row.shape or catalogue.text_config(CATALOGUED))), lora)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.train()
    return model, [parameter for parameter in model.parameters() if parameter.requires_grad]


def _micro_batch(model: Any, tokens: int) -> None:
    ids = torch.ones(1, tokens, dtype=torch.long, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        found = model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))
        found.logits.argmax(-1)  # ms-swift's accuracy
    loss = found.loss
    del found
    loss.backward()


def _loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: object) -> torch.Tensor:
    shifted = logits.float()[..., :-1, :].contiguous()
    return torch.nn.functional.cross_entropy(shifted.view(-1, vocab_size), labels[..., 1:].reshape(-1))


if __name__ == "__main__":
    main()
