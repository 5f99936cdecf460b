"""Scripts that start LLaMA-Factory or Axolotl with a YAML, with values laid over it, or with arguments alone."""

from pathlib import Path

import pytest
import yaml

from autofit.errors import ConfigError
from autofit.frontends.command import UNSURE, commands
from autofit.frontends.reading import explain, read
from autofit.frontends.tools import AXOLOTL, LLAMA_FACTORY, shipped
from autofit.frontends.writing import OwnFile, changed, source_of

LLAMA = """# the model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
template: llama3
cutoff_len: 2048  # tokens
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""
AXO = """base_model: Qwen/Qwen3-4B
adapter: lora
lora_r: 16
lora_alpha: 16
lora_target_linear: true
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_torch
bf16: true
datasets: [{path: tatsu-lab/alpaca, type: alpaca}]
"""
TRAIN_BASH = """src/train_bash.py --stage sft --model_name_or_path Qwen/Qwen3-4B --do_train \\
    --finetuning_type lora --lora_target q_proj,v_proj --template qwen --max_source_length 1024 \\
    --max_target_length 512 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --fp16 --plot_loss
"""


def script(folder: Path, text: str) -> Path:
    """A script in `folder`, beside the YAMLs that it may name."""
    (folder / "examples").mkdir(exist_ok=True)
    (folder / "examples/lf.yaml").write_text(LLAMA)
    (folder / "examples/ax.yml").write_text(AXO)
    path = folder / "run.sh"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "tool", "ranks", "micro"),
    [
        ("llamafactory-cli train examples/lf.yaml", LLAMA_FACTORY, None, 1),
        ("export CUDA_VISIBLE_DEVICES=0,1\nllamafactory-cli train examples/lf.yaml", LLAMA_FACTORY, 2, 1),
        ("FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=4 llamafactory-cli train examples/lf.yaml", LLAMA_FACTORY, 8, 1),
        ("llamafactory-cli train examples/lf.yaml per_device_train_batch_size=4", LLAMA_FACTORY, None, 4),
        ("torchrun --nproc_per_node 4 --nnodes 2 src/train.py examples/lf.yaml", LLAMA_FACTORY, 8, 1),
        ("!llamafactory-cli train examples/lf.yaml", LLAMA_FACTORY, None, 1),
        ("%%bash\nllamafactory-cli train examples/lf.yaml", LLAMA_FACTORY, None, 1),
        (f"deepspeed --num_gpus 8 --num_nodes 3 {TRAIN_BASH}", LLAMA_FACTORY, 24, 4),
        (f"deepspeed --include localhost:0,1,5 {TRAIN_BASH}", LLAMA_FACTORY, 3, 4),
        (f"python {TRAIN_BASH}", LLAMA_FACTORY, 1, 4),
        (f"accelerate launch --num_processes 6 {TRAIN_BASH}", LLAMA_FACTORY, 6, 4),
        ("axolotl train examples/ax.yml", AXOLOTL, None, 2),
        ("accelerate launch --num_processes 2 -m axolotl.cli.train examples/ax.yml", AXOLOTL, 2, 2),
        ("axolotl train examples/ax.yml --launcher torchrun -- --nproc_per_node=4 --nnodes=1", AXOLOTL, 4, 2),
        ("CUDA_VISIBLE_DEVICES=0,3 axolotl train examples/ax.yml --micro-batch-size 8", AXOLOTL, 2, 8),
    ],
)  # fmt: skip
def test_a_script_is_read_with_its_yaml_its_values_and_its_ranks(
    text: str, tool: object, ranks: int | None, micro: int, tmp_path: Path
) -> None:
    path = script(tmp_path, text)
    found = read(path)
    assert found is not None
    assert (found.tool, found.ranks) == (getattr(tool, "name"), ranks)  # noqa: B009
    assert found.values["per_device_train_batch_size"] == micro
    told = dict(explain(path).lines)
    steps = found.values["gradient_accumulation_steps"]
    assert isinstance(steps, int)
    assert f"= {micro * steps} samples" in told["effective batch"]
    assert (f"x {ranks} rank" in told["effective batch"]) is (ranks is not None)


def test_the_two_lengths_of_2023_are_the_one_that_they_made_together(tmp_path: Path) -> None:
    found = read(script(tmp_path, f"python {TRAIN_BASH}"))
    assert found is not None
    assert found.prompt_tokens == 1536
    assert found.values["dtype"] == "float16"


def test_an_accelerate_config_shares_what_the_yaml_does_not(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump({
        "distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": 2},
    }))  # fmt: skip
    path = script(tmp_path, "accelerate launch --config_file fsdp.yaml src/train.py examples/lf.yaml")
    found = read(path)
    assert found is not None
    assert (found.ranks, found.launch["distributed_type"]) == (4, "FSDP")


def test_changes_are_written_into_the_yaml_with_what_the_script_lays_over_it(tmp_path: Path) -> None:
    source = source_of(script(tmp_path, "llamafactory-cli train examples/lf.yaml cutoff_len=1024 packing=true"))
    assert Path(str(source.foreign["path"])).name == "lf.yaml"
    own = OwnFile.of(source.foreign, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1})
    assert own.command == "llamafactory-cli train"
    assert own.text.startswith("# the model\n")
    tuned = yaml.safe_load(own.text)
    assert (tuned["cutoff_len"], tuned["packing"], tuned["per_device_train_batch_size"]) == (1024, True, 8)
    assert "cutoff_len: 1024  # tokens" in own.text
    assert changed(source, {"lora_rank": 32}).source.values["lora_r"] == 32


def test_changes_of_a_command_of_arguments_are_written_into_it(tmp_path: Path) -> None:
    source = source_of(script(tmp_path, f"cd /opt\npython {TRAIN_BASH}echo done\n"))
    own = OwnFile.of(source.foreign, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1})
    assert own.command == "bash"
    assert "--per_device_train_batch_size 8 --gradient_accumulation_steps 1 --fp16" in own.text
    assert own.text.endswith("echo done\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "llamafactory-cli train examples/gone.yaml",
            "Axolotl: there is no file 'examples/gone.yaml'",
        ),
        ("llamafactory-cli train $CONFIG", "arguments must begin with --name"),
        ("llamafactory-cli train $DIR/a.yaml", "does not say the config for certain"),
        ("llamafactory-cli train examples/lf.yaml --bf16", "takes key=value; got '--bf16'"),
        ("llamafactory-cli train examples/lf.yaml cutoff_len=$LENGTH", "does not say cutoff_len for certain"),
        ("axolotl train", "names no YAML"),
        ("axolotl preprocess examples/ax.yml", "no training is started in .*: it must call"),
    ],
)
def test_a_script_that_cannot_be_read_is_one_line_that_says_why(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        explain(script(tmp_path, text))
    assert "\n" not in str(raised.value)


def test_a_copy_of_a_log_that_lost_its_backslashes_is_one_command() -> None:
    text = "swift sft\n  --model a/b\n--lora_rank 8 \n# --old 1\n  --max_length 2\necho --x\n"
    words = [command.words for command in commands(text)]
    assert words[0] == ("swift", "sft", "--model", "a/b", "--lora_rank", "8")
    assert words[-1] == ("echo", "--x")


def test_unknown_arguments_are_passed_over_where_ms_swift_is_told_to(tmp_path: Path) -> None:
    line = "swift sft --model Qwen/Qwen3-4B --dataset a/b --torch_dtype bfloat16 --no_such_thing 1"
    with pytest.raises(ConfigError, match="unknown key 'no_such_thing'"):
        read(script(tmp_path, line))
    found = read(script(tmp_path, f"{line} --ignore_args_error true"))
    assert found is not None
    assert any("ignores what it does not know: unknown key 'no_such_thing'" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "stage", "offloads"),
    [("ds_z2_config.json", 2, "none"), ("ds_z3_offload_config.json", 3, "cpu"), ("ds_z0_config.json", 0, "none")],
)
def test_a_file_that_the_tool_ships_is_known_where_it_is_not_here(
    name: str, stage: int, offloads: str, tmp_path: Path
) -> None:
    path = tmp_path / "lf.yaml"
    path.write_text(f"%%writefile lf.yaml\n{LLAMA}deepspeed: /elsewhere/examples/deepspeed/{name}\n")
    found = read(path)
    assert found is not None
    config = found.launch.get("deepspeed_config", {})
    assert isinstance(config, dict)
    assert (config.get("zero_stage"), config.get("offload_optimizer_device")) == (stage, offloads)
    assert f"{name} is not here: the file of that name that LLaMA-Factory ships is taken for it" in " ".join(
        found.notes
    )
    (tmp_path / name).write_text('{"zero_optimization": {"stage": 1}}')
    path.write_text(f"{LLAMA}deepspeed: {name}\n")
    own = read(path)
    assert own is not None
    assert own.launch["deepspeed_config"]["zero_stage"] == 1  # type: ignore[index]
    assert shipped(LLAMA_FACTORY.name, "ds_z9_config.json") is None


def test_names_and_values_of_2023_and_2024_are_those_of_today(tmp_path: Path) -> None:
    old = {"stage": "dpo", "dpo_beta": 0.3, "flash_attn": True, "quantization_bit": 4,
           "quantization_method": "bitsandbytes", "reserved_label_len": 1}  # fmt: skip
    path = tmp_path / "lf.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(LLAMA), **old}))
    found = read(path)
    assert found is not None
    assert (found.values["beta"], found.values["load_in_4bit"]) == (0.3, True)
    assert found.values["attn_implementation"] == "flash_attention_2"


def test_quantization_bit_has_no_effect_on_a_model_that_is_stored_quantised(tmp_path: Path) -> None:
    path = tmp_path / "lf.yaml"
    values = {**yaml.safe_load(LLAMA), "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"}
    notes = []
    for more in ({}, {"quantization_bit": 4}):
        path.write_text(yaml.safe_dump({**values, **more}))
        found = read(path)
        assert found is not None
        notes.append([note for note in found.notes if "GPTQ" in note])
    assert notes[0] == notes[1] != []


@pytest.mark.parametrize(
    ("text", "looks"),
    [
        (LLAMA, False), (LLAMA.replace("lora", "full"), None), (f"{LLAMA}ddp_find_unused_parameters: true\n", True),
        (f"{LLAMA}fsdp: full_shard\n", None), (AXO, False), (f"{AXO}ddp_find_unused_parameters: true\n", True),
    ],
)  # fmt: skip
def test_ddp_looks_for_parameters_without_a_gradient_where_the_tool_lets_it(
    text: str, looks: bool | None, tmp_path: Path
) -> None:
    """With adapters and reentrant checkpointing transformers' own default ends in the first backward pass."""
    path = tmp_path / "file.yaml"
    path.write_text(text)
    found = read(path)
    assert found is not None
    assert found.values.get("ddp_find_unused_parameters") is looks


