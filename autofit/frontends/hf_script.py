"""Scripts that start a trainer of their own with transformers' arguments, as FastChat's and Qwen's do. Free of torch.

The work of such a Python file is unknown: it is taken for a plain Trainer of a language model. Settings that the
arguments leave open count as the larger: weights in float32, adapters on all linear layers, every sample of the full
length.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from autofit.errors import ConfigError
from autofit.frontends.command import (
    UNSURE,
    Command,
    accelerate_config,
    arguments,
    check_certain,
    commands,
    started_ranks,
    told_ranks,
)
from autofit.frontends.draft import Draft, Explanation, Foreign, Line, lines, said
from autofit.frontends.python_file import ADAPTED, LENGTHS, RANKS, adapted, as_it_is, python_file
from autofit.frontends.sharing import of_accelerate
from autofit.frontends.tools import asks_for_evaluation, keys_of, launch_of, note_commas, take, take_evaluation
from autofit.frontends.trl_recipe import batch_words

TOOL = "transformers"
_MODEL = "model_name_or_path"
_OTHER_TASK = re.compile(
    r"dpo|ppo|grpo|kto|orpo|reward|distil|embed|rerank|llava|_vl|vlm|mm_|seq2seq|classif|glue|qa\b"
)
_SEEING = ("vision_tower", "image_folder", "image_path", "tune_mm_llm", "mm_projector_lr", "max_pixels", "video_folder")
_LENGTHS = (*LENGTHS, "max_length", "seq_length", "max_len")
_LORA = ("use_lora", "use_peft", "use_peft_lora", "lora_enable")
_QLORA = ("q_lora", "use_qlora", "qlora", "load_in_4bit")
_RANK = 8  # PEFT's default
# Arguments of a script's own whose defaults count, those of one thing together.
_DEFAULTS = (_LENGTHS, RANKS, ("lora_alpha",), ("lora_dropout",), ADAPTED, _LORA, _QLORA)


def of_script(text: str, *, folder: Path, ranks: int | None = None) -> Foreign:
    """The recipe of the first training that a script in `folder` starts. Raises ConfigError."""
    found = list(started(text))
    command, place = found[0]
    program = command.words[place]
    if _OTHER_TASK.search(Path(program).name):
        raise ConfigError(
            f"{program}: only the training of a language model on text is read, by its arguments{as_it_is(program)}"
        )
    given = arguments(command.words[place + 1 :], folder, tool=TOOL)
    check_certain([key for key, value in given.items() if UNSURE in str(value) and _counts(key)])
    given = {key: value for key, value in given.items() if UNSURE not in str(value)}
    before = command.words[:place]
    shared = accelerate_config(before, folder)
    if not {"deepspeed", "fsdp"} & given.keys():
        given |= of_accelerate(shared)
    defaults = _defaults(program, folder, given)
    if ranks is None:
        ranks = started_ranks(before, told_ranks(before, shared, {}), command.variables)
    foreign = _recipe({**defaults, **given}, folder, ranks, program)
    more = [f"the script starts {len(found)} trainings; the first is read"] if len(found) > 1 else []
    if told := [f"{key} {value}" for key, value in defaults.items() if value]:
        more.append(f"by {program}'s own defaults: {', '.join(told)}")
    return replace(foreign, notes=(*foreign.notes, *more))


def _defaults(program: str, folder: Path, given: Mapping[str, object]) -> dict[str, object]:
    """{argument: default} of those that the script's file has, and the command omits, under this or another name."""
    file = python_file(program, folder)
    own = {} if file is None else file.own
    return {
        name: own[name] for names in _DEFAULTS if not given.keys() & set(names)
        for name in names if own.get(name) is not None
    }  # fmt: skip


def explain(text: str, *, folder: Path, ranks: int | None = None) -> Explanation:
    """The start command, the trainer that stands for it, and the effective batch by transformers' defaults."""
    command, place = next(started(text))
    found = of_script(text, folder=folder, ranks=ranks)
    first = (
        Line("tool", f"{command.words[place]}, with {TOOL}' arguments"),
        Line("effective batch", batch_words("hf", found.values, found.ranks)),
    )
    return Explanation(tool=TOOL, lines=(*first, *lines(found)), notes=found.notes)


