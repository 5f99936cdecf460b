"""A stand-in for vLLM in the training process, which needs a card: TRL's real `vllm_mode: colocate` generates with it.

It allows one engine in a process, as vLLM does with sleep mode, and holds its bytes while the process lives. Every
engine writes a line. Where `engines.hang` stands beside that file, an engine waits; with `engines.full` it has no room.
"""

from pathlib import Path

HELD_BYTES = 1 << 26
BESIDE_ENGINE = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
_MODULES = {  # what TRL imports of it (trl/generation/vllm_generation.py, vllm_client.py), with vLLM 0.31's names
    "__init__.py": f"HELD_BYTES = {HELD_BYTES}"
    """
import os
import random
import time
import torch
from types import SimpleNamespace

__version__ = "0.31.0"
RequestOutput = object

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    made = 0

    def __init__(self, **given):
        assert LLM.made == 0, "Sleep mode can only be used for one instance per process."
        assert given["enable_sleep_mode"] and given["load_format"] == "dummy"
        LLM.made = 1
        with open(os.environ["ENGINES"], "a") as file:
            file.write(f"{os.getpid()} {os.getppid()} {os.environ['RANK']}\\n")
        while os.path.exists(os.environ["ENGINES"] + ".hang"):
            time.sleep(0.05)
        if os.path.exists(os.environ["ENGINES"] + ".full"):
            raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        LLM.kept = torch.empty(HELD_BYTES, dtype=torch.uint8, device=device)  # while the process lives
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda weights: None))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=SimpleNamespace(max_model_len=256))

    def sleep(self, level):
        pass

    def wake_up(self, tags=None):
        pass

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, sampling_params, use_tqdm):
        def completion():
            ids = [random.randrange(50) for _ in range(sampling_params.max_tokens)]
            return SimpleNamespace(token_ids=ids, logprobs=[{i: SimpleNamespace(logprob=-1.0, rank=1)} for i in ids])
        return [SimpleNamespace(prompt_token_ids=one["prompt_token_ids"], outputs=[completion()]) for one in prompts]
""",
    "sampling_params.py": "StructuredOutputsParams = object\n",
    "utils/__init__.py": "",
    "utils/network_utils.py": "get_ip = None\n",
    "distributed/__init__.py": "",
    "distributed/weight_transfer/__init__.py": "",
    "distributed/weight_transfer/nccl_common.py": "trainer_init = None\n",
    "distributed/weight_transfer/nccl_engine.py": "NCCLTrainerSendWeightsArgs = NCCLWeightTransferEngine = object\n",
    "distributed/weight_transfer/packed_tensor.py": "packed_nccl_broadcast_producer = None\n",
}


def engine_env(folder: Path) -> dict[str, str]:
    """What the environment of a process has, to import the stand-in, made in `folder`, as vLLM."""
    for name, text in _MODULES.items():
        path = folder / "modules/vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"PYTHONPATH": str(folder / "modules"), "ENGINES": str(folder / "engines")}


def engines_in(folder: Path) -> list[list[int]]:
    """(process, its parent, rank) of each engine that was made."""
    path = folder / "engines"
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []
