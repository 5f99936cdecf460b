"""Errors that end a training of ms-swift before its first step, and its trainings beside causal models and answers.

Read at 3602360a: swift/arguments/sft_args.py and rlhf_args.py (checks), swift/trainers/arguments.py,
swift/rlhf_trainers (args_mixin.py, rollout_mixin.py, the trainers' losses), swift/pipelines/train. No torch here.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

from autofit.errors import ConfigError, quoted
from autofit.frontends import sharing
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

# Arguments of ms-swift 2 (2.6.1, llm/utils/argument.py) that today's has by another name, or not at all: "". The first
# release with today's is 3.0 (its ReleaseNote3.0.md); tuner_type was train_type in 3.x.
_OLD = {
    "sft_type": "tuner_type", "model_id_or_path": "model", "template_type": "template", "dtype": "torch_dtype",
    "batch_size": "per_device_train_batch_size", "eval_batch_size": "per_device_eval_batch_size",
    "quantization_bit": "quant_bits", "bnb_4bit_comp_dtype": "bnb_4bit_compute_dtype", "use_flash_attn": "attn_impl",
    "lora_dropout_p": "lora_dropout", "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save", "lora_bias_trainable": "lora_bias", "lora_lr_ratio": "lorap_lr_ratio",
    "neftune_alpha": "neftune_noise_alpha", "ref_model_id_or_path": "ref_model", "use_liger": "use_liger_kernel",
    "preprocess_num_proc": "dataset_num_proc", "dataset_test_ratio": "split_dataset_ratio",
    "custom_train_dataset_path": "dataset", "custom_val_dataset_path": "val_dataset",
    "only_save_model": "save_only_model", "add_output_dir_suffix": "add_version", "check_model_is_latest": "",
    "train_dataset_sample": "", "self_cognition_sample": "", "train_dataset_mix_ratio": "",
    "check_dataset_strategy": "", "test_oom_error": "", "push_hub_strategy": "",
}  # fmt: skip
OLD_COMMANDS = ("dpo", "orpo", "simpo")  # its commands beside sft, pt and rlhf (2.6.1, cli/main.py)


def check_version(given: Mapping[str, object], command: str | None = None) -> None:
    """Raise ConfigError for arguments of ms-swift 2, with those of today, as today's ends with an error there."""
    old = [key for key in _OLD if key in given]
    if not old and command not in OLD_COMMANDS:
        return
    words = [f"--{_OLD[key]} for --{key}" for key in old if _OLD[key]]
    if "model" not in given and "model_id_or_path" not in given and "model_type" in given:
        words.insert(0, f"--model, a name on the hub or a folder, for --model_type {given['model_type']}")
    if command in OLD_COMMANDS:
        words.insert(0, f"`swift rlhf --rlhf_type {command}` for `swift {command}`")
    if str(given.get("deepspeed", "")).startswith("default-"):
        words.append(f"--deepspeed {str(given['deepspeed']).removeprefix('default-')}")
    gone = [f"--{key}" for key in old if not _OLD[key]]
    raise ConfigError(
        "these are words of ms-swift 2 (until December 2024), and today's are read, 4.x; write "
        + "; ".join([", ".join(words), *([f"leave out {', '.join(gone)}"] if gone else [])]).removeprefix("; ")
        + "; without target_modules today's trains all linear layers, and 2.x did some of each model"
    )


def evaluates(draft: Draft) -> bool:
    """True if there are samples to evaluate on, and a time (sft_args.py, _init_eval_strategy; data_args.py)."""
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


# -- students of a teacher, embedding models and rerankers ------------------------------------------------------------
# Read in swift/rlhf_trainers/gkd_trainer.py and rollout_mixin.py (_setup_teacher), swift/arguments/rlhf_args.py
# (_check_teacher), swift/loss, swift/template/base.py (the batches of embeddings and rerankers).

