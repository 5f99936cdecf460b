"""ms-swift's command lines and YAML as a recipe of `hf`, or of TRL's GRPO trainer, from which its own one is derived.

Read at 3602360a: swift/arguments (defaults, rules), swift/trainers/arguments.py (batch), swift/cli/main.py (how it is
started), swift/pipelines/train/tuner.py (what is trained), swift/rlhf_trainers. No torch here.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from autofit.errors import ConfigError, quoted
from autofit.frontends import sharing, swift_rules
from autofit.frontends.command import (
    UNSURE,
    Command,
    accelerate_config,
    arguments,
    check_certain,
    commands,
    ranks_in,
    told_ranks,
    visible_cards,
)
from autofit.frontends.draft import Draft, Foreign, Saying, number, said
from autofit.frontends.tools import (
    MS_SWIFT,
    QUANTISED,
    keys_of,
    note_adapters,
    note_swift,
    take,
    take_evaluation,
    take_quantised,
    targets,
)
from autofit.recipe.keys import weight_bits
from autofit.recipe.yaml_file import parse_yaml, read_yaml_mapping

TYPE = "command"  # sft, pt or rlhf, under which the command's arguments are read
_TRAINS = ("sft", "pt", "rlhf", *swift_rules.OLD_COMMANDS)
_LIKE = {"dpo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "simpo", "cpo": "cpo", "rm": "reward",
         "gkd": "gkd", "seq_cls": "classify", "embedding": "embed", "reranker": "rerank",
         "generative_reranker": "rerank"}  # fmt: skip
_NAMED_BY = dict.fromkeys(swift_rules.TASKS, "task_type")  # the argument that names an objective which is no rlhf_type
_SAMPLES = 16  # of an optimizer step over all ranks, where the accumulation is not set
_USUAL_TOKENS = 2048  # of the sample that stands for data without a limit
_ATTENTION = {"flash_attn": "flash_attention_2", "flash_attention_2": "flash_attention_2", "sdpa": "sdpa",
              "flash_attention_3": "flash_attention_3", "eager": "eager"}  # fmt: skip
# pipelines/train/tuner.py, arguments/tuner_args.py: {PEFT's option: (the argument, its default)}. PEFT calls Bone MiSS
_PEFT_TYPES = {"adalora": "ADALORA", "bone": "MISS"}
_ADAPTERS: Mapping[str, Mapping[str, tuple[str, int | float]]] = {
    "adalora": {
        "target_r": ("adalora_target_r", 8), "init_r": ("adalora_init_r", 12), "tinit": ("adalora_tinit", 0),
        "tfinal": ("adalora_tfinal", 0), "deltaT": ("adalora_deltaT", 1), "beta1": ("adalora_beta1", 0.85),
        "beta2": ("adalora_beta2", 0.85), "orth_reg_weight": ("adalora_orth_reg_weight", 0.5),
    },
    "bone": {"r": ("reft_rank", 4)},
}  # fmt: skip
# Types of tuners that are not PEFT's LoRA; `full` and `lora` are simulated.
_TUNERS = ("lora", "full", "longlora", "adalora", "llamapro", "adapter", "vera", "boft", "fourierft", "reft", "bone",
           "ia3", "lora_llm", "swift")  # fmt: skip
_BESIDE = ("llamapro", "adapter", "reft")  # tuners without adapters of PEFT
_DTYPES = ("float16", "bfloat16", "float32")
EMBEDDINGS = ("embed_tokens", "wte", "wpe", "embed_in", "word_embeddings")  # of transformers' causal models
_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
_PLAIN = {"zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
          "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
          "train_micro_batch_size_per_gpu": "auto"}  # fmt: skip
_BUCKETS = {"allgather_bucket_size": 200_000_000, "reduce_bucket_size": 200_000_000}
_AUTO = {"overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1_000_000_000,
         "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
         "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1_000_000_000,
         "stage3_max_reuse_distance": 1_000_000_000}  # fmt: skip
_ON_HOST = {"device": "cpu", "pin_memory": True}
_ZERO: Mapping[str, Mapping[str, object]] = {  # swift/config: what its names mean
    name: {**_PLAIN, "zero_optimization": zero}
    for name, zero in {
        "zero0": {"stage": 0, **_BUCKETS}, "zero1": {"stage": 1, **_BUCKETS}, "zero2": {"stage": 2, **_BUCKETS},
        "zero2_offload": {"stage": 2, "offload_optimizer": _ON_HOST, **_BUCKETS}, "zero3": {"stage": 3, **_AUTO},
        "zero3_offload": {"stage": 3, "offload_optimizer": _ON_HOST, "offload_param": _ON_HOST, **_AUTO},
    }.items()
}  # fmt: skip
_BY_TORCHRUN = frozenset(("NPROC_PER_NODE", "NNODES"))  # variables with which `swift` starts torchrun (cli/main.py)
NOT_STARTED = "no `swift sft`, `swift pt` or `swift rlhf` is started in it, so it does not train"
_FSDP2 = {"version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
          "cpu_ram_efficient_loading": True, "state_dict_type": "SHARDED_STATE_DICT",
          "activation_checkpointing": True}  # fmt: skip


# -- a script ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiftTraining:
    """Arguments of a training that a script starts, with TYPE among them, its ranks, and what to know of the script."""

    values: Mapping[str, object]
    ranks: int | None
    notes: tuple[str, ...] = ()


def training(text: str, *, folder: Path) -> SwiftTraining:
    """The first training that a script starts. Raises ConfigError if it starts none."""
    found = list(started(text))
    if not found and any(command.words[:1] == ("megatron",) for command in commands(text)):
        raise ConfigError("`megatron sft` and `megatron rlhf` train with Megatron, which is not simulated")
    if not found:
        raise ConfigError(NOT_STARTED)
    command, kind, words = found[0]
    values, environment = arguments(words, folder, tool="ms-swift"), dict(command.variables)
    environment |= _env(values)
    swift_rules.check_version(values, kind)
    config = accelerate_config(command.words, folder)
    values = {**sharing.of_accelerate(config), **values}
    notes = (f"the script starts {len(found)} trainings; the first is read",) if len(found) > 1 else ()
    values |= {TYPE: kind, "ENV": environment}
    return SwiftTraining(values=values, ranks=_ranks(command, environment, config), notes=notes)


def of_script(text: str, *, folder: Path, ranks: int | None = None) -> Foreign:
    """The recipe of the first training that a script starts, on its own ranks or those that are told beside it.

    Raises ConfigError where it starts none.
    """
    found = training(text, folder=folder)
    foreign = recipe(found.values, folder=folder, ranks=found.ranks if ranks is None else ranks)
    return replace(foreign, notes=(*foreign.notes, *found.notes))


def started(text: str) -> Iterator[tuple[Command, str, tuple[str, ...]]]:
    """(a command that trains with ms-swift; sft, pt or rlhf; its arguments) of a script."""
    for command in commands(text):
        words = command.words
        if len(words) > 1 and words[0] == "swift" and words[1] in _TRAINS:
            yield command, words[1], words[2:]
            continue
        for place, (word, following) in enumerate(pairwise((*words, ""))):
            if word.rpartition("/")[2] == "swift" and following in _TRAINS:  # behind torchrun, or in a container
                yield command, following, words[place + 2 :]
                break
            kind = next(
                (kind for kind in _TRAINS if word.endswith((f"swift/cli/{kind}.py", f"swift.cli.{kind}"))), None
            )
            if kind is not None:
                yield command, kind, words[place + 1 :]
                break


def _ranks(command: Command, environment: Mapping[str, str], config: Mapping[str, object]) -> int | None:
    """Ranks that the launcher starts: its options, its config, or NPROC_PER_NODE x NNODES of the environment.

    Raises ConfigError where a rank would have several cards, over which ms-swift splits the model.
    """
    told = told_ranks(command.words, config, environment)
    if told is None and "NNODES" in environment and command.words[0] == "swift":
        told = "1", environment["NNODES"]  # torchrun's own ranks of a node
    cards = visible_cards(environment)
    if told is None and command.words[0] in ("accelerate", "deepspeed"):
        return cards if cards and cards > 1 else None
    if told is None and cards and cards > 1:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES names {cards} cards and NPROC_PER_NODE is not set, so ms-swift splits the model "
            "over them (device_map), which is not simulated"
        )
    if told is None:
        return 1 if cards else None
    each = ranks_in((told[0], 1))
    if cards and each and cards % each and command.words[0] == "swift":  # utils/env.py, is_mp
        raise ConfigError(f"ms-swift ends there: {each} ranks (NPROC_PER_NODE) do not divide {cards} visible cards")
    if cards and each and cards >= 2 * each:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES names {cards} cards for {each} ranks, so ms-swift splits the model of each "
            f"over {cards // each} (device_map), which is not simulated"
        )
    return ranks_in(told)


def _env(values: dict[str, object]) -> dict[str, str]:
    given = values.pop("ENV", None)
    return {str(key): str(value) for key, value in given.items()} if isinstance(given, Mapping) else {}


# -- its arguments ----------------------------------------------------------------------------------------------------


def recipe(given: Mapping[str, object], *, folder: Path, ranks: int | None = None) -> Foreign:
    """The recipe of ms-swift's arguments, on `ranks` ranks where these are known. Raises ConfigError."""
    given = dict(given)
    environment = _env(given)
    swift_rules.check_version(given)
    if ranks is None and environment:
        told = told_ranks((), {}, environment)
        ranks = None if told is None else ranks_in(told)
    for name, today in (("train_type", "tuner_type"), ("init_lora_weights", "init_weights")):  # names until 3.x
        if name in given:
            given.setdefault(today, given.pop(name))
    draft = Draft(MS_SWIFT.name, given)
    with draft.told_together():
        return _recipe(draft, folder, ranks, environment)


