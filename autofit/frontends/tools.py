"""Common parts of the readers of LLaMA-Factory, Axolotl and ms-swift: defaults, DeepSpeed's files, scripts.

Read at LLaMA-Factory ff6d4d12, Axolotl 067b021c and ms-swift 3602360a. No torch here.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

import yaml

from autofit.errors import ConfigError, nearest, quoted
from autofit.files import TornFile, read_json
from autofit.frontends.command import (
    UNSURE,
    Command,
    accelerate_config,
    arguments,
    certain,
    check_certain,
    commands,
    started_ranks,
    told_ranks,
)
from autofit.frontends.draft import Draft, Explanation, Line
from autofit.frontends.sharing import fsdp, near, of_accelerate, zero
from autofit.recipe.keys import evaluates
from autofit.recipe.yaml_file import may_read, parse_yaml, read_yaml_mapping

# Which tool a YAML of training settings is of, told by keys that no other has. No torch here.
#
# The keys are those of the tools' own dataclasses and schemas, read at LLaMA-Factory ff6d4d12
# (src/llamafactory/hparams), Axolotl 067b021c (src/axolotl/utils/schemas), ms-swift 3602360a (swift/arguments) and verl
# 1dda039b (verl/trainer/config); TRL 1.16 and the other tools have none of them.

_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # owner/name
_LEAST = 2  # own keys, so that one misspelt key of a recipe does not make it another tool's


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool: keys of which each of its files has at least one, and more that are its own."""

    name: str
    needs: tuple[str, ...]
    own: tuple[str, ...]
    sharers: tuple[str, ...] = ()  # keys that say over how many ranks the tokens of a sample are spread

    def keys_in(self, values: Mapping[str, object]) -> tuple[str, ...]:
        """The tool's own keys in a file, those that it needs first; () if all of these are missing.

        Keys over mappings count for verl alone: `model:` with a name inside is a file of somebody's own.
        """
        needed = [key for key in self.needs if key in values]
        needed = [key for key in needed if self.name == "verl" or not isinstance(values[key], Mapping)]
        return (*needed, *(key for key in self.own if key in values)) if needed else ()


VERL = Tool(name="verl", needs=("actor_rollout_ref",), own=("critic", "algorithm", "trainer", "reward_model"))
LLAMA_FACTORY = Tool(
    name="LLaMA-Factory", needs=("stage", "finetuning_type", "cutoff_len"),
    own=("template", "lora_target", "dataset_dir", "neat_packing", "pref_beta", "pref_loss", "quantization_bit",
         "quantization_method", "preprocessing_num_workers", "overwrite_cache", "plot_loss", "val_size", "flash_attn",
         "enable_liger_kernel", "max_samples", "freeze_vision_tower", "adapter_name_or_path", "pure_bf16",
         "disable_gradient_checkpointing", "use_unsloth", "image_max_pixels", "video_max_pixels", "model_class",
         "dist_config", "kernel_config", "sample_backend", "quant_config"),
)  # fmt: skip
AXOLOTL = Tool(
    name="Axolotl", needs=("base_model",),
    own=("micro_batch_size", "sequence_len", "adapter", "sample_packing", "pad_to_sequence_len", "val_set_size",
         "num_epochs", "optimizer", "lora_target_linear", "dataset_prepared_path", "train_on_inputs", "lr_scheduler",
         "flash_attention", "saves_per_epoch", "evals_per_epoch", "rl", "special_tokens", "lora_model_dir",
         "pretraining_dataset"),
    sharers=("context_parallel_size", "sequence_parallel_degree"),
)  # fmt: skip
MS_SWIFT = Tool(
    name="ms-swift", needs=("model",),
    own=("tuner_type", "train_type", "rlhf_type", "split_dataset_ratio", "torch_dtype", "target_modules", "attn_impl",
         "quant_bits", "quant_method", "freeze_vit", "freeze_aligner", "model_author", "truncation_strategy",
         "load_from_cache_file", "external_plugins", "lazy_tokenize", "loss_scale", "val_dataset", "system"),
    sharers=("sequence_parallel_size",),
)  # fmt: skip
TOOLS = (VERL, LLAMA_FACTORY, AXOLOTL, MS_SWIFT)


