"""The bytes and seconds of a GRPO step, from formulas: `predict` gives the predictions, `truth` the probe results.

The figures do not claim to match a real card. `truth` differs from `predict` in efficiencies (GEMM, bandwidth, launch),
fragmentation that depends on knobs, kernel choices that help or hurt whole regions, and noise. The difference is scaled
to the requested misprediction: the root mean square, over all allowed candidates (including those that do not fit), of
the logarithm of truth / prediction, in bytes and in seconds separately. Half of its square is an offset common to all
candidates, half varies between them: 30 % is an offset of 21 % and a standard deviation of 21 %.

`truth` has separate errors in the seconds of rollout and update, and a probe reports both, like a real one.
`truth_of_totals` is the earlier law: a probe reports two numbers, and the unexplained error is that of the whole step.
A law may return (bytes, seconds) alone, or (bytes, seconds, seconds before the update).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from autofit.space.space import Space

Floats = NDArray[np.float64]
_GB = 1e9
_UNEXPLAINED = 0.05  # error outside all formulas, as a logarithm, before scaling
_WITHIN = np.sqrt(0.5)  # share of a misprediction that varies over the candidates, and share common to all
_WEIGHT_BYTES = {"none": 2.0, "8bit": 1.06, "4bit": 0.55}  # a parameter, with scales and the layers left in bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder: parameters, layers, hidden and MLP width, heads, KV heads of `head` width, vocabulary."""

    parameters: float
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head: int = 128
    vocab: int = 151_936
    prompt_tokens: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card as the data sheet has it: bytes that a program sees, context, bytes/s, dense half FLOP/s."""

    name: str
    capacity_bytes: float
    context_bytes: float
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The parameters that a cost model must guess."""

    gemm: float = 0.5  # share of the dense peak, at many tokens
    half_tokens: float = 2000.0  # tokens in a micro-batch at which half of that is reached
    bandwidth: float = 0.75
    launch_s: float = 6e-6
    decode_kernels: float = 52.0  # a layer and token
    update_kernels: float = 150.0  # a layer, forward and backward
    eager_rows: float = 10.0  # bytes a score in the eager attention's backward
    kept: float = 34.0  # bytes a token and hidden unit that a layer keeps without checkpointing
    checkpoint_kept: float = 2.0
    fragmentation: float = 0.06
    cache_copy: float = 1.0  # copies of the KV cache that growing it costs, in bytes moved
    flash: float = 0.9  # time of a layer's attention with flash against sdpa
    compiled: float = 0.9
    unfused: float = 3.0  # passes over the optimizer's bytes


Columns = dict[str, NDArray[np.object_]]


def columns(space: Space) -> Columns:
    """{knob: its value for every allowed candidate}, the split of the batch among them."""
    allowed = space.allowed()
    split = np.array([space.split(c) for c in allowed])
    found: Columns = {}
    for knob, values in zip(space.knobs, zip(*(c.values for c in allowed), strict=True), strict=True):
        found[knob.name] = np.array(values, dtype=object)
    resolved = space.recipe.resolved
    for name in ("gradient_checkpointing", "attn_implementation", "max_completion_length", "lora_r", "optim",
                 "torch_compile", "torch_empty_cache_steps"):  # fmt: skip
        found.setdefault(name, np.array([resolved.get(name)] * len(allowed), dtype=object))
    for place, name in enumerate(("micro", "accumulation", "chunk", "groups")):
        found[name] = split[:, place]
    return found


