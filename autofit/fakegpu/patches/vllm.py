"""A simulated vLLM for TRL's colocate and server modes, since vLLM may not be installed and cannot start here.

TRL 1.16 (`trl/generation/vllm_generation.py`) runs one engine in the training process with a fraction `u` of the card.
In sleep mode the engine sleeps at level 2 outside of generation, wakes its weights for synchronisation and its KV cache
for generation. Here the engine allocates its weights and a KV cache that fills the rest of `u` times the card. Both
come from the simulated allocator, on a separate stream so that no other tensor reuses them; sleeping frees both.

Two quantities are unknown without a card and listed in `gpu.notes`: the memory that vLLM keeps during sleep (CUDA
graphs, workspaces), and memory in addition to its fraction. Its seconds are a roofline: weights and KV cache are read
once per token, without scheduling.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Protocol, cast
from unittest import mock

import torch

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.depth.layers import NEVER, Delay, LayerClock
from autofit.fakegpu.depth.stack import Stack, full_config, stack_of
from autofit.fakegpu.errors import FakeGpuError
from autofit.fakegpu.patches.redirect import untouched

Target = tuple[object, str, object, str]
_LAYER = re.compile(r"layers\.(\d+)\.")
_GRAPH_S = 41e-6  # host seconds of launching a CUDA graph (pytorch/pytorch#150488), which a decode step replays
_STREAM = 1 << 20  # a number that no stream of the training code has
_NOTE = (
    "vLLM was not run: its share of the card is taken whole and given back in sleep; what it keeps while asleep or "
    "takes beside its share is not known, and its seconds are a roofline without scheduling"
)
_SERVER_NOTE = (
    "vLLM's server was not run: it holds nothing of this card, and its seconds are a roofline of one more card of this "
    "kind, without scheduling or network"
)
_SERVER_SHARE = 0.9  # fraction of the server's card: the default of `trl vllm-serve` (--gpu_memory_utilization)


class _Settings(Protocol):
    """The fields of `vllm.SamplingParams` that the simulation reads."""

    max_tokens: int
    logprobs: int | None


class SamplingParams(SimpleNamespace):
    """vllm.SamplingParams: stores all its arguments."""


class FakeEngine:
    """`vllm.LLM` for one simulated card."""

    def __init__(
        self,
        gpu: FakeGpu,
        model: torch.nn.Module,
        *,
        gpu_memory_utilization: float,
        max_model_len: int | None,
        max_num_seqs: int,
        tensor_parallel_size: int,
        elsewhere: bool = False,
    ) -> None:
        if not 0 < gpu_memory_utilization <= 1:
            raise FakeGpuError(
                f"vllm_gpu_memory_utilization must be above 0 and at most 1; got {gpu_memory_utilization}"
            )
        self._gpu = gpu
        self._stack = stack_of(_text_config(model))
        self._config = full_config(_text_config(model))
        self._weights_bytes = _weights_bytes(model) // tensor_parallel_size
        self._kv_bytes = int(gpu_memory_utilization * gpu.spec.capacity_bytes) - self._weights_bytes
        self._parameters = self._weights_bytes * tensor_parallel_size // 2
        self._ranks = tensor_parallel_size
        self._most_sequences = max_num_seqs
        self._held: dict[str, int] = {}
        self._elsewhere = elsewhere
        if self._kv_bytes <= 0:
            raise torch.OutOfMemoryError(
                f"vLLM's weights of {self._weights_bytes} bytes leave no room for a KV cache in its share of "
                f"vllm_gpu_memory_utilization={gpu_memory_utilization} of the card"
            )
        gpu.note(_SERVER_NOTE if elsewhere else _NOTE)
        longest = max_model_len or getattr(self._config, "max_position_embeddings", 1 << 20)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=self._load_weights)))
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=longest),
            model_executor=SimpleNamespace(driver_worker=worker),
        )
        self.wake_up()

    # ------------------------------------------------------------------ memory
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the weights, the KV cache, or both; may raise torch.OutOfMemoryError."""
        memory = self._gpu.memory
        for tag, nbytes in (("weights", self._weights_bytes), ("kv_cache", self._kv_bytes)):
            if self._elsewhere or tag in self._held or (tags is not None and tag not in tags):
                continue
            before, memory.stream = memory.stream, _STREAM
            try:
                self._held[tag] = memory.allocate(nbytes, "vLLM", f"vLLM {tag}")
            finally:
                memory.stream = before

    def sleep(self, level: int = 1) -> None:
        """Free weights and KV cache, back to the driver (level 1 keeps a copy of the weights on the host)."""
        for index in self._held.values():
            self._gpu.memory.release(index)
        self._held.clear()
        self._gpu.memory.allocator.empty_cache()

    def reset_prefix_cache(self) -> bool:
        return True

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        bandwidth = self._gpu.clock.kernels.bandwidth_bytes_per_s
        for name, tensor in weights:
            nbytes = 2 * tensor.numel() * tensor.element_size()
            self._pass(_repeats(name, self._stack) * max(nbytes / bandwidth, self._gpu.clock.costs.launch_s))

    # ------------------------------------------------------------------ generation
    def generate(
        self, prompts: Sequence[dict[str, list[int]]], sampling_params: _Settings, use_tqdm: bool = False
    ) -> list[SimpleNamespace]:
        """Completions of full length (the worst case); advances the clock by the time of decoding."""
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        self._spend([len(row) for row in ids], sampling_params.max_tokens)
        token = int(getattr(self._config, "vocab_size", 3)) // 3  # never an end-of-sequence token
        logprobs = None
        if sampling_params.logprobs is not None:
            logprobs = [{token: SimpleNamespace(logprob=-1.0, rank=1)}] * sampling_params.max_tokens
        completion = SimpleNamespace(token_ids=[token] * sampling_params.max_tokens, logprobs=logprobs)
        return [SimpleNamespace(prompt_token_ids=row, outputs=[completion]) for row in ids]

    def _spend(self, prompt_lengths: Sequence[int], tokens: int) -> None:
        """Prefill at the card's rate; each decode step reads all weights and the KV cache of the running sequences."""
        clock, kernels = self._gpu.clock, self._gpu.clock.kernels
        per_token = self._kv_bytes_per_token()
        mean = sum(prompt_lengths) / max(1, len(prompt_lengths))
        fits = max(1, int(self._kv_bytes // (per_token * (mean + tokens))))
        together = min(len(prompt_lengths), self._most_sequences, fits)
        waves = math.ceil(len(prompt_lengths) / max(1, together))
        rate = self._gpu.spec.half_flops_per_s * kernels.flops_frac * self._ranks
        bandwidth = kernels.bandwidth_bytes_per_s
        prefill_s = 2 * self._parameters * sum(prompt_lengths) / rate
        read = self._weights_bytes + together * (mean + tokens / 2) * per_token
        step_s = max(read / bandwidth, 2 * self._parameters * together / rate, _GRAPH_S)
        clock.synchronize()
        self._pass(prefill_s + waves * tokens * step_s)

    def _pass(self, seconds: float) -> None:
        """Advance the clock, for the host and the card."""
        clock = self._gpu.clock
        clock.advance(seconds)
        if isinstance(clock, LayerClock):
            clock.play([(0, Delay(seconds, NEVER, NEVER, seconds))])

    def _kv_bytes_per_token(self) -> int:
        config = self._config
        heads = getattr(config, "num_attention_heads", 1)
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 1) // heads
        return max(1, 2 * 2 * getattr(config, "num_hidden_layers", 1) * key_heads * dim // self._ranks)


class FakeClient:
    """TRL's `VLLMClient`: the server's engine is on another card, so only its time counts here."""

    def __init__(self, gpu: FakeGpu, model: torch.nn.Module) -> None:
        self._engine = FakeEngine(
            gpu, model, gpu_memory_utilization=_SERVER_SHARE, max_model_len=None, max_num_seqs=256,
            tensor_parallel_size=1, elsewhere=True,
        )  # fmt: skip

    def init_communicator(self, device: object = None) -> None: ...

    def close_communicator(self) -> None: ...

    def get_world_size(self) -> int:
        return 1

    def get_server_info(self) -> dict[str, object]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def reset_prefix_cache(self) -> bool:
        return True

    def update_named_params(self, metadata: object, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._engine._load_weights(weights)

    def generate(
        self, prompts: Sequence[list[int]], n: int = 1, max_tokens: int = 16, logprobs: int | None = None,
        **rest: object,
    ) -> dict[str, object]:  # fmt: skip
        """`n` completions of full length for each prompt."""
        inputs = [{"prompt_token_ids": ids} for ids in prompts for _ in range(n)]
        rows = self._engine.generate(inputs, SamplingParams(max_tokens=max_tokens, logprobs=logprobs))
        completions = [row.outputs[0].token_ids for row in rows]
        known = logprobs is not None
        return {
            "prompt_ids": list(prompts),
            "completion_ids": completions,
            "logprobs": [[[-1.0]] * len(ids) for ids in completions] if known else None,
            "logprob_token_ids": [[[token] for token in ids] for ids in completions] if known else None,
        }


def _text_config(model: torch.nn.Module) -> object:
    config = getattr(model, "config", None)
    return cast("object", getattr(config, "get_text_config", lambda: config)())


def _weights_bytes(model: torch.nn.Module) -> int:
    """vLLM's copy of the base model: 2 bytes per weight (dtype "auto" turns fp32 to half), packed weights unchanged.

    All layers of the full model count, even if the model was built with fewer (`stack.shrink`).
    """
    stack = stack_of(_text_config(model))
    seen: dict[int, float] = {}
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            packed = not parameter.dtype.is_floating_point
            nbytes = parameter.numel() * (parameter.element_size() if packed else 2)
            seen[id(parameter)] = nbytes * _repeats(name, stack)
    return round(sum(seen.values()))


def _repeats(name: str, stack: Stack | None) -> float:
    """Number of the full model's parameters that the parameter of this name represents."""
    layer = _LAYER.search(name)
    return 1.0 if stack is None or layer is None or stack.unit(int(layer[1])) is None else stack.growth


def trl_vllm(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Patches of `trl.generation.vllm_generation`: vLLM appears installed, with the simulated engine and client."""
    owner = module.VLLMGeneration
    models: list[torch.nn.Module] = []

    def start(self: object) -> None:
        models.append(self.model)  # type: ignore[attr-defined]
        try:
            with mock.patch.dict(os.environ):  # it sets RANK and similar, with which accelerate would start NCCL
                original(self)
        finally:
            models.pop()

    def engine(
        model: str,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        **rest: object,
    ) -> FakeEngine:
        return FakeEngine(
            gpu, models[-1], gpu_memory_utilization=gpu_memory_utilization, max_model_len=max_model_len,
            max_num_seqs=max_num_seqs, tensor_parallel_size=tensor_parallel_size,
        )  # fmt: skip

    original = untouched(owner._init_vllm)
    reason = "vLLM cannot run on a card that is not there"
    for name, value in (
        ("LLM", engine), ("SamplingParams", SamplingParams), ("StructuredOutputsParams", SimpleNamespace),
        ("is_vllm_available", lambda *_: True), ("VLLMClient", lambda *_, **__: FakeClient(gpu, models[-1])),
    ):  # fmt: skip
        yield module, name, value, reason
    yield owner, "_init_vllm", start, reason