TASKS = ("seq_cls", "embedding", "reranker", "generative_reranker")
_EMBEDDED_BY = ("infonce", "cosine_similarity", "contrastive", "online_contrastive")
_RANKED_BY = ("pointwise_reranker", "listwise_reranker")
_RANKED_BY_3 = {  # names of ms-swift 3 (swift/plugin/loss.py)
    "reranker": "pointwise_reranker", "generative_reranker": "pointwise_reranker",
    "listwise_generative_reranker": "listwise_reranker",
}  # fmt: skip
LOSSES = ("cross_entropy", *_EMBEDDED_BY, *_RANKED_BY)
_OF_TEACHER = ("teacher_model", "teacher_model_server", "teacher_deepspeed", "gkd_logits_topk", "sft_alpha", "lmbda",
               "temperature")  # fmt: skip


def shared_sequence(draft: Draft, kind: str, ranks: int | None, environment: Mapping[str, str]) -> None:
    """Ranks that share their samples (swift/sequence_parallel). Raises ConfigError."""
    size = draft.whole("sequence_parallel_size") or 1
    if size == 1:
        return
    if kind in ("grpo", "dpo"):
        _whole_samples(draft, kind, size, ranks)
        return
    if kind not in ("sft", "pt", "embedding"):
        raise ConfigError(
            f"sequence_parallel_size with {'task_type' if kind in TASKS else 'rlhf_type'} {kind} is not simulated"
        )
    if ranks is None or ranks % size:
        raise ConfigError(f"sequence_parallel_size {size} must divide the ranks; got {ranks or 'no number of them'}")
    draft.put("sequence_parallel_size", size)
    if kind != "embedding" and (chunk := _count(environment, "CELOSS_PARALLEL_SIZE", 0)):
        draft.put("loss_chunk", chunk, "sequence_parallel_size")
    draft.note(
        "linear attention, of models that have it, is simulated on a rank's tokens, without the exchange of its heads"
    )