def evaluate(c: Columns, shape: Shape, card: Card, rates: Rates) -> tuple[Floats, Floats, Floats, Floats]:
    """(static bytes, device-used bytes, step seconds, those before the update) of every allowed candidate."""
    micro, accumulation = c["micro"].astype(float), c["accumulation"].astype(float)
    rollout = micro * c["chunk"].astype(float)
    rounds = np.maximum(1.0, micro * accumulation / rollout)
    new = c["max_completion_length"].astype(float)
    tokens = shape.prompt_tokens + new
    checkpointed = c["gradient_checkpointing"].astype(bool)
    eager = c["attn_implementation"] == "eager"
    flash = c["attn_implementation"] == "flash_attention_2"
    compiled = c["torch_compile"].astype(bool)
    emptied = c["torch_empty_cache_steps"] == 1
    quantised = c.get("quantization", np.array(["none"] * len(micro), dtype=object))
    weight = np.array([_WEIGHT_BYTES[str(q)] for q in quantised]) * shape.parameters
    rank = c["lora_r"].astype(float)
    adapters = 2.0 * rank * shape.layers * (4 * shape.hidden + 3 * (shape.hidden + shape.mlp))
    fused = c["optim"] == "adamw_torch_fused"
    expandable = c.get("env.PYTORCH_CUDA_ALLOC_CONF", np.full(len(micro), None)) == "expandable_segments:True"

    static = weight + 16.0 * adapters + card.context_bytes
    kv_token = 4.0 * shape.layers * shape.kv_heads * shape.head
    kv = rollout * tokens * kv_token
    in_rollout = kv * (1.0 + rates.cache_copy / shape.layers * 2) + rollout * shape.vocab * 8.0
    rows = micro * tokens
    layer = rows * shape.hidden * (rates.kept + np.where(rank > 0, 8.0, 0.0)) + rows * shape.mlp * 6.0
    scores = np.where(eager, micro * shape.heads * tokens**2 * rates.eager_rows / 2, 0.0)
    kept = np.where(
        checkpointed, rows * shape.hidden * rates.checkpoint_kept * shape.layers + layer + scores,
        shape.layers * (layer + scores),
    )  # fmt: skip
    head = np.minimum(rows, 4096) * 32768 * 2.0 + rows * shape.hidden * 4.0
    in_update = kept + head + np.where(fused, 0.0, 4.0 * adapters)
    loose = rates.fragmentation * np.where(expandable, 0.3, 1.0) * np.where(emptied, 0.7, 1.0)
    used = static + np.maximum(in_rollout, in_update) * (1.0 + loose)

    bandwidth = card.bytes_per_s * rates.bandwidth
    slower = np.where(eager, 1.15, np.where(flash, rates.flash * 0.5 + 0.5, 1.0))
    slower = slower * np.where(compiled, rates.compiled, 1.0)
    dequantise = np.where(quantised == "4bit", 1.5, np.where(quantised == "8bit", 2.2, 1.0))
    launches = shape.layers * rates.decode_kernels * rates.launch_s * np.where(compiled, 0.8, 1.0)
    moved = weight * dequantise + rollout * (tokens - new / 2) * kv_token * (1.0 + rates.cache_copy)
    decode = rounds * new * np.maximum(launches, moved / bandwidth)
    speed = card.flops_per_s * rates.gemm * rows / (rows + rates.half_tokens)
    attention = 12.0 * shape.layers * shape.heads * shape.head * tokens * np.where(eager, 3.0, 1.0)
    work = (shape.parameters * np.where(checkpointed, 6.0, 4.0) + attention) * rows
    each = np.maximum(work * slower / speed, shape.layers * rates.update_kernels * rates.launch_s)
    each = each + np.where(eager, shape.layers * scores / bandwidth * 2, 0.0) + (dequantise - 1) * weight / bandwidth
    optimizer = adapters * 16.0 * np.where(fused, 1.0, rates.unfused) / bandwidth + np.where(fused, 2e-4, 8e-3)
    prefill = rounds * rollout * shape.prompt_tokens * 2.0 * shape.parameters / (card.flops_per_s * rates.gemm)
    rollout = np.asarray(decode + prefill, float)
    step = np.asarray(rollout + accumulation * each + optimizer + np.where(emptied, 0.05, 0.0), float)
    return np.asarray(static, float), np.asarray(used, float), step, rollout


def predict(known: Columns, shape: Shape, card: Card) -> tuple[Floats, Floats, Floats, Floats]:
    """(floor bytes, device-used bytes, step seconds, those before the update): the predictions for the search."""
    return evaluate(known, shape, card, Rates())


def truth(
    known: Columns,
    codes: NDArray[np.int64],
    shape: Shape,
    card: Card,
    *,
    misprediction: float,
    seed: int,
    unexplained: float = _UNEXPLAINED,
) -> tuple[Floats, Floats, Floats]:
    """(device-used bytes, step seconds, those before the update) that probes measure, without their noise.

    `codes` number the knobs' values. Most of the misprediction comes from other rates; `unexplained` (of a logarithm,
    before scaling) from no formula: in the rollout, of the knobs that a rollout knows; in the update, of all.
    """
    chance = np.random.default_rng([seed, int(misprediction * 1000)])
    expected, actual = predict(known, shape, card), evaluate(known, shape, card, _other_rates(chance))
    bytes_off = np.log(actual[1] / expected[1]) + unexplained * _regions(codes, chance)
    matters = [_changes(expected[3], column) for column in codes.T]
    phases, actual_phases = (np.array([rollout, step - rollout]) for _, _, step, rollout in (expected, actual))
    off = np.log(actual_phases / phases)
    off += unexplained * np.array([_regions(codes[:, matters], chance), _regions(codes, chance)])
    used = _mispredicted_bytes(expected, bytes_off, misprediction, chance)
    rollout, update = _scaled_phases(phases, off, misprediction, chance)
    return used, rollout + update, rollout


def truth_unexplained(
    known: Columns, codes: NDArray[np.int64], shape: Shape, card: Card, *, misprediction: float, seed: int
) -> tuple[Floats, Floats, Floats]:
    """A harder law: most of the misprediction comes from values, pairs and waves outside all formulas."""
    return truth(known, codes, shape, card, misprediction=misprediction, seed=seed, unexplained=0.3)


def truth_of_totals(
    known: Columns, codes: NDArray[np.int64], shape: Shape, card: Card, *, misprediction: float, seed: int
) -> tuple[Floats, Floats]:
    """(device-used bytes, step seconds): probes report no phases, and the unexplained error is of the whole step."""
    chance = np.random.default_rng([seed, int(misprediction * 1000)])
    expected, actual = predict(known, shape, card), evaluate(known, shape, card, _other_rates(chance))
    bytes_off, seconds_off = (np.log(actual[i] / expected[i]) + _UNEXPLAINED * _regions(codes, chance) for i in (1, 2))
    used = _mispredicted_bytes(expected, bytes_off, misprediction, chance)
    return used, expected[2] * np.exp(_scaled(seconds_off, misprediction, chance))


