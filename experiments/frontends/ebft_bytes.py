"""Bytes, loss and gradients of energy-based fine-tuning: Axolotl's own strided trainer against trainers/hf_ebft.py.

Run: python -m experiments.frontends.ebft_bytes --axolotl DIR, a checkout. Both train a small Llama on the CPU, where
both take eager attention, with the same seed. Axolotl's mixins for optimizers and samplers, its Triton kernels (which
the trainer imports and does not use) and its logger are stood in for. Prints the most bytes beside the model.
"""

import argparse
import gc
import importlib.util
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from autofit.trainers.hf_ebft import EbftTrainer, Strides

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from rank_peaks import allocator_bytes

PACKAGE = "axolotl.core.trainers.ebft"
MIXINS = ("DistributedParallelMixin", "RngLoaderMixin", "SchedulerMixin", "OptimizerInitMixin", "OptimizerMixin")
KERNELS = ("fused_cosine_similarity", "fused_diversity_penalty", "fused_log_softmax_gather", "fused_reinforce_loss")
TOKENS, PROMPT, TEXTS = 192, 40, 2
CASES: Mapping[str, tuple[Mapping[str, Any], bool, int]] = {  # (settings, whether with LoRA, tokens without a label)
    "LoRA, texts": ({"use_whitening": True}, True, 0),
    "LoRA, answers": ({"ce_coef": 0.03, "min_completion_prefix": 8, "use_whitening": True}, True, PROMPT),
    "LoRA, mean of the words": ({"embed_method": "mean_pooling", "stride": 16, "generate_max_len": 4}, True, 0),
    "all weights": ({"use_whitening": True}, False, 0),
    "all weights, with the text": ({"ce_coef": 0.1, "top_p": 0.9, "advantage_estimator": "group_norm"}, False, 0),
}  # fmt: skip


class _OnOneCpu:
    """torch to Axolotl's trainer, where cuda:0, of which there is one, is the CPU."""

    cuda = SimpleNamespace(is_available=lambda: False, device_count=lambda: 1, empty_cache=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: torch.device("cpu")) if name == "device" else getattr(torch, name)


def theirs(checkout: Path) -> type:
    """AxolotlStridedEBFTTrainer, without the rest of Axolotl."""
    made = {name: ModuleType(name) for name in (f"{PACKAGE}.kernels", "axolotl.core.trainers.mixins",
            "axolotl.core.trainers.mixins.optimizer", "axolotl.utils.logging", PACKAGE)}  # fmt: skip
    for name in MIXINS:
        for home in ("axolotl.core.trainers.mixins", "axolotl.core.trainers.mixins.optimizer"):
            setattr(made[home], name, type(name, (), {}))
    for name in KERNELS:
        setattr(made[f"{PACKAGE}.kernels"], name, None)
    vars(made["axolotl.utils.logging"])["get_logger"] = logging.getLogger
    sys.modules |= {**made, "axolotl": ModuleType("axolotl")}
    for name in ("rewards", "strided"):
        spec = importlib.util.spec_from_file_location(
            f"{PACKAGE}.{name}", checkout / f"src/axolotl/core/trainers/ebft/{name}.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    vars(module).update(torch=_OnOneCpu(), _FLEX_ATTENTION_AVAILABLE=False)
    found: type = module.AxolotlStridedEBFTTrainer
    return found


def trainer(kind: type, settings: Mapping[str, Any], *, lora: bool, folder: str) -> Any:
    """A trainer of a small model; their class reads its settings from the arguments, as `ebft_...`."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4000,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).bfloat16()
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    args = TrainingArguments(folder, use_cpu=True, report_to="none", logging_steps=10**6)
    rows = Dataset.from_list([{"input_ids": [1]}])
    if kind is EbftTrainer:
        return EbftTrainer(model=model, args=args, train_dataset=rows, strides=Strides(**settings))
    for key, value in settings.items():
        setattr(args, f"ebft_{key}", value)
    found = kind(model=model, args=args, train_dataset=rows)
    found.state.global_step = 1  # no log
    return found


def peaks(one: Any, prompt: int) -> Iterator[tuple[int, float, float]]:
    """(the most bytes, the loss, the norm of the gradients), of the loss and of both passes; after one to warm up."""
    ids = torch.randint(0, 4000, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :prompt] = -100
    kept = []  # what an earlier pass leaves is not freed within a later record
    for backward in (True, False, True):
        one.model.zero_grad()
        one.model.train()
        torch.manual_seed(2)
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            loss = one.compute_loss(one.model, {"input_ids": ids, "labels": labels})
            if backward:
                loss.backward()
        norm = sum(float(p.grad.square().sum()) for p in one.model.parameters() if p.grad is not None) ** 0.5
        kept.append(loss)
        if len(kept) > 1:
            yield allocator_bytes(profiled)[0], float(loss), norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axolotl", type=Path, required=True)
    kinds = theirs(parser.parse_args().axolotl), EbftTrainer
    with tempfile.TemporaryDirectory() as folder:
        for name, (settings, lora, prompt) in CASES.items():
            both = [peaks(trainer(kind, settings, lora=lora, folder=folder), prompt) for kind in kinds]
            for what, (a, real, norm), (b, ours, other) in zip(("forward", "both passes"), *both, strict=True):
                print(
                    f"| {name} | {what} | {a:,} | {b:,} | {b / a - 1:+.2%} | {real:.6f} | {ours:.6f} | "
                    f"{norm:.6f} | {other:.6f} |"
                )


if __name__ == "__main__":
    main()