def _recipe(draft: Draft, folder: Path, ranks: int | None, environment: Mapping[str, str]) -> Foreign:
    kind = _kind(draft)
    if draft.is_on("use_ray"):
        ranks = _ray_ranks(draft, ranks)
    _check_certain(draft)
    draft.put("model_name_or_path", draft.text("model"), "model")
    draft.put("model_revision", draft.text("model_revision"))
    trainer = "grpo" if kind == "grpo" else "hf"
    if trainer == "hf":
        draft.put("objective", _LIKE.get(kind, "sft"), _NAMED_BY.get(kind, "rlhf_type" if kind in _LIKE else TYPE))
    if kind == "seq_cls":
        draft.put("num_labels", draft.whole("num_labels"))
    launch = _launch(draft, folder)
    _batch(draft, kind, ranks)
    swift_rules.shared_sequence(draft, kind, ranks, environment)
    _dtype(draft)
    _tuner(draft)
    if kind == "gkd":
        swift_rules.teacher(draft, _ZERO, folder, launch)
    else:
        swift_rules.ignore_teacher(draft, kind)
    if kind in _NAMED_BY and kind != "seq_cls":
        swift_rules.task(draft, kind, environment)
    length = _length(draft, kind)
    # GRPO with vLLM is a rank of one where nothing started several (rlhf_args.py, _init_grpo)
    started = (
        (ranks or 1) > 1 or not _BY_TORCHRUN.isdisjoint(environment) or (kind == "grpo" and draft.says("use_vllm"))
    )
    if (ranks or 1) > 1 and not launch:
        draft.put("ddp_find_unused_parameters", draft.truth("ddp_find_unused_parameters", None))
    _checkpointing(draft, is_replicated=started and not launch)
    sharded = launch.get("fsdp_config")
    if sharing.checkpoints_itself(launch):  # sft_args.py: FSDP's own alone
        draft.put("gradient_checkpointing", False, "fsdp")
        draft.fixed.add("gradient_checkpointing")
    if sharded and not draft.values.get("gradient_checkpointing"):  # they have no effect then
        draft.fixed.add("gradient_checkpointing_kwargs")
    _others(draft, kind)
    take(draft)
    if swift_rules.evaluates(draft):
        take_evaluation(draft, trainer, usual=1)
    swift_rules.check(draft, kind, ranks)
    draft.ignore((*keys_of(MS_SWIFT.name).without_effect, TYPE))
    strict = not draft.is_on("ignore_args_error")
    note_swift(draft, folder)
    note_adapters(draft, "adapters", "lora_rank", folder)
    if trainer == "hf":  # model/utils.py, get_default_device_map
        draft.put("loads_on_card", True)
    return draft.foreign(trainer, launch=launch, ranks=ranks, prompt_tokens=length, strict=strict)