def tool_of(values: Mapping[str, object]) -> Tool | None:
    """The tool whose file has these `values`, if exactly one tool has two own keys in it."""
    found = tools_of(values)
    return found[0] if len(found) == 1 else None


def tools_of(values: Mapping[str, object]) -> tuple[Tool, ...]:
    """The tools that have two own keys or more in these `values`."""
    if "actor_rollout_ref" in values:
        return (VERL,)
    return tuple(tool for tool in TOOLS if len(tool.keys_in(values)) >= _LEAST)


_ACCUMULATION, _MICRO = "gradient_accumulation_steps", "per_device_train_batch_size"
# Micro-batch key and its default. LLaMA-Factory: transformers' TrainingArguments; Axolotl: schemas/training.py;
# ms-swift: swift/trainers/arguments.py, line 129.
_MICRO_BATCH = {LLAMA_FACTORY.name: (_MICRO, 8), AXOLOTL.name: ("micro_batch_size", 1), MS_SWIFT.name: (_MICRO, 1)}
# The key that names the trainer, and its default (finetuning_args.py; schemas/config.py; rlhf_args.py).
_TRAINER = {
    LLAMA_FACTORY.name: ("stage", "sft"), AXOLOTL.name: ("rl", "sft"), MS_SWIFT.name: ("rlhf_type", "sft or pt"),
}  # fmt: skip
_OTHER_TRAINERS = ("process_reward_model", "reward_model", "task_type")  # keys that name it where that one does not
# Engines of LLaMA-Factory with batches of their own, and keys of its new trainer, which has another batch.
_OTHER_BATCH = ("use_mca", "use_megatron_bridge", "use_hyper_parallel", "model_class", "dist_config")


def explain(tool: Tool, values: Mapping[str, object], *, ranks: int | None = None) -> Explanation:
    """The trainer and the batch of a file of `tool`, on `ranks` data-parallel ranks where these are known."""
    keys = ", ".join(tool.keys_in(values)[:4])
    lines = [
        Line("tool", f"{tool.name}, by its keys {keys}" if keys else f"{tool.name}, by its command"),
        Line("trainer", _trainer(tool, values)),
        Line("effective batch", _effective(tool, values, ranks)),
    ]
    return Explanation(tool=tool.name, lines=tuple(lines))


def batch_sentence(tool: Tool, values: Mapping[str, object]) -> str:
    """The trainer and the effective batch in half a sentence."""
    return f"{_trainer(tool, values)}; the effective batch is {_effective(tool, values, None)}"


def _trainer(tool: Tool, values: Mapping[str, object]) -> str:
    key, usual = _TRAINER[tool.name]
    if values.get(key) is not None:
        return f"{key} {values[key]}"
    others = () if tool is LLAMA_FACTORY else _OTHER_TRAINERS
    other = next((each for each in others if values.get(each)), None)
    if other is not None:
        return f"{other} {_shown(values[other])}"
    if (command := values.get("command")) in ("sft", "pt"):  # of a script of ms-swift
        return f"swift {command}"
    return f"{key} dpo (the default)" if command == "rlhf" else f"{usual} (no {key} in it)"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _effective(tool: Tool, values: Mapping[str, object], ranks: int | None) -> str:
    if tool is LLAMA_FACTORY and (values.get("stage") == "ppo" or any(values.get(key) for key in _OTHER_BATCH)):
        return "not known: PPO, Megatron and the new trainer (v1) have batches of their own"
    key, usual = _MICRO_BATCH[tool.name]
    micro = _whole(values.get(key, usual))
    if micro is None:
        return f"not known: {key} must be a whole number"
    accumulation, said = _accumulation(tool, values, micro, ranks)
    if accumulation is None:
        return f"{key} {micro}{'' if key in values else ' (the default)'} x {said}"
    each = f"{key} {micro}{'' if key in values else ' (the default)'} x {said} = {micro * accumulation} samples"
    if ranks is None:
        return f"{each} on each data-parallel rank"
    sharers, shared = _sharers(tool, values)
    if sharers > 1 and ranks % sharers == 0:
        of = ranks // sharers
        return f"{each} x {of} ({ranks} ranks / {shared} {sharers}) = {micro * accumulation * of}"
    return f"{each} x {ranks} rank{'s' if ranks > 1 else ''} = {micro * accumulation * ranks}"


