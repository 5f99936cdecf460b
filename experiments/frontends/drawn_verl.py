"""verl's commands drawn by chance, and its own reading: hydra's composition and `validate_config`.

DIR holds the package `verl` (0.9.1, by `pip install --no-deps --target DIR`, with hydra-core, omegaconf, tensordict and
codetiming). Ray and the rollout's engines are stood in for. What its workers assert later is asked here in its order.
"""

import importlib.abc
import importlib.machinery
import shlex
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from autofit.frontends.command import commands
from autofit.frontends.draft import Foreign
from experiments.frontends.chance import NO, Drawn, Facts, Values

_A, _R, _F, _M = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))
_MICRO, _SCORED, _TOKENS = (
    "ppo_micro_batch_size_per_gpu",
    "log_prob_micro_batch_size_per_gpu",
    "ppo_max_token_len_per_gpu",
)
_RANK_OF_VLLM = 512
_KL: Values = {f"{_A}.use_kl_loss": True, f"{_F}.{_SCORED}": 8}
_DYNAMIC: Values = {f"{_A}.use_dynamic_bsz": True, f"{_A}.{_TOKENS}": 8192}
_PPO: Values = {
    "algorithm.adv_estimator": "gae",
    "critic.ppo_micro_batch_size_per_gpu": 4,
    "critic.model.path": "Qwen/Qwen2.5-0.5B",
}
AXES: dict[str, tuple[object, ...]] = {
    f"{_M}.path": ("Qwen/Qwen2.5-0.5B",), "algorithm.adv_estimator": ("grpo", "grpo", "rloo"),
    "data.train_batch_size": (64, 128, 256, 1024, NO), f"{_A}.ppo_mini_batch_size": (32, 64, 128, NO),
    f"{_A}.{_MICRO}": (1, 2, 4, 8, 16), f"{_R}.n": (1, 4, 5, 8, NO), f"{_R}.{_SCORED}": (1, 2, 4, 8, 16, 32),
    f"{_R}.name": ("vllm",), f"{_R}.tensor_model_parallel_size": (1, 1, 2, NO),
    f"{_R}.gpu_memory_utilization": (NO, 0.4, 0.8), "data.max_prompt_length": (NO, 512, 1024),
    "data.max_response_length": (NO, 1024, 2048), "trainer.n_gpus_per_node": (NO, 1, 2, 4, 8),
    "trainer.nnodes": (NO, 1, 2),
    f"{_A}.strategy": (NO, "fsdp", "fsdp2"), f"{_A}.fsdp_config.param_offload": (NO, True, False),
    f"{_A}.fsdp_config.optimizer_offload": (NO, True, False), f"{_A}.fsdp_config.model_dtype": (NO, NO, "bf16", "fp32"),
    f"{_M}.enable_gradient_checkpointing": (NO, True, False), f"{_M}.use_remove_padding": (NO, NO, True, False),
    f"{_A}.use_kl_loss": (NO, NO, False), f"{_A}.entropy_coeff": (NO, 0, 0.01), f"{_A}.optim.lr": (NO, 1e-6),
    f"{_A}.ppo_epochs": (NO, NO, 1, 2), "trainer.total_epochs": (NO, 15),
}  # fmt: skip
RARE: tuple[Values, ...] = (
    _KL, _KL, _KL, {**_KL, f"{_F}.{_SCORED}": NO}, {**_KL, f"{_F}.{_SCORED}": 3}, {"algorithm.use_kl_in_reward": True},
    {**_KL, "algorithm.use_kl_in_reward": True}, _DYNAMIC, _DYNAMIC, {**_DYNAMIC, f"{_A}.{_MICRO}": NO},
    {**_DYNAMIC, f"{_A}.{_TOKENS}": 512}, {**_DYNAMIC, f"{_R}.log_prob_use_dynamic_bsz": False},
    {f"{_R}.log_prob_use_dynamic_bsz": True}, {**_DYNAMIC, **_KL, f"{_R}.log_prob_max_token_len_per_gpu": 16384},
    {**_DYNAMIC, f"{_A}.ulysses_sequence_parallel_size": 2}, {f"{_A}.ulysses_sequence_parallel_size": 2},
    {f"{_A}.fsdp_config.ulysses_sequence_parallel_size": 2}, {f"{_A}.ulysses_sequence_parallel_size": 3},
    {f"{_A}.ulysses_sequence_parallel_size": 2, f"{_M}.use_remove_padding": False}, {f"{_M}.lora_rank": 32},
    {f"{_M}.lora_rank": 32, f"{_M}.lora_alpha": 64, f"{_R}.load_format": "safetensors"}, {f"{_M}.lora_rank": 32, **_KL},
    {f"{_M}.lora_rank": 1024}, {f"{_M}.lora.rank": 16}, _PPO, _PPO, {**_PPO, "critic.ppo_mini_batch_size": 16},
    {**_PPO, "critic.ppo_micro_batch_size_per_gpu": NO}, {**_PPO, "critic.ppo_epochs": 2}, {**_PPO, **_DYNAMIC},
    {f"{_A}.ppo_micro_batch_size": 16, f"{_A}.{_MICRO}": NO}, {f"{_A}.ppo_micro_batch_size": 16},
    {f"{_A}.{_MICRO}": NO},
    {f"{_R}.log_prob_micro_batch_size": 16, f"{_R}.{_SCORED}": NO}, {f"{_R}.{_SCORED}": NO},
    {f"{_R}.log_prob_micro_batch_size": 16}, {f"{_A}.{_MICRO}": 3}, {f"{_A}.{_MICRO}": 7}, {f"{_R}.{_SCORED}": 3},
    {f"{_R}.{_SCORED}": 48}, {f"{_R}.tensor_model_parallel_size": 4}, {f"{_R}.tensor_model_parallel_size": 3},
    {f"{_R}.pipeline_model_parallel_size": 2}, {"data.train_batch_size": 96}, {f"{_A}.ppo_mini_batch_size": 48},
    {f"{_A}.ppo_mini_batch_size": 2048}, {"data.train_batch_size": 100}, {"data.train_batch_size": 16},
    {f"{_A}.loss_agg_mode": "seq-mean-token-mean"}, {f"{_A}.loss_agg_mode": "mean"}, {f"{_R}.enforce_eager": True},
    {f"{_R}.free_cache_engine": False}, {f"{_R}.max_num_batched_tokens": 16384}, {f"{_M}.use_fused_kernels": True},
    {f"{_A}.entropy_from_logits_with_chunking": True}, {f"{_A}.fsdp_config.fsdp_size": 2}, {f"{_R}.name": "sglang"},
    {f"{_F}.fsdp_config.param_offload": True}, {f"{_A}.fsdp_config.offload_policy": True, f"{_A}.strategy": "fsdp2"},
    {"algorithm.rollout_correction.bypass_mode": True}, {f"{_R}.val_kwargs.do_sample": True, f"{_R}.temperature": 0},
)  # fmt: skip
MISTAKES: tuple[Values, ...] = (
    {f"{_A}.{_MICRO}": 0}, {f"{_A}.{_MICRO}": "four"}, {f"{_A}.{_MICRO}": 1.5}, {f"{_A}.{_MICRO}": -1}, {f"{_R}.n": 0},
    {f"{_R}.n": "a"}, {"data.train_batch_size": "1k"}, {"data.train_batch_size": 0}, {f"{_A}.ppo_mini_batch_size": 1e2},
    {f"{_A}.ppo_mini_batch_size": 0}, {"trainer.n_gpus_per_node": 0}, {"trainer.n_gpus_per_node": 3},
    {f"{_A}.ppo_mini_batchsize": 32}, {f"{_A}.micro_batch_size": 4}, {f"{_A}.strategy": "ddp"},
    {f"{_A}.strategy": "FSDP"},
    {f"{_A}.use_dynamic_bsz": "maybe"}, {f"{_A}.use_kl_loss": "yes"}, {f"{_R}.gpu_memory_utilization": "a"},
    {f"{_A}.fsdp_config.model_dtype": "float8"}, {f"{_A}.fsdp_config.param_offload": "cpu"}, {f"{_M}.lora_rank": -1},
    {f"{_M}.lora_rank": "a"}, {f"{_A}.ppo_epochs": 0}, {f"{_A}.ppo_epochs": "a"},
    {f"{_M}.enable_gradient_checkpoint": True},
    {"data.max_prompt_length": "a"}, {"data.max_response_length": 0}, {f"{_R}.tensor_model_parallel_size": 0},
    {"algorithm.adv_estimator": "ppo"}, {f"{_R}.name": "hf"}, {f"{_A}.optim.lr": "a"}, {"actor.strategy": "fsdp"},
)  # fmt: skip


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Ray and the rollout's engines, as names without effect."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        absent = name.partition(".")[0] in ("ray", "vllm", "sglang")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def command(values: Values) -> str:
    words = [f"{key}={shlex.quote(str(value))}" for key, value in values.items()]
    return " \\\n    ".join(["python3 -m verl.trainer.main_ppo", *words]) + "\n"