def _kind(draft: Draft) -> str:
    """sft, pt, or the type of `swift rlhf`. Raises ConfigError for unsupported ones."""
    if draft.given.get("model") is None:
        draft.wrong("--model is missing")
    draft.refuse(keys_of(MS_SWIFT.name).refused)
    task = draft.text("task_type", choices=("causal_lm", *swift_rules.TASKS, "prm"))
    if task == "prm":
        raise ConfigError(f"task_type prm is not simulated; causal_lm, {', '.join(swift_rules.TASKS)} are")
    if draft.whole("lisa_activated_layers", least=0) and draft.given.get("tuner_type") != "full":  # callbacks/lisa.py
        raise ConfigError("lisa_activated_layers needs tuner_type full, as ms-swift says")
    if draft.is_on("use_galore") and not str(draft.given.get("optim", "adamw")).startswith(("adamw", "paged_adamw")):
        raise ConfigError(f"use_galore with optim {draft.given['optim']} is not simulated; with adamw_torch it is")
    if draft.text("tuner_backend") == "unsloth":
        raise ConfigError("tuner_backend unsloth: Unsloth's kernels are not simulated")
    draft.check_model(draft.given.get("model"))
    command = draft.text(TYPE)
    rlhf = draft.text("rlhf_type", "dpo" if command == "rlhf" else None)
    if command in ("sft", "pt") and rlhf is not None:
        draft.wrong(f"rlhf_type is of `swift rlhf`, not of `swift {command}`")
    if task == "seq_cls" and rlhf is None and draft.given.get("num_labels") is None:
        raise ConfigError("num_labels is missing, and ms-swift needs it with task_type seq_cls")
    if task is None and rlhf is None and draft.given.get("num_labels") is not None:  # model_meta.py
        return "seq_cls"
    if task in _NAMED_BY and rlhf is None:  # a head for scores, or none, and no logits of words
        return task
    if rlhf is None:
        return command or "sft"
    if rlhf not in ("grpo", *_LIKE) or rlhf in _NAMED_BY:
        raise ConfigError(
            f"rlhf_type {rlhf} is not simulated; grpo, {', '.join(k for k in _LIKE if k not in _NAMED_BY)} are"
        )
    return rlhf


