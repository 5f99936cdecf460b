"""The watchers of a full run, for a promoted run and for a callback in a script, and the summary of its start."""

from collections.abc import Iterable, Sequence
from typing import Any

from autofit.units import format_bytes, format_seconds
from autofit.watching.contract import Promise, Watched, Watcher
from autofit.watching.contract_watcher import ContractWatcher
from autofit.watching.events import Kind, RunEvent
from autofit.watching.guards import GuardWatcher
from autofit.watching.memory import MemoryWatcher
from autofit.watching.progress import ProgressWatcher
from autofit.watching.rewards import RewardWatcher
from autofit.watching.thresholds import Guard, GuardCheck

_MOST_NAMES = 8  # of LoRA's targets


class SummaryWatcher(Watcher):
    """Tells once, when training begins, what is trained, how it is batched, and what memory was promised."""

    def __init__(self, guards: Sequence[Guard] = ()) -> None:
        self._guards = guards

    def begins(self, run: Watched) -> Iterable[RunEvent]:
        facts = facts_of(run, self._guards)
        width = max(map(len, facts))
        text = "\n".join([f"{run.trainer} on {_device(run)}", *(f"  {k:<{width}}  {v}" for k, v in facts.items())])
        return [RunEvent(step=run.first_step, kind=Kind.START, text=text, data=facts)]


def facts_of(run: Watched, guards: Sequence[Guard] = ()) -> dict[str, str]:
    """{what: in words} of a run that begins; a key is missing where nothing is known."""
    trainer = run.hf_trainer
    own = {} if trainer is None else _of_trainer(trainer, run)
    facts = {
        **own, "batch": _batch(run), "steps": _steps(run), "memory": _memory(run.promise),
        "guards": _guards([guard for guard in guards if _can_watch(guard, run)]),
    }  # fmt: skip
    return {key: text for key, text in facts.items() if text}


def _of_trainer(trainer: Any, run: Watched) -> dict[str, str]:
    model, args = trainer.model, trainer.args
    return {
        "model": _model(model), "adapter": _adapter(model), "precision": _precision(model, args),
        "checkpointing": _checkpointing(model, args), "optimizer": _optimizer(trainer),
        "lengths": _lengths(args), "rewards": _rewards(trainer), "reference": _reference(trainer),
        "saves": _saves(args),
    }  # fmt: skip


def _device(run: Watched) -> str:
    if run.device != "cuda":
        return "the CPU"
    import torch

    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{card.name} ({format_bytes(card.total_memory)})"


def _model(model: Any) -> str:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = getattr(getattr(base, "config", None), "_name_or_path", "")
    trained, count = _parameters(model)
    share = 100 * trained / max(1, count)
    origin = f" from {name}" if name else ""
    kind = next(c for c in type(base).__mro__ if not c.__name__.startswith("FSDP"))  # FSDP2 makes a class of its own
    return f"{kind.__name__}{origin}: {trained:,} of {count:,} parameters are trained ({share:.3g}%)"


def _parameters(model: Any) -> tuple[int, int]:
    """Parameters (trained, all); of 4-bit weights those that they stand for."""
    if hasattr(model, "get_nb_trainable_parameters"):
        trained, count = model.get_nb_trainable_parameters()
        return int(trained), int(count)
    if hasattr(model, "num_parameters"):
        return int(model.num_parameters(only_trainable=True)), int(model.num_parameters())
    each = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, grad in each if grad), sum(n for n, _ in each)


def _adapter(model: Any) -> str:
    config = next(iter(getattr(model, "peft_config", {}).values()), None)
    if config is None:
        return ""
    targets = config.target_modules
    names = sorted(targets) if isinstance(targets, set | list | tuple) else [str(targets)]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    kind = str(getattr(config.peft_type, "value", config.peft_type)).lower()
    rank = f" r {config.r}, alpha {config.lora_alpha}," if hasattr(config, "lora_alpha") else ""
    return f"{kind}{rank} on {', '.join(names[:_MOST_NAMES])}{more}"


def _precision(model: Any, args: Any) -> str:
    counts: dict[str, int] = {}
    for parameter in model.parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        counts[kind] = counts.get(kind, 0) + parameter.numel()
    held = " and ".join(sorted(counts, key=lambda kind: -counts[kind]))
    kind = "bfloat16" if getattr(args, "bf16", False) else "float16" if getattr(args, "fp16", False) else ""
    quantized = ", quantized" if getattr(model, "is_quantized", False) else ""
    return f"weights in {held}{quantized}" + (f", computed in {kind} where that is safe (autocast)" if kind else "")


