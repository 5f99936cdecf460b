"""Rules of TRL and transformers that hold several keys together, told before either is imported. No torch here.

Those of `TrainingArguments._validate_args`, of the `__post_init__` of TRL's configs and of the trainers, as read in
transformers 5.23 and TRL 1.16; tests/test_early.py holds them against the installed ones, and they are those of TRL
1.14.2 and transformers 5.17 too. A number that is given as text is left to their parser.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autofit.errors import nearest

# The keys whose values, where a recipe leaves them out, the rules need.
READ = (
    "dataloader_num_workers", "dataset_kwargs", "eval_steps", "eval_strategy", "generation_batch_size",
    "gradient_accumulation_steps", "load_best_model_at_end", "log_completions", "logging_steps", "logging_strategy",
    "loss_type", "lr_scheduler_type", "max_length", "num_generations", "num_generations_eval", "packing",
    "padding_free", "per_device_eval_batch_size", "per_device_train_batch_size", "save_steps", "save_strategy",
    "steps_per_generation", "use_vllm", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
)  # fmt: skip
_MICRO, _ACCUMULATION, _GROUP = "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"
_ROLLOUT, _STEPS = "generation_batch_size", "steps_per_generation"
DEBUG_OPTIONS = ("underflow_overflow", "tpu_metrics_debug")  # DebugOption of transformers
ACCELERATOR_KEYS = (  # AcceleratorConfig of transformers
    "split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking",
    "gradient_accumulation_kwargs", "use_configured_state",
)  # fmt: skip
_MOST_BYTES = 2**20  # of a file beside a recipe
_RATIO = 1_000_000  # transformers compares ratios of a training in millionths


@dataclass(frozen=True, slots=True)
class _Asked:
    values: Mapping[str, object]
    defaults: Mapping[str, object]

    def __getitem__(self, key: str) -> object:
        return self.values[key] if key in self.values else self.defaults.get(key)

    def number(self, key: str) -> float | None:
        """A number; None if there is none, or only in text."""
        value = self[key]
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def broken(values: Mapping[str, object], defaults: Mapping[str, object], ranks: int | None) -> Iterator[str]:
    """Sentence of each rule that `values` break: what must hold, what was given, what to change.

    `defaults` has the keys of READ that the trainer takes. Without `ranks` the rules of whole groups are left out.
    """
    asked = _Asked(values, defaults)
    yield from _steps(asked)
    yield from _best_model(asked)
    if asked["eval_strategy"] == "no" and asked["lr_scheduler_type"] in ("reduce_lr_on_plateau", "greedy"):
        yield f"lr_scheduler_type {asked['lr_scheduler_type']} needs an evaluation: set eval_strategy to steps or epoch"
    for key in ("warmup_steps", "learning_rate", "lora_dropout"):
        if (number := asked.number(key)) is not None and number < 0:
            yield f"{key} must be 0 or more; got {number}"
    if (dropout := asked.number("lora_dropout")) is not None and dropout > 1:
        yield f"lora_dropout must be from 0 to 1; got {dropout}"
    if values.get("dataloader_prefetch_factor") is not None and asked["dataloader_num_workers"] == 0:
        yield "dataloader_prefetch_factor needs dataloader_num_workers of 1 or more; it is 0"
    yield from _named_parts(asked)
    yield from _large_files(asked)
    yield from _losses(asked)
    yield from _packing(asked)
    if _GROUP in defaults:
        yield from _groups(asked, ranks)
        yield from _generation(asked)


def whole_groups(values: Mapping[str, object], defaults: Mapping[str, object]) -> str:
    """Advice for a generation of one rank that would end inside of a group; TRL names no key that was given."""
    asked = _Asked(values, defaults)
    if asked[_ROLLOUT] is not None or asked["eval_strategy"] not in (None, "no", False):
        return ""
    accumulates = _ACCUMULATION if asked[_STEPS] is None else _STEPS
    micro, steps, group = (asked[name] for name in (_MICRO, accumulates, _GROUP))
    if not (isinstance(micro, int) and isinstance(steps, int) and isinstance(group, int)):
        return ""
    if group < 2 or micro * steps % group == 0:
        return ""
    return (
        f" It is {_MICRO} {micro} x {accumulates} {steps} x ranks, and holds whole groups: change one of the two, "
        f"or {_GROUP}"
    )


def _steps(asked: _Asked) -> Iterator[str]:
    for what in ("logging", "eval", "save"):
        if asked[f"{what}_strategy"] != "steps":
            continue
        key = f"{what}_steps"
        steps = asked.number(key)
        if what == "logging" and steps == 0:
            yield "logging_steps must be more than 0 with logging_strategy steps; got 0"
        if what == "eval" and not asked[key] and asked.number("logging_steps") == 0:
            yield "eval_strategy steps needs eval_steps (or logging_steps) of more than 0"
        if steps is not None and steps > 1 and steps != int(steps):
            yield f"{key} must be a whole number where it is more than 1; got {steps}"


def _best_model(asked: _Asked) -> Iterator[str]:
    evaluates, saves = asked["eval_strategy"], asked["save_strategy"]
    if asked["load_best_model_at_end"] is not True or saves == "best":
        return
    needs = "load_best_model_at_end needs"
    if evaluates != saves:
        yield (
            f"{needs} evaluation and saving at the same time: eval_strategy is {evaluates} and save_strategy {saves}; "
            "make them the same, or save_strategy best"
        )
        return
    between = "eval_steps" if asked["eval_steps"] else "logging_steps"
    save, check = asked.number("save_steps"), asked.number(between)
    if evaluates != "steps" or not save or not check:
        return
    mixed = (save < 1) != (check < 1)
    if save % check and (mixed or (save * _RATIO) % (check * _RATIO)):
        other = ", which stands in for eval_steps" if between != "eval_steps" else ""
        yield f"{needs} save_steps to be a multiple of {between}{other}; got {save} and {check}"


def _named_parts(asked: _Asked) -> Iterator[str]:
    """Names inside of a value: the options of `debug`, the keys of `accelerator_config`, or its file."""
    debug, config = asked.values.get("debug"), asked.values.get("accelerator_config")
    for name in debug.split() if isinstance(debug, str) else ():
        if name not in DEBUG_OPTIONS:
            yield f"debug must be {' or '.join(DEBUG_OPTIONS)}; got {name!r}{nearest(name, DEBUG_OPTIONS)}"
    for key in config if isinstance(config, Mapping) else ():
        if key not in ACCELERATOR_KEYS:
            known = nearest(str(key), ACCELERATOR_KEYS) or f"; it has {', '.join(ACCELERATOR_KEYS)}"
            yield f"accelerator_config has no key {key!r}{known}"
    if isinstance(config, str) and not config.startswith("{") and not os.path.isfile(config):
        yield f"accelerator_config must be a mapping or a JSON file; there is no file {config!r}"


def _large_files(asked: _Asked) -> Iterator[str]:
    """Files that TRL reads whole."""
    for key in ("accelerator_config", "chat_template_path"):
        name = asked.values.get(key)
        if not isinstance(name, str) or os.path.isdir(name) or not os.path.exists(name):
            continue
        if not os.path.isfile(name):
            yield f"{key} must be a file; {name!r} is a pipe or a device"
        elif os.path.getsize(name) > _MOST_BYTES:
            yield f"{key} must have at most {_MOST_BYTES >> 20} MiB; {name!r} has {os.path.getsize(name) >> 20}"


def _losses(asked: _Asked) -> Iterator[str]:
    weights, losses = asked.values.get("loss_weights"), asked["loss_type"]
    count = len(losses) if isinstance(losses, list) else 1
    if isinstance(weights, list) and len(weights) != count:
        yield f"loss_weights must have a number for each of loss_type ({count}); got {len(weights)}"


def _packing(asked: _Asked) -> Iterator[str]:
    if "packing" not in asked.defaults:
        return
    packs = asked["packing"]
    if packs is True and asked["max_length"] is None and not asked["dataset_kwargs"]:
        yield "packing needs a max_length, the tokens of a packed row; it is null"
    if asked["padding_free"] is True and packs is False and asked["max_length"] is not None:
        yield (
            f"padding_free without packing does not cut samples to max_length, which is {asked['max_length']}: set "
            "packing: true, or max_length: null for samples that are short enough"
        )


def _groups(asked: _Asked, ranks: int | None) -> Iterator[str]:
    """The rules of a generation: whole groups, of two completions or more."""
    if asked.values.get("auto_find_batch_size") is True:
        yield (
            f"auto_find_batch_size must be false: a smaller batch would split groups of {_GROUP} completions; lower "
            f"{_MICRO} instead"
        )
    if asked[_ROLLOUT] is not None and asked[_STEPS] is not None:
        yield (
            f"{_ROLLOUT} and {_STEPS} say the same, the completions that are generated at once: leave one of the two "
            f"out; got {asked[_ROLLOUT]} and {asked[_STEPS]}"
        )
        return
    group, micro = asked.number(_GROUP), asked.number(_MICRO)
    if group == 1:
        yield f"{_GROUP} must be 2 or more, for a completion's advantage is against the others of its prompt; got 1"
        return
    steps = asked.number(_ACCUMULATION if asked[_STEPS] is None else _STEPS)
    if ranks is None or not group or not micro or not steps or group < 0 or micro < 0 or steps < 0:
        return
    given, pass_size = asked.number(_ROLLOUT), micro * ranks
    if given is not None and given % pass_size:
        yield (
            f"{_ROLLOUT} ({given}) must be divisible by {_MICRO} x ranks, {micro} x {ranks} = {pass_size}: change one"
        )
    elif (whole := pass_size * steps if given is None else given) % group:
        yield f"{_ROLLOUT} ({whole}) must be divisible by {_GROUP} ({group})." + (
            whole_groups(asked.values, asked.defaults) or f" Change one of the two, or {_MICRO}"
        )
    yield from _evaluated_groups(asked, group, ranks)


def _evaluated_groups(asked: _Asked, group: float, ranks: int) -> Iterator[str]:
    micro, evaluated = asked.number("per_device_eval_batch_size"), asked.number("num_generations_eval") or group
    if asked["eval_strategy"] in ("steps", "epoch") and micro and micro * ranks % evaluated:
        yield (
            f"per_device_eval_batch_size x ranks, {micro} x {ranks} = {micro * ranks}, must be divisible by the "
            f"{evaluated} completions of a prompt in an evaluation: change it, or num_generations_eval"
        )


def _generation(asked: _Asked) -> Iterator[str]:
    """Rules of sampling, and of TRL's GRPO alone: of its engine's corrections and of its log."""
    if (temperature := asked.number("temperature")) is not None and temperature <= 0:
        yield f"temperature must be more than 0, which the log-probabilities are divided by; got {temperature}"
    if asked.values.get("log_completions_hub_repo") is not None and asked["log_completions"] is False:
        yield "log_completions_hub_repo needs log_completions: true"
    engine = "vllm_importance_sampling"
    low, high, mode = asked.number(f"{engine}_clip_min"), asked.number(f"{engine}_clip_max"), asked[f"{engine}_mode"]
    if low is not None and high is not None and low >= high:
        yield f"{engine}_clip_min must be less than {engine}_clip_max; got {low} and {high}"
    if asked[f"{engine}_correction"] is not True:
        return
    if mode in ("token_truncate", "sequence_truncate") and low is None and high is None:
        yield f"{engine}_mode {mode} needs {engine}_clip_min or {engine}_clip_max"
    if asked["loss_type"] == "vespo" and asked["use_vllm"] is True and mode not in ("token_truncate", "token_mask"):
        yield f"loss_type vespo with vLLM needs {engine}_mode token_truncate or token_mask; it is {mode}"