def _ray_ranks(draft: Draft, told: int | None) -> int | None:
    """The ranks that Ray starts: those of the group of the worker `default` (swift/ray_utils/resource_manager.py).

    Raises ConfigError if roles have groups of their own.
    """
    groups = {name: group for name, group in draft.mapping("device_groups").items() if isinstance(group, Mapping)}
    if [group.get("workers") for group in groups.values()] != [["default"]]:
        raise ConfigError("use_ray is simulated with one group of device_groups, whose only worker is default")
    given = next(iter(groups.values())).get("ranks")
    span = re.fullmatch(r"list\(range\((\d+), ?(\d+)\)\)", str(given))
    if told is not None:
        return told
    if span:
        return int(span[2]) - int(span[1])
    return len(given) if isinstance(given, list) else int(number(given) or 0) or None


def _launch(draft: Draft, folder: Path) -> dict[str, object]:
    if draft.says("deepspeed") and draft.says("fsdp"):
        draft.wrong("fsdp and deepspeed cannot both be given")
    if draft.says("deepspeed"):
        return sharing.zero(draft.given["deepspeed"], folder, _ZERO)
    config = draft.mapping("fsdp_config")
    if draft.given.get("fsdp") == "fsdp2":
        draft.raw("fsdp")
        return sharing.fsdp(True, _FSDP2)
    if not draft.says("fsdp"):
        return {}
    if "fsdp_config" not in draft.given:  # else it is an accelerate config's
        given = draft.given["fsdp"]
        text = str(given)
        whole = given if isinstance(given, Mapping) else parse_yaml(text) if text.lstrip().startswith("{") else None
        content = whole if isinstance(whole, Mapping) else _fsdp_file(text, folder)
        inner = content.get("fsdp_config")
        config = inner if isinstance(inner, Mapping) else {}
        if config.get("activation_cpu_offload"):
            draft.note("activation_cpu_offload: the hidden states stay on the card here: an upper bound")
        return sharing.fsdp(content.get("fsdp", "full_shard auto_wrap"), config, 2)
    return sharing.fsdp(draft.given["fsdp"], config)


def _fsdp_file(given: str, folder: Path) -> Mapping[str, object]:
    """The JSON that `fsdp` names. Raises ConfigError."""
    try:
        path = sharing.near(given, folder, otherwise=sharing.OTHERWISE)
    except sharing.UnreadFileError:
        raise
    except ConfigError as error:
        raise ConfigError(f"fsdp is fsdp2 or a JSON file with fsdp_config in it: {error}") from error
    return read_yaml_mapping(path, what="file")


def _batch(draft: Draft, kind: str, ranks: int | None) -> None:
    """swift/trainers/arguments.py, line 283: the default accumulation makes at least 16 samples over all ranks."""
    micro = draft.whole("per_device_train_batch_size", 1) or 1
    usual = 1 if kind == "grpo" else max(1, math.ceil(_SAMPLES / micro / (ranks or 1)))
    steps = draft.whole("gradient_accumulation_steps", usual) or usual
    if draft.given.get("gradient_accumulation_steps") is None and kind != "grpo" and ranks is None:
        draft.note(f"gradient_accumulation_steps is as many as make {_SAMPLES} samples over all ranks: {steps} on one")
    draft.put("per_device_train_batch_size", micro)
    draft.put("gradient_accumulation_steps", steps)


def _dtype(draft: Draft) -> None:
    """Type of the weights: torch_dtype, with no float32 masters (model_args.py, _init_mixed_precision)."""
    dtype = draft.text("torch_dtype", choices=_DTYPES)
    if dtype is None:
        dtype = "bfloat16"
        draft.note("torch_dtype is the model's own where it is not set, taken as bfloat16")
    draft.put("dtype", dtype, "torch_dtype")
    bf16, fp16 = dtype == "bfloat16", dtype in ("float16", "float32")
    draft.put("bf16", draft.is_on("bf16", bf16) if draft.given.get("bf16") is not None else bf16, "torch_dtype")
    half = draft.is_on("fp16") if draft.given.get("fp16") is not None else fp16
    draft.put("fp16", half or None, "torch_dtype")
    draft.ignore(("bf16", "fp16"))