def _sharers(tool: Tool, values: Mapping[str, object]) -> tuple[int, str]:
    """(ranks that have parts of the same samples, the key that says so): 1 where each has samples of its own."""
    return max(((_whole(values.get(key)) or 1, key) for key in tool.sharers), default=(1, ""))


def _accumulation(
    tool: Tool, values: Mapping[str, object], micro: int, ranks: int | None
) -> tuple[int | None, str]:  # fmt: skip
    """(the accumulation, its origin in words); None if it depends on values outside the file."""
    given = values.get(_ACCUMULATION)
    if given is not None:
        return _whole(given), f"{_ACCUMULATION} {given}"
    total = _whole(values.get("batch_size"))
    if tool is AXOLOTL and total is not None and _ACCUMULATION in values:  # set to nothing: normalize_config divides
        return total // micro, f"{total // micro}, from batch_size {total}"
    if tool is MS_SWIFT and values.get("rlhf_type") != "grpo":  # swift/trainers/arguments.py, line 283
        if ranks is None:
            return None, f"as many as make 16 samples or more over all ranks ({_ACCUMULATION} is not set)"
        steps = max(1, math.ceil(16 / micro / ranks))
        alone = _sharers(tool, values)[0] == 1  # it counts all ranks, also those that share their samples
        return steps, f"{steps}, with which ms-swift makes 16 samples or more" if alone else f"{steps}, ms-swift's own"
    return 1, f"{_ACCUMULATION} 1 (the default)"


def _whole(given: object) -> int | None:
    return given if isinstance(given, int) and not isinstance(given, bool) and given > 0 else None


# -- keys that no reader looks at one by one, by what they do to memory (keys.yaml) -----------------------------------
# LLaMA-Factory and ms-swift take the keys of transformers' TrainingArguments too.


# The same key in our recipe: the optimizer, its schedule, precision, and what trains how long.
SAME = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "num_train_epochs",
    "max_steps", "lr_scheduler_type", "warmup_steps", "seed", "optim_args", "neftune_noise_alpha",
    "torch_empty_cache_steps", "label_smoothing_factor", "gradient_checkpointing_kwargs",
    "average_tokens_across_devices",
)  # fmt: skip
# What stands for a model that is quantised already: NF4 takes 0.5 bytes a weight and 4 bytes for each block of 64.
_LIKE_NF4 = (
    "weights (0.52 bytes each in groups of 128) are simulated as bitsandbytes' NF4 (0.5625 bytes each), and what its "
    "kernels unpack as one matrix in 16 bits"
)
QUANTISED = {
    "gptq": f"GPTQ's {_LIKE_NF4}",
    "awq": f"AWQ's {_LIKE_NF4}",
    "aqlm": "AQLM's weights of 2 bits are simulated as bitsandbytes' NF4 (4.5 bits each): an upper bound",
}
# Optimizers by transformers' own names (training_args.py, OptimizerNames) whose states are simulated.
OPTIMIZERS = (
    "adamw_torch", "adamw_torch_fused", "adafactor", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "sgd",
    "adagrad", "adamw_bnb_8bit", "adamw_8bit", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit",
    "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit",
    "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "stable_adamw", "schedule_free_adamw",
    "schedule_free_radam", "schedule_free_sgd",
)  # fmt: skip
_RENAMED = {"adamw_hf": "adamw_torch"}  # removed from transformers; the same states


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolKeys:
    """The keys of one tool: refused ones with the reason, noted ones with their effect, and irrelevant ones."""

    refused: Mapping[str, str] = field(default_factory=dict)
    noted: Mapping[str, str]
    without_effect: frozenset[str]
    plugins: Mapping[str, str] = field(default_factory=dict)  # Axolotl's, by their class: the effect, or ""

    def take(self, draft: Draft) -> None:
        """Name those that have an effect, and ignore the irrelevant ones."""
        draft.name(self.noted)
        draft.ignore(self.without_effect)


def keys_of(tool: str) -> ToolKeys:
    """The keys of a tool by its name, or of "transformers"."""
    return _all()[tool]


@cache
def _all() -> Mapping[str, ToolKeys]:
    text = resources.files("autofit.frontends").joinpath("keys.yaml").read_text(encoding="utf-8")
    content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  (a SafeLoader)
    return {
        tool: ToolKeys(**{**keys, "without_effect": frozenset(keys["without_effect"].split())})
        for tool, keys in content.items()
    }


