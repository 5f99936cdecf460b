"""What ends a training of ms-swift before its first step, and whether one evaluates.

Read at 3602360a: swift/arguments/sft_args.py and rlhf_args.py (checks), swift/trainers/arguments.py,
swift/rlhf_trainers (args_mixin.py, rollout_mixin.py, the trainers' losses), swift/pipelines/train. No torch here.
"""

import math
import re

from autofit.frontends.draft import Draft, number, truth
from autofit.frontends.tools import check_best_model

_FLASH = ("flash_attn", "flash_attention_2", "flash_attention_3", "flash_attention_4")
_ATTENTION = (*_FLASH, "sdpa", "eager", "flex_attention")
_UNPADDED = ("sft", "pt", "seq_cls", "embedding", "reranker", "generative_reranker", "grpo", "dpo", "kto", "gkd")
_NO_LLAMA = re.compile(
    r"(?i)^(?!.*llama).*(?:qwen|mistral|mixtral|gemma|glm|phi-|internlm|baichuan)"
)  # pipelines/train
_REFERRED = ("dpo", "kto", "ppo", "grpo")
_GENERATING = ("grpo", "gkd")
_REWARDED_BY = ("reward_funcs", "reward_model", "reward_model_plugin", "use_gym_env", "teacher_model",
                "teacher_model_server")  # fmt: skip
_LOSSES = {  # others end at the first step
    "dpo": ("sigmoid", "robust", "exo_pair", "hinge", "ipo", "bco_pair", "sppo_hard", "nca_pair", "aot_unpaired", "aot",
            "apo_zero", "apo_down", "discopop", "sft"),
    "cpo": ("sigmoid", "hinge", "ipo", "simpo", "alphapo"), "kto": ("kto", "apo_zero_unpaired"),
    "grpo": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "real", "fipo"),
}  # fmt: skip


def evaluates(draft: Draft) -> bool:
    """Whether there is what to evaluate on, and when (sft_args.py, _init_eval_strategy; data_args.py)."""
    given = draft.given
    if (given.get("eval_strategy") or given.get("save_strategy")) == "no":
        return False
    if draft.says("val_dataset") or draft.says("cached_val_dataset"):
        return True
    return (number(given.get("split_dataset_ratio")) or 0) > 0 and truth(given.get("streaming")) is not True


def check(draft: Draft, kind: str, ranks: int | None) -> None:
    """Tell what ms-swift ends with, in its own words where it has some; on `ranks` ranks where these are known."""
    given, on = draft.given, draft.says
    attention = given.get("attn_impl")
    unpadded = "packing" if on("packing") else "padding_free" if on("padding_free") else None
    known = _LOSSES.get(kind)
    unused = kind == "grpo" and number(given.get("beta")) == 0
    chats = truth(given.get("use_chat_template")) is not False
    refers = unused or (kind in _REFERRED and not draft.values.get("use_peft"))
    losses = given.get("loss_type")
    listed = losses if isinstance(losses, list) else [losses]
    rules = (
        (unpadded and attention not in _FLASH,
         f"{unpadded} needs flash attention: attn_impl {', '.join(_FLASH)}; got {attention or 'none'}"),
        (unpadded and kind not in _UNPADDED, f"{unpadded} cannot be with rlhf_type {kind}"),
        (attention is not None and attention not in _ATTENTION and "/" not in str(attention),
         f"attn_impl must be one of {', '.join(_ATTENTION)}, or a kernel of the Hub; got {attention}"),
        (draft.values.get("bf16") and draft.values.get("fp16"),
         "bf16 and fp16 cannot both be true; torch_dtype sets the one that is not given"),
        (on("packing") and on("lazy_tokenize"), "packing and lazy_tokenize cannot both be true"),
        (given.get("eval_strategy") not in (None, "no", "steps", "epoch"),
         f"eval_strategy must be no, steps or epoch; got {given.get('eval_strategy')}"),
        (given.get("tuner_type") == "longlora" and _NO_LLAMA.search(str(given.get("model"))),
         f"tuner_type longlora is of Llama models, as ms-swift says; got {given.get('model')}"),
        (on("streaming") and (number(given.get("max_steps")) or 0) <= 0, "streaming needs max_steps"),
        (on("streaming") and (on("cached_dataset") or on("cached_val_dataset")),
         "cached_dataset cannot be with streaming"),
        (given.get("truncation_strategy") == "split" and kind != "pt" and chats,
         "truncation_strategy split is of `swift pt`, as ms-swift says"),
        (on("warmup_ratio") and on("warmup_steps"), "warmup_ratio and warmup_steps cannot both be given"),
        ((number(given.get("warmup_ratio")) or 0) >= 1, "warmup_ratio must be less than 1"),
        (given.get("ref_model") is not None and not refers,
         f"ref_model is of rlhf_type {', '.join(_REFERRED)} with tuner_type full"),
        (known and losses is not None and not set(map(str, listed)) <= set(known or ()),
         f"loss_type with rlhf_type {kind} must be one of {', '.join(known or ())}; got {losses}"),
    )  # fmt: skip
    for broken, text in rules:
        if broken:
            draft.wrong(text)
    check_best_model(draft, _strategy(draft) if evaluates(draft) else "no")
    if kind in _GENERATING:
        _check_engine(draft, ranks)
    if kind == "grpo":
        _check_groups(draft, ranks)
    if kind == "kto" and losses != "apo_zero_unpaired" and _update(draft) * (ranks or 2) <= 1:
        draft.wrong("rlhf_type kto needs 2 samples or more in an optimizer step, as ms-swift says; got 1")


