"""Continuous batching of transformers on the simulated card, whose generation loop runs in a thread of its own.

Fake tensors cannot enter another thread. So `generate_batch` is played here: one step of the real model with one token
of each sequence, its sampling, and then the rest of the steps by the clock. What the paged cache and its attention add
is `engines.continuous`. While a forecast traces a training (`clock.log`), two steps of the model are traced and the
forecast adds the rest for each candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.depth.layers import Delay, LayerClock
from autofit.fakegpu.depth.stack import full_config, repeats, stack_of, stands_for, text_config
from autofit.fakegpu.engines.continuous import PagedBatching
from autofit.fakegpu.engines.decoder import Decoder

Target = tuple[object, str, object, str]
_DEFAULT_SHARE = 0.9  # of transformers; TRL sets 0.5
_NOTE = (
    "transformers' continuous batching was not run: its cache takes its whole share of the memory that is left, "
    "prompts share nothing, sequences without a place wait for all others, and its scheduler takes no time"
)
_FLASH_NOTE = (
    "with flash attention, continuous batching replays CUDA graphs and masks nothing; it was played with masks and "
    "launch by launch, an upper bound of its time and memory"
)


def transformers_batching(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Patch of `ContinuousMixin.generate_batch`."""

    def generate_batch(
        model: Any, inputs: Sequence[list[int]], generation_config: Any = None, continuous_batching_config: Any = None,
        max_new_tokens: int | None = None, **rest: object,
    ) -> dict[str, SimpleNamespace]:  # fmt: skip
        settings = model.generation_config if generation_config is None else generation_config
        tokens = int(max_new_tokens or settings.max_new_tokens)
        with torch.no_grad():
            _play(gpu, model.eval(), [len(row) for row in inputs], tokens, _share(continuous_batching_config))
        token = int(text_config(model.config).vocab_size) // 3  # never an end-of-sequence token
        return {
            f"req_{i}": SimpleNamespace(prompt_ids=list(row), generated_tokens=[token] * tokens, error=None)
            for i, row in enumerate(inputs)
        }

    reason = "the generation loop runs in a thread, which fake tensors cannot enter"
    yield module.ContinuousMixin, "generate_batch", generate_batch, reason


def _share(config: Any) -> float:
    return float(getattr(config, "max_memory_percent", None) or _DEFAULT_SHARE)


def _play(gpu: FakeGpu, model: Any, prompts: list[int], tokens: int, share: float) -> None:
    gpu.note(_NOTE)
    if "flash" in str(getattr(model.config, "_attn_implementation", "")):
        gpu.note(_FLASH_NOTE)
    clock, memory = gpu.clock, gpu.memory
    law = PagedBatching(
        spec=gpu.spec, costs=clock.costs, decoder=Decoder.of(full_config(text_config(model.config))), share=share
    )
    if clock.log is not None:
        clock.log.engine(law)
        for number in (0, 1):
            clock.log.decode_step(number)
            _step(model, len(prompts))
        clock.log.decode_end()
        return
    held = memory.allocator.reserved_bytes + _missing_bytes(model)
    if not law.waves(prompts, tokens, held):
        raise torch.OutOfMemoryError(
            f"continuous batching has {float(law.cache_bytes(held)):.0f} bytes for its cache "
            f"(max_memory_percent={share}), which hold {law.cache_tokens(held, len(prompts))} tokens; one sequence has "
            f"{max(prompts) + tokens}; raise max_memory_percent in transformers_continuous_batching_config"
        )
    cache = memory.allocate(max(1, int(law.cache_bytes(held))), "KV cache", "paged cache")
    clock.synchronize()
    began = clock.now_s
    stretch = clock.cut() if isinstance(clock, LayerClock) else 0
    _step(model, len(prompts))
    clock.synchronize()
    law = replace(law, step_s=_whole_depth(gpu, model, clock.now_s - began, stretch))
    seconds = (tokens - 1) * law.step_s + law.added_s(prompts, tokens, held)
    clock.advance(seconds)
    if isinstance(clock, LayerClock):
        clock.play([(0, Delay.passed(seconds))])
    memory.release(cache)


def _step(model: Any, sequences: int) -> None:
    """One token of each sequence through the real model, and its sampling."""
    ids = torch.zeros((1, sequences), dtype=torch.long, device=model.device)
    places = torch.arange(sequences, device=model.device).unsqueeze(0)
    logits = model(input_ids=ids, position_ids=places, use_cache=False).logits.float()
    probabilities = torch.nn.functional.softmax(logits[0], dim=-1)
    torch.multinomial(probabilities, num_samples=1).squeeze(-1).cpu()


def _missing_bytes(model: Any) -> float:
    """Bytes of the weights of the layers that a model with fewer does not have."""
    standing = stands_for(text_config(model.config))
    parameters = model.named_parameters()
    return float(sum(p.numel() * p.element_size() * (repeats(name, standing) - 1) for name, p in parameters))


def _whole_depth(gpu: FakeGpu, model: Any, seconds: float, stretch: int) -> float:
    """Seconds of a step with all layers, if the model was built with fewer."""
    clock, stack = gpu.clock, stack_of(text_config(model.config))
    if stack is None or not isinstance(clock, LayerClock):
        return seconds
    clock.cut()
    inside = sum(delay.inside_s for code, delay in clock.stretches[stretch:] if code)
    layers = len(stack.kept)
    return seconds + inside / layers * (stack.layers - layers)