def take(draft: Draft) -> None:
    """Take the keys with the same meaning in transformers, and ignore or name the others. The batch's stay."""
    keys = keys_of("transformers")
    draft.refuse(keys.refused)
    draft.same(*SAME)
    take_optimizer(draft, "optim", "adafactor" if draft.is_on("adafactor") else "adamw_torch_fused")
    keys.take(draft)


def take_quantised(draft: Draft, method: str, compute: str) -> None:
    """A model that is quantised already, by `method`, as one of bitsandbytes in 4 bits."""
    draft.put("load_in_4bit", True, "quantization_bit")
    draft.put("use_bnb_nested_quant", False)
    draft.put("bnb_4bit_quant_type", "nf4")
    draft.put("bnb_4bit_quant_storage", compute)
    draft.note(QUANTISED[method])


def take_optimizer(draft: Draft, key: str, usual: str) -> None:
    """The optimizer that `key` names. Raises ConfigError for one with unsupported states."""
    name = draft.text(key, usual) or usual
    name = _RENAMED.get(name, name)
    if name not in OPTIMIZERS:
        raise ConfigError(f"{key}: the states of the optimizer {name} are not simulated{nearest(name, OPTIMIZERS)}")
    draft.put("optim", name, key)


def targets(draft: Draft, names: list[str], key: str) -> list[str]:
    """Modules with adapters as a recipe of TRL has them, which reads a name that is alone as a pattern of a path."""
    note_commas(draft, names, key)
    return [rf"(.*\.)?{re.escape(names[0])}"] if len(names) == 1 and names != ["all-linear"] else names


def note_commas(draft: Draft, names: list[str], key: str) -> None:
    """Note the names of a list that have a comma inside: PEFT finds no module of such a name, and goes on without."""
    if joined := [name for name in names if "," in name]:
        shown = ", ".join(map(quoted, joined))
        one = len(joined) == 1
        draft.note(
            f"{key}: the comma in {shown} is read as part of {'a name' if one else 'names'} that no module has, so "
            f"PEFT adapts nothing for {'it' if one else 'them'}; write one name per entry, without commas"
        )


# -- evaluation within a training: how many samples at once ------------------------------------------------------------

_SAMPLES = "per_device_eval_batch_size"


def asks_for_evaluation(draft: Draft) -> bool:
    """True if the file has a strategy of evaluation, by transformers' key of today or of before 2024."""
    given = draft.given
    return evaluates({"eval_strategy": given.get("eval_strategy", given.get("evaluation_strategy"))})


def take_evaluation(draft: Draft, trainer: str, *, key: str = _SAMPLES, usual: int) -> None:
    """Let the recipe evaluate as many samples at once as `key` says; by default `usual` ones.

    A trainer that generates evaluates whole groups, which the tools make in ways of their own: a note.
    """
    samples = draft.whole(key, usual)
    if trainer in ("grpo", "rloo"):
        draft.note(f"evaluation is not simulated: {samples} completions at once ({key})")
        return
    draft.values["eval_strategy"] = "epoch"  # whenever it is, it takes the same
    draft.put(_SAMPLES, samples, key)


# -- files on disk that a tool's file names: those that are not here are noted ---------------------------------------

_FORMATS = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".txt")
_BUILDERS = ("json", "csv", "parquet", "arrow", "text")  # `path` of datasets whose files are named beside it
_INFO = "dataset_info.json"
_LONGEST = 300  # characters of a path that are shown
_NOT_HERE = ("ONLINE", "REMOTE:")  # dataset_dir of LLaMA-Factory (data/parser.py)
_OF_SWIFT = re.compile(r"(?:(?:HF|MS|hf|ms)::)?(?P<path>[^:#]*)")  # [source::]path[:subsets][#samples]


def _places(name: str, folder: Path, inner: str = "") -> list[Path]:
    """Possible paths of a file named in `folder`, and of `inner` in it: here or beside it; [] if that is forbidden."""
    places = [Path(name) / inner, folder / name / inner]
    return places if all(map(may_read, places)) else []


def _names(given: object) -> Iterator[str]:
    """The names that are certain, in a list or in a text with commas."""
    listed = given if isinstance(given, list) else str(given or "").split(",")
    yield from (name for each in listed if (name := str(each).strip()) and UNSURE not in name)