def own_reading(folder: Path) -> Callable[[Path, int | None], Facts]:
    """hydra's composition, verl's validation and dataclasses, and what its workers assert."""
    import peft  # noqa: F401  (before the stand-ins, for which it would look)

    sys.path.insert(0, str(folder))
    sys.meta_path.append(_Finder())
    from hydra import compose, initialize_config_dir
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.workers.config.model import HFModelConfig

    def rank_of_vllm(rank: int) -> None:
        if rank > _RANK_OF_VLLM:
            raise ValueError(f"lora_rank must be less than or equal to {_RANK_OF_VLLM}, but got {rank}")

    engine = types.ModuleType("verl.workers.rollout.vllm_rollout.utils")  # which imports vLLM
    engine.get_vllm_max_lora_rank = rank_of_vllm  # type: ignore[attr-defined]
    package = types.ModuleType("verl.workers.rollout.vllm_rollout")
    sys.modules |= {module.__name__: module for module in (package, engine)}
    HFModelConfig.__post_init__ = lambda self: None  # it asks the hub for the model

    def own(path: Path, ranks: int | None) -> Facts:
        warnings.simplefilter("ignore")
        words = next(iter(commands(path.read_text()))).words[3:]
        with initialize_config_dir(str(folder / "verl/trainer/config"), version_base=None):
            config = compose("ppo_trainer", overrides=list(words))
        refers, judges = bool(need_reference_policy(config)), need_critic(config)
        validate_config(config, refers, judges)
        parts = config.actor_rollout_ref
        actor, rollout = omega_conf_to_dataclass(parts.actor), omega_conf_to_dataclass(parts.rollout)
        gpus, sharers = (
            config.trainer.nnodes * config.trainer.n_gpus_per_node,
            actor.engine.ulysses_sequence_parallel_size,
        )
        lora = parts.model.lora_rank or parts.model.lora.rank
        shards, dynamic = gpus // sharers, actor.use_dynamic_bsz
        samples, effective = config.data.train_batch_size * rollout.n, actor.ppo_mini_batch_size * rollout.n
        micro = None if dynamic else actor.ppo_micro_batch_size_per_gpu
        scored = None if dynamic else rollout.log_prob_micro_batch_size_per_gpu
        refer = None if dynamic or not refers else parts.ref.log_prob_micro_batch_size_per_gpu
        # engine_workers.py: __init__ of the workers, then train_mini_batch; engine/utils.py: prepare_micro_batches
        assert dynamic == rollout.log_prob_use_dynamic_bsz, "use_dynamic_bsz of the actor and the rollout"
        engine = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
        assert gpus % engine == 0, "rollout world_size"
        assert gpus % sharers == 0, "sequence parallel"
        assert dynamic or (scored is not None and micro is not None), "micro-batch sizes of the workers"
        assert samples % shards == 0, "a generation over the ranks"
        bypassed = config.algorithm.rollout_correction.bypass_mode
        if not dynamic and not bypassed:
            assert samples // shards % scored == 0, "data size of the log-probabilities"
        if refer is not None and not lora:
            assert samples // (gpus // parts.ref.ulysses_sequence_parallel_size) % refer == 0, (
                "data size of the reference"
            )
        assert effective % shards == 0, "mini-batch over the ranks"
        assert samples % effective == 0, "mini-batches of a generation"
        assert dynamic or effective // shards % micro == 0, "data size of the update"
        return {
            "ranks": gpus, "each": effective // shards, "generated": samples // shards, "micro": micro,
            "scored": scored,
            "refers": refers, "refer": refer, "dynamic": dynamic, "budget": actor.ppo_max_token_len_per_gpu,
            "sharers": sharers, "group": rollout.n, "epochs": actor.ppo_epochs,
            "prompt": config.data.max_prompt_length, "response": config.data.max_response_length,
            "strategy": "fsdp2" if actor.strategy == "fsdp2" else "fsdp1",
            "dtype": {"bfloat16": "bf16", "float32": "fp32"}.get(actor.engine.model_dtype, actor.engine.model_dtype),
            "param_offload": actor.engine.param_offload, "optimizer_offload": actor.engine.optimizer_offload,
            "lora": lora or 0, "checkpoints": parts.model.enable_gradient_checkpointing,
            "tensor_parallel": rollout.tensor_model_parallel_size, "share": rollout.gpu_memory_utilization,
            "eager": rollout.enforce_eager, "frees": rollout.free_cache_engine, "critic": judges,
            "engine": rollout.name,
            "entropy": actor.calculate_entropy or actor.entropy_coeff != 0, "fused": parts.model.use_fused_kernels,
        }  # fmt: skip

    return own