def _tuner(draft: Draft) -> None:
    kind = draft.text("tuner_type", "lora", choices=_TUNERS) or "lora"
    model = str(draft.given.get("model")).lower()
    if "-fp8" in model:
        raise ConfigError("a model quantised with FP8 is not simulated; quant_method bnb is")
    quantised = next((method for method in QUANTISED if f"-{method}" in model), None)
    if quantised and kind in ("full", *_BESIDE):
        raise ConfigError(f"a model quantised with {quantised.upper()} needs an adapter; set tuner_type: lora")
    if kind not in ("lora", "full", "llamapro", "adapter", "longlora", "reft", *_ADAPTERS):
        raise ConfigError(
            f"tuner_type {kind} is not simulated; full, lora, longlora, llamapro, adapter, reft, "
            f"{', '.join(_ADAPTERS)} are"
        )
    if kind == "longlora":
        draft.note(
            "longlora: attention in groups of a quarter of the tokens is simulated as attention to all: an upper bound "
            "of the time, and of the memory but for copies of one layer's queries, keys and values"
        )
    quantizer, bits = draft.text("quant_method"), draft.whole("quant_bits")
    nested, table = draft.is_on("bnb_4bit_use_double_quant", True), draft.text("bnb_4bit_quant_type", "nf4")
    storage = draft.text("bnb_4bit_quant_storage")
    lora = {key: draft.whole(key, usual) for key, usual in (("lora_rank", 8), ("lora_alpha", 32))}
    dropout, modules = draft.number("lora_dropout", 0.05), _by_name(draft, "target_modules", "all-linear")
    pattern = draft.text("target_regex")
    draft.ignore(("target_parameters",))
    saved, cast = _by_name(draft, "modules_to_save"), draft.text("lora_dtype", choices=_DTYPES)
    dora, stable = draft.is_on("use_dora"), draft.is_on("use_rslora")
    if quantizer is None or bits != 4:
        draft.defaults.pop("bnb_4bit_use_double_quant", None)
        draft.defaults.pop("bnb_4bit_quant_type", None)
    if quantised:
        take_quantised(draft, quantised, str(draft.values["dtype"]))
    elif quantizer is None:
        pass
    elif quantizer != "bnb" or bits not in (4, 8):
        raise ConfigError(f"quant_method {quantizer} with quant_bits {bits} is not simulated; bnb with 4 or 8 is")
    else:
        draft.put(f"load_in_{bits}bit", True, "quant_bits")
        if bits == 4:
            draft.put("use_bnb_nested_quant", nested, "bnb_4bit_use_double_quant")
            draft.put("bnb_4bit_quant_type", table)
            draft.put("bnb_4bit_quant_storage", storage)
    if kind == "llamapro":
        _llamapro(draft)
    elif kind in ("adapter", "reft"):
        _beside_layers(draft, kind)
    elif layers := draft.whole("lisa_activated_layers", least=0):
        _lisa(draft, layers)
    if kind in ("full", *_BESIDE):
        for key in ("lora_rank", "lora_alpha", "lora_dropout", "target_modules"):
            draft.defaults.pop(key, None)
        return
    draft.put("use_peft", True, "tuner_type")
    if dropout is not None and not 0 <= dropout <= 1:
        draft.wrong(f"lora_dropout must be 0 to 1; got {dropout}")
    if kind in _ADAPTERS:
        if "objective" not in draft.values:
            raise ConfigError(f"tuner_type {kind} with rlhf_type grpo is not simulated; lora is")
        options = {
            ours: draft.whole(key, usual, least=0) if isinstance(usual, int) else draft.number(key, usual)
            for ours, (key, usual) in _ADAPTERS[kind].items()
        }
        draft.put("peft_adapter", {"peft_type": _PEFT_TYPES[kind], **options}, "tuner_type")
        draft.fixed.update(("lora_r", "use_peft"))
        draft.defaults.pop("lora_rank", None)
    draft.put("lora_r", lora["lora_rank"], "lora_rank")
    draft.put("lora_alpha", lora["lora_alpha"])
    draft.put("lora_dropout", dropout)
    if pattern is not None:
        draft.put("lora_target_modules", [pattern], "target_regex")
    elif modules is not None:
        draft.put("lora_target_modules", targets(draft, modules, "target_modules"), "target_modules")
    draft.put("lora_target_parameters", draft.names("target_parameters"), "target_parameters")
    draft.put("lora_modules_to_save", saved, "modules_to_save")
    draft.put("use_dora", dora or None)
    draft.put("use_rslora", stable or None)
    if cast == "float16":  # tuner.py casts trained weights in float16, which a scaler of gradients does not take
        cast = "float32"
    if "objective" in draft.values:
        draft.put("adapter_dtype", cast or "float32", "lora_dtype")
    elif cast == "bfloat16":
        draft.note("lora_dtype bfloat16: adapters in float32 are simulated: an upper bound")