def note_adapters(draft: Draft, key: str, rank: str, folder: Path) -> None:
    """Note missing folders of adapters to train on, and those of another rank than the simulated one."""
    for name in _names(draft.given.get(key)):
        if not (places := _places(name, folder, "adapter_config.json")):
            continue
        found = next((path for path in places if path.parent.is_dir()), None)
        if found is None and _ON_HUB.fullmatch(name):
            draft.note(f"{key}: there is no folder {name} here; {draft.tool} then looks for it on the hub")
        elif found is None:
            draft.note(f"{key}: there is no folder {name} here, without which {draft.tool} does not start")
        elif not found.is_file():
            draft.note(f"{key}: {name} has no adapter_config.json, without which {draft.tool} does not start")
        elif isinstance(own := (_content(found) or {}).get("r"), int) and own != draft.values.get("lora_r"):
            draft.note(f"{key}: the adapter in {name} has rank {own}; set {rank} to it, which is what is simulated")


def _content(path: Path) -> dict[str, object] | None:
    """The JSON object in `path`, if it is readable."""
    try:
        return read_json(path)
    except (TornFile, OSError):
        return None


def note_axolotl(draft: Draft, folder: Path) -> None:
    """Note the missing files of `datasets` and `test_datasets` of Axolotl."""
    for key in ("datasets", "test_datasets"):
        given = draft.given.get(key)
        for entry in given if isinstance(given, list) else ():
            if isinstance(entry, Mapping):
                path, files = entry.get("path"), entry.get("data_files")
                listed = files if isinstance(files, list) else [files]
                _note_gone(draft, key, listed if path in _BUILDERS else [path], folder)


def note_swift(draft: Draft, folder: Path) -> None:
    """Note the missing files of `--dataset` and `--val_dataset` of ms-swift."""
    for key in ("dataset", "val_dataset"):
        given = draft.given.get(key)
        names = [str(name) for name in (given if isinstance(given, list) else str(given or "").split())]
        paths = [found["path"] for name in names if UNSURE not in name and (found := _OF_SWIFT.match(name))]
        _note_gone(draft, key, paths, folder)


def note_llama_factory(draft: Draft, folder: Path) -> None:
    """Note datasets of LLaMA-Factory that dataset_info.json lacks, or whose files are missing beside it."""
    stated = draft.given.get("dataset_dir")
    name = "data" if stated is None else stated
    if not isinstance(name, str) or name == UNSURE or name.startswith(_NOT_HERE):
        return
    if not (places := _places(name, folder, _INFO)):
        return
    found = next(filter(os.path.isfile, places), None)
    if found is None:
        if stated is not None:
            draft.note(f"dataset_dir: {quoted(name)} has no {_INFO} here, without which {draft.tool} does not start")
        return
    if (known := _content(found)) is None:
        draft.note(f"dataset_dir: {_INFO} in {quoted(name)} cannot be read")
        return
    for key in ("dataset", "eval_dataset"):
        for each in _names(draft.given.get(key)):
            if each not in known:
                within = f"{_INFO} in {quoted(name, _LONGEST)}"
                draft.note(f"{key}: {within} has no {quoted(each)}, without which {draft.tool} does not start")
            elif isinstance(entry := known[each], Mapping) and isinstance(file := entry.get("file_name"), str):
                _note_gone(draft, key, [os.path.join(".", name, file)], folder)


def _note_gone(draft: Draft, key: str, names: Sequence[object], folder: Path) -> None:
    for name in names:
        if not isinstance(name, str) or UNSURE in name or "*" in name or "://" in name:
            continue
        is_path = name.startswith(("/", "./", "../", "~/")) or name.endswith(_FORMATS)  # and nothing else
        places = _places(os.path.expanduser(name), folder) if is_path else []
        if places and not any(map(os.path.exists, places)):
            draft.note(f"{key}: there is no {quoted(name, _LONGEST)} here, without which {draft.tool} does not start")


def check_best_model(draft: Draft, evaluated: str) -> None:
    """Report an unknowable best model, an error of transformers' TrainingArguments; evaluation is `evaluated`.

    The strategies of evaluation and saving must be the same.
    """
    saved = str(draft.given.get("save_strategy") or "steps")
    if draft.says("load_best_model_at_end") and saved not in ("best", evaluated):
        draft.wrong(f"load_best_model_at_end needs evaluation and saving at the same time; got {evaluated} and {saved}")


