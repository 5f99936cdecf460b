"""Files of verl, and what its tests share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autofit.api.reading import source_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FSDP = f"{ACTOR}.fsdp_config"
REF, BUDGET = "actor_rollout_ref.ref", "ppo_max_token_len_per_gpu"
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
QWEN: dict[str, object] = {
    "algorithm.adv_estimator": "grpo", "data.train_batch_size": 1024, "data.max_response_length": 1024,
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B-Instruct", f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 16, f"{ACTOR}.use_kl_loss": True, f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": 5, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 32,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
}  # fmt: skip
GIB = 1 << 30


def script(values: Mapping[str, object], head: str = "") -> str:
    return (
        f"{head}\npython3 -m verl.trainer.main_ppo " + " \\\n  ".join(f"{k}={v}" for k, v in values.items()) + " $@\n"
    )


def nested(values: Mapping[str, object]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in values.items():
        *outer, last = path.split(".")
        place = found
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def origin_of(path: Path) -> Mapping[str, object]:
    return source_of(path).foreign
