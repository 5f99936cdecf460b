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


@pytest.mark.parametrize(
    ("loop", "value"),
    [
        ('while [[ "$1" != "" ]]; do case $1 in -m ) shift; M=$1 ;; esac; shift; done', "Qwen/Qwen2.5-7B"),
        ("while [ $# -gt 0 ]; do\n  case $1 in -m) M=$2; shift 2 ;; *) exit 1;; esac\ndone", "Qwen/Qwen2.5-7B"),
        ("while (( $# )); do M=$1; shift; done", "Qwen/Qwen2.5-7B"),
        ("while getopts m: opt; do case $opt in m) M=$OPTARG;; esac; done", "Qwen/Qwen2.5-7B"),
        ("while [[ -n ${1} ]]; do M=$1; shift; done", "Qwen/Qwen2.5-7B"),
        ("while test $# -ne 0; do M=$1; shift; done", "Qwen/Qwen2.5-7B"),
        ('while [[ -n "${1:-}" ]]; do M=$1; shift; done', "Qwen/Qwen2.5-7B"),
        ("while [[ $1 == -* ]]; do M=$2; shift 2; done", "Qwen/Qwen2.5-7B"),
        ('if [ "$MISSING" ]; then :; fi; if [ "" ]; then M=$1; fi', "Qwen/Qwen2.5-7B"),
        ("while [ $# -lt 2 ]; do M=$1; shift; done", None), ("while read line; do M=$line; done", None),
        ("M=$1", None), ("M=${1:-Qwen/Qwen2.5-7B}", "Qwen/Qwen2.5-7B"),
    ],
)  # fmt: skip
def test_a_script_with_options_of_its_own_is_read_as_without_any(loop: str, value: str | None, tmp_path: Path) -> None:
    arguments = ARGUMENTS.replace("Qwen/Qwen2.5-7B-Instruct", "$M")
    path = script(tmp_path, f"M=Qwen/Qwen2.5-7B\n{loop}\npython finetune.py {arguments}\n")
    if value is None:
        with pytest.raises(ConfigError, match="does not say model_name_or_path for certain"):
            read(path)
        return
    found = read(path)
    assert found is not None
    assert found.values["model_name_or_path"] == value
    told = "the script is read as it runs without arguments of its own"
    assert (told in found.notes) == (told in explain(path).notes) == loop.startswith("while")


def test_the_text_of_a_here_document_is_no_command(tmp_path: Path) -> None:
    """A quote in it hid the training behind it."""
    text = "python - <<'PY'\nx = \"it's\nPY\ncat <<-EOF > a\n\tpython a.py --model_name_or_path x\n\tEOF\ncat <<< a\n"
    found = read(script(tmp_path, f"{text}python finetune.py {ARGUMENTS}\n"))
    assert found is not None
    assert found.values["model_name_or_path"] == "Qwen/Qwen2.5-7B-Instruct"
    assert not any("the first is read" in note for note in found.notes)


FINETUNE = """
@dataclass
class LoraArguments:
    lora_r: int = 64
    lora_dropout: float = field(default=0.05)
    lora_target_modules: List[str] = field(default_factory=lambda: ["c_attn", "w1"])
    q_lora: bool = False
    model_max_length: int = field(default=8192)
"""


def test_what_a_command_leaves_out_is_taken_from_the_scripts_own_defaults(tmp_path: Path) -> None:
    (tmp_path / "finetune.py").write_text(FINETUNE)
    found = read(script(tmp_path, f"python finetune.py {ARGUMENTS} --use_lora --lora_dropout 0.1\n"))
    assert found is not None
    wanted = {"lora_r": 64, "lora_dropout": 0.1, "lora_target_modules": ["c_attn", "w1"], "max_length": 2048}
    assert wanted.items() <= found.values.items()
    assert "load_in_4bit" not in found.values
    assert "by finetune.py's own defaults: lora_r 64, lora_target_modules ['c_attn', 'w1']" in found.notes


@pytest.mark.parametrize("own", ["class RewardTrainer(Trainer):\n    pass\nRewardTrainer()\n", "Trainer()\n"])
def test_a_file_that_makes_none_of_trls_trainers_is_none_by_its_name(own: str, tmp_path: Path) -> None:
    """It was told as TRL's reward trainer, with its own arguments as unknown keys of TRL."""
    (tmp_path / "reward_modeling.py").write_text(f"from transformers import Trainer\n{own}")
    path = script(tmp_path, f"python reward_modeling.py {ARGUMENTS}\n")
    with pytest.raises(ConfigError, match=r"only the training of a language model on text.*fit-check"):
        read(path)
    (tmp_path / "reward_modeling.py").unlink()
    assert explain(path).tool == "TRL"  # by its name, where there is no file


def test_a_refusal_names_the_file_that_was_started_last_and_none_that_is_not_known(tmp_path: Path) -> None:
    path = script(tmp_path, "python $HOME/data.py\npython train.py --epochs 3\npython ${A}/b.py\n")
    with pytest.raises(ConfigError, match=r"fit-check --gpu NAME train\.py \.\.\. runs it as it is"):
        read(path)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("torchrun -m verl.trainer.fsdp_sft_trainer a=8", r"starts verl\.trainer\.fsdp_sft_trainer, and of verl only"),
        (
            "python3 -m verl.trainer.main config=a.yaml",
            r"trains with EasyR1 \(verl\.trainer\.main\), which is not read",
        ),
        ("deepspeed --module openrlhf.cli.train_sft --zero_stage 2", r"trains with OpenRLHF .*autofit init --help"),
    ],
)
def test_what_other_tools_start_is_named(command: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(script(tmp_path, f"{command}\n"))


def test_what_a_launcher_of_a_cluster_starts_behind_two_dashes_is_read(tmp_path: Path) -> None:
    """The launcher was taken for the script: a DPO on eight cards was told as plain training on one."""
    outer, inner = "python mason.py --cluster a --num_nodes 1 --image b --", "accelerate launch --num_processes 8"
    found = read(script(tmp_path, f"{outer} {inner} own/finetune.py {ARGUMENTS} --seed $RANDOM\n"))
    assert found is not None
    assert (found.ranks, "image" in str(found.notes)) == (8, False)
    for start in (inner, r"source setup.sh \&\& python"):
        with pytest.raises(ConfigError, match=r"own/dpo_tune\.py: only the training of a language model"):
            read(script(tmp_path, f"{outer} {start} own/dpo_tune.py {ARGUMENTS}\n"))
