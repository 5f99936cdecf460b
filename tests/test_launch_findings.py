"""What doctor says of a launch on several cards: each finding where it belongs, and not where it does not."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipes import grpo_recipe

from autofit.recipe.catalogue import attention_heads
from autofit.recipe.findings import Finding, Severity, StatedLaunch, findings
from autofit.recipe.launch import THREADS, Launch, read_accelerate_config
from autofit.units import format_bytes

WEIGHTS = 15_230_000_000


def asked(launch: Launch | None = None, *, config: Any = None, name: str = "run.yaml",
          num_processes: int | None = None, card: str = "", cards_here: int = 0, model: str = "m",
          **keys: Any) -> StatedLaunch:  # fmt: skip
    """A GRPO recipe with `keys` on a launch, without LoRA and checkpointing unless `keys` say so."""
    launch = launch or Launch(ranks=4)
    recipe = grpo_recipe(**{"use_peft": False, "gradient_checkpointing": False, **keys})
    recipe = replace(recipe, launch=launch, weights_bytes=WEIGHTS, model=model)
    return StatedLaunch(recipe=recipe, file=name, config=config or {}, num_processes=num_processes, card=card,
                 cards_here=cards_here, config_name="fsdp2.yaml")  # fmt: skip


def of(found: list[Finding], key: str) -> Finding:
    return next(f for f in found if f.where.endswith((f": {key}", f".{key}")))


FSDP2, ZERO3 = Launch(ranks=8, sharding="fsdp2"), Launch(ranks=8, sharding="zero3")
FSDP1 = Launch(ranks=2, sharding="fsdp1")
HYBRID = {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
SYNCED = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
OFFLOADED = replace(FSDP2, offload="parameters")
FLAT: dict[str, Any] = {
    "bnb_4bit_quant_storage": "bfloat16",
    "load_in_4bit": True,
    "use_peft": True,
    "dtype": "bfloat16",
}
QLORA: dict[str, Any] = {**FLAT, "bnb_4bit_quant_storage": None}
ENGINE: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate"}
TWICE: dict[str, Any] = {"gradient_checkpointing": True, "ddp_find_unused_parameters": True,
         "gradient_checkpointing_kwargs": {"use_reentrant": True}}  # fmt: skip

LOOKS: dict[str, Any] = {"use_peft": True, "ddp_find_unused_parameters": None}


def zero(**keys: object) -> dict[str, object]:
    return {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": {"zero_stage": 3, **keys}}


CASES = [
    # (the key, its severity, what makes the finding, what has none of it)
    ("distributed_type", "error", asked(Launch(), config={"distributed_type": "NO", "num_processes": 8}),
     asked(Launch(), config={"distributed_type": "NO", "num_processes": 1})),
    ("num_processes", "error", asked(Launch(), config={"distributed_type": "MULTI_GPU", "num_processes": 1}),
     asked(config={"distributed_type": "MULTI_GPU", "num_processes": 1}, num_processes=4)),
    ("num_processes", "error", asked(replace(FSDP2, ranks=1), config={"distributed_type": "FSDP"}),
     asked(FSDP2, config={"distributed_type": "FSDP"}, num_processes=8)),
    ("num_processes", "error", asked(replace(FSDP2, ranks=1), config={"distributed_type": "FSDP"}),
     asked(FSDP2, config={"distributed_type": "FSDP"})),  # the recipe's YAML or WORLD_SIZE has said it
    ("fsdp_config.fsdp_auto_wrap_policy", "warning", asked(FSDP2, config={"fsdp_config": {"fsdp_version": 2}}),
     asked(FSDP2)),
    ("fsdp_config.fsdp_auto_wrap_policy", "warning",
     asked(FSDP2, config={"fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}}),
     asked(FSDP2, config={"fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}})),
    ("fsdp_config.fsdp_state_dict_type", "warning", asked(FSDP2, config={"fsdp_config": {"fsdp_version": 2}}),
     asked(Launch(ranks=8, sharding="fsdp1"), config={"fsdp_config": {"fsdp_version": 1}})),
    ("num_machines", "note", asked(Launch(ranks=16, machines=2)), asked(Launch(ranks=16))),
    ("sync_each_batch", "warning", asked(FSDP2), asked(FSDP2, gradient_accumulation_steps=1)),
    ("sync_each_batch", "warning", asked(FSDP2), asked(FSDP2, accelerator_config=SYNCED)),
    ("sync_each_batch", "warning", asked(Launch(ranks=8, sharding="fsdp1")), asked(ZERO3)),
    ("sync_each_batch", "warning", asked(FSDP2), asked(FSDP2, use_peft=True)),
    ("beta", "warning", asked(FSDP2, beta=0.04), asked(FSDP2, beta=0.0)),
    ("beta", "warning", asked(FSDP2, beta=0.04), asked(FSDP2, beta=0.04, use_peft=True)),
    ("beta", "warning", asked(FSDP2, beta=0.04), asked(ZERO3, beta=0.04)),
    ("fsdp_config.fsdp_offload_params", "error", asked(OFFLOADED, use_vllm=False), asked(FSDP2, use_vllm=False)),
    ("fsdp_config.fsdp_offload_params", "error", asked(OFFLOADED, use_vllm=False), asked(OFFLOADED, use_vllm=True)),
    ("fsdp_config.fsdp_offload_params", "error", asked(OFFLOADED, model="Qwen/Qwen3-8B", use_vllm=True, use_peft=True),
     asked(OFFLOADED, model="Qwen/Qwen3-0.6B", use_vllm=True, use_peft=True)),
    ("gpu_ids", "error", asked(config={"distributed_type": "MULTI_GPU", "num_processes": 4, "gpu_ids": "0,1"}),
     asked(config={"distributed_type": "MULTI_GPU", "num_processes": 4, "gpu_ids": "0,1,2,3"})),
    ("nproc_per_node", "error", asked(config={"nproc_per_node": 4}), asked(config={"num_processes": 4})),
    ("distributed_type", "error", asked(config={"distributed_type": "MULTI_CPU", "num_processes": 4}),
     asked(config={"distributed_type": "MULTI_CPU", "num_processes": 4, "mpirun_config": {"mpirun_ccl": "0"}})),
    ("deepspeed_config.gradient_accumulation_steps", "error", asked(ZERO3, config=zero(gradient_accumulation_steps=8)),
     asked(ZERO3, config=zero(gradient_accumulation_steps=4))),
    ("deepspeed_config.gradient_clipping", "error",
     asked(ZERO3, config=zero(gradient_clipping=0.5), max_grad_norm=1.0),
     asked(ZERO3, config=zero(gradient_clipping="auto"), max_grad_norm=1.0)),
    ("OMP_NUM_THREADS", "warning", asked(OFFLOADED, use_vllm=True), asked(FSDP2)),
    ("OMP_NUM_THREADS", "warning", asked(replace(ZERO3, offload="optimizer")),
     asked(replace(OFFLOADED, config={THREADS: 8}))),
    ("optim", "error", asked(FSDP2, optim="paged_adamw_8bit"), asked(optim="paged_adamw_8bit")),
    ("optim", "error", asked(FSDP2, optim="adamw_8bit"), asked(FSDP2, optim="adamw_torch_8bit")),
    ("num_generations", "error", asked(num_generations=6), asked(num_generations=8)),
    ("model_init_kwargs.device_map", "warning", asked(model_init_kwargs={"device_map": "auto"}),
     asked(model_init_kwargs={"device_map": None})),
    ("model_init_kwargs.device_map", "note",
     asked(Launch(), model_init_kwargs={"device_map": "auto"}, cards_here=2),
     asked(Launch(), model_init_kwargs={"device_map": "auto"}, cards_here=1)),
    ("fsdp_config.fsdp_cpu_ram_efficient_loading", "warning",
     asked(FSDP2, config={"fsdp_config": {"fsdp_cpu_ram_efficient_loading": False}}),
     asked(FSDP2, config={"fsdp_config": {"fsdp_cpu_ram_efficient_loading": True}})),
    ("deepspeed_config.zero3_init_flag", "warning",
     asked(ZERO3, config={"deepspeed_config": {"zero3_init_flag": False}}),
     asked(ZERO3, config={"deepspeed_config": {"zero3_init_flag": True}})),
    ("deepspeed_config.zero_stage", "warning", asked(Launch(ranks=8, sharding="zero2"), use_peft=True),
     asked(ZERO3, use_peft=True)),
    ("ds3_gather_for_generation", "warning", asked(ZERO3, ds3_gather_for_generation=True),
     asked(ZERO3, ds3_gather_for_generation=True, use_vllm=True)),
    ("ds3_gather_for_generation", "warning", asked(ZERO3, ds3_gather_for_generation=True),
     asked(ZERO3, ds3_gather_for_generation=False)),
    ("deepspeed_config.zero_stage", "note", asked(ZERO3, ds3_gather_for_generation=False, use_peft=True),
     asked(ZERO3, ds3_gather_for_generation=False)),
    ("num_proceses", "error", asked(config={"num_processes": 4, "num_proceses": 8}),
     asked(config={"num_processes": 4, "of_a_newer_release": 1})),
    ("fsdp_config.fsdp_sharding_strategy", "error", asked(FSDP1, config={"fsdp_config": HYBRID}, cards_here=8),
     asked(FSDP1, config={"fsdp_config": HYBRID, "gpu_ids": "0,1"}, cards_here=8)),
    ("fsdp_config.fsdp_sharding_strategy", "error",
     asked(FSDP1, config={"fsdp_config": {**HYBRID, "fsdp_auto_wrap_policy": "NO_WRAP"}}),
     asked(FSDP1, config={"fsdp_config": HYBRID}, cards_here=2)),
    ("fsdp_config.fsdp_sync_module_states", "error",
     asked(FSDP2, config={"distributed_type": "FSDP", "fsdp_config": {"fsdp_sync_module_states": False}}),
     asked(FSDP2, config={"distributed_type": "FSDP", "fsdp_config": {
         "fsdp_sync_module_states": False, "fsdp_cpu_ram_efficient_loading": False}})),
    ("fsdp_config.fsdp_offload_param", "warning", asked(config={"fsdp_config": {"fsdp_offload_param": True}}),
     asked(config={"fsdp_config": {"fsdp_ignored_modules": "a", "of_a_newer_release": 1}})),
    ("deepspeed_config.zero3_save_16bit", "warning",
     asked(ZERO3, config={"deepspeed_config": {"zero3_save_16bit": True}}),
     asked(ZERO3, config={"deepspeed_config": {"zero3_save_16bit_model": True, "gradient_accumulation_steps": 1}})),
    ("deepspeed_config.offload_param_nvme_path", "warning",
     asked(ZERO3, config={"deepspeed_config": {"offload_param_device": "nvme", "offload_param_nvme_path": "/n"}}),
     asked(ZERO3, config={"deepspeed_config": {"offload_param_device": "cpu", "offload_param_nvme_path": "/n"}})),
    ("distributed_type", "note", asked(use_peft=True), asked(FSDP2, use_peft=True)),
    ("fsdp_config.fsdp_version", "error", asked(FSDP1, use_peft=True, bf16=True, use_vllm=False),
     asked(FSDP2, use_peft=True, bf16=True, use_vllm=False)),
    ("fsdp_config.fsdp_version", "error", asked(FSDP1, use_peft=True, fp16=True, use_vllm=False),
     asked(FSDP1, use_peft=True, bf16=False, use_vllm=False)),
    ("deepspeed_config.zero_stage", "warning", asked(Launch(ranks=2, sharding="zero0")), asked(Launch(ranks=2))),
    ("bnb_4bit_quant_storage", "warning", asked(FSDP2, **QLORA), asked(FSDP2, **FLAT)),
    ("bnb_4bit_quant_storage", "error", asked(Launch(ranks=2, sharding="fsdp1"), **QLORA),
     asked(Launch(ranks=2, sharding="fsdp1"), **FLAT)),
    ("bnb_4bit_quant_storage", "error", asked(FSDP2, **FLAT, fp16=True), asked(FSDP2, **FLAT, bf16=True)),
    ("load_in_4bit", "warning", asked(ZERO3, **QLORA), asked(**QLORA)),
    ("load_in_4bit", "note", asked(FSDP2, **FLAT), asked(FSDP2, **QLORA)),
    ("fsdp_config.fsdp_activation_checkpointing", "error",
     asked(FSDP2, config={"fsdp_config": {"fsdp_activation_checkpointing": True}}, gradient_checkpointing=True),
     asked(FSDP2, config={"fsdp_config": {"fsdp_activation_checkpointing": True}})),
    ("gradient_checkpointing", "note", asked(FSDP2, gradient_checkpointing=True), asked(gradient_checkpointing=True)),
    ("ddp_find_unused_parameters", "error", asked(**TWICE),
     asked(**{**TWICE, "gradient_checkpointing_kwargs": {"use_reentrant": False}})),
    ("ddp_find_unused_parameters", "error", asked(**{**TWICE, **LOOKS}),
     asked(**{**TWICE, **LOOKS, "ddp_find_unused_parameters": False})),
    ("ddp_find_unused_parameters", "error", asked(**{**TWICE, **LOOKS}),
     asked(**{**TWICE, **LOOKS, "use_peft": False})),
    ("save_only_model", "error", asked(FSDP2, save_only_model=True, load_best_model_at_end=True),
     asked(save_only_model=True, load_best_model_at_end=True)),
    ("auto_find_batch_size", "error", asked(ZERO3, auto_find_batch_size=True), asked(auto_find_batch_size=True)),
    ("deepspeed_config.zero3_save_16bit_model", "warning",
     asked(ZERO3, config={"deepspeed_config": {"zero3_save_16bit_model": False}}), asked(ZERO3)),
    ("fsdp_config.fsdp_state_dict_type", "warning",
     asked(FSDP2, config={"fsdp_config": {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}}), asked(FSDP2)),
    ("fsdp_config.fsdp_state_dict_type", "error",
     asked(FSDP2, config={"fsdp_config": {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}}, save_only_model=True),
     asked(FSDP2, save_only_model=True)),
    ("vllm_tensor_parallel_size", "error", asked(**ENGINE, vllm_tensor_parallel_size=3),
     asked(**ENGINE, vllm_tensor_parallel_size=2)),
    ("vllm_tensor_parallel_size", "error",
     asked(Launch(ranks=8), model="Qwen/Qwen2.5-7B", **ENGINE, vllm_tensor_parallel_size=8),
     asked(Launch(ranks=8), model="Qwen/Qwen2.5-7B", **ENGINE, vllm_tensor_parallel_size=4)),
    ("vllm_tensor_parallel_size", "note", asked(use_vllm=True, vllm_mode="server", vllm_tensor_parallel_size=2),
     asked(use_vllm=True, vllm_mode="server", vllm_tensor_parallel_size=1)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def threads_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(("key", "severity", "wrong", "right"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_each_finding_is_where_it_belongs_and_not_elsewhere(
    key: str, severity: str, wrong: StatedLaunch, right: StatedLaunch
) -> None:
    found = of(findings(wrong), key)
    assert found.severity == severity
    assert found.what
    assert found.fix
    assert len(str(found)) <= 320
    assert all(not f.where.endswith((f": {key}", f".{key}")) or f.severity != severity for f in findings(right))


def test_a_deepspeed_json_without_accumulation_counts_as_1(tmp_path: Path) -> None:
    for name, content in (("none.json", {}), ("auto.json", {"gradient_accumulation_steps": "auto"})):
        (tmp_path / name).write_text(json.dumps(content))
    without, auto = (
        asked(ZERO3, config=zero(deepspeed_config_file=str(tmp_path / n))) for n in ("none.json", "auto.json")
    )
    assert 'write "auto" there' in of(findings(without), "gradient_accumulation_steps").fix
    assert not [f for f in findings(auto) if f.where.endswith("gradient_accumulation_steps")]


def test_weights_are_gathered_in_the_dtype_of_mixed_precision() -> None:
    key = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
    for dtype, bf16, gathered in (
        ("float32", True, WEIGHTS // 2),
        ("float32", False, WEIGHTS),
        ("bfloat16", True, WEIGHTS),
    ):
        found = findings(asked(FSDP2, dtype=dtype, bf16=bf16))
        assert format_bytes(gathered) in next(f for f in found if f.where.endswith(key)).what


def test_the_host_memory_of_all_ranks_is_computed() -> None:
    """8 ranks of 15.23 GB each; on two machines 4 of them share one."""
    config: dict[str, object] = {"fsdp_config": {"fsdp_cpu_ram_efficient_loading": False}}
    assert format_bytes(8 * WEIGHTS) in of(findings(asked(FSDP2, config=config)),
                                           "fsdp_config.fsdp_cpu_ram_efficient_loading").what  # fmt: skip
    two = asked(Launch(ranks=8, sharding="fsdp2", machines=2), config=config)
    assert format_bytes(4 * WEIGHTS) in of(findings(two), "fsdp_config.fsdp_cpu_ram_efficient_loading").what


def test_a_size_of_tensor_parallel_that_works_is_named() -> None:
    """Qwen2.5-7B has 28 attention heads: 8 ranks can share them by 1, 2 and 4."""
    wrong = asked(Launch(ranks=8), model="Qwen/Qwen2.5-7B", **ENGINE, vllm_tensor_parallel_size=8)
    found = of(findings(wrong), "vllm_tensor_parallel_size")
    assert "28 attention heads" in found.what
    assert found.fix == "take one of 1, 2, 4"
    assert attention_heads("nobody/knows") is None


def test_heads_are_read_from_a_model_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 12}}')
    assert attention_heads(str(tmp_path)) == 12


def test_cards_without_peer_to_peer_are_told_and_others_are_not() -> None:
    assert [f.where for f in findings(asked(card="rtx4090"))] == ["the card"]
    assert findings(asked(card="a100-80gb")) == []
    assert findings(asked(Launch(), card="rtx4090")) == []


def test_a_finding_on_keys_of_the_recipe_names_them_as_written() -> None:
    values = {"fsdp": True, "fsdp_config": {"cpu_ram_efficient_loading": False}}
    launch = replace(FSDP2, config={"fsdp_config": {"fsdp_cpu_ram_efficient_loading": False}})
    told = replace(asked(launch, name="run.yaml"), values=values)
    assert of(findings(told), "cpu_ram_efficient_loading").where == "run.yaml: fsdp_config.cpu_ram_efficient_loading"


def test_a_flag_of_the_recipe_counts_more_than_the_accelerate_config_below_it() -> None:
    launch = replace(FSDP2, config={"fsdp_config": {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}})
    flagged = asked(launch, config={"fsdp_config": {"fsdp_state_dict_type": "FULL_STATE_DICT"}})
    told = replace(flagged, values={"fsdp_state_dict_type": "SHARDED_STATE_DICT"})
    assert of(findings(told), "fsdp_state_dict_type").where == "run.yaml: fsdp_state_dict_type"


def test_the_worst_is_said_first() -> None:
    found = findings(asked(FSDP2, **QLORA, save_only_model=True, load_best_model_at_end=True))
    order = [list(Severity).index(f.severity) for f in found]
    assert order == sorted(order)
    assert found[0].stops


# -- the libraries' own behaviour, on which the findings rest ---------------------------------------------------------


def launch_as_accelerate_does(config: dict[str, object], folder: Path) -> argparse.Namespace:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(config))
    given = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, _, _ = _validate_launch_command(given)
    assert isinstance(args, argparse.Namespace)
    return args


def test_accelerate_starts_one_process_for_no_and_wraps_one_for_multi_gpu(tmp_path: Path) -> None:
    """`single_gpu.yaml`, which TRL ships, says num_processes: 8."""
    single, _ = read_accelerate_config("single_gpu")
    assert single["num_processes"] == 8
    assert launch_as_accelerate_does(single, tmp_path).multi_gpu is False
    alone = launch_as_accelerate_does({**single, "distributed_type": "MULTI_GPU", "num_processes": 1}, tmp_path)
    assert (alone.multi_gpu, alone.num_processes) == (True, 1)


TWO_RANKS = """
import os, sys
import torch
from torch.utils.checkpoint import checkpoint
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    def forward(self, x):
        x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=sys.argv[3] == "True")
        return x
