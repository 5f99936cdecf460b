"""The reach of a gradient proof: what it compares of a recipe, key by key, and of many ranks. No torch here.

A recipe of many ranks is proven on at most 4 gloo ranks of one CPU, with DDP or FSDP2.
"""

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import cast

from autofit.errors import ConfigError
from autofit.plugin.protocol import compared_attention
from autofit.recipe.keys import LAUNCH, BatchKeys, weight_bits
from autofit.recipe.recipe import Batch, merge
from autofit.space.traits import UNPROVEN, Reach, traits_of

# Changes of the recipe that can be applied to both baseline and candidate in the small trainings.
IN_BOTH = ("use_peft", "lora_task_type", "lora_r", "lora_alpha", "max_completion_length", "num_generations")
# Keys that no space varies, and a comparison of two recipes meets.
_KEYS: Mapping[str, Reach] = {
    **dict.fromkeys((
        "logging_steps", "logging_strategy", "logging_first_step", "report_to", "save_steps", "save_strategy",
        "save_total_limit", "save_only_model", "output_dir", "run_name", "disable_tqdm", "log_completions",
        "num_completions_to_print", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
        "dataloader_persistent_workers", "skip_memory_metrics", "eval_strategy", "eval_steps",
        "per_device_eval_batch_size",
    ), Reach.HARMLESS),
    **dict.fromkeys((
        "torch_compile_backend", "torch_compile_mode", "liger_kernel_config", "fsdp", "fsdp_config", "deepspeed",
        "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "gradient_checkpointing_kwargs.offload",
    ), Reach.KERNEL),
}  # fmt: skip
_ENV = "neutral by construction: a setting of an allocator or library, outside the model's arithmetic"
_BOUNDS = ("epsilon", "epsilon_high", "delta", "off_policy_mask_threshold")


def reach(
    compared: Collection[str], key: str, value: object, own: object, stated: Mapping[str, object] | None = None
) -> tuple[Reach, str]:
    """(reach of a proof for `key` changed from `own` to `value`, reason why it is not compared or "").

    `compared` has the keys that the trainer's small trainings use unchanged, `stated` the traits that a space states.
    """
    if key == "attn_implementation":
        absent = [v for v in (own, value) if not compared_attention(v)]
        if not absent:
            return Reach.COMPARED, ""
        return Reach.KERNEL, f"the kernel {absent[0]!r} does not run on a CPU; the model's default replaces it"
    traits = traits_of(key, stated)
    known = traits.proof or _KEYS.get(key)
    if key in compared or (key.partition(".")[0] in compared and known is not Reach.KERNEL):
        return Reach.COMPARED, ""
    if known is not None:
        return known, traits.why or UNPROVEN[known]
    if key == "env":
        return Reach.HARMLESS, _ENV
    if key in _BOUNDS:
        return Reach.OTHER, "it is a bound, and the proof's samples may never reach it"
    if key.startswith("optim"):
        return Reach.OTHER, "it changes the update, not the gradient"
    return Reach.OTHER, UNPROVEN[Reach.OTHER]


def unlike(resolved: Mapping[str, object]) -> tuple[str, ...]:
    """The differences between the recipe and the small trainings, one phrase each."""
    found = ["whole optimizer steps only, without a partial step at the end of an epoch"]
    dtype = resolved.get("dtype")
    if resolved.get("bf16") or resolved.get("fp16") or dtype not in (None, "float32", "auto"):
        found.append("float32, not the recipe's 16-bit arithmetic, which has larger rounding errors")
    if weight_bits(resolved):
        found.append("no quantised weights")
    if resolved.get("use_vllm"):
        found.append("no vLLM: its importance weights, one per token or sequence, are not compared")
    if not compared_attention(resolved.get("attn_implementation")):
        found.append(f"the model's attention kernel for CPUs, not {resolved['attn_implementation']}")
    if resolved.get("torch_compile") or resolved.get("use_liger_kernel"):
        found.append("neither torch.compile nor Liger's kernels")
    if (resolved.get("use_peft") and resolved.get("lora_dropout")) or resolved.get("neftune_noise_alpha"):
        found.append("no dropout and no noise: their random numbers differ in every split")
    return tuple(found)