def say(foreign: Foreign, changes: Mapping[str, object]) -> dict[str, object]:
    """{argument: value} of `changes`. Raises ConfigError for one that the script may not take."""
    return said(foreign, changes, {})


def started(text: str) -> Iterator[tuple[Command, int]]:
    """(a command that trains, the place of the Python file or module in it)."""
    for command in commands(text):
        words = command.words
        if not any(word.partition("=")[0] == f"--{_MODEL}" for word in words):
            continue
        for place, word in enumerate(words):
            module = words[place - 1] == "-m" and not word.startswith(("torch.", "accelerate", "deepspeed"))
            if place and (word.endswith(".py") or module):
                yield command, place
                break


def _counts(key: str) -> bool:
    own = keys_of(TOOL)
    return key not in own.without_effect and not re.search(
        r"data|path|dir|name|token$|file|wandb|seed", key.replace(_MODEL, "")
    )


def _recipe(given: dict[str, object], folder: Path, ranks: int | None, program: str) -> Foreign:
    draft = Draft(TOOL, given)
    with draft.told_together():
        return _made(draft, folder, ranks, program)


def _made(draft: Draft, folder: Path, ranks: int | None, program: str) -> Foreign:
    draft.refuse(dict.fromkeys(_SEEING, "training on images, video or sound is not read, only on text"))
    draft.put(_MODEL, draft.text(_MODEL))
    draft.same("trust_remote_code")
    draft.put("model_revision", draft.text("model_revision"))
    draft.put("objective", "sft")
    draft.put("per_device_train_batch_size", draft.whole("per_device_train_batch_size", 8))
    draft.put("gradient_accumulation_steps", draft.whole("gradient_accumulation_steps", 1))
    draft.put("gradient_checkpointing", draft.is_on("gradient_checkpointing"))
    launch = launch_of(draft, folder)
    _weights(draft)
    attention = draft.text("attn_implementation")
    flash = draft.is_on("use_flash_attn") or draft.is_on("use_flash_attention_2")
    draft.put("attn_implementation", attention or ("flash_attention_2" if flash else None))
    draft.put("use_liger_kernel", True if draft.is_on("use_liger_kernel") else None)
    lengths = {key: length for key in _LENGTHS if (length := draft.whole(key)) is not None}
    key, tokens = next(iter(lengths.items()), ("max_length", None))
    draft.put("max_length", tokens, key)
    take(draft)
    if asks_for_evaluation(draft):
        take_evaluation(draft, "hf", usual=8)
    if unread := draft.left():
        draft.note(f"left out, as only {program} knows what they do: {', '.join(unread)}")
        draft.ignore(unread)
    draft.note(f"{program} is taken for a plain Trainer that makes all logits; what it does besides is not simulated")
    return draft.foreign("hf", launch=launch, ranks=ranks, prompt_tokens=tokens)


def _weights(draft: Draft) -> None:
    """The trained weights, and the type of all."""
    quantised = [key for key in _QLORA if draft.is_on(key)]
    adapters = [key for key in _LORA if draft.is_on(key)]
    bf16, fp16 = draft.is_on("bf16"), draft.is_on("fp16")
    draft.put("bf16", bf16)
    draft.put("fp16", fp16 or None)
    dtype = next((said for key in ("torch_dtype", "dtype") if (said := draft.text(key))), None)
    if dtype in (None, "auto"):
        dtype = "float32"
        draft.note("the script does not say in what the weights are held: float32 is taken, the larger (torch_dtype)")
    draft.put("dtype", dtype, "torch_dtype")
    if not quantised and not adapters:
        return
    draft.put("use_peft", True, (adapters or quantised)[0])
    rank = next((found for key in RANKS if (found := draft.whole(key))), None)
    draft.put("lora_r", rank or _RANK, "lora_r")
    draft.put("lora_alpha", draft.whole("lora_alpha"))
    draft.put("lora_dropout", draft.number("lora_dropout"))
    asked, modules = next(((key, adapted(told)) for key in ADAPTED if (told := draft.raw(key))), ("", None))
    if isinstance(modules, list):
        note_commas(draft, list(map(str, modules)), asked)
    draft.put("lora_target_modules", modules or ["all-linear"])
    if rank is None or modules is None:
        draft.note(
            "the script does not say its adapters: PEFT's rank of 8 on all linear layers is taken where it is open"
        )
    if quantised:
        draft.put("load_in_4bit", True, quantised[0])