model = torch.nn.parallel.DistributedDataParallel(Model(), find_unused_parameters=True)
try:
    model(torch.ones(1, 2)).sum().backward()
except RuntimeError as error:
    assert "marked as ready twice" in str(error) or "ready only once" in str(error), error
    os._exit(7)
os._exit(0)
"""


@pytest.mark.thorough  # torch's own end; CI has the finding that says so before
@pytest.mark.parametrize(("reentrant", "ends"), [(True, 7), (False, 0)])
def test_ddp_with_unused_parameters_and_reentrant_checkpoints_fails_in_its_first_backward(
    reentrant: bool, ends: int, tmp_path: Path
) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", TWO_RANKS, str(tmp_path / "store"), str(rank), str(reentrant)], env=env)
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [ends, ends]


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_doctor_prints_each_finding_and_ends_with_1_where_it_would_not_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from autofit.cli import main

    recipe, launch = tmp_path / "run.yaml", tmp_path / "fsdp2.yaml"
    recipe.write_text("model_name_or_path: Qwen/Qwen2.5-0.5B\ndtype: bfloat16\nmax_length: 64\n")
    config, _ = read_accelerate_config("fsdp2")
    inner = config["fsdp_config"]
    assert isinstance(inner, dict)
    inner["fsdp_activation_checkpointing"] = True
    launch.write_text(yaml.safe_dump(config))
    options = ["--trainer", "sft", "--gpu", "2xa100-80gb", "--prompt-tokens", "32"]
    assert main(["doctor", str(recipe), "--accelerate_config", str(launch), *options]) == 1
    told = capsys.readouterr().out
    assert f"error: the accelerate config {launch}: fsdp_config.fsdp_activation_checkpointing: true together" in told
    options += ["--set", "gradient_checkpointing=false"]
    assert main(["doctor", str(recipe), "--accelerate_config", str(launch), *options]) == 0
    said = capsys.readouterr()
    assert "error" not in said.out
    assert ("nothing wrong was found" in said.err) == ("warning" not in said.out)


def test_keys_of_fsdp_without_their_prefix_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    keys = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
    path.write_text(yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": keys}))
    config, _ = read_accelerate_config(str(path))
    found = findings(asked(FSDP2, config=config))
    assert not [f for f in found if f.where.endswith(("fsdp_auto_wrap_policy", "fsdp_state_dict_type"))]


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "multi_gpu", "single_gpu", "zero1", "zero2", "zero3"])
def test_no_key_of_a_config_that_trl_ships_is_unknown(name: str) -> None:
    config, _ = read_accelerate_config(name)
    assert not [f for f in findings(asked(config=config)) if "a key that it does not know" in f.what]


def test_accelerate_launch_passes_no_path_of_nvme_on() -> None:
    from accelerate.utils import launch as of_accelerate

    assert of_accelerate.__file__ is not None
    assert "NVME_PATH" not in Path(of_accelerate.__file__).read_text()


def test_an_accumulation_in_the_accelerate_config_is_blamed_there_as_removing_the_recipes_changes_the_batch() -> None:
    values: dict[str, Any] = {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 4}
    config = zero(gradient_accumulation_steps=4)
    given = replace(asked(ZERO3, config=config, name="grpo.yaml", **values), values=values)
    found = of(findings(given), "gradient_accumulation_steps")
    assert found.where == "fsdp2.yaml: deepspeed_config.gradient_accumulation_steps"
    assert "the recipe's 8 is taken then, and the effective batch stays as it is" in found.fix


def test_a_tool_with_a_launch_of_its_own_is_told_nothing_about_keys_of_accelerate() -> None:
    """verl shards by its own worker: its files have no such keys."""
    of_trl = asked(replace(FSDP1, config={"fsdp_config": {"fsdp_version": 1}}), gradient_accumulation_steps=4)
    assert {f.where.rpartition(".")[2] for f in findings(of_trl)} >= {"sync_each_batch", "fsdp_auto_wrap_policy"}
    assert findings(replace(of_trl, recipe=replace(of_trl.recipe, trainer="verl"))) == []