def our_reading(found: Foreign) -> Facts:
    """The same facts as autofit reads them."""
    values, launch = found.values, found.values["launch"]
    assert isinstance(launch, Mapping)
    micro, dynamic = int(str(values[_MICRO])), bool(values["use_dynamic_bsz"])
    refers = bool(values["reference"])
    return {
        "ranks": found.ranks, "each": micro * int(str(values["gradient_accumulation_steps"])),
        "generated": micro * int(str(values["steps_per_generation"])), "micro": None if dynamic else micro,
        "scored": None if dynamic else values[_SCORED], "refers": refers,
        "refer": values[f"ref_{_SCORED}"] if refers and not dynamic else None, "dynamic": dynamic,
        "budget": values[_TOKENS], "sharers": values["ulysses_sequence_parallel_size"], "group": values["rollout_n"],
        "epochs": values["ppo_epochs"], "prompt": values["max_prompt_length"],
        "response": values["max_response_length"],
        "strategy": launch["sharding"], "dtype": values["model_dtype"], "param_offload": values["param_offload"],
        "optimizer_offload": values["optimizer_offload"], "lora": values.get("lora_rank") or 0,
        "checkpoints": values["enable_gradient_checkpointing"], "tensor_parallel": values["tensor_model_parallel_size"],
        "share": values["gpu_memory_utilization"], "eager": values["enforce_eager"],
        "frees": values["free_cache_engine"],
        "critic": bool(values.get("critic")), "engine": values["rollout_name"], "entropy": values["calculate_entropy"],
        "fused": values["use_fused_kernels"],
    }  # fmt: skip


TOOL = Drawn(
    axes=AXES, rare=RARE, mistakes=MISTAKES, own=own_reading, ours=our_reading, text=command, ending=".sh",
    ranks=(None,),
)  # fmt: skip