MOST_RANKS = 4
_MOST_OWN = 8  # ranks of a recipe whose samples no fewer ranks can share in micro-batches of the same size
_RUN_HERE = ("ddp", "fsdp2")
_MACHINES = "neutral by construction: it changes where the ranks run"
_ENGINE = "it changes the engine that generates, and the proof's samples are fixed"


def reach_of_launch(
    key: str, value: object, own: object, stated: Mapping[str, object] | None = None
) -> tuple[Reach, str]:
    """(reach of a proof for `launch.KEY` changed from `own` to `value`, reason why it is not compared or "")."""
    field = key.partition(".")[2]
    if field == "sharding":
        absent = [v for v in (own or "ddp", value) if v not in _RUN_HERE]
        return (Reach.KERNEL, f"{_absent(str(absent[0]))}; DDP replaces it") if absent else (Reach.COMPARED, "")
    if field == "ranks":
        return Reach.COMPARED, ""
    if field == "server_ranks" and own and value:
        return Reach.HARMLESS, "neutral by construction: the copies of the same engine divide the prompts"
    if field == "machines":
        return Reach.HARMLESS, _MACHINES
    traits = traits_of(key, stated)
    if traits.proof is not None:
        return traits.proof, traits.unproven
    return Reach.OTHER, _ENGINE if field == "server_ranks" else "it is a setting of accelerate that the proof lacks"


def _absent(sharding: str) -> str:
    if sharding == "fsdp1":
        return "the proof's ranks on a CPU run no FSDP1"
    return "DeepSpeed is not installed" if find_spec("deepspeed") is None else "the proof's ranks run no DeepSpeed"


def on_few_ranks(values: Mapping[str, object], sizes: Mapping[str, object], keys: BatchKeys) -> dict[str, object]:
    """The recipe `values` on the ranks of a proof, with the same samples in an optimizer step and a rollout.

    `sizes` has the resolved values of its batch keys. Fewer ranks have a larger accumulation. Raises ConfigError if
    there are more ranks than a proof can have.
    """
    launch = cast("Mapping[str, object]", values.get(LAUNCH) or {})
    rest = {key: value for key, value in values.items() if key != LAUNCH}
    if launch.get("ranks", 1) == 1:
        return rest
    batch = Batch.of(sizes, keys, cast(int, launch["ranks"]))
    few = batch.on(_ranks(batch), keys)
    if few.ranks != batch.ranks:
        once = {} if keys.rollout_batch is None else {keys.rollout_batch: None}
        rest = merge(rest, {**few.to_keys(keys), **once})
    own = str(launch.get("sharding", "ddp"))
    sharding = own if own in _RUN_HERE else "ddp"
    reshard = launch.get("reshard_after_forward", True)
    return {**rest, LAUNCH: {"ranks": few.ranks, "sharding": sharding, "reshard_after_forward": reshard}}


def _ranks(batch: Batch) -> int:
    """Ranks of a proof that have the same samples in micro-batches of the same size."""
    whole = (batch.effective, batch.generated or batch.effective)
    fitting = [n for n in range(2, MOST_RANKS + 1) if not any(total % (n * batch.micro) for total in whole)]
    if batch.ranks in fitting or (not fitting and batch.ranks <= _MOST_OWN):
        return batch.ranks
    if not fitting:
        raise ConfigError(f"a proof has at most {_MOST_OWN} ranks, and fewer than {batch.ranks} cannot share the batch")
    return max(fitting)


def launch_unlike(named: Mapping[str, tuple[Mapping[str, object], Mapping[str, object]]]) -> tuple[str, ...]:
    """The differences between launches of the recipe and those of the proof, one phrase each.

    `named` has {"trial" or "baseline": (its values, its values in the proof)}.
    """
    found: list[str] = []
    for name, (values, small) in named.items():
        asked, had = (cast("Mapping[str, object]", v.get(LAUNCH) or {}) for v in (values, small))
        own, few = (cast(int, launch.get("ranks", 1)) for launch in (asked, had))
        if own > 1:
            fewer = f", not {own}: the accumulation is larger" if few != own else ""
            found.append(f"{few} gloo ranks of one CPU in the {name}{fewer}")
        sharding = str(asked.get("sharding", "ddp"))
        if own > 1 and sharding not in _RUN_HERE:
            found.append(f"DDP in the {name}, not {sharding}: {_absent(sharding)}")
    return tuple(found)
