"""`transformers.Trainer` on a simulated card: `python hf_trainer.py rtx4090`. Needs transformers and accelerate."""

import sys
import tempfile

import torch
from fakegpu_torch import fake_gpu
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of 1,024 tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(1024)
        return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    card = sys.argv[1] if len(sys.argv) > 1 else "rtx4090"
    with fake_gpu(card) as gpu, tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=4, bf16=True, save_strategy="no", report_to=[]
        )
        Trainer(GPT2LMHeadModel(GPT2Config()), arguments, train_dataset=Rows()).train()
    print(f"{card}: {gpu.peak_allocated_bytes / 1e9:.2f} GB allocated, {gpu.peak_reserved_bytes / 1e9:.2f} GB reserved")
    print(gpu.why_peak())
