"""Scripts that start somebody's own trainer with transformers' arguments."""

from pathlib import Path

import pytest

from autofit.errors import ConfigError
from autofit.frontends.reading import explain, read
from autofit.frontends.writing import as_long, source_of

ARGUMENTS = (
    "--model_name_or_path Qwen/Qwen2.5-7B-Instruct --data_path data.json --bf16 True --model_max_length 2048 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --gradient_checkpointing True "
    "--lazy_preprocess True"
)


def script(folder: Path, text: str) -> Path:
    path = folder / "run.sh"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("start", "ranks"),
    [
        ("torchrun --nproc_per_node 4 --nnodes 2 --node_rank $RANK train.py", 8),
        ("python -m torch.distributed.run --nproc_per_node=8 finetune.py", 8),
        ("CUDA_VISIBLE_DEVICES=1,2 deepspeed finetune/run.py", 2), ("python fastchat/train/train_mem.py", 1),
        ("accelerate launch --num_processes 3 -m my.finetune", 3), ("deepspeed --num_gpus 4 train.py", 4),
    ],
)  # fmt: skip
def test_the_arguments_are_a_plain_trainers_on_the_ranks_that_are_started(
    start: str, ranks: int, tmp_path: Path
) -> None:
    path = script(tmp_path, f"export WANDB_MODE=offline\n{start} {ARGUMENTS}\n")
    found = read(path)
    assert found is not None
    assert (found.trainer, found.ranks, found.prompt_tokens) == ("hf", ranks, 2048)
    wanted = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "gradient_checkpointing": True,
        "bf16": True, "dtype": "float32", "max_length": 2048,  # else the trainer would cut its samples to 1,024
    }  # fmt: skip
    assert wanted.items() <= found.values.items()
    assert found.keys["max_length"] in ("model_max_length", "max_seq_length")
    assert "use_peft" not in found.values
    assert any("knows what they do: data_path, lazy_preprocess" in note for note in found.notes)
    assert any("float32 is taken, the larger" in note for note in found.notes)
    assert f"x {ranks} rank{'s' if ranks > 1 else ''} = {8 * ranks}" in dict(explain(path).lines)["effective batch"]
    source = source_of(path)
    assert source.trainer == "hf"
    assert source.notes[0].startswith("a script with transformers' arguments: a plain transformers Trainer")


def test_samples_are_as_long_as_was_told_where_the_script_has_no_length(tmp_path: Path) -> None:
    arguments = ARGUMENTS.replace("--model_max_length 2048 ", "")
    source = source_of(script(tmp_path, f"torchrun train.py {arguments}\n"))
    assert as_long(source, None) == source
    assert as_long(source, 4096).values["max_length"] == 4096
    limited = source_of(script(tmp_path, f"torchrun train.py {ARGUMENTS}\n"))
    assert as_long(limited, 4096) == limited


@pytest.mark.parametrize(
    ("more", "values"),
    [
        ("--use_lora", {"use_peft": True, "lora_r": 8, "lora_target_modules": ["all-linear"]}),
        (
            "--use_lora True --lora_r 64 --lora_target_modules q_proj v_proj",
            {"lora_r": 64, "lora_target_modules": ["q_proj", "v_proj"]},
        ),
        ("--q_lora True --lora_rank 16", {"load_in_4bit": True, "lora_r": 16}),
        ("--torch_dtype bfloat16", {"dtype": "bfloat16"}),
        ("--use_flash_attn True", {"attn_implementation": "flash_attention_2"}),
        ("--optim adamw_bnb_8bit", {"optim": "adamw_bnb_8bit"}),
    ],
)  # fmt: skip
def test_what_is_trained_and_how_it_is_held(more: str, values: dict[str, object], tmp_path: Path) -> None:
    found = read(script(tmp_path, f"python train.py {ARGUMENTS} {more}"))
    assert found is not None
    assert values.items() <= found.values.items()


def test_sharding_is_that_of_its_deepspeed_file_or_of_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "fsdp.yaml").write_text("{distributed_type: FSDP, num_processes: 2, fsdp_config: {fsdp_version: 2}}")
    for start, more, kind in (
        ("deepspeed --num_gpus 8 train.py", "--deepspeed ds.json", "DEEPSPEED"),
        ("accelerate launch --config_file fsdp.yaml train.py", "", "FSDP"),
        ("torchrun --nproc_per_node 4 train.py", "--fsdp 'full_shard auto_wrap'", "FSDP"),
    ):
        found = read(script(tmp_path, f"{start} {ARGUMENTS} {more}"))
        assert found is not None
        assert found.launch["distributed_type"] == kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"python train_dpo.py {ARGUMENTS}", "only the training of a language model on text is read"),
        (f"python train.py {ARGUMENTS} --vision_tower x", "vision_tower: training on images"),
        (f"python train.py {ARGUMENTS} --deepspeed gone.json", "there is no file 'gone.json'"),
        (f"python train.py {ARGUMENTS} --lora_r $RANK", "does not say lora_r for certain"),
        (f"python train.py {ARGUMENTS} --per_device_train_batch_size many", "per_device_train_batch_size must be"),
        ("python train.py --learning_rate 1", "no training is started in .* a Python file with"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line_that_says_why(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read(script(tmp_path, text))
    assert "\n" not in str(raised.value)
