"""A simulated vLLM for TRL's colocate and server modes, since vLLM itself may be missing and needs a real card.

TRL 1.16 (`trl/generation/vllm_generation.py`) runs one engine in the training process with a fraction `u` of the card.
In sleep mode the engine sleeps at level 2 outside of generation, wakes its weights for synchronisation and its KV cache
for generation. Memory and seconds are those of `engines.vllm`. The bytes come from the simulated allocator, on a
separate stream so that no other tensor reuses them; sleeping frees weights and cache, CUDA graphs stay.

While a forecast traces a training (`clock.log`), the engine holds nothing and takes no time: the forecast adds both for
each candidate, whose share of the card and number of sequences differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Protocol, cast
from unittest import mock

import torch

from autofit.fakegpu.card import FakeGpu, world_size
from autofit.fakegpu.depth.layers import Delay, LayerClock
from autofit.fakegpu.depth.stack import full_config, repeats, stands_for
from autofit.fakegpu.engines.forward import Decoder
from autofit.fakegpu.engines.vllm import VllmEngine
from autofit.fakegpu.patches.redirect import Target, untouched
from autofit.fakegpu.rates.collectives import server_cards

# What a caller may ask of vLLM's generation: the arguments of the real classes, which refuse every other one.

# Fields of vllm.SamplingParams (vllm/sampling_params.py) of 0.22.0, the first version that TRL 1.16 takes, and those
# that came until 0.31.0, the last one. None of the first went.
_FIRST_FIELDS = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "output_kind", "skip_clone", "output_text_buffer_length", "_eos_token_id",
    "_all_stop_token_ids", "structured_outputs", "logit_bias", "allowed_token_ids", "extra_args", "bad_words",
    "_bad_words_token_ids", "skip_reading_prefix_cache", "thinking_token_budget", "repetition_detection",
    "routed_experts_prompt_start",
)  # fmt: skip
_LATER_FIELDS = (
    "watermarking", "prompt_logprob_token_ids", "prompt_logprob_start", "stream_interval", "trace_decode_token_ids",
)  # fmt: skip
FIELDS = frozenset((*_FIRST_FIELDS, *_LATER_FIELDS))


class SamplingParams(SimpleNamespace):
    """vllm.SamplingParams: stores its arguments, and refuses unknown fields as the real one (msgspec) does."""

    def __init__(self, **given: object) -> None:
        unknown = next((name for name in given if name not in FIELDS), None)
        if unknown is not None:
            raise TypeError(f"Unexpected keyword argument '{unknown}' (vLLM's SamplingParams has no such field)")
        super().__init__(**given)


@dataclass
class StructuredOutputsParams:
    """vllm.sampling_params.StructuredOutputsParams: exactly one constraint."""

    json: object = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in kinds if asdict(self)[name] is not None]
        if len(given) != 1:
            raise ValueError(f"structured outputs need one of {', '.join(kinds)}; got {', '.join(given) or 'none'}")


_STREAM = 1 << 20  # a number that no stream of the training code has
_NOTE = (
    "vLLM was not run: its schedule is played with the kernels that were measured on the card, its profiling run, CUDA "
    "graphs and other memory beside weights and cache are estimates, and every completion has its full length"
)
_SLEEP_NOTE = (
    "vLLM's sleep was not run: it frees weights and cache and keeps its CUDA graphs; waking up fails on a card if "
    "memory that torch has cached is in the way"
)
_SERVER_NOTE = (
    "vLLM's server was not run: it holds nothing of this card, and its seconds are those of cards of this kind, one "
    "unless more are said, without network"
)
_LONGEST = 1 << 17  # tokens, of a model whose config names no longest sequence
_SERVER_SHARE = 0.9  # fraction of the server's card: the default of `trl vllm-serve` (--gpu_memory_utilization)


class _Settings(Protocol):
    """The fields of `vllm.SamplingParams` that the simulation reads."""

    max_tokens: int
    logprobs: int | None


class FakeEngine:
    """`vllm.LLM` for one simulated card; `law` has its bytes and seconds.

    An engine in a process of its own holds `process_bytes` besides: its CUDA context and its communicators.
    """

    def __init__(self, gpu: FakeGpu, model: torch.nn.Module, law: VllmEngine, *, process_bytes: int = 0) -> None:
        self._gpu = gpu
        self.law = law
        self._standing = stands_for(_text_config(model))
        self._vocab = int(getattr(full_config(_text_config(model)), "vocab_size", 3))
        self._held: dict[str, int] = {}
        self.group = 1  # completions of one prompt in a row
        if law.refusal and not self._forecast:
            raise torch.OutOfMemoryError(law.refusal)
        gpu.note(_SERVER_NOTE if law.remote else _NOTE)
        if law.sleeps:
            gpu.note(_SLEEP_NOTE)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=self.load_weights)))
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=law.longest),
            model_executor=SimpleNamespace(driver_worker=worker),
        )
        self._tell()
        self._hold("resting", law.held_bytes(weights=False, cache=False) + process_bytes)
        self._map(("weights", "kv_cache"))
        with self._computing():
            pass  # the profiling run

    @property
    def _forecast(self) -> bool:
        return self._gpu.clock.log is not None

    def _tell(self) -> None:
        """Tell a forecast the engine's law."""
        if self._gpu.clock.log is not None:
            self._gpu.clock.log.engine(self.law)

    # ------------------------------------------------------------------ memory
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the weights, the KV cache, or both; may raise torch.OutOfMemoryError."""
        self._pass(self.law.wake_s(self._map(tags or ("weights", "kv_cache"))))

    def sleep(self, level: int = 1) -> None:
        """Free weights and KV cache, back to the driver (level 1 keeps a copy of the weights on the host)."""
        freed = ("kv_cache",) if self.law.keeps_weights else ("weights", "kv_cache")
        mapped = [self._held.pop(tag) for tag in freed if tag in self._held]
        self._pass(self.law.sleep_s(sum(self._gpu.memory.allocations[index].nbytes for index in mapped)))
        for index in mapped:
            self._gpu.memory.release(index)
        if mapped:
            self._gpu.memory.empty_cache()

    def end(self) -> None:
        """Free all that the engine holds, and its process with it."""
        for index in self._held.values():
            self._gpu.memory.release(index)
        self._held.clear()

    def _map(self, tags: Sequence[str]) -> int:
        """Allocate what the tags name; the bytes allocated."""
        sizes = {"weights": self.law.weights_bytes, "kv_cache": max(0, self.law.cache_bytes)}
        return sum(self._hold(tag, sizes[tag]) for tag in tags if tag in sizes)

    def _hold(self, tag: str, nbytes: int) -> int:
        if self.law.remote or self._forecast or tag in self._held or not nbytes:
            return 0
        memory = self._gpu.memory
        before, memory.stream = memory.stream, _STREAM
        try:
            self._held[tag] = memory.allocate(nbytes, "vLLM", f"vLLM {tag}")
        finally:
            memory.stream = before
        return nbytes

    @contextmanager
    def _computing(self) -> Iterator[None]:
        self._hold("activations", self.law.activation_bytes)
        yield
        if "activations" in self._held:
            self._gpu.memory.release(self._held.pop("activations"))

    def reset_prefix_cache(self) -> bool:
        """The end of a synchronisation of weights."""
        self._tell()
        self.law = replace(self.law, sync_s=0.0)
        return True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        bandwidth = self._gpu.clock.kernels.bandwidth_bytes_per_s
        for name, tensor in weights:
            nbytes = 2 * tensor.numel() * tensor.element_size()
            seconds = max(nbytes / bandwidth, self._gpu.clock.costs.launch_s)
            if self.law.remote and world_size() > 1:  # NCCL sends it from this card to the server's
                seconds += self._gpu.clock.collectives.seconds("broadcast", nbytes / 2, 2)
            seconds *= repeats(name, self._standing)
            self.law = replace(self.law, sync_s=self.law.sync_s + seconds)
            self._pass(seconds)

    # ------------------------------------------------------------------ generation
    def generate(
        self, prompts: Sequence[dict[str, list[int]]], sampling_params: _Settings, use_tqdm: bool = False
    ) -> list[SimpleNamespace]:
        """Completions of full length (the worst case); advances the clock by the time of their generation."""
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        tokens = sampling_params.max_tokens
        with self._computing():
            self._gpu.clock.synchronize()
            if not self._forecast:
                group = self.group if len(ids) % self.group == 0 else 1
                self._pass(self.law.generation_s([len(row) for row in ids], tokens, group=group))
        token = self._vocab // 3  # never an end-of-sequence token
        logprobs = None
        if sampling_params.logprobs is not None:
            logprobs = [{token: SimpleNamespace(logprob=-1.0, rank=1)}] * tokens
        completion = SimpleNamespace(token_ids=[token] * tokens, logprobs=logprobs)
        return [SimpleNamespace(prompt_token_ids=row, outputs=[completion]) for row in ids]

    def _pass(self, seconds: float) -> None:
        """Advance the clock, for the host and the card."""
        if self._forecast or not seconds:
            return
        clock = self._gpu.clock
        clock.advance(seconds)
        if isinstance(clock, LayerClock):
            clock.play([(0, Delay.passed(seconds))])


class FakeClient:
    """TRL's `VLLMClient`: the server's engine is on another card, so only its time counts here."""

    def __init__(self, gpu: FakeGpu, model: torch.nn.Module) -> None:
        self._engine = FakeEngine(
            gpu, model, _law(gpu, model, gpu_memory_utilization=_SERVER_SHARE, batched_tokens=8192, remote=True)
        )

    def init_communicator(self, device: object = None) -> None: ...

    def close_communicator(self) -> None: ...

    def get_world_size(self) -> int:
        return 1

    def get_server_info(self) -> dict[str, object]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def reset_prefix_cache(self) -> bool:
        return True

    def update_named_params(self, metadata: object, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._engine.load_weights(weights)

    def generate(
        self, prompts: Sequence[list[int]], n: int = 1, max_tokens: int = 16, logprobs: int | None = None,
        **rest: object,
    ) -> dict[str, object]:  # fmt: skip
        """`n` completions of full length for each prompt."""
        largest = -(-len(prompts) // self._engine.law.copies)  # the cards work at once, each on its part
        inputs = [{"prompt_token_ids": ids} for ids in prompts[:largest] for _ in range(n)]
        self._engine.group = n
        params = cast(_Settings, SamplingParams(max_tokens=max_tokens, logprobs=logprobs))
        rows = self._engine.generate(inputs, params)
        completions = [rows[0].outputs[0].token_ids] * (len(prompts) * n)
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


def weights_bytes(model: torch.nn.Module) -> int:
    """vLLM's copy of the base model: 2 bytes per weight (dtype "auto" turns fp32 to half), packed weights unchanged.

    All layers of the full model count, even if the model was built with fewer (`stack.shrink`).
    """
    standing = stands_for(_text_config(model))
    seen: dict[int, float] = {}
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            packed = not parameter.dtype.is_floating_point
            nbytes = _whole_numel(parameter) * (parameter.element_size() if packed else 2)
            seen[id(parameter)] = nbytes * repeats(name, standing)
    return round(sum(seen.values()))


def _whole_numel(parameter: torch.nn.Parameter) -> int:
    """Elements of a whole parameter; this rank may hold a share, and under ZeRO-3 the parameter itself is empty."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _law(
    gpu: FakeGpu, model: torch.nn.Module, *, gpu_memory_utilization: float, max_model_len: int | None = None,
    max_num_seqs: int | None = None, tensor_parallel_size: int = 1, batched_tokens: int = 4096,
    enable_sleep_mode: bool = False, remote: bool = False,
) -> VllmEngine:  # fmt: skip
    """The engine that vLLM would build of `model`: its weights in half precision, leaving out adapters."""
    config = full_config(_text_config(model))
    nbytes = weights_bytes(model)
    packed = any(not p.dtype.is_floating_point for p in model.parameters())
    return VllmEngine(
        spec=gpu.spec, costs=gpu.clock.costs, decoder=replace(Decoder.of(config), weight_bytes=0.53 if packed else 2.0),
        weights_bytes=nbytes // tensor_parallel_size, utilization=gpu_memory_utilization,
        longest=int(max_model_len or getattr(config, "max_position_embeddings", None) or _LONGEST),
        most_sequences=max_num_seqs or 256, ranks=tensor_parallel_size, batched_tokens=batched_tokens,
        sleeps=enable_sleep_mode, remote=remote, served=world_size() if remote else 1,
        copies=server_cards.get() if remote else 1,
    )  # fmt: skip


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
        model: str, tensor_parallel_size: int = 1, gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None, max_num_seqs: int | None = None, max_num_batched_tokens: int = 8192,
        enable_sleep_mode: bool = False, **rest: object,
    ) -> FakeEngine:  # fmt: skip
        law = _law(
            gpu, models[-1], gpu_memory_utilization=gpu_memory_utilization, max_model_len=max_model_len,
            max_num_seqs=max_num_seqs, tensor_parallel_size=tensor_parallel_size,
            batched_tokens=max_num_batched_tokens, enable_sleep_mode=enable_sleep_mode,
        )  # fmt: skip
        return FakeEngine(gpu, models[-1], law)

    def generate(
        self: object, prompts: object, images: object, num_generations: int, profiler: object = None
    ) -> object:
        llm = getattr(self, "llm", None)
        if isinstance(llm, FakeEngine):
            llm.group = num_generations
        return generating(self, prompts, images, num_generations, profiler)

    original = untouched(owner._init_vllm)
    generating: Callable[..., object] = untouched(owner.generate)
    reason = "vLLM cannot run on a card that is not there"
    for name, value in (
        ("LLM", engine), ("SamplingParams", SamplingParams), ("StructuredOutputsParams", StructuredOutputsParams),
        ("is_vllm_available", lambda *_: True), ("VLLMClient", lambda *_, **__: FakeClient(gpu, models[-1])),
    ):  # fmt: skip
        yield module, name, value, reason
    yield owner, "_init_vllm", start, reason
    yield owner, "generate", generate, "the engine is told how many completions a prompt has"