def _mispredicted_bytes(
    expected: tuple[Floats, ...], off: Floats, misprediction: float, chance: np.random.Generator
) -> Floats:
    floor, used = expected[:2]
    return np.maximum(floor, used * np.exp(_scaled(off, misprediction, chance)))


def _other_rates(chance: np.random.Generator) -> Rates:
    def off(spread: float) -> float:
        return float(np.exp(chance.normal(0.0, spread)))

    base = Rates()
    return Rates(
        gemm=base.gemm * off(0.4), half_tokens=base.half_tokens * off(0.8), bandwidth=base.bandwidth * off(0.3),
        launch_s=base.launch_s * off(0.6), decode_kernels=base.decode_kernels * off(0.2), flash=base.flash * off(0.3),
        update_kernels=base.update_kernels * off(0.3), eager_rows=base.eager_rows * off(0.3), kept=base.kept * off(0.3),
        checkpoint_kept=base.checkpoint_kept * off(0.3), fragmentation=base.fragmentation * off(0.8),
        cache_copy=base.cache_copy * off(0.7), compiled=base.compiled * off(0.1), unfused=base.unfused * off(0.5),
    )  # fmt: skip


def _changes(values: Floats, code: NDArray[np.int64]) -> bool:
    """Whether `values` depend on this knob: the means of its values differ by more than 0.1 %."""
    means = [np.log(values[code == one]).mean() for one in np.unique(code)]
    return bool(np.ptp(means) > 1e-3)


def _regions(coded: NDArray[np.int64], chance: np.random.Generator) -> Floats:
    """Errors outside all formulas (kernel choices, fragmentation): effects of values and pairs, and smooth waves."""
    codes = [column for column in coded.T if np.ptp(column)]
    total = np.zeros(len(codes[0]))
    for code in codes:
        total += chance.normal(0, 1.0, int(code.max()) + 1)[code] / np.sqrt(len(codes))
    for _ in range(4):
        one, two = chance.choice(len(codes), 2, replace=False)
        effects = chance.normal(0, 0.5, (int(codes[one].max()) + 1, int(codes[two].max()) + 1))
        total += effects[codes[one], codes[two]] / 2
    phase = sum(chance.normal(0, 0.8) * code for code in codes)
    return np.asarray(total + 0.5 * np.sin(phase + chance.uniform(0, 6)), dtype=np.float64)


def _scaled(values: Floats, misprediction: float, chance: np.random.Generator) -> Floats:
    """`values` with a root mean square of `misprediction`: half of it over the grid, half common to all."""
    within: Floats = values - values.mean()
    found: Floats = within / max(1e-9, within.std()) * _WITHIN * misprediction + _common(misprediction, chance)
    return found


def _scaled_phases(expected: Floats, off: Floats, misprediction: float, chance: np.random.Generator) -> Floats:
    """Seconds (phases, candidates): `off` is scaled until the whole step has the misprediction of `_scaled`."""
    step = expected.sum(axis=0)

    def total_off(scale: float) -> Floats:
        return np.asarray(np.log((expected * np.exp(scale * off)).sum(axis=0) / step), dtype=np.float64)

    scale = brentq(lambda s: total_off(s).std() - _WITHIN * misprediction, 0.0, 20.0)
    common = _common(misprediction, chance) - total_off(scale).mean()
    return np.asarray(expected * np.exp(scale * off + common), dtype=np.float64)


def _common(misprediction: float, chance: np.random.Generator) -> float:
    return float(_WITHIN * misprediction * (1 if chance.random() < 0.5 else -1))


_CARDS = (
    Card(name="rtx4090", capacity_bytes=25.4 * _GB, context_bytes=0.52 * _GB, bytes_per_s=1008e9, flops_per_s=165e12),
    Card(name="a100-40gb", capacity_bytes=42.3 * _GB, context_bytes=0.53 * _GB, bytes_per_s=1555e9, flops_per_s=312e12),
    Card(name="h100", capacity_bytes=84.9 * _GB, context_bytes=0.64 * _GB, bytes_per_s=3350e9, flops_per_s=989e12),
)
CARDS = {card.name: card for card in _CARDS}
SHAPES = {
    "0.5B": Shape(parameters=0.49e9, layers=24, hidden=896, mlp=4864, heads=14, kv_heads=2, head=64),
    "1.5B": Shape(parameters=1.54e9, layers=28, hidden=1536, mlp=8960, heads=12, kv_heads=2),
    "4B": Shape(parameters=4.0e9, layers=36, hidden=2560, mlp=9728, heads=32, kv_heads=8),
    "8B": Shape(parameters=8.2e9, layers=36, hidden=4096, mlp=12288, heads=32, kv_heads=8),
    "14B": Shape(parameters=14.8e9, layers=40, hidden=5120, mlp=17408, heads=40, kv_heads=8),
}