# -- DeepSpeed's files that LLaMA-Factory and Axolotl ship ------------------------------------------------------------
# Their settings, read at LLaMA-Factory 1d6e8b21 (examples/deepspeed) and Axolotl 2341b2c0, 1377ccc3 and 58b1d3a4
# (deepspeed_configs).

_ON_HOST = {"device": "cpu", "pin_memory": True}
_BOTH = {"offload_optimizer": _ON_HOST, "offload_param": _ON_HOST}
_SIZES = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
          "stage3_param_persistence_threshold": "auto", "contiguous_gradients": True}  # fmt: skip
_LF2 = {"stage": 2, "overlap_comm": False, "reduce_scatter": True, "contiguous_gradients": True,
        "allgather_bucket_size": 500_000_000, "reduce_bucket_size": 500_000_000,
        "round_robin_gradients": True}  # fmt: skip
_LF3 = {"stage": 3, "overlap_comm": False, **_SIZES, "sub_group_size": 1_000_000_000,
        "stage3_max_live_parameters": 1_000_000_000, "stage3_max_reuse_distance": 1_000_000_000}  # fmt: skip
_AX3 = {"stage": 3, "overlap_comm": True, **_SIZES, "sub_group_size": 0, "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0}  # fmt: skip
_AX1 = {"stage": 1, "overlap_comm": True}
_AX2 = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True}
_COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_FILES: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    LLAMA_FACTORY.name: {
        "ds_z0_config.json": {**_LF2, "stage": 0}, "ds_z2_config.json": _LF2,
        "ds_z2_offload_config.json": {**_LF2, "offload_optimizer": _ON_HOST}, "ds_z3_config.json": _LF3,
        "ds_z3_offload_config.json": {**_LF3, **_BOTH},
    },
    AXOLOTL.name: {
        "zero1.json": _AX1, "zero2.json": _AX2, "zero3.json": _AX3, "zero3_bf16.json": _AX3,
        "zero3_bf16_cpuoffload_all.json": {**_AX3, **_BOTH},
        "zero3_bf16_cpuoffload_params.json": {**_AX3, "offload_param": _ON_HOST},
    },
}  # fmt: skip


