"""What ms-swift trains beside causal models and answers: students of a teacher, embedding models and rerankers.

Read at 3602360a: swift/rlhf_trainers/gkd_trainer.py and rollout_mixin.py (_setup_teacher), swift/arguments/rlhf_args.py
(_check_teacher), swift/loss, swift/template/base.py (the batches of embeddings and rerankers). No torch here.
"""

from collections.abc import Mapping
from pathlib import Path

from autofit.errors import ConfigError, quoted
from autofit.frontends import sharing
from autofit.frontends.draft import Draft, number

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
    """Take the keys of a teacher where none is used. Raises ConfigError for GRPO, which would use it."""
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
    """How the teacher is shared, which is as the student is unless teacher_deepspeed says else."""
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