def _by_name(draft: Draft, key: str, usual: str | None = None) -> list[str] | None:
    """Names of modules, with those of embeddings in place of `all-embedding` (tuner.py, get_target_modules)."""
    names = draft.names(key, usual)
    if names is None:
        return None
    if draft.given.get("tuner_type") in ("full", *_BESIDE):
        return names  # without effect
    if "," in str(draft.given.get(key)) and not isinstance(draft.given.get(key), list):
        draft.wrong(f"{key} must be names with spaces between them; got {quoted(draft.given[key])}")
    if names == ["ALL"]:
        draft.wrong(f"{key} ALL, of ms-swift 2, is all-linear today")
    if "all-norm" in names or (len(names) > 1 and "all-linear" in names):
        raise ConfigError(f"{key} {' '.join(names)} is not simulated; write the modules' own names")
    return [name for each in names for name in (EMBEDDINGS if each == "all-embedding" else (each,))]


def _lisa(draft: Draft, layers: int) -> None:
    """swift/callbacks/lisa.py freezes all layers but some, and keeps all outside of the layers trainable."""
    if "objective" not in draft.values:
        draft.note("LISA, which trains changing layers, is simulated as training of all: an upper bound")
        return
    draft.put("trainable_layers", layers, "lisa_activated_layers")
    draft.put("trains_rest", True, "lisa_activated_layers")
    draft.note(f"LISA trains {layers} changing layers; the last {layers} and their optimizer's state are simulated")


def _beside_layers(draft: Draft, kind: str) -> None:
    """swift/tuners/adapter.py, behind the MLP of every layer, or swift/tuners/reft.py, behind every layer."""
    if "objective" not in draft.values:
        raise ConfigError(f"tuner_type {kind} with rlhf_type grpo is not simulated; lora is")
    draft.fixed.add("use_peft")
    if kind == "adapter":
        draft.put("bottleneck", draft.whole("adapter_length", 128), "adapter_length")
        return
    intervention = draft.text("reft_intervention_type", "LoreftIntervention")
    if intervention != "LoreftIntervention" or draft.says("reft_layers"):
        raise ConfigError("tuner_type reft is simulated with LoreftIntervention at all layers")
    draft.put("reft_rank", draft.whole("reft_rank", 4))


def _llamapro(draft: Draft) -> None:
    """swift/tuners/llamapro.py. Raises ConfigError for settings that its own trainer, or ours, refuses."""
    blocks, groups = draft.whole("llamapro_num_new_blocks", 4), draft.whole("llamapro_num_groups")
    if groups not in (None, blocks):
        raise ConfigError("llamapro_num_groups is simulated where it equals llamapro_num_new_blocks; omit it")
    if weight_bits(draft.values) or "objective" not in draft.values:
        raise ConfigError("tuner_type llamapro is not simulated with quant_method or rlhf_type grpo")
    draft.put("added_layers", blocks, "llamapro_num_new_blocks")
    if draft.values["dtype"] == "float16":  # tuner.py casts trained weights
        draft.put("adapter_dtype", "float32", "tuner_type")
    draft.fixed.update(("use_peft", "load_in_4bit", "load_in_8bit"))


def _length(draft: Draft, kind: str) -> int:
    """Tokens of the sample that stands for the data."""
    length, packed = draft.whole("max_length"), draft.whole("packing_length")
    packing = draft.is_on("packing")
    if packing and length is None and packed is None:
        raise ConfigError("packing fills rows to the model's own limit where max_length is not set; set one")
    if packing and kind == "dpo":
        return _packed_pairs(draft, packed or length or 0)
    if packing and kind not in ("sft", "pt", "gkd"):
        raise ConfigError(f"packing with {_NAMED_BY.get(kind, 'rlhf_type')} {kind} is not simulated; omit it")
    if kind == "grpo":
        if length is None:
            length = 512
            draft.note(
                "max_length is not set, so prompts of 512 tokens stand for the data; --prompt-tokens N says others"
            )
        return length
    if packing and packed:
        length = packed
    if length is None:
        length = _USUAL_TOKENS
        draft.note(
            f"max_length is not set, and ms-swift takes the model's own limit: samples of {length:,} tokens stand for "
            "the data; --prompt-tokens N says others"
        )
    if kind == "gkd":
        length = swift_rules.lengthened(draft, length)
    draft.put("max_length", length)
    if packing:
        draft.put("packing", True)
        draft.put("block_diagonal", True, "packing")
    return length


