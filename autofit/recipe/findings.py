"""Findings: faults of a launch, settings that clash, the memory of cards and host. Free of torch.

Every finding is what the installed libraries do, read in their source or run: accelerate 1.15, transformers 5.23, TRL
1.16, torch 2.13. Where the libraries raise an error, theirs comes late (after the weights are loaded) or names no key.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from autofit.files import read_json
from autofit.recipe.catalogue import attention_heads, text_config
from autofit.recipe.keys import GROWING, GROWS, LAUNCH, QUANT_STORAGE, SYNC_EACH_BATCH, divisors
from autofit.recipe.launch import THREADS, Launch, is_on, named_cards, sharding_strategy, state_dict_type, wrap_policy
from autofit.recipe.launch_keys import CONFIG_KEYS, SECTION_KEYS, place
from autofit.recipe.profile import profile
from autofit.recipe.recipe import Recipe, inner_value
from autofit.units import format_bytes


class Severity(StrEnum):
    ERROR = "error"  # it does not train, or not on these ranks
    WARNING = "warning"  # it trains, and costs memory, time or a checkpoint
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong: where it stands, what happens, and what to change."""

    severity: Severity
    where: str  # the file and the key
    what: str
    fix: str

    @property
    def stops(self) -> bool:
        """True if the training fails to run as asked."""
        return self.severity is Severity.ERROR

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # the new name wins (transformers 5.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedLaunch:
    """A recipe with its launch, and what the user's own files said before they were read.

    `values` is the recipe as it stands in `file`, `config` the accelerate config in the file `config_name` ({} without
    one); `cards_here` are the cards of this machine, `card` the model of the card that is trained on (as autofit names
    it), where it is known.
    """

    recipe: Recipe
    file: str = "the recipe"
    values: Mapping[str, object] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    config_name: str = "the accelerate config"
    num_processes: int | None = None  # of the command line
    card: str = ""
    cards_here: int = 0

    @property
    def launch(self) -> Launch:
        return self.recipe.launch

    def section(self, name: str) -> Mapping[str, object]:
        """A section of the accelerate config, such as fsdp_config, with the recipe's changes; {} if it is missing."""
        found = {**self.config, **self.launch.config}.get(name)
        return cast("Mapping[str, object]", found) if isinstance(found, Mapping) else {}

    def value(self, key: str) -> object:
        """The recipe's value of a key, defaults included."""
        return self.recipe.resolved.get(key, self.recipe.values.get(key))

    @property
    def checkpoints(self) -> bool:
        """True if the recipe checkpoints activations."""
        return next((is_on(value) for key in CHECKPOINTING if (value := self.value(key)) is not None), False)

    @property
    def gathered_bytes(self) -> int | None:
        """Bytes of all weights as FSDP gathers them: in the dtype of mixed precision."""
        weights, dtype = self.recipe.weights_bytes, str(self.value("dtype") or "float32")
        halved = dtype == "float32" and any(is_on(self.value(key)) for key in ("bf16", "fp16"))
        return weights // 2 if halved and weights is not None else weights

    def in_recipe(self, key: str) -> str:
        return f"{self.file}: {key}"

    def in_config(self, key: str) -> str:
        """Place at which the user sets a key of an accelerate config: there, or in the recipe."""
        if key == "num_processes" and self.num_processes is not None:
            return "--num_processes"
        return place(key, self.values, file=self.file, config=self.config, config_name=self.config_name)


_FLOATS = ("bfloat16", "float16", "float32")


def _wrapped(asked: StatedLaunch) -> Iterator[Finding]:
    """FSDP with no policy makes the model one group (accelerate, fsdp2_prepare_auto_wrap_policy)."""
    section, weights = asked.section("fsdp_config"), asked.gathered_bytes
    if asked.launch.sharding.startswith("fsdp") and section and wrap_policy(section) == "NO_WRAP":
        size = "" if weights is None else f", {format_bytes(weights)}"
        yield Finding(
            severity=Severity.WARNING, where=asked.in_config("fsdp_config.fsdp_auto_wrap_policy"),
            what=f"without a policy the model is sharded in one piece: each card gathers all its weights at once{size}",
            fix="set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, which gathers a layer at a time",
        )  # fmt: skip


