"""Findings: what is wrong with a launch, with settings that clash, with the memory of cards and host. No torch here.

Sources as in `launch_findings.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import cast

from autofit.recipe.catalogue import text_config
from autofit.recipe.keys import GROWING, GROWS, LAUNCH, QUANT_STORAGE, SYNC_EACH_BATCH
from autofit.recipe.launch import Launch, is_on, wrap_policy
from autofit.recipe.launch_keys import place
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
        """Whether the training does not run as asked."""
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
        """A section of the accelerate config, such as fsdp_config, with what the recipe changes; {} without it."""
        found = {**self.config, **self.launch.config}.get(name)
        return cast("Mapping[str, object]", found) if isinstance(found, Mapping) else {}

    def value(self, key: str) -> object:
        """The recipe's value of a key, defaults included."""
        return self.recipe.resolved.get(key, self.recipe.values.get(key))

    @property
    def checkpoints(self) -> bool:
        """Whether the recipe checkpoints activations."""
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
        """Where the user says a key of an accelerate config: there, or in the recipe."""
        if key == "num_processes" and self.num_processes is not None:
            return "--num_processes"
        return place(key, self.values, file=self.file, config=self.config, config_name=self.config_name)


_FLOATS = ("bfloat16", "float16", "float32")


def _wrapped(asked: StatedLaunch) -> Iterator[Finding]:
    """FSDP without a policy makes the model one group (accelerate, fsdp2_prepare_auto_wrap_policy)."""
    section, weights = asked.section("fsdp_config"), asked.gathered_bytes
    if asked.launch.sharding.startswith("fsdp") and section and wrap_policy(section) == "NO_WRAP":
        size = "" if weights is None else f", {format_bytes(weights)}"
        yield Finding(
            severity=Severity.WARNING, where=asked.in_config("fsdp_config.fsdp_auto_wrap_policy"),
            what=f"without a policy the model is sharded in one piece: each card gathers all its weights at once{size}",
            fix="set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, which gathers a layer at a time",
        )  # fmt: skip


def _loading(asked: StatedLaunch) -> Iterator[Finding]:
    """What each rank loads into host memory, and onto which cards."""
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
    """DeepSpeed without ZeRO, which holds more than DDP (deepspeed 0.19, runtime/fp16/unfused_optimizer.py)."""
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
    """A reference model that FSDP2 gathers whole (trl/models/utils.py, prepare_fsdp: fully_shard without a policy)."""
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
    """4-bit weights whose storage cannot be sharded."""
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
    """The type of a training's mixed precision; without it, that of its weights."""
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
        """Whether a recipe with `value(key)` for each key has all of the settings."""
        return all(value(key) in values for key, values in self.settings.items())


def _has_own_lm_head(recipe: Recipe) -> bool:
    """Whether TRL's loss takes the LM head of the model, and that is known not to be the input embeddings."""
    by_head = profile(recipe.trainer_name or recipe.trainer).takes_lm_head
    return by_head and text_config(recipe.model).get("tie_word_embeddings") is False


def _enters_again_on_ranks(recipe: Recipe) -> bool:
    """Whether several ranks train, and what checkpointing there is would be reentrant."""
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
    """What fails in `recipe`, or where its YAML has `values`, in them."""
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