def _whole_samples(draft: Draft, kind: str, size: int, ranks: int | None) -> None:
    """A rank's parts of a micro-batch as some of its samples, which have as many tokens, logits and heads."""
    micro = draft.values["per_device_train_batch_size"]
    assert isinstance(micro, int)
    if micro % size or (ranks or size) % size:
        raise ConfigError(
            f"sequence_parallel_size {size} with rlhf_type {kind} is simulated where it divides the ranks and "
            f"per_device_train_batch_size {micro}"
        )
    draft.put("per_device_train_batch_size", micro // size)
    draft.fixed.add("per_device_train_batch_size")
    draft.note(
        f"sequence_parallel_size: a rank computes 1/{size} of the tokens of {micro} samples, which is simulated as "
        f"{micro // size} whole samples; the exchange of heads, and its seconds, is not: a lower bound, by copies of "
        "one layer's queries, keys and values"
    )


def ignore_teacher(draft: Draft, kind: str) -> None:
    """Take the keys of an unused teacher. Raises ConfigError for GRPO, which would use it."""
    if kind == "grpo":
        draft.refuse(dict.fromkeys(_OF_TEACHER[:2], "a teacher is simulated with rlhf_type gkd, not beside a reward"))
    draft.ignore(_OF_TEACHER)


def teacher(draft: Draft, zero: Mapping[str, Mapping[str, object]], folder: Path, launch: Mapping[str, object]) -> None:
    """GKD: a student and its teacher. Raises ConfigError."""
    beta = draft.number("beta", 0.5)
    draft.put("beta", beta)
    draft.put("temperature", draft.number("temperature", 0.9))
    draft.put("nll_weight", draft.number("sft_alpha"), "sft_alpha")
    words, name = draft.whole("gkd_logits_topk"), draft.text("teacher_model")
    if draft.says("teacher_model_server"):
        if words is None:
            raise ConfigError("teacher_model_server needs gkd_logits_topk, as ms-swift says")
    elif words is not None and name is None:
        raise ConfigError("gkd_logits_topk without teacher_model or teacher_model_server is not simulated; omit it")
    draft.put("teacher_words", words, "gkd_logits_topk")
    draft.check_model(name)
    if name is not None and (name != draft.given.get("model") or not draft.values.get("use_peft")):
        draft.put("teacher_model_name_or_path", name, "teacher_model")
        _placed(draft, zero, folder, launch)
    draft.fixed.update(("use_peft", "load_in_4bit", "load_in_8bit") if name == draft.given.get("model") else ())


def lengthened(draft: Draft, length: int) -> int:
    """Tokens of a sample of GKD with a prompt, or a whole sample of the data, of `length` tokens.

    A student's own answer comes on top of a prompt, and has logits alone where all answers are the student's.
    """
    share = draft.number("lmbda", 0.5)
    if not share:
        return length
    if not draft.is_on("use_vllm"):
        draft.note(
            "the student generates answers with transformers, which is not simulated: a lower bound where its cache, "
            "or under ZeRO-3 all weights at once, need more than the update"
        )
    elif draft.given.get("vllm_mode") == "colocate":
        used = draft.number("vllm_gpu_memory_utilization", 0.9)
        if not draft.whole("sleep_level", least=0):
            draft.put("engine_share", used, "vllm_gpu_memory_utilization")
            return _with_answers(draft, length, share)
        draft.note(
            f"only the update is simulated: a lower bound, for vLLM holds {used} of the card while it generates, "
            "beside the weights and the optimizer's states"
        )
    return _with_answers(draft, length, share)


def _with_answers(draft: Draft, length: int, share: float) -> int:
    own = draft.whole("response_length") or draft.whole("max_new_tokens") or draft.whole("max_completion_length", 512)
    assert own is not None
    draft.fixed.add("max_length")
    draft.put("answer_tokens", own if share >= 1 else max(own, length), "lmbda")
    return length + own


def _placed(draft: Draft, zero: Mapping[str, Mapping[str, object]], folder: Path, launch: Mapping[str, object]) -> None:
    """Sharding of the teacher, which is the student's unless teacher_deepspeed sets another."""
    if not draft.says("teacher_deepspeed"):
        return
    own = sharing.zero(draft.given["teacher_deepspeed"], folder, zero).get("deepspeed_config")
    student = launch.get("deepspeed_config")
    stages = [int(number(of["zero_stage"]) or 0) if isinstance(of, Mapping) else 0 for of in (own, student)]
    if stages[0] < 3 <= stages[1]:
        raise ConfigError("teacher_deepspeed that does not shard, beside a student under ZeRO-3, is not simulated")
    offloads = isinstance(own, Mapping) and str(own.get("offload_param_device") or "none") != "none"
    if stages[0] > stages[1] or offloads:
        draft.note("teacher_deepspeed: the teacher is held as the student's sharding says: an upper bound")


def task(draft: Draft, kind: str, environment: Mapping[str, str]) -> None:
    """An embedding model or a reranker. Raises ConfigError."""
    losses = _EMBEDDED_BY if kind == "embedding" else _RANKED_BY
    loss = draft.raw("loss_type")
    if kind != "embedding":
        loss = _RANKED_BY_3.get(str(loss), loss)
    if loss not in losses:
        got = "it has none" if loss is None else f"got {quoted(loss)}"
        raise ConfigError(f"loss_type with task_type {kind} must be one of {', '.join(losses)}; {got}")
    if loss != losses[0]:
        draft.note(f"loss_type {loss} is simulated as {losses[0]}, on the same numbers for each text")
    if kind == "embedding":
        draft.note("a sample is two texts of max_length tokens here; negatives of the data come on top, as rows")
    else:
        counts = [_count(environment, *of) for of in (("MAX_POSITIVE_SAMPLES", 1), ("MAX_NEGATIVE_SAMPLES", 7))]
        draft.put("negatives", counts[0] * (1 + counts[1]) - 1, "task_type")
        draft.put("word_scores", True if kind == "generative_reranker" else None, "task_type")
        draft.note(
            f"a sample is as many documents as ms-swift takes at most, {counts[0] * (1 + counts[1])}, each of "
            "max_length tokens: an upper bound"
        )
    if draft.is_on("padding_free"):
        draft.note("padding_free: the copy of the last hidden states that puts rows apart again is not simulated")


def _count(environment: Mapping[str, str], name: str, usual: int) -> int:
    found = number(environment.get(name, usual))
    if found is None or found < 0:
        raise ConfigError(f"{name} must be a whole number; got {quoted(environment[name])}")
    return int(found)