def shipped(tool: str, given: object) -> dict[str, object] | None:
    """The settings of the file that `tool` ships under this path's name, if it ships one."""
    zero = _FILES.get(tool, {}).get(Path(given).name) if isinstance(given, str) else None
    return (
        None
        if zero is None
        else {**dict.fromkeys(_COUNTS, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": dict(zero)}
    )


def deepspeed(draft: Draft, folder: Path) -> object:
    """The `deepspeed` of a tool's file in `folder`, or the settings of the shipped file if that is missing."""
    given = draft.given["deepspeed"]
    found = shipped(draft.tool, given)
    if found is not None:
        try:
            near(str(given), folder)
        except ConfigError:
            draft.note(f"{given} is not here: the file of that name that {draft.tool} ships is taken for it")
            return found
    return given


def launch_of(draft: Draft, folder: Path) -> dict[str, object]:
    """The accelerate config of transformers' `deepspeed`, or of its `fsdp` and `fsdp_config`, or {}."""
    given = draft.raw("fsdp_config")
    config = {str(key): value for key, value in given.items()} if isinstance(given, Mapping) else {}
    wrapped = draft.raw("fsdp_transformer_layer_cls_to_wrap")
    if wrapped is not None:  # transformers puts it into fsdp_config
        config.setdefault("transformer_layer_cls_to_wrap", wrapped)
    if draft.says("deepspeed") and draft.says("fsdp"):  # transformers' Trainer ends with an error
        draft.wrong("fsdp and deepspeed cannot both be given")
    if draft.says("deepspeed"):
        return zero(deepspeed(draft, folder), folder)
    if draft.says("fsdp"):
        return fsdp(draft.given["fsdp"], config)
    draft.ignore(("fsdp_min_num_params",))
    return {}


# -- scripts that start LLaMA-Factory or Axolotl, with a YAML, values laid over it, or arguments alone ----------------

# LLaMA-Factory (hparams/parser.py, read_args, and launcher.py at ff6d4d12) takes a YAML and `key=value` after it, or
# `--key value`; Axolotl (cli/main.py at 067b021c) a YAML and `--key value` after it.
_YAML = (".yaml", ".yml", ".json")
_PROGRAMS = {"llamafactory-cli": LLAMA_FACTORY, "lmf": LLAMA_FACTORY, "axolotl": AXOLOTL}  # each with `train`
_SCRIPT = re.compile(r"(?:.*/)?(?:(train_bash\.py|src/train\.py|llamafactory/launcher\.py)|(axolotl/cli/train\.py))")
_MODULE = re.compile(r"(llamafactory\.(?:launcher|cli))|(axolotl\.cli\.train)")
# Of `axolotl train` (cli/args.py, cli/main.py): how it is started, and nothing of the training.
_NAMES = """
launcher num_processes num_machines main_process_port main_process_ip sweep cloud debug debug_text_only
debug_num_examples prompter shard mixed_precision machine_rank accelerate_config use_ray ray_num_workers
"""
_OF_LAUNCH = frozenset(_NAMES.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training that a script starts: the tool, its keys and values, and the ranks where the script says them.

    `config` is the YAML that it names, and `laid_over` has the values that the script says besides.
    """

    tool: Tool
    values: Mapping[str, object]
    ranks: int | None
    config: Path | None = None
    laid_over: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def training(text: str, *, folder: Path) -> Training:
    """The first training that a script in `folder` starts. Raises ConfigError."""
    found = list(started(text))
    command, tool, place = found[0]
    words = command.words[place + 1 :]
    config = near(certain("the config", words[0]), folder) if words and words[0].endswith(_YAML) else None
    if config is None and tool is AXOLOTL:
        raise ConfigError("`axolotl train` names no YAML in it")
    rest = words if config is None else words[1:]
    own = _overrides(rest) if config is not None and tool is LLAMA_FACTORY else _arguments(rest, folder, tool)
    shared = accelerate_config(command.words[:place], folder)
    given = {} if config is None else read_yaml_mapping(config, what=f"config of {tool.name}")
    check_certain([key for key, value in own.items() if UNSURE in str(value) and key != "output_dir"])
    over = of_accelerate(shared) if tool is LLAMA_FACTORY and not {"deepspeed", "fsdp"} & {*given, *own} else {}
    over |= {key: value for key, value in own.items() if key not in _OF_LAUNCH}
    notes = (f"the script starts {len(found)} trainings; the first is read",) if len(found) > 1 else ()
    # `axolotl train` starts a launcher itself, with options among its own
    before = command.words if tool is AXOLOTL and place == 1 else command.words[:place]
    told = told_ranks(before, shared, command.variables if tool is LLAMA_FACTORY and place == 1 else {})
    ranks = started_ranks(command.words, told, command.variables)
    return Training(tool=tool, values={**given, **over}, ranks=ranks, config=config, laid_over=over, notes=notes)


def started(text: str) -> Iterator[tuple[Command, Tool, int]]:
    """(a command that trains, the tool, the place of the last word before its arguments)."""
    for command in commands(text):
        words = command.words
        if len(words) > 1 and words[1] == "train" and (tool := _PROGRAMS.get(words[0].rpartition("/")[2])):
            yield command, tool, 1
            continue
        for place, word in enumerate(words):
            match = _SCRIPT.fullmatch(word) or _MODULE.fullmatch(word)
            if match is not None:
                after = place + (words[place + 1 : place + 2] == ("train",))
                yield command, LLAMA_FACTORY if match[1] else AXOLOTL, after
                break


def _overrides(words: Sequence[str]) -> dict[str, object]:
    """{key: value} of `key=value`, as OmegaConf reads them; a key may be a.b."""
    found: dict[str, object] = {}
    for word in words:
        key, mark, value = word.partition("=")
        if not mark or key.startswith("-"):
            raise ConfigError(f"after its YAML LLaMA-Factory takes key=value; got {quoted(word)}")
        found[key] = UNSURE if UNSURE in value else parse_yaml(value)
    return found


def _arguments(words: Sequence[str], folder: Path, tool: Tool) -> dict[str, object]:
    """The values of `--key value`, up to a `--`, after which a launcher's own follow."""
    return arguments(words[: words.index("--") if "--" in words else None], folder, tool=tool.name)
