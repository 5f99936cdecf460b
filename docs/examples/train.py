import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

data = load_dataset("databricks/databricks-dolly-15k", split="train")
data = data.map(lambda row: {"text": f"{row['instruction']} {row['context']} {row['response']}"})

SFTTrainer(
    model="Qwen/Qwen2.5-1.5B-Instruct",
    train_dataset=data.remove_columns(["instruction", "context", "response"]),
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
    args=SFTConfig(
        output_dir="out",
        bf16=True,
        max_length=1024,
        gradient_checkpointing=False,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        model_init_kwargs={"dtype": torch.bfloat16},
    ),
).train()
