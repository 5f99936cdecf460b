"""Files of every kind that an option can name: whole ones, and such in which a value, a line or a byte is hostile."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import yaml

SECRET = "ghp_" + "Storm0Storm1Storm2Storm3Storm4Storm56"  # of nobody
ODD_WORDS = ["", " ", "0", "-1", "1e400", "nan", "inf", "9" * 400, "null", "[", "{", "${a}", "~", "/dev/zero",
             "/dev/full", "/proc/self/mem", "fifo", "a/b", "os:system", "x:y:z", "é" * 200, "x" * 5000, "%s", "{0}",
             "\x1b[31mred", "a\nb", "\u202e", "--", "-", "=", "run.yaml", "data", "model", "link", "broken",
             "deep.yaml", "postgresql://u:p@127.0.0.1:9/x", "file:/dev/zero", "file:fifo", "0xh100", "99999xh100",
             "1.5GB"]  # fmt: skip
_ODD: list[object] = [
    None, True, 0, -1, 10**9, 10**30, 1e308, float("nan"), float("inf"), "", " ", "nan", "true", "auto", "none", "${a}",
    "/dev/zero", "fifo", "..", "a/b", "\x00", "\x1b[31mred", "a\nb", "\u202e", "x" * 5000, "%s", "{value:9999999999}",
    "40GB", "9" * 400, "1-00:00", [], {}, [[]], [None], {"a": {}}, ["x"] * 3, {"type": []}, "ds.json", "fsdp.yaml",
]  # fmt: skip
_BASES: dict[str, dict[str, object]] = {
    "accelerate.yaml": {"distributed_type": "DEEPSPEED", "num_processes": 2, "num_machines": 1,
                        "mixed_precision": "bf16",
                        "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu"}},
    "fsdp.yaml": {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True}},
    "ds.json": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": "auto"},
                "gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": "auto"},
    "pipeline.yaml": {"vars": {"base": "model"}, "trials": 1, "stages": {
        "sft": {"trainer": "sft", "recipe": "run.yaml"},
        "grpo": {"trainer": "grpo", "recipe": "run.yaml", "set": {"model_name_or_path": "${sft}"}}}},
    "executor.yaml": {"executor": "slurm", "partition": "gpu", "time": "4h", "nodes": 1, "setup": ["module load x"]},
    "prices.yaml": {"h100": 2.5, "t4": 0.3},
    "space.yaml": {"trainer": "grpo", "knobs": {
        "per_device_train_batch_size": {"tier": "neutral", "values": [1, 2, 4]},
        "gradient_accumulation_steps": {"tier": "neutral", "values": "solved"}}},
    "guards.yaml": {"kl-high": {"metric": "kl", "check": "band", "max": 10, "says": "kl is {value}"}},
    "dataset_info.json": {"identity": {"file_name": "data/train.jsonl"}, "other": {"hf_hub_url": "a/b"}},
    "config.json": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 99,
                    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
}  # fmt: skip
FOREIGN: list[dict[str, object]] = [
    {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "stage": "sft", "finetuning_type": "lora", "do_train": True,
     "template": "qwen", "dataset": "identity", "cutoff_len": 2048, "per_device_train_batch_size": 1, "lora_rank": 8,
     "deepspeed": "ds.json", "dataset_dir": ".", "hf_hub_token": SECRET},
    {"base_model": "Qwen/Qwen2.5-0.5B", "datasets": [{"path": "./data/train.jsonl", "type": "alpaca"}],
     "adapter": "qlora", "load_in_4bit": True, "lora_alpha": 16, "lora_target_linear": True, "hub_token": SECRET,
     "sequence_len": 2048, "micro_batch_size": 2, "gradient_accumulation_steps": 4,
     "fsdp_config": {"fsdp_version": 2}},
    {"data": {"train_files": "x.parquet", "train_batch_size": 64, "max_prompt_length": 512, "max_response_length": 512},
     "actor_rollout_ref": {"model": {"path": "Qwen/Qwen2.5-0.5B"},
                           "actor": {"ppo_mini_batch_size": 32, "ppo_micro_batch_size_per_gpu": 2},
                           "rollout": {"name": "vllm", "n": 4, "gpu_memory_utilization": 0.4}},
     "algorithm": {"adv_estimator": "grpo"}, "trainer": {"n_gpus_per_node": 4, "nnodes": 1}},
]  # fmt: skip
SCRIPTS = [
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=x.parquet data.train_batch_size=64 "
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B actor_rollout_ref.actor.ppo_mini_batch_size=32 "
    "actor_rollout_ref.rollout.n=4 trainer.n_gpus_per_node=4 trainer.nnodes=1\n",
    "CUDA_VISIBLE_DEVICES=0 swift sft --model Qwen/Qwen2.5-0.5B --train_type lora --dataset data "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 16 --max_length 2048 --deepspeed zero2\n",
    "accelerate launch --config_file accelerate.yaml grpo.py --model_name_or_path model --deepspeed ds.json\n",
]  # fmt: skip
_TRAINER = [
    "import sys\nsys.exit('set MY_KEY first')\n", "raise KeyboardInterrupt\n", "import os\nos._exit(3)\n",
    "def f(:\n", "TRAINER = None\n", "TRAINER = object()\n", "import ctypes\nctypes.string_at(0)\n",
    "raise RuntimeError('\\x1b[31m' + 'y' * 10**6)\n",
]  # fmt: skip
_OF_RECIPE: dict[str, Callable[[random.Random], object]] = {
    "env": lambda dice: {"GITHUB_TOKEN": SECRET, "A": dice.choice(["1", f"Bearer {SECRET}"])},
    "deepspeed": lambda dice: dice.choice(["ds.json", "zero2", {"zero_optimization": {"stage": 3}}]),
    "accelerate_config": lambda dice: dice.choice(["accelerate.yaml", "fsdp.yaml", "zero3", "fsdp2"]),
    "model_name_or_path": lambda dice: dice.choice(["Qwen/Qwen2.5-0.5B", "model", "config.json", "."]),
    "use_vllm": lambda dice: True, "vllm_mode": lambda dice: dice.choice(["colocate", "server"]),
    "reward_funcs": lambda dice: dice.choice(["trainer.f", ["trainer:f"], "accuracy_reward"]),
    "load_in_4bit": lambda dice: True, "packing": lambda dice: True,
    "objective": lambda dice: dice.choice(["sft", "dpo"]),
    "hub_token": lambda dice: SECRET,
    "accelerator_config": lambda dice: dice.choice([{"split_batch": True}, {"even_batches": 1}, "ds.json", "fifo", ""]),
    "debug": lambda dice: dice.choice(["underflow_overflow", "all", "", True]),
    "generation_batch_size": lambda dice: dice.choice([1, 6, 8, -8]),
    "num_generations": lambda dice: dice.choice([1, 3, 4, 0]),
    "eval_strategy": lambda dice: dice.choice(["steps", "epoch", False]),
    "load_best_model_at_end": lambda dice: True,
}  # fmt: skip


def write_files(home: Path, dice: random.Random) -> str:
    """Write the files of an input into `home`; what is odd about them, in words."""
    recipe = dice.choice(["run.yaml", "sft/run.yaml", "sft/run.yaml"])  # a rollout is simulated in seconds
    values = dict(yaml.safe_load((home / recipe).read_text()))
    for name in dice.sample(sorted(_OF_RECIPE), dice.choice([0, 0, 1, 2, 3])):
        values[name] = _OF_RECIPE[name](dice)
    files: dict[str, object] = {**_BASES, "run.yaml": values, "foreign.yaml": dice.choice(FOREIGN)}
    if dice.random() < 0.9:
        del files["executor.yaml"]  # every command of a folder reads it
    odd = set(dice.choices(sorted(files) + ["run.yaml"] * 8 + ["foreign.yaml"] * 4, k=dice.choice([0, 1, 1, 2, 3])))
    for name, content in files.items():
        given = changed(content, dice) if name in odd else content
        text = json.dumps(given) if name.endswith(".json") else yaml.safe_dump(given, allow_unicode=True)
        data = text.encode("utf-8", "surrogatepass")
        (home / name).write_bytes(torn(data, dice) if name in odd and dice.random() < 0.3 else data)
    script = dice.choice(SCRIPTS)
    (home / "foreign.sh").write_bytes(torn(script.encode(), dice) if dice.random() < 0.5 else script.encode())
    (home / "trainer.py").write_text(dice.choice(_TRAINER))
    (home / "storage").write_text(dice.choice(["postgresql://u:pw@127.0.0.1:9/x", "", "x" * 5000, "\x00"]))
    (home / "deep.yaml").write_text("[" * 3000)
    os.mkfifo(home / "fifo")
    (home / "broken").symlink_to("gone")
    (home / "link").symlink_to("link")
    if dice.random() < 0.05:
        name = dice.choice(["run.yaml", "pipeline.yaml", "studies/studies.db", "data/train.jsonl", "ds.json"])
        (home / name).unlink()
        kinds: list[Callable[[], None]] = [
            (home / name).mkdir, lambda: os.mkfifo(home / name), lambda: (home / name).symlink_to("/dev/zero"),
        ]  # fmt: skip
        dice.choice(kinds)()
        odd.add(f"{name} (not a file)")
    return ", ".join(sorted(odd))


def changed(content: object, dice: random.Random) -> object:
    """`content` with a hostile value, or an unknown or missing key, somewhere inside."""
    if isinstance(content, dict) and content and dice.random() < 0.95:
        copy = dict(content)
        key = dice.choice(sorted(copy))
        how = dice.random()
        if how < 0.1:
            del copy[key]
        elif how < 0.2:
            copy[dice.choice(["x", "", "lora_rank", "a.b", "\u202e", "é" * 99])] = dice.choice(_ODD)
        else:
            copy[key] = changed(copy[key], dice) if isinstance(copy[key], dict | list) else dice.choice(_ODD)
        return copy
    if isinstance(content, list) and content and dice.random() < 0.6:
        at = dice.randrange(len(content))
        return [changed(one, dice) if n == at else one for n, one in enumerate(content)]
    return dice.choice(_ODD)


def torn(data: bytes, dice: random.Random) -> bytes:
    at = dice.randint(0, len(data))
    piece = dice.choice([b"", b"\t", b"- ", b": ", b"*a", b"&a [*a]", b"!!python/object/apply:os.system ['id']",
                         b"<<: ", b"\x00", b"\xff\xfe", b"---\n", b"'", b"\"", b"${", b"`id`", b"\r"])  # fmt: skip
    return data[:at] + piece + data[at + len(piece) * dice.randint(0, 2) :]