def _loading(asked: StatedLaunch) -> Iterator[Finding]:
    """Weights that each rank loads into host memory, and the cards onto which it does."""
    launch, weights = asked.launch, asked.recipe.weights_bytes
    each = max(1, launch.ranks // launch.machines)
    given = asked.value("model_init_kwargs")
    if isinstance(given, Mapping) and given.get("device_map") is not None:
        yield from _device_map(asked, str(given["device_map"]))
    if each == 1 or weights is None:
        return
    cost = f"each of {each} ranks loads all weights into host memory: {each} x {format_bytes(weights)} = " \
           f"{format_bytes(each * weights)}"  # fmt: skip
    fsdp, zero = asked.section("fsdp_config"), asked.section("deepspeed_config")
    if launch.sharding.startswith("fsdp") and not is_on(fsdp.get("fsdp_cpu_ram_efficient_loading", True)):
        # transformers/distributed/fsdp.py, is_fsdp_enabled: rank 0 alone reads weights only with this variable
        yield Finding(
            severity=Severity.WARNING, where=asked.in_config("fsdp_config.fsdp_cpu_ram_efficient_loading"),
            what=f"false: {cost}", fix=f"set it to true: {format_bytes(weights)} on rank 0 alone",
        )  # fmt: skip
    if launch.sharding == "zero3" and not is_on(zero.get("zero3_init_flag", True)):
        # accelerate/utils/dataclasses.py, DeepSpeedPlugin: without it transformers does not enter deepspeed.zero.Init
        yield Finding(
            severity=Severity.WARNING, where=asked.in_config("deepspeed_config.zero3_init_flag"),
            what=f"false: {cost}", fix="set it to true, so that each rank keeps its share as the model is built",
        )  # fmt: skip


def _device_map(asked: StatedLaunch, value: str) -> Iterator[Finding]:
    where = asked.in_recipe("model_init_kwargs.device_map")
    if asked.launch.ranks > 1:
        # trl/trainer/grpo_trainer.py, line 344, and the other trainers: None on MULTI_GPU and DEEPSPEED. A script of
        # one's own reaches accelerate/accelerator.py, line 1478, which raises after the weights are loaded.
        yield Finding(
            severity=Severity.WARNING, where=where,
            what=f"{value} has no effect on {asked.launch.ranks} ranks: TRL sets it to null, and accelerate refuses to "
                 "train a model that is split over the cards",
            fix="remove it; sharding: fsdp2 or zero3 splits a model over the cards",
        )  # fmt: skip
    elif value != "auto" or asked.cards_here > 1:
        yield Finding(
            severity=Severity.NOTE, where=where,
            what=f"{value} lays the layers on all visible cards, which then work one after the other",
            fix="set CUDA_VISIBLE_DEVICES to one card, or train on several ranks: --num_processes N",
        )  # fmt: skip


def _whole_base(asked: StatedLaunch) -> Iterator[Finding]:
    """LoRA with a sharding that leaves the frozen weights whole."""
    launch, weights = asked.launch, asked.recipe.weights_bytes
    if launch.ranks == 1 or not asked.recipe.uses_lora or weights is None:
        return
    shared = {"zero1": "the adapter's optimizer state", "zero2": "the adapter's gradients and optimizer state"}
    if launch.sharding in shared:
        yield Finding(
            severity=Severity.WARNING, where=asked.in_config("deepspeed_config.zero_stage"),
            what=f"{launch.sharding} shards only {shared[launch.sharding]}: the frozen weights stay whole, "
                 f"{format_bytes(weights)} on each of {launch.ranks} cards, so it takes as much as one card",
            fix="take zero3 or fsdp2, which shard the frozen weights too, or multi_gpu, which is faster where it fits",
        )  # fmt: skip
    elif launch.sharding == "ddp":
        yield Finding(
            severity=Severity.NOTE, where=asked.in_config("distributed_type"),
            what=f"DDP keeps the frozen weights whole: {format_bytes(weights)} on each of {launch.ranks} cards",
            fix=f"if that does not fit, take {_sharding(asked)}, which shards them",
        )  # fmt: skip


def _sharding(asked: StatedLaunch) -> str:
    """The sharding of all weights that goes with the optimizer, in the words of the recipe's launch."""
    name = "zero3" if asked.recipe.resolved.get("optim") in _OF_BITSANDBYTES else "fsdp2"
    return name if asked.recipe.foreign else f"--accelerate_config {name}"


def _unsharded(asked: StatedLaunch) -> Iterator[Finding]:
    """DeepSpeed at ZeRO stage 0, which holds more than DDP (deepspeed 0.19, runtime/fp16/unfused_optimizer.py)."""
    if asked.launch.sharding == "zero0":
        yield Finding(
            severity=Severity.WARNING, where=asked.in_config("deepspeed_config.zero_stage"),
            what="stage 0 shards nothing, and DeepSpeed holds a float32 copy of each trained 16-bit weight and of its "
                 "gradient besides, whole on every card",
            fix="take zero_stage: 2, which splits both over the cards, or --accelerate_config multi_gpu",
        )  # fmt: skip


def _gathered(asked: StatedLaunch) -> Iterator[Finding]:
    """ZeRO-3 where it saves least: TRL gathers the weights to generate, and LoRA leaves little else to shard."""
    if asked.launch.sharding != "zero3" or asked.recipe.weights_bytes is None:
        return
    size = format_bytes(asked.recipe.weights_bytes)
    gathers = is_on(asked.value("ds3_gather_for_generation")) and not is_on(asked.value("use_vllm"))
    if asked.recipe.generates and gathers:  # trl/models/utils.py, unwrap_model_for_generation
        yield Finding(
            severity=Severity.WARNING, where=asked.in_recipe("ds3_gather_for_generation"),
            what=f"TRL gathers all weights on every card to generate, {size}: as much as on one card",
            fix="set it to false, which is slower, or generate with vLLM (use_vllm: true)",
        )  # fmt: skip
    elif asked.recipe.uses_lora:
        yield Finding(
            severity=Severity.NOTE, where=asked.in_config("deepspeed_config.zero_stage"),
            what=f"under LoRA ZeRO-3 shards the frozen weights ({size}) and little else: activations and logits stay "
                 "as on one card, and up to 1e9 parameters (stage3_max_live_parameters) stay gathered",
            fix="shrink the micro-batch or checkpoint activations where it does not fit",
        )  # fmt: skip


def _reference(asked: StatedLaunch) -> Iterator[Finding]:
    """A reference model that FSDP2 gathers whole (trl/models/utils.py, prepare_fsdp: fully_shard with no policy)."""
    weights, trainer = asked.gathered_bytes, asked.recipe.trainer
    if asked.launch.sharding != "fsdp2" or asked.recipe.uses_lora or weights is None:
        return
    by, unless = profile(trainer).reference_by, profile(trainer).reference_unless
    always = bool(unless) and not is_on(asked.value(unless))
    if always or (by and asked.value(by)):
        yield Finding(
            severity=Severity.WARNING, where=asked.in_recipe(unless if always else by),
            what="TRL shards the reference model in one piece under FSDP2: each card gathers all its weights at once, "
                 f"{format_bytes(weights)}, for a while twice",
            fix=f"set {unless}: true, or train with LoRA, which needs no second model" if always else
                f"set {by}: 0, or train with LoRA, which needs no second model",
        )  # fmt: skip


def _between_syncs(asked: StatedLaunch) -> Iterator[Finding]:
    """Gradients between two micro-batches (transformers/trainer.py, line 1896: no_sync unless sync_each_batch)."""
    recipe, weights = asked.recipe, asked.gathered_bytes
    if not asked.launch.sharding.startswith("fsdp") or recipe.uses_lora or weights is None:
        return
    given = inner_value({"accelerator_config": asked.value("accelerator_config")}, SYNC_EACH_BATCH)
    if recipe.grad_accum_steps > 1 and not is_on(given):
        yield Finding(
            severity=Severity.WARNING, where=asked.in_recipe(SYNC_EACH_BATCH),
            what="between two micro-batches FSDP keeps the gradients of all weights on every card, about "
                 f"{format_bytes(weights)}",
            fix="set it to true, which costs a reduction for each micro-batch, or take one micro-batch for each step",
        )  # fmt: skip


def quantised(asked: StatedLaunch) -> Iterator[Finding]:
    """4-bit weights whose storage fails to be sharded."""
    launch = asked.launch
    if launch.ranks == 1 or not is_on(asked.value("load_in_4bit")):
        return
    where, storage = asked.in_recipe(QUANT_STORAGE), str(asked.value(QUANT_STORAGE) or "uint8")
    computed = _computed(asked)
    set_it = f"set {QUANT_STORAGE}: {computed}, the type that FSDP gathers in"
    if launch.sharding.startswith("fsdp") and storage in _FLOATS and computed not in (storage, "float32"):
        # torch/distributed/fsdp/_fully_shard/_fsdp_param.py, line 901; _flat_param.py, _use_low_precision_shard
        yield Finding(
            severity=Severity.ERROR, where=where,
            what=f"FSDP casts what it gathers to {computed}: 4-bit weights stored as {storage} become other numbers",
            fix=set_it,
        )  # fmt: skip
    if storage not in _FLOATS:
        if launch.sharding == "fsdp2":  # accelerate/utils/fsdp_utils.py, line 798
            yield Finding(
                severity=Severity.WARNING, where=where,
                what=f"accelerate leaves 4-bit weights stored as {storage} out of the sharding: every card holds all "
                     "of them",
                fix=f"{set_it}; the step then needs less, the load not: a card holds all and its share",
            )  # fmt: skip
        elif launch.sharding == "fsdp1":  # torch/distributed/fsdp/_flat_param.py, line 811
            yield Finding(
                severity=Severity.ERROR, where=where,
                what=f"FSDP1 cannot flatten 4-bit weights stored as {storage} (integers)",
                fix=f"{set_it}, and dtype too: it flattens weights of one type only",
            )  # fmt: skip
    elif launch.sharding == "fsdp2":  # on two gloo ranks with torch 2.13 every such bit pattern stayed as it was
        yield Finding(
            severity=Severity.NOTE, where=asked.in_recipe("load_in_4bit"),
            what="an open report (bitsandbytes, issue 1945) says that FSDP2 changes 4-bit weights whose bits look like "
                 "a NaN; on CPU ranks that was not seen, on a card it was not tried",
            fix="compare the first losses with those of one card before a long run",
        )  # fmt: skip
    if launch.sharding == "zero3":  # transformers/modeling_utils.py, get_init_context: no zero.Init if is_quantized
        yield Finding(
            severity=Severity.WARNING, where=asked.in_recipe("load_in_4bit"),
            what="transformers loads quantised weights whole on every rank, also with zero3_init_flag: true",
            fix="plan card memory for all weights while loading; or take multi_gpu",
        )  # fmt: skip


def _computed(asked: StatedLaunch) -> str:
    """The type of a training's mixed precision, else that of its weights."""
    given = "bfloat16" if is_on(asked.value("bf16")) else "float16" if is_on(asked.value("fp16")) else None
    dtype = given or str(asked.value("dtype") or "float32")
    return dtype if dtype in _FLOATS else "bfloat16"


CHECKS = (_wrapped, _loading, _whole_base, _unsharded, _gathered, _reference, _between_syncs, quantised)


# -- settings that a training fails with once they come together, though each works by itself -------------------------

SHARDING, OFFLOAD = "launch.sharding", "launch.offload"
_RMSPROP = ("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit")
_OF_BITSANDBYTES = (
    "adamw_8bit", "adamw_bnb_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit",
    "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit",
    *_RMSPROP,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """Keys of a recipe, each with the values that clash: a training with all of them fails. Then what happens.

    `when` says for which recipes.
    """

    settings: Mapping[str, tuple[object, ...]]
    key: str  # that its user would change
    what: str
    fix: str
    when: Callable[[Recipe], bool] = lambda recipe: True

    def is_met(self, value: Callable[[str], object]) -> bool:
        """True if a recipe with `value(key)` for each key has all of the settings."""
        return all(value(key) in values for key, values in self.settings.items())


def _has_own_lm_head(recipe: Recipe) -> bool:
    """True if TRL's loss takes the LM head of the model, and that is known to differ from the input embeddings."""
    by_head = profile(recipe.trainer_name or recipe.trainer).takes_lm_head
    return by_head and text_config(recipe.model).get("tie_word_embeddings") is False


def _enters_again_on_ranks(recipe: Recipe) -> bool:
    """True if several ranks train, and their checkpointing, if any, would be reentrant."""
    asked = StatedLaunch(recipe=recipe)
    ways = (asked.value(f"{key}_kwargs") for key in CHECKPOINTING)
    way = next((value for value in ways if isinstance(value, Mapping)), {})
    return recipe.launch.ranks > 1 and is_on(way.get("use_reentrant"))


def _is_trls(recipe: Recipe) -> bool:
    return profile(recipe.trainer_name or recipe.trainer).of_trl


CLASHES = (
    Clash(  # transformers: generation/utils.py, line 784; continuous_batching/continuous_api.py, line 1211
        settings={SHARDING: ("fsdp2",), OFFLOAD: ("parameters",), "use_vllm": (False,)},
        key=OFFLOAD,
        what="transformers 5.23 moves the inputs of a generation to the host, where the weights are, and the gathered "
             "weights are on the card: it ends with `Expected all tensors to be on the same device`",
        fix="set fsdp_offload_params: false, or generate with vLLM (use_vllm: true)",
    ),
    Clash(  # accelerate/utils/fsdp_utils.py, line 733, sees no norm in a PeftModel; trl/trainer/utils.py, line 1615
        settings={SHARDING: ("fsdp2",), OFFLOAD: ("parameters",), "use_peft": (True,)},
        key=OFFLOAD,
        what="under PEFT accelerate 1.15 makes the LM head a group of its own, which TRL's loss does not gather: it "
             "moves the hidden states to the host, where the head's shard is, and ends with tensors on two devices",
        fix="set fsdp_offload_params: false, or train all weights",
        when=_has_own_lm_head,
    ),
    *(
        Clash(  # peft/tuners/lora/layer.py, line 1098; bf16 seen with torch 2.13's CUDA build
            settings={SHARDING: ("fsdp1",), "use_peft": (True,), half: (True,), "use_vllm": (False,)},
            key=SHARDING,
            what="TRL generates outside of autocast, where PEFT makes an adapter's input float32, as its shard is, and "
                 "FSDP1 its weights 16-bit: a rollout ends with `expected mat1 and mat2 to have the same dtype`",
            fix="set fsdp_version: 2, or --accelerate_config fsdp2",
        )
        for half in ("bf16", "fp16")
    ),
    Clash(  # seen with bitsandbytes 0.50 and torch 2.13; github.com/bitsandbytes-foundation/bitsandbytes/issues/1633
        settings={SHARDING: ("fsdp2",), "optim": _OF_BITSANDBYTES},
        key="optim",
        what="optimizers of bitsandbytes cannot update the shards of FSDP2 (DTensors): it ends with `does not have a "
             "sharding strategy registered` in the first optimizer step",
        fix="set optim: adamw_torch_fused, or adamw_torch_8bit (torchao); or take multi_gpu",
    ),
    Clash(  # seen with bitsandbytes 0.50 and the CUDA build of torch 2.13
        settings={SHARDING: ("fsdp2",), "load_in_8bit": (True,)},
        key="load_in_8bit",
        what="FSDP2 cannot shard weights in 8 bits: it ends with `Creating a Parameter from an instance of type "
             "Int8Params` while it wraps the model",
        fix="take load_in_4bit with bnb_4bit_quant_storage: bfloat16 in its place, or multi_gpu",
    ),
    Clash(  # bitsandbytes 0.50: backends/cuda/ops.py, str2optimizer32bit; seen with the CUDA build of torch 2.13
        settings={"optim": _RMSPROP, "dtype": ("bfloat16",), "use_peft": (False,)},
        key="optim",
        what="bitsandbytes' RMSprop has no kernel for bfloat16 gradients: it ends with `data type combination not "
             "supported` in the first optimizer step",
        fix="set optim: adamw_bnb_8bit, or dtype: float32",
    ),
    *(
        Clash(  # transformers/trainer.py, line 756; seen on two gloo ranks and with the CUDA build of torch 2.13
            settings={
                SHARDING: ("ddp",), "use_peft": (use_peft,), "ddp_find_unused_parameters": looks, checkpoints: (True,),
            },
            key="ddp_find_unused_parameters",
            what="true, as transformers sets it under PEFT, with reentrant checkpointing ends in the first backward "
                 "pass: DDP finds a parameter ready twice",
            fix="set ddp_find_unused_parameters: false, or use_reentrant: false in the checkpointing kwargs",
            when=_enters_again_on_ranks,
        )
        for use_peft, looks in ((True, (None, True)), (False, (True,))) for checkpoints in CHECKPOINTING
    ),
    *(
        Clash(  # trl/trainer/sft_trainer.py, line 911, and its like; seen with the CUDA build of torch 2.13
            settings={"fp16": (True,), "use_peft": (True,), low_bits: (True,)},
            key="fp16",
            what="TRL makes the adapters of a quantised model bfloat16, and the loss scaling of fp16 has no kernel for "
                 "their gradients: it ends with `not implemented for 'BFloat16'` in the first optimizer step",
            fix="set fp16: false, and bf16: true where the card has bfloat16",
            when=_is_trls,
        )
        for low_bits in ("load_in_4bit", "load_in_8bit")
    ),
    *(
        Clash(  # torch/amp/grad_scaler.py, _unscale_grads_; seen on the simulated card, which runs torch's own code
            settings={
                "fp16": (True,), "dtype": (half,), "use_peft": (False,), SHARDING: ("ddp",),
                **dict.fromkeys(("adapter_dtype", "bottleneck", "reft_rank"), (None,)),  # which are float32
            },
            key="fp16",
            what=f"the loss scaling of fp16 needs gradients in float32, and those of {half} weights are {half}: it "
                 f"ends with `{ends}` in the first optimizer step",
            fix="set dtype: float32, or fp16: false, and bf16: true where the card has bfloat16",
        )
        for half, ends in (("float16", "Attempting to unscale FP16 gradients"),
                           ("bfloat16", "not implemented for 'BFloat16'"))
    ),
    Clash(  # vllm/device_allocator/cumem.py, CuMemAllocator; github.com/pytorch/pytorch/issues/147851
        settings={
            "use_vllm": (True,), "vllm_mode": ("colocate",), "vllm_enable_sleep_mode": (True,), GROWING: (GROWS,),
        },
        key=GROWING,
        what="vLLM's sleep mode frees its memory through a pool of torch's, and none has expandable segments: vLLM "
             "ends with `Expandable segments are not compatible with memory pool` as it starts",
        fix="leave it out, or set vllm_enable_sleep_mode: false",
    ),
)  # fmt: skip


def clashes(recipe: Recipe, values: Mapping[str, object] | None = None) -> Iterator[Clash]:
    """Settings that fail in `recipe`, or in its YAML with `values`, if given."""
    changed = recipe.values if values is None else values
    launch = (recipe.launch if values is None else Launch.of(values)).to_values()

    def value(key: str) -> object:
        outer, dot, inner = key.partition(".")
        if outer == LAUNCH:
            return launch.get(inner)
        return inner_value(changed, key) if dot else changed.get(key, recipe.resolved.get(key))

    return (clash for clash in CLASHES if clash.is_met(value) and clash.when(recipe))  # which may read a file


def clashes_of(recipe: Recipe) -> Iterator[Clash]:
    """The clashes that the recipe's trainer and model can have."""
    return (clash for clash in CLASHES if clash.when(recipe))


# -- a launch on several cards: what is wrong with it, or will surprise its user --------------------------------------


def findings(asked: StatedLaunch) -> list[Finding]:
    """All findings, the worst first; for a tool with a launch of its own, accelerate's keys are skipped."""
    accelerates = (
        _known, _started, _hybrid, _broadcast, _packages, _batch, *CHECKS, _checkpointing, _saving, _deepspeed_batch,
        _threads, _clashes,
    )  # fmt: skip
    checks = (*(() if profile(asked.recipe.trainer).own_launch else accelerates), _engine, _cards)
    order = list(Severity)
    return sorted((found for check in checks for found in check(asked)), key=lambda f: order.index(f.severity))


def _known(asked: StatedLaunch) -> Iterator[Finding]:
    """Keys that are misspelt, or lost on their way. Other unknown ones may be of a newer accelerate."""
    for key in asked.config:
        if key not in CONFIG_KEYS:
            close = get_close_matches(str(key), CONFIG_KEYS, n=1, cutoff=0.85)
            yield Finding(  # accelerate/commands/config/config_args.py, from_yaml_file
                severity=Severity.ERROR, where=asked.in_config(str(key)),
                what="accelerate (1.15) refuses a config with a key that it does not know",
                fix=f"write {close[0]}" if close else "remove it",
            )  # fmt: skip
    for section, known in SECTION_KEYS.items():
        inner = asked.config.get(section)
        for key in inner if isinstance(inner, Mapping) else ():
            if key not in known and (close := get_close_matches(str(key), known, n=1, cutoff=0.7)):
                yield Finding(  # accelerate/commands/launch.py, line 1269: an unused argument
                    severity=Severity.WARNING, where=asked.in_config(f"{section}.{key}"),
                    what="accelerate ignores a key that it does not know", fix=f"write {close[0]}",
                )  # fmt: skip
    zero = asked.section("deepspeed_config")
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(f"{key}_device") == "nvme" and zero.get(f"{key}_nvme_path"):
            yield Finding(  # accelerate/utils/launch.py, prepare_deepspeed_cmd_env, sets no such variable
                severity=Severity.WARNING, where=asked.in_config(f"deepspeed_config.{key}_nvme_path"),
                what="accelerate launch does not pass it on: DeepSpeed writes to a folder named none",
                fix=f"export ACCELERATE_DEEPSPEED_{key.upper()}_NVME_PATH, or name a deepspeed_config_file with it",
            )  # fmt: skip


def _started(asked: StatedLaunch) -> Iterator[Finding]:
    """Number of processes that accelerate starts."""
    kind = str(asked.config.get("distributed_type", ""))
    wanted = asked.num_processes or asked.config.get("num_processes", 1)
    if kind == "NO" and isinstance(wanted, int) and wanted > 1:
        # accelerate/commands/launch.py, launch_command: without multi_gpu it is simple_launcher, which starts one
        yield Finding(
            severity=Severity.ERROR, where=asked.in_config("distributed_type"),
            what=f"NO starts one process, whatever num_processes={wanted} says",
            fix="set distributed_type: MULTI_GPU, or take --accelerate_config multi_gpu, fsdp2 or zero3",
        )  # fmt: skip
    if kind == "MULTI_CPU" and isinstance(wanted, int) and wanted > 1 and not asked.config.get("mpirun_config"):
        yield Finding(  # accelerate/commands/launch.py, launch_command: simple_launcher, seen with 1.15
            severity=Severity.ERROR, where=asked.in_config("distributed_type"),
            what=f"accelerate launch starts one process for MULTI_CPU without mpirun_config, not {wanted}",
            fix="start it with torchrun --nproc_per_node, or `autofit promote`, which starts the ranks itself",
        )  # fmt: skip
    if kind in ("MULTI_GPU", "FSDP", "DEEPSPEED") and asked.launch.ranks == 1 and "num_processes" not in asked.config:
        yield Finding(  # accelerate/commands/launch.py: "You need to manually pass in `--num_processes`"
            severity=Severity.ERROR, where=asked.in_config("num_processes"),
            what="it is missing, and accelerate refuses a distributed launch without it",
            fix=f"set it to the number of cards{_or_here(asked)}, or pass --num_processes",
        )  # fmt: skip
    elif kind == "MULTI_GPU" and asked.launch.ranks == 1:
        # the flag --multi_gpu with one process is refused, a config file with both is not (launch.py, line 1208)
        yield Finding(
            severity=Severity.ERROR, where=asked.in_config("num_processes"),
            what="MULTI_GPU with num_processes 1 trains on one card, in a DDP wrapper that costs memory",
            fix=f"set num_processes to the number of cards{_or_here(asked)}, or distributed_type: 'NO'",
        )  # fmt: skip
    cards, each = named_cards(asked.config), asked.launch.ranks // asked.launch.machines
    if kind in ("MULTI_GPU", "FSDP", "DEEPSPEED") and cards not in (None, each):
        yield Finding(  # accelerate/utils/launch.py sets CUDA_VISIBLE_DEVICES to them
            severity=Severity.ERROR, where=asked.in_config("gpu_ids"),
            what=f"it names {cards} card(s) for {each} ranks of a machine, of which each takes one",
            fix=f"name {each}, or write all",
        )  # fmt: skip
    if asked.launch.machines > 1:
        yield Finding(
            severity=Severity.NOTE, where=asked.in_config("num_machines"),
            what=f"num_processes {asked.launch.ranks} counts the ranks of all {asked.launch.machines} machines, "
                 f"{asked.launch.ranks // asked.launch.machines} each; probes and simulations are of one machine",
            fix="start it on every machine, each with its machine_rank and the same main_process_ip",
        )  # fmt: skip


def _or_here(asked: StatedLaunch) -> str:
    return f" (here {asked.cards_here})" if asked.cards_here > 1 else ""


def _hybrid(asked: StatedLaunch) -> Iterator[Finding]:
    """Groups of FSDP1 that are made by the cards that torch sees (torch/distributed/fsdp/_init_utils.py)."""
    strategy, section = sharding_strategy(asked.section("fsdp_config")), asked.section("fsdp_config")
    if asked.launch.sharding != "fsdp1" or not strategy.startswith("HYBRID"):
        return
    where = asked.in_config("fsdp_config.fsdp_sharding_strategy")
    if wrap_policy(section) == "NO_WRAP":
        yield Finding(
            severity=Severity.ERROR, where=where, what=f"torch refuses {strategy} without a wrapping policy",
            fix="set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        )  # fmt: skip
    if 1 < asked.launch.ranks < asked.cards_here and named_cards(asked.config) is None:
        yield Finding(  # new_subgroups: the group must not exceed the world
            severity=Severity.ERROR, where=where,
            what=f"torch makes groups of all {asked.cards_here} visible cards, and refuses {asked.launch.ranks} ranks",
            fix=f"set {asked.launch.sharding_strategy}, the same on one machine, or name the cards with gpu_ids",
        )  # fmt: skip


def _broadcast(asked: StatedLaunch) -> Iterator[Finding]:
    """Weights that rank 0 alone loads and keeps to itself."""
    inner = asked.config.get("fsdp_config")
    fsdp = inner if asked.config.get("distributed_type") == "FSDP" and isinstance(inner, Mapping) else {}
    if fsdp.get("fsdp_cpu_ram_efficient_loading", True) and not fsdp.get("fsdp_sync_module_states", True):
        yield Finding(  # accelerate/utils/launch.py, prepare_multi_gpu_env, whatever the version of FSDP
            severity=Severity.ERROR, where=asked.in_config("fsdp_config.fsdp_sync_module_states"),
            what="accelerate refuses false unless fsdp_cpu_ram_efficient_loading is false too",
            fix="remove it, or set both to false",
        )  # fmt: skip


def _packages(asked: StatedLaunch) -> Iterator[Finding]:
    if asked.launch.is_deepspeeds and find_spec("deepspeed") is None:
        yield Finding(
            severity=Severity.WARNING, where=asked.in_config("distributed_type"),
            what="DEEPSPEED needs the package deepspeed, which is not installed here",
            fix="pip install deepspeed, or take fsdp2, which needs nothing more",
        )  # fmt: skip


def _batch(asked: StatedLaunch) -> Iterator[Finding]:
    """Groups that the ranks fail to share (trl/trainer/grpo_config.py, line 1131)."""
    recipe = asked.recipe
    if not recipe.generates or recipe.num_generations < 1:
        return
    key, group = recipe.keys.group, recipe.num_generations
    for what, samples in (("rollout", recipe.generation_batch_size), ("effective batch", recipe.effective_batch_size)):
        if samples % group:
            near = sorted(divisors(samples))[1:7]
            yield Finding(
                severity=Severity.ERROR, where=asked.in_recipe(str(key)),
                what=f"the {what} of {samples} completions over {recipe.world_size} rank(s) is no multiple of "
                     f"{key}={group}, so a group would be split",
                fix=f"{key} that works: {', '.join(map(str, near))}; or change {recipe.keys.micro_batch}",
            )  # fmt: skip
            return


def _checkpointing(asked: StatedLaunch) -> Iterator[Finding]:
    launch = asked.launch
    key = next((key for key in CHECKPOINTING if asked.recipe.values.get(key) is not None), CHECKPOINTING[1])
    own = is_on(asked.section("fsdp_config").get("fsdp_activation_checkpointing", False))
    if not asked.checkpoints or launch.ranks == 1:
        return
    if launch.sharding.startswith("fsdp") and own:  # transformers/trainer.py, line 879
        yield Finding(
            severity=Severity.ERROR, where=asked.in_config("fsdp_config.fsdp_activation_checkpointing"),
            what=f"true together with the recipe's {key}, which TRL turns on unless told otherwise, is refused after "
                 "the model is loaded",
            fix=f"set {key}: false in the recipe",
        )  # fmt: skip
    elif launch.sharding.startswith("fsdp"):  # transformers/training_args.py, line 2795
        yield Finding(
            severity=Severity.NOTE, where=asked.in_recipe(key),
            what="with FSDP the recipe's own checkpointing gathers the parameters once more in the backward pass",
            fix=f"set {key}: false, and true for {asked.in_config('fsdp_config.fsdp_activation_checkpointing')}",
        )  # fmt: skip


def _saving(asked: StatedLaunch) -> Iterator[Finding]:
    launch = asked.launch
    sharded = launch.sharding != "ddp"
    only_model = is_on(asked.value("save_only_model"))
    if sharded and only_model and is_on(asked.value("load_best_model_at_end")):  # transformers/trainer.py, line 892
        yield Finding(
            severity=Severity.ERROR, where=asked.in_recipe("save_only_model"),
            what=f"with load_best_model_at_end it is refused under {launch.sharding}: the best model is loaded from a "
                 "whole checkpoint",
            fix="set save_only_model: false",
        )  # fmt: skip
    if launch.sharding == "zero3":
        if is_on(asked.value("auto_find_batch_size")):  # transformers/trainer.py, line 901
            yield Finding(
                severity=Severity.ERROR, where=asked.in_recipe("auto_find_batch_size"),
                what="transformers refuses it with ZeRO-3, and it would change the effective batch",
                fix="remove it; `autofit search` finds the micro-batch",
            )  # fmt: skip
        if not is_on(asked.section("deepspeed_config").get("zero3_save_16bit_model", True)):
            yield Finding(  # transformers/trainer.py, save_model
                severity=Severity.WARNING, where=asked.in_config("deepspeed_config.zero3_save_16bit_model"),
                what="false: the model is saved as ZeRO shards, which from_pretrained cannot read",
                fix="set it to true, or run zero_to_fp32.py on each checkpoint",
            )  # fmt: skip
    state = state_dict_type(asked.section("fsdp_config"), launch.sharding)
    if launch.sharding.startswith("fsdp") and "SHARDED" in state:
        where = asked.in_config("fsdp_config.fsdp_state_dict_type")
        if only_model:  # transformers/trainer.py, line 907
            yield Finding(
                severity=Severity.ERROR, where=where, what=f"{state} is refused with save_only_model: true",
                fix="set FULL_STATE_DICT, or save_only_model: false",
            )  # fmt: skip
        else:  # transformers/trainer.py, save_model: only FULL_STATE_DICT is saved
            yield Finding(
                severity=Severity.WARNING, where=where,
                what=f"{state}: the final model is not saved in a form that from_pretrained reads, only shards of "
                     "checkpoints",
                fix="set FULL_STATE_DICT, or merge the shards: accelerate merge-weights",
            )  # fmt: skip


def _deepspeed_batch(asked: StatedLaunch) -> Iterator[Finding]:
    """Values for DeepSpeed in an accelerate config against the recipe's for transformers (trainer_config_finalize)."""
    zero = asked.config.get("deepspeed_config")
    if asked.config.get("distributed_type") != "DEEPSPEED" or not isinstance(zero, Mapping):
        return
    accumulation = asked.recipe.grad_accum_steps
    told = {"gradient_accumulation_steps": accumulation, "gradient_clipping": asked.value("max_grad_norm")}
    for key, own in told.items():
        if own is not None and zero.get(key, "auto") not in ("auto", own):
            yield Finding(
                severity=Severity.ERROR, where=asked.in_config(f"deepspeed_config.{key}"),
                what=f"{zero[key]} here and {own} in the recipe: transformers refuses two values",
                fix=f"remove it here: the recipe's {own} is taken then, and the effective batch stays as it is"
                    if key == "gradient_accumulation_steps" else "remove it here: the recipe's is taken then",
            )  # fmt: skip
    path = zero.get("deepspeed_config_file")
    content = read_json(Path(path)) if isinstance(path, str) else None
    if content is not None and "gradient_accumulation_steps" not in content and accumulation != 1:
        yield Finding(  # accelerate/utils/dataclasses.py, line 1274
            severity=Severity.ERROR, where=f"{path}: gradient_accumulation_steps",
            what=f"it is missing, which accelerate takes for 1, and the recipe has {accumulation}: transformers "
                 "refuses two values",
            fix='write "auto" there, as autofit does in what it writes',
        )  # fmt: skip


def _threads(asked: StatedLaunch) -> Iterator[Finding]:
    """The one thread of a rank whose optimizer is on the host (torch/distributed/run.py, line 872; accelerate too)."""
    launch = asked.launch
    if launch.offload != "none" and launch.ranks > 1 and not launch.flags and not os.environ.get("OMP_NUM_THREADS"):
        yield Finding(
            severity=Severity.WARNING, where="the environment: OMP_NUM_THREADS",
            what="it is not set: each rank gets one thread for the optimizer's step on the host, about 2.3 s for each "
                 "1e9 parameters of a rank (fused AdamW, clipping, float32)",
            fix="export it as the machine's cores by its ranks"
                + (f", or set {THREADS} in the recipe" if launch.sharding.startswith("fsdp") else ""),
        )  # fmt: skip


_OF_FSDP = {OFFLOAD: "fsdp_config.fsdp_offload_params", SHARDING: "fsdp_config.fsdp_version"}


def _clashes(asked: StatedLaunch) -> Iterator[Finding]:
    """Settings that fail together."""
    for clash in clashes(asked.recipe):
        in_config = _OF_FSDP.get(clash.key)
        own = asked.in_recipe(clash.key) if in_config is None else asked.in_config(in_config)
        yield Finding(severity=Severity.ERROR, where=own, what=clash.what, fix=clash.fix)


def _engine(asked: StatedLaunch) -> Iterator[Finding]:
    """Tensor parallel of a colocated vLLM engine."""
    size, ranks = asked.value("vllm_tensor_parallel_size"), asked.launch.ranks
    if not is_on(asked.value("use_vllm")) or not isinstance(size, int) or isinstance(size, bool) or size <= 1:
        return
    where = asked.in_recipe("vllm_tensor_parallel_size")
    if asked.value("vllm_mode") == "server":
        yield Finding(
            severity=Severity.NOTE, where=where, what="it has no effect in server mode",
            fix=f"start the server with --tensor_parallel_size {size}",
        )  # fmt: skip
        return
    heads = attention_heads(asked.recipe.model)
    works = [n for n in range(1, ranks + 1) if ranks % n == 0 and (heads is None or heads % n == 0)]
    if ranks % size:  # trl/generation/vllm_generation.py, line 314
        yield Finding(
            severity=Severity.ERROR, where=where, what=f"{size} must divide the {ranks} rank(s) that share engines",
            fix=f"take one of {', '.join(map(str, works))}",
        )  # fmt: skip
    elif heads is not None and heads % size:
        yield Finding(  # vLLM's ModelConfig.verify_with_parallel_config
            severity=Severity.ERROR, where=where,
            what=f"{size} must divide the {heads} attention heads of {asked.recipe.model}",
            fix=f"take one of {', '.join(map(str, works))}",
        )  # fmt: skip


def _cards(asked: StatedLaunch) -> Iterator[Finding]:
    """Cards that lack access to each other's memory."""
    if asked.launch.ranks > 1 and asked.card.startswith("rtx40"):
        # accelerate/utils/environment.py, check_cuda_p2p_ib_support: "RTX 40" with a driver below 550.40.07
        yield Finding(
            severity=Severity.NOTE, where="the card",
            what=f"{asked.card} has no peer-to-peer copies, so collectives go through host memory; with a driver below "
                 "550.40.07 accelerate refuses to start several ranks",
            fix="start with accelerate launch or trl, which set NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 themselves",
        )  # fmt: skip