def _strategy(draft: Draft) -> str:
    return str(draft.given.get("eval_strategy") or draft.given.get("save_strategy") or "steps")


def _update(draft: Draft) -> int:
    """Samples of an optimizer step on a rank."""
    micro, steps = draft.values["per_device_train_batch_size"], draft.values["gradient_accumulation_steps"]
    assert isinstance(micro, int)
    assert isinstance(steps, int)
    return micro * steps


def _check_engine(draft: Draft, ranks: int | None) -> None:
    given, on = draft.given, draft.says
    mode, parts = given.get("vllm_mode"), number(given.get("vllm_tensor_parallel_size")) or 1
    if on("async_generate") and mode != "server":
        draft.wrong("async_generate needs vllm_mode server")
    if on("use_vllm") and mode is None:
        draft.wrong("use_vllm needs vllm_mode: colocate or server")
    if mode is not None and not on("use_vllm"):
        draft.wrong("vllm_mode needs use_vllm true")
    if on("use_vllm") and mode == "server" and not (on("vllm_server_host") or on("vllm_server_base_url")):
        draft.wrong("vllm_mode server needs vllm_server_host or vllm_server_base_url")
    if on("use_vllm") and mode == "colocate" and ranks and ranks % parts:  # rollout_mixin.py, beside the loaded model
        draft.wrong(f"vllm_tensor_parallel_size {parts:g} must divide the ranks; got {ranks}")


def _check_groups(draft: Draft, ranks: int | None) -> None:
    """Whole groups in a generation, and in an evaluation (args_mixin.py, _init_generation_batch_params)."""
    given = draft.given
    if given.get("vllm_mode") != "server" and not any(draft.says(key) for key in _REWARDED_BY):
        draft.wrong("rlhf_type grpo needs reward_funcs or reward_model")
    group, samples = draft.values.get("num_generations"), number(given.get("per_device_train_batch_size")) or 1
    if not isinstance(group, int) or ranks is None:
        return
    at_once = int(samples) * ranks
    accumulated = number(given.get("gradient_accumulation_steps")) or 1
    steps, whole = number(given.get("steps_per_generation")), number(given.get("generation_batch_size"))
    if whole is not None and (whole % at_once or (steps is not None and whole != at_once * steps)):
        draft.wrong(
            f"generation_batch_size must be per_device_train_batch_size x ranks ({at_once}) x steps_per_generation; "
            f"got {whole:g}"
        )
    made = whole if whole is not None else at_once * steps if steps is not None else at_once * accumulated
    if group == 1:
        draft.wrong("num_generations must be 2 or more; got 1")
    if group > 1 and made % group:
        draft.wrong(f"a generation of {made:g} completions must be whole groups: num_generations is {group}")
    evaluated = (number(given.get("per_device_eval_batch_size")) or 1) * ranks
    tested = number(given.get("num_generations_eval")) or group
    if group > 1 and evaluates(draft) and math.fmod(evaluated, tested):
        draft.wrong(
            f"an evaluation of {evaluated:g} completions (per_device_eval_batch_size x ranks) must be whole groups of "
            f"{tested:g}, as ms-swift says"
        )