@pytest.mark.parametrize(
    "text",
    [
        "a=" + "x" * 20 + "\n" + "a=$a$a\n" * 40 + "echo $a",
        "a=" + "x" * 20_000 + "\necho" + " $a" * 5_000,
        "a=" + "x" * 20_000 + '\necho "' + "$a" * 5_000 + '"',
        "a=(x)\n" + "a+=(${a[@]} ${a[@]})\n" * 40,
    ],
    ids=["doubled", "words", "quoted", "array"],
)
def test_variables_that_double_themselves_fill_no_memory(text: str) -> None:
    with pytest.raises(ConfigError, match="more than 2 MiB with its variables filled in"):
        list(commands(text))


def test_a_mark_of_a_terminal_before_a_command_is_none_of_its_words() -> None:
    assert [command.words for command in commands("$ swift sft\n$HOME/a b\n  $ trl sft")] == [
        ("swift", "sft"),
        (f"{UNSURE}/a", "b"),
        ("trl", "sft"),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("uv run --with trl -p 3.12 trl sft --seed 1", ("trl", "sft", "--seed", "1")),
        ("uv run --no-sync train.py --seed 1", ("python", "train.py", "--seed", "1")),
        ("A=1 uv run --module a.train", ("python", "-m", "a.train")),
        ("conda run -n lf llamafactory-cli train x.yaml", ("llamafactory-cli", "train", "x.yaml")),
        ("uv run -- accelerate launch train.py", ("accelerate", "launch", "train.py")),
        ("uv pip install trl", ("uv", "pip", "install", "trl")),
        ("uv run", ("uv", "run")),
    ],
)
def test_what_runs_a_command_in_an_environment_is_no_part_of_it(line: str, words: tuple[str, ...]) -> None:
    assert [command.words for command in commands(line)] == [words]