def _checkpointing(model: Any, args: Any) -> str:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    on = getattr(base, "is_gradient_checkpointing", getattr(args, "gradient_checkpointing", False))
    return "on: activations are computed again in the backward pass" if on else "off"


def _optimizer(trainer: Any) -> str:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    kind = "" if optimizer is None else f"{type(optimizer).__name__}, "
    args = trainer.args
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    return f"{kind}learning rate {args.learning_rate:g} ({schedule})"


def _lengths(args: Any) -> str:
    completion, whole = getattr(args, "max_completion_length", None), getattr(args, "max_length", None)
    if completion:
        return f"completions of at most {completion} tokens"
    return f"samples of at most {whole} tokens" if whole else ""


def _rewards(trainer: Any) -> str:
    names = list(getattr(trainer, "reward_func_names", None) or ())
    given = getattr(trainer, "reward_weights", None)
    weights = [1.0] * len(names) if given is None else [float(weight) for weight in given]
    return ", ".join(f"{n} × {w:g}" if w != 1 else str(n) for n, w in zip(names, weights, strict=True))


def _reference(trainer: Any) -> str:
    beta = getattr(trainer, "beta", None)
    if not isinstance(beta, int | float):
        return ""
    if beta == 0:
        return "none: beta is 0, so no KL is computed"
    held = "a model of its own" if getattr(trainer, "ref_model", None) is not None else "without a second model"
    return f"KL with beta {beta:g}, {held}"


def _saves(args: Any) -> str:
    """The recipe's own checkpoints; a promoted run saves more, between them."""
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    steps = getattr(args, "save_steps", 0)
    often = {"steps": f"a checkpoint every {steps:g} steps", "epoch": "a checkpoint every epoch"}.get(strategy, "")
    most = getattr(args, "save_total_limit", None)
    return often and often + (f", of which the last {most} are kept" if most else "")


def _batch(run: Watched) -> str:
    """Effective batch = micro-batch × accumulation × ranks, in the words of what is trained."""
    word = "completions" if run.generates else "samples"
    args = getattr(run.hf_trainer, "args", None)
    if args is None:
        return f"{run.samples_per_step} {word} a step"
    micro, steps, ranks = int(args.train_batch_size), int(args.gradient_accumulation_steps), int(args.world_size)
    whole = micro * steps * ranks
    text = f"micro-batch {micro} × accumulation {steps} × {ranks} rank{'s' * (ranks > 1)} = {whole} {word} a step"
    group = getattr(run.hf_trainer, "num_generations", None)
    return f"{text}: {whole / group:g} prompts × {group} completions" if run.generates and group else text


def _steps(run: Watched) -> str:
    epochs = getattr(getattr(run.hf_trainer, "state", None), "num_train_epochs", None)
    text = str(run.last_step)
    text += f" ({epochs} epoch{'s' * (epochs != 1)})" if isinstance(epochs, int) and epochs else ""
    text += f", goes on after step {run.first_step}" if run.first_step else ""
    step_s = None if run.promise is None else run.promise.step_s
    if step_s is None:
        return text
    whole = format_seconds(step_s * (run.last_step - run.first_step))
    return f"{text}; about {whole} at the promised {format_seconds(step_s)} a step"


def _memory(promise: Promise | None) -> str:
    if promise is None or promise.device_used_bytes is None:
        return ""
    limit = "" if promise.limit_bytes is None else f", limit {format_bytes(promise.limit_bytes)}"
    return f"{format_bytes(promise.device_used_bytes)} promised{limit} ({promise.fidelity} on {promise.device_name})"


def _can_watch(guard: Guard, run: Watched) -> bool:
    without_kl = getattr(run.hf_trainer, "beta", None) == 0 and guard.looks_at("kl")
    return guard.generates in (None, run.generates) and not (without_kl and guard.check is not GuardCheck.FINITE)


def _guards(guards: Sequence[Guard]) -> str:
    if not guards:
        return "none"
    stops = [guard.name for guard in guards if guard.stops]
    return (
        "of what it logs: "
        + ", ".join(guard.name for guard in guards)
        + (f"; the run stops at {', '.join(stops)}" if stops else "")
    )


def watchers(*, guards: Sequence[Guard]) -> list[Watcher]:
    """Everyone who looks at a run, with the guards that are on.

    A watcher is made anew for each start of a run. This list is the only place that names them.
    """
    return [
        SummaryWatcher(guards), RewardWatcher(), ProgressWatcher(), ContractWatcher(), MemoryWatcher(),
        GuardWatcher(guards),
    ]  # fmt: skip