def _packed_pairs(draft: Draft, length: int) -> int:
    """Tokens of each answer of the one pair that stands for a packed row of `length` tokens."""
    half = max(1, length // 2)
    draft.put("max_length", half)
    draft.fixed.add("max_length")
    draft.note(
        f"a packed row of {length:,} tokens is simulated as one pair of answers of {half:,} tokens each, which has as "
        "many logits; attention is to more tokens than in shorter samples: an upper bound"
    )
    return half


def _checkpointing(draft: Draft, *, is_replicated: bool) -> None:
    """Re-entrant checkpointing but under DDP (swift/trainers/mixin.py, _fix_gradient_checkpointing)."""
    draft.put("gradient_checkpointing", draft.is_on("gradient_checkpointing", True))
    kwargs = dict(draft.mapping("gradient_checkpointing_kwargs"))
    if kwargs.get("use_reentrant") is None:
        kwargs["use_reentrant"] = not is_replicated
        draft.defaults["gradient_checkpointing_kwargs"] = kwargs
    draft.put("gradient_checkpointing_kwargs", kwargs)


def _others(draft: Draft, kind: str) -> None:
    if kind in _LIKE and kind not in _NAMED_BY and draft.is_on("disable_dropout", True):  # rlhf_trainers/rlhf_mixin.py
        draft.without_dropout("disable_dropout")
    attention = draft.text("attn_impl")
    if attention is not None and attention not in _ATTENTION:
        draft.note(f"attn_impl {attention} is simulated as PyTorch's own attention (sdpa)")
    draft.put("attn_implementation", _ATTENTION.get(attention or ""), "attn_impl")
    if draft.is_on("use_liger_kernel"):
        draft.put("use_liger_kernel", True)
    kept = draft.raw("use_logits_to_keep")
    whole = kind == "gkd" and "answer_tokens" not in draft.values
    if (
        (kind in ("sft", "pt", "dpo", "kto") or whole)
        and kept is not False
        and not draft.values.get("use_liger_kernel")
    ):
        draft.note("ms-swift makes logits from the first token of an answer on, and here of all: an upper bound")
    loss = draft.raw("loss_type")
    beta = draft.number("beta")
    if kind in ("gkd", *swift_rules.TASKS):
        pass
    elif kind == "dpo":
        if loss not in (None, "sigmoid", "hinge", "ipo", ["sigmoid"]):
            draft.note(f"loss_type {loss} is simulated as sigmoid, on the same logits")
        draft.put("beta", beta if beta is not None else 0.1, "beta")
    elif kind in _LIKE and kind != "rm":
        _answers(draft, kind, loss, beta)
    if kind == "grpo":
        _grpo(draft, loss, beta)
    elif kind in ("sft", "pt") and loss not in (None, "cross_entropy"):
        if not draft.says("external_plugins") and loss not in swift_rules.LOSSES:  # swift/loss/mapping.py
            raise ConfigError(f"loss_type {loss} ends with an error in ms-swift, which has no such loss; omit it")
        raise ConfigError(f"loss_type {loss} is not simulated; cross_entropy is")
    draft.name(keys_of(MS_SWIFT.name).noted)
    draft.ignore(("use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size",
                  "vllm_max_model_len", "sleep_level", "num_generations", "num_iterations", "generation_batch_size",
                  "steps_per_generation", "max_completion_length"))  # fmt: skip


def _answers(draft: Draft, kind: str, loss: object, beta: float | None) -> None:
    """KTO, ORPO, SimPO and CPO (swift/rlhf_trainers, arguments/rlhf_args.py), derived from TRL's."""
    usual = 2.0 if kind == "simpo" else 0.1
    if beta is None:
        draft.defaults["beta"] = usual
    draft.put("beta", usual if beta is None else beta)
    if loss not in (None, "kto", "orpo", "simpo", "sigmoid", [kind]):
        draft.note(f"loss_type {loss} is simulated as {kind}, on the same logits")
    weight, gamma = draft.number("cpo_alpha", 1.0), draft.number("simpo_gamma", 1.0)
    if kind == "orpo":
        draft.put("nll_weight", 1.0, "rlhf_type")
    elif kind != "kto":
        draft.put("nll_weight", weight, "cpo_alpha")
    if kind == "simpo":
        draft.put("simpo_gamma", gamma)
    for key, kinds in (("cpo_alpha", ("cpo", "simpo")), ("simpo_gamma", ("simpo",))):
        if kind not in kinds:
            draft.defaults.pop(key, None)


def _grpo(draft: Draft, loss: object, beta: float | None) -> None:
    """swift/arguments/rlhf_args.py; its trainer is derived from TRL's."""
    draft.put("num_generations", draft.whole("num_generations", 8))
    longest = (
        draft.whole("response_length") or draft.whole("max_new_tokens") or draft.whole("max_completion_length", 512)
    )
    draft.put("max_completion_length", longest)
    draft.put("num_iterations", draft.whole("num_iterations"))
    draft.put("generation_batch_size", draft.whole("generation_batch_size"))
    draft.put("steps_per_generation", draft.whole("steps_per_generation"))
    if beta is None:
        draft.defaults["beta"] = 0.04
    draft.put("beta", 0.04 if beta is None else beta)
    if loss in (None, *_LOSSES):
        draft.put("loss_type", loss or "grpo", "loss_type")
    else:
        draft.note(f"loss_type {loss} is simulated as grpo, on the same log-probabilities")
        draft.put("loss_type", "grpo", "loss_type")
    draft.put("reward_funcs", ["think_format_reward"], "reward_funcs")
    if draft.is_on("use_vllm"):
        mode = draft.text("vllm_mode", choices=("colocate", "server"))
        draft.put("use_vllm", True)
        draft.put("vllm_mode", mode)
        draft.put("vllm_max_model_length", draft.whole("vllm_max_model_len"), "vllm_max_model_len")
        if mode == "colocate":
            draft.put("vllm_gpu_memory_utilization", draft.number("vllm_gpu_memory_utilization", 0.9))
            draft.put("vllm_tensor_parallel_size", draft.whole("vllm_tensor_parallel_size", 1))
            draft.put("vllm_enable_sleep_mode", (draft.whole("sleep_level", least=0) or 0) > 0, "sleep_level")


def _words(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _check_certain(draft: Draft) -> None:
    known = keys_of(MS_SWIFT.name).without_effect | keys_of("transformers").without_effect
    check_certain([key for key, value in draft.given.items() if UNSURE in _words(value) and key not in known])


# -- back in its own arguments ----------------------------------------------------------------------------------------


def say(foreign: Foreign, changes: Mapping[str, object]) -> dict[str, object]:
    """{argument of ms-swift: value} of changes of a recipe. Raises ConfigError for one that it has none for."""
    names = {ours: theirs for theirs, ours in _ATTENTION.items() if theirs != "flash_attn"}
    checkpoints = changes.get("gradient_checkpointing", foreign.values.get("gradient_checkpointing", True))
    own: dict[str, Saying] = {
        **dict.fromkeys(("objective", "bf16", "fp16", "adapter_dtype", "packing", "block_diagonal", "reward_funcs")),
        "dtype": "torch_dtype",
        "attn_implementation": lambda value: {"attn_impl": names[str(value)]} if value in names else None,
        "load_in_4bit": lambda value: {"quant_method": "bnb", "quant_bits": 4} if value else None,
        "load_in_8bit": lambda value: {"quant_method": "bnb", "quant_bits": 8} if value else None,
        "use_liger_kernel": "use_liger_kernel",
        "lora_r": "lora_rank",
        "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout",
        "lora_target_modules": "target_modules",
        "optim": "optim",
        "use_peft": lambda value: {"tuner_type": "lora"} if value else None,
        "vllm_enable_sleep_mode": lambda value: {"sleep_level": 1 if value else 0},
        "peft_adapter": None,
        "launch.sharding": lambda value: _sharding(foreign.launch, str(value), checkpoints=bool(checkpoints)),
        "launch.reshard_after_forward": lambda value: {} if value and not foreign.launch else None,  # as fsdp2 does
    }  # fmt: skip
    return said(foreign, changes, own)


def _sharding(launch: Mapping[str, object], value: str, *, checkpoints: bool) -> dict[str, object] | None:
    """The argument for this sharding, if there is one, and no other one stands in its way.

    The name fsdp2 turns FSDP's own checkpoints on (swift/config/fsdp2.json); without them its content is written out.
    """
    if value == "fsdp2" and not launch:
        inner = {"fsdp_" * (key == "version") + key: given for key, given in _FSDP2.items()}
        content = {"fsdp": "full_shard auto_wrap", "fsdp_config": {**inner, "activation_checkpointing": False}}
        return {"fsdp": "fsdp2" if checkpoints else json.dumps(content)}
    return {"deepspeed": value} if value in _ZERO and not launch.get("fsdp_config") else None
