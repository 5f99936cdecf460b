"""The share of hold-out problems that a model solves, greedily and sampled."""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from autofit.demo.rewards import chain_sum_reward
from autofit.demo.smollm2 import run_module

SAMPLES_PER_PROBLEM = 8
MAX_COMPLETION_TOKENS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutReward:
    """Mean reward (0 to 1) over hold-out problems: of greedy completions, and of completions at temperature 1."""

    num_problems: int
    greedy: float
    sampled: float


def held_out_reward(model: Path, test_jsonl: Path, *, seed: int = 0) -> HeldOutReward:
    """The rewards of the tiny model, or of its adapter, in the folder `model` on the problems in `test_jsonl`.

    Runs in a child process, so the caller imports no torch.
    """
    output = run_module(
        "experiments.tiny_reward.heldout", [str(model), str(test_jsonl), "--seed", str(seed)], timeout_s=600
    )
    return HeldOutReward(**json.loads(output.splitlines()[-1]))


def _measure(model_dir: Path, test_jsonl: Path, *, seed: int) -> HeldOutReward:
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    loader = AutoPeftModelForCausalLM if (model_dir / "adapter_config.json").exists() else AutoModelForCausalLM
    model = loader.from_pretrained(str(model_dir)).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir), padding_side="left")
    rows = [json.loads(line) for line in test_jsonl.read_text().splitlines()]
    prompts = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt", return_token_type_ids=False)
    answers = [row["answer"] for row in rows]

    def mean_reward(*, samples: int) -> float:
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "num_return_sequences": samples}
        with torch.no_grad():
            ids = model.generate(
                **prompts, max_new_tokens=MAX_COMPLETION_TOKENS, **(how if samples > 1 else {"do_sample": False})
            )
        texts = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards = chain_sum_reward(texts, [answer for answer in answers for _ in range(samples)])
        return sum(rewards) / len(rewards)

    return HeldOutReward(
        num_problems=len(rows), greedy=mean_reward(samples=1), sampled=mean_reward(samples=SAMPLES_PER_PROBLEM)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("test_jsonl", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(asdict(_measure(arguments.model, arguments.test_jsonl, seed=arguments.seed))))


if __name__ == "__main__":
    main()
