"""Generation from few traced tokens: after two equal decode steps, the rest is extrapolated from them.

A decode step repeats the previous one with tensors that grow linearly (the KV cache). Once two consecutive steps have
the same allocations and frees in the same order, the remaining steps are played into the allocator directly, with
extrapolated sizes. Most of these steps play only the tensors that grow or outlive the step, since all others reuse the
same cached blocks. Every 16th step also plays the tensors of the large pool, because a growing cache may have taken
their block. The last two steps are played completely, so the peak is that of a complete last step.

Of a rollout of more than MOST_PLAYED tokens every n-th step is played, with the time of n. Against all steps, Qwen3-8B
with 2,048 tokens: the same peak and seconds, least capacity and reserved bytes within 0.4 % (16,384 tokens, against
every 8th: 2.5 %, for a native allocator with such a cache fragments, and its least capacity is not smooth).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autofit.fakegpu.allocator import SMALL_BYTES
from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.depth.layers import Delay, LayerClock
from autofit.fakegpu.depth.stack import full_config, repeats, stack_of, stands_for, text_config
from autofit.fakegpu.engines.forward import Decoder, PagedBatching
from autofit.fakegpu.patches.redirect import Target, untouched
from autofit.fakegpu.patches.same_calls import if_alike_played

FIRST_TRY = 4  # traced steps before the first comparison; the first ones contain the prefill
LAST_TRY = 40
LARGE_EVERY = 16
MOST_PLAYED = 512  # decode steps of one rollout


@dataclass(frozen=True, slots=True)
class _Event:
    """One event of a decode step: an allocation, or the free of allocation `position` of `steps_ago`."""

    is_allocation: bool
    steps_ago: int
    position: int
    layer: int


@dataclass(slots=True)
class _Step:
    """A traced decode step: its events, and the index and size of each allocation."""

    events: list[_Event]
    ids: list[int]
    sizes: list[int]
    seconds: float
    stretches: list[tuple[int, Delay]]


class RolloutSynthesis:
    """Compares the decode steps of one `generate` call, and extrapolates the rest once they repeat."""

    def __init__(self, gpu: FakeGpu, total_steps: int, alike_after: int = 0) -> None:
        """Steps repeat each other after `alike_after` of them: those until a sliding window is full are traced."""
        self.gpu = gpu
        self.total_steps = total_steps
        self.first_try = FIRST_TRY + alike_after
        self.skipped_steps = 0
        self._marks: list[tuple[int, float, int]] = []
        self._traced_s: tuple[dict[str, float], ...] = ()  # parts of the time at the last two boundaries

    def at_boundary(self) -> bool:
        """Called before each decode step; true if the remaining steps were just played and the loop can end."""
        memory, clock = self.gpu.memory, self.gpu.clock
        stretch = clock.cut() if isinstance(clock, LayerClock) else 0
        self._marks.append((len(memory.log), clock.now_s, stretch))
        self._traced_s = (*self._traced_s[-1:], clock.traced_s)
        done = len(self._marks) - 1
        if clock.log is not None:
            clock.log.decode_step(done)
        if not 0 <= done - self.first_try <= LAST_TRY - FIRST_TRY or done >= self.total_steps:
            return False
        before, last = self._step(done - 2), self._step(done - 1)
        if before is None or last is None or before.events != last.events:
            return False
        if clock.log is not None:
            clock.log.decode_end()
        self._play(before, last, done)
        self.skipped_steps = self.total_steps - done
        return True

    def _step(self, number: int) -> _Step | None:
        """The traced step `number`; None if it freed an allocation older than the two steps before it."""
        log = self.gpu.memory.log
        born: dict[int, tuple[int, int]] = {}
        for step in range(max(0, number - 2), number):
            start, end = self._marks[step][0], self._marks[step + 1][0]
            position = 0
            for index in range(start, end):
                if log.nbytes[index] > 0:
                    born[log.ids[index]] = (step, position)
                    position += 1
        (start, start_s, first), (end, end_s, last) = self._marks[number], self._marks[number + 1]
        clock = self.gpu.clock
        stretches = clock.stretches[first:last] if isinstance(clock, LayerClock) else []
        result = _Step([], [], [], end_s - start_s, stretches)
        for index in range(start, end):
            storage, nbytes, layer = log.ids[index], log.nbytes[index], log.tags[index]
            if nbytes > 0:
                born[storage] = (number, len(result.ids))
                result.events.append(_Event(True, 0, len(result.ids), layer))
                result.ids.append(storage)
                result.sizes.append(nbytes)
            elif storage in born:
                step, position = born[storage]
                result.events.append(_Event(False, number - step, position, layer))
            else:
                return None
        return result

    def _play(self, before: _Step, last: _Step, done: int) -> None:
        memory = self.gpu.memory
        templates = [memory.allocations[index] for index in last.ids]
        growth = [
            0 if template.is_stepwise else after - size
            for size, after, template in zip(before.sizes, last.sizes, templates, strict=True)
        ]
        own = {e.position for e in last.events if not e.is_allocation and e.steps_ago == 0}
        local = {position for position in own if growth[position] == 0}
        short = [e for e in last.events if not (e.position in local and e.steps_ago == 0)]
        small = {position for position in local if last.sizes[position] <= SMALL_BYTES}
        large = [e for e in last.events if not (e.position in small and e.steps_ago == 0)]
        steps_of = [_step_of(memory.allocations[a].shape, t.shape) for a, t in zip(before.ids, templates, strict=True)]
        slope = last.seconds - before.seconds
        layers, clock = self.gpu.layers, self.gpu.clock
        start_s, end_s = self._traced_s
        like = {part: max(0.0, seconds - start_s.get(part, 0.0)) for part, seconds in end_s.items()}
        steps = self._played_steps(done)
        ids: dict[int, dict[int, int]] = {-2: dict(enumerate(before.ids)), -1: dict(enumerate(last.ids))}
        for place, (step, covered) in enumerate(steps):
            mine = ids[place] = {}
            later = step - done + 1  # number of steps after the last traced one
            whole = place >= len(steps) - 2
            for event in last.events if whole else large if place % LARGE_EVERY == 0 else short:
                if layers is not None:
                    layers.set(event.layer)
                if event.is_allocation:
                    template = templates[event.position]
                    nbytes = last.sizes[event.position] + growth[event.position] * later
                    shape = _grown(template.shape, steps_of[event.position], later)
                    mine[event.position] = memory.allocate_like(template, max(nbytes, 1), shape)
                else:
                    memory.release(ids[place - event.steps_ago][event.position])
            ids.pop(place - 3, None)
            mean = later - (covered - 1) / 2
            clock.advance(max(last.seconds + slope * mean, 0.0) * covered, like=like)
            if isinstance(clock, LayerClock) and len(before.stretches) == len(last.stretches):
                pairs = zip(before.stretches, last.stretches, strict=True)
                clock.play([(tag, b.grown(a, mean)) for (_, a), (tag, b) in pairs], times=covered)
        if layers is not None:
            layers.set(0)
        self._hand_over([(ids[len(steps) - 1], last), (ids[len(steps) - 2], before)])

    def _played_steps(self, done: int) -> list[tuple[int, int]]:
        """(step, number of steps that it stands for) of the steps to play; the last two always are."""
        end = self.total_steps - 2
        stride = self.total_steps if self.gpu.only_last_decode_steps else -(-self.total_steps // MOST_PLAYED)
        steps = [*range(done + stride - 1, end, stride), *(step for step in (end, end + 1) if step >= done)]
        return [(step, step - before) for before, step in pairwise([done - 1, *steps])]

    def _hand_over(self, last_steps: Sequence[tuple[dict[int, int], _Step]]) -> None:
        """Map the tensors alive now to the allocations of the last played steps."""
        stand_ins: dict[int, int] = {}
        for played, step in last_steps:
            for position, index in enumerate(step.ids):
                if position in played and self.gpu.memory.is_live(played[position]):
                    stand_ins[index] = played[position]
        self.gpu.memory.replace(stand_ins)


def _step_of(before: tuple[int, ...], last: tuple[int, ...]) -> tuple[int, ...]:
    """Growth of a shape in a decode step; () if it stays."""
    return () if before == last else tuple(b - a for a, b in zip(before, last, strict=True))


def _grown(shape: tuple[int, ...], step: tuple[int, ...], steps: int) -> tuple[int, ...]:
    """The shape `steps` decode steps later."""
    return tuple(size + by * steps for size, by in zip(shape, step, strict=True)) if step else shape


def transformers_generation(gpu: FakeGpu, module: ModuleType) -> Iterable[tuple[object, str, object, str]]:
    """Patches of `GenerationMixin`: the start of a decode loop, and its check for unfinished sequences."""
    mixin = module.GenerationMixin
    running: list[RolloutSynthesis | _Countdown] = []
    reason = "a rollout is played from its first tokens, not simulated token by token"
    yield mixin, "generate", if_alike_played(gpu, untouched(mixin.generate)), "a rollout like one before is played"
    dropped = getattr(module, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ())
    yield mixin, "_sample", _sample(gpu, running, untouched(mixin._sample), dropped), reason
    yield (
        mixin, "_beam_search", partial(_beam_search, running, untouched(mixin._beam_search)),
        "its end depends on unknown scores",
    )  # fmt: skip
    unfinished = partial(_has_unfinished, running, untouched(mixin._has_unfinished_sequences))
    yield mixin, "_has_unfinished_sequences", unfinished, reason


def _sample(
    gpu: FakeGpu, running: list[RolloutSynthesis | _Countdown], original: Callable[..., torch.Tensor],
    dropped: Container[str],
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """`_sample`, which plays its steps; only the prompt needs the `dropped` ones of its arguments."""

    def played(
        synthesis: RolloutSynthesis, model: torch.nn.Module, input_ids: torch.Tensor, *args: object, **kwargs: object
    ) -> torch.Tensor:
        """All tokens of the steps of `synthesis`."""
        running.append(synthesis)
        try:
            out = original(model, input_ids, *args, **kwargs)
        finally:
            running.remove(synthesis)
        rest = out[:, -1:].expand(-1, synthesis.skipped_steps)
        return torch.cat([out, rest], dim=1) if synthesis.skipped_steps else out

    def sample(model: torch.nn.Module, input_ids: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        criteria, settings = kwargs.get("stopping_criteria"), kwargs.get("generation_config")
        steps = (getattr(criteria, "max_length", None) or 0) - input_ids.shape[1]
        plain = not getattr(settings, "return_dict_in_generate", False) and kwargs.get("streamer") is None
        if not plain or steps <= FIRST_TRY + 2 or not isinstance(input_ids, FakeTensor):
            return original(model, input_ids, *args, **kwargs)
        filling = _filling(model, steps, input_ids)
        if filling and gpu.clock.log is not None:
            return original(model, input_ids, *args, **kwargs)  # a forecast is made of steps that are alike
        if gpu.skips_rollouts:
            return torch.cat([input_ids, input_ids.new_full((len(input_ids), steps), _token(model))], dim=1)
        cache, embedded = kwargs.get("past_key_values"), kwargs.get("inputs_embeds") is not None
        if filling is not None and filling > 3 * FIRST_TRY and not (args or embedded) and _can_grow(cache):
            first = RolloutSynthesis(gpu, filling - 2)
            input_ids = played(first, model, input_ids, **kwargs)
            if not first.skipped_steps:
                return input_ids
            _grow(gpu, cache, first.skipped_steps)
            advance = cast("Any", model)._update_model_kwargs_for_generation
            kwargs = advance({}, kwargs, num_new_tokens=first.total_steps)
            kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
            if hasattr(settings, "_mask_length"):  # of a mask of ones, which is not passed
                settings._mask_length = input_ids.shape[1]
            return sample(model, input_ids, **kwargs)
        return played(RolloutSynthesis(gpu, steps, filling or 0), model, input_ids, *args, **kwargs)

    return sample


def _token(model: Any) -> int:
    """The token that every sampling gives (`known_values`), different from the end-of-sequence token."""
    return int(text_config(model.config).vocab_size) // 3


class _Countdown:
    """Runs a beam search to its last token, the worst case, since its scores are unknown."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def at_boundary(self) -> bool:
        self._left -= 1
        return self._left < 0


def _beam_search(
    running: list[RolloutSynthesis | _Countdown], original: Callable[..., torch.Tensor], model: torch.nn.Module,
    input_ids: torch.Tensor, *args: object, **kwargs: object,
) -> torch.Tensor:  # fmt: skip
    criteria = cast("_HasLength", args[1] if len(args) > 1 else kwargs["stopping_criteria"])
    if not isinstance(input_ids, FakeTensor) or criteria.max_length is None:
        return original(model, input_ids, *args, **kwargs)
    countdown = _Countdown(criteria.max_length - input_ids.shape[1])
    running.append(countdown)
    try:
        return original(model, input_ids, *args, **kwargs)
    finally:
        running.remove(countdown)


class _HasLength(Protocol):
    max_length: int | None


def _has_unfinished(
    running: list[RolloutSynthesis | _Countdown], original: Callable[..., bool], model: torch.nn.Module,
    this_peer_finished: bool, *args: object, **kwargs: object,
) -> bool:  # fmt: skip
    if running and running[-1].at_boundary():
        return False
    return original(model, this_peer_finished, *args, **kwargs)


def _filling(model: torch.nn.Module, steps: int, input_ids: torch.Tensor) -> int | None:
    """Steps until the model's sliding window is full, after which its cache stays as large; None if it stays open."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    window, prompt = int(getattr(text, "sliding_window", None) or 0), input_ids.shape[1]
    kinds = getattr(text, "layer_types", None) or ()
    slides = window and (any("sliding" in kind for kind in kinds) or not kinds)
    return max(0, window + 1 - prompt) if slides and prompt + steps > window else None


_OF_TOKENS = ("DynamicLayer", "DynamicSlidingWindowLayer")  # transformers/cache_utils.py


def _can_grow(cache: Any) -> bool:
    """True if all layers of a cache keep only the keys and values of tokens."""
    layers = getattr(cache, "layers", None) or ()
    return bool(layers) and all(type(layer).__name__ in _OF_TOKENS for layer in layers)


def _grow(gpu: FakeGpu, cache: Any, tokens: int) -> None:
    """Give a cache the shape that it has `tokens` later; its memory has been played to there."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            before = getattr(layer, name)
            gpu.tracer.paused = True
            try:
                after = before.new_empty((*before.shape[:-2], before.shape[-2] + tokens, before.shape[-1]))
            finally:
                gpu.tracer.paused = False
            gpu.memory.take_over(after, before)
            setattr(layer, name, after)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length += tokens


# Continuous batching of transformers on the simulated card, whose generation loop runs in a thread of its own.
#
# Fake tensors cannot enter another thread. So `generate_batch` is played here: one step of the real model with one
# token of each sequence, its sampling, and then the rest of the steps by the clock. What the paged cache and its
# attention add is `engines.forward`. While a forecast traces a training (`clock.log`), two steps of the model are
# traced and the forecast adds the rest for each candidate.

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
        token = _token(model)
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
    """Bytes of the weights of the layers that a shrunken model lacks."""
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
