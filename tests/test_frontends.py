"""Other tools' files: which tool's, and the batch by that tool's own arithmetic. Figures are worked out by hand."""

import importlib
import json
import math
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import autofit
from autofit.cli import main
from autofit.errors import MOST_OF_A_LINE, ConfigError
from autofit.frontends import axolotl, command, llama_factory, tools, verl, verl_recipe, verl_rules
from autofit.frontends.reading import explain, refusal
from autofit.frontends.tools import AXOLOTL, LLAMA_FACTORY, MS_SWIFT, TOOLS, VERL, tool_of
from autofit.plugin.registry import trainer_for

LLAMA: dict[str, object] = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "stage": "sft", "do_train": True,
    "finetuning_type": "lora", "template": "llama3", "cutoff_len": 2048, "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
}  # fmt: skip
AXO: dict[str, object] = {"base_model": "Qwen/Qwen3-4B", "micro_batch_size": 2, "gradient_accumulation_steps": 4,
                          "sequence_len": 2048, "adapter": "lora", "optimizer": "adamw_torch"}  # fmt: skip
SWIFT: dict[str, object] = {"model": "Qwen/Qwen2.5-7B-Instruct", "tuner_type": "lora", "torch_dtype": "bfloat16",
                            "per_device_train_batch_size": 2, "split_dataset_ratio": 0.0}  # fmt: skip


def verl_file(**changed: object) -> dict[str, object]:
    """A GRPO config on 8 GPUs with `changed` values by their last name: `n`, `use_kl_loss`, ..."""
    places: dict[str, tuple[str, ...]] = {
        "actor": ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "use_kl_loss",
                  "ppo_max_token_len_per_gpu", "strategy", "ulysses_sequence_parallel_size", "ppo_epochs"),
        "rollout": ("n", "tensor_model_parallel_size", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"),
        "ref": ("ref_log_prob",), "model": ("lora_rank", "use_remove_padding"),
    }  # fmt: skip
    given = {"ppo_micro_batch_size_per_gpu": 16, "n": 5, "log_prob_micro_batch_size_per_gpu": 16, **changed}
    nested: dict[str, Any] = {section: {name: given[name] for name in names if name in given}
                              for section, names in places.items()}  # fmt: skip
    prompts = {"train_batch_size": given["train_batch_size"]} if "train_batch_size" in given else {}
    rest = {"algorithm": {"adv_estimator": "grpo"}, "trainer": {"use_v1": given.get("use_v1", True)}}
    return {"actor_rollout_ref": nested, "data": prompts, **rest}


@pytest.mark.parametrize(
    ("values", "tool"),
    [
        (LLAMA, LLAMA_FACTORY), (AXO, AXOLOTL), (SWIFT, MS_SWIFT), (verl_file(), VERL),
        ({"model_name_or_path": "m", "optimizer": "adamw", "num_epochs": 3}, None),  # a recipe with misspelt keys
        ({"model_name_or_path": "m", "stage": 2}, None),
        ({**LLAMA, **AXO}, None),  # of two tools
    ],
)  # fmt: skip
def test_a_file_is_of_the_tool_whose_own_keys_it_has(values: dict[str, object], tool: object) -> None:
    assert tool_of(values) is tool


def test_no_key_is_of_two_tools_or_of_trl() -> None:
    keys = [key for tool in TOOLS for key in (*tool.needs, *tool.own)]
    assert len(keys) == len(set(keys))
    scripts = [importlib.import_module(f"trl.scripts.{name}") for name in ("grpo", "sft", "dpo", "reward")]
    kinds = [kind for script in scripts for kind in script.make_parser().dataclass_types]
    assert not {field.name for kind in kinds for field in fields(kind)} & set(keys)


def facts(values: dict[str, object]) -> dict[str, str]:
    return {line.name: line.text for line in verl_rules.explain(values).lines}


def test_the_effective_batch_of_verl_is_mini_batch_by_group_over_all_gpus_not_the_generation() -> None:
    said = facts(verl_file())
    assert "1,024 prompts x 5 = 5,120 samples" in said["a generation"]
    assert "256 prompts x 5 = 1,280 samples an optimizer step, over all 8 GPUs" in said["effective batch"]
    assert said["optimizer steps"].startswith("4 a generation")
    assert "160 samples a data-parallel rank and step = 10 micro-batches of 16" in said["micro-batches"]
    assert "8 a generation (1,024 / 256 x 2 epochs)" in facts(verl_file(ppo_epochs=2))["optimizer steps"]


def test_the_micro_batch_of_verl_changes_no_effective_batch_and_sequence_parallel_no_more() -> None:
    other = facts(verl_file(ppo_micro_batch_size_per_gpu=32, ulysses_sequence_parallel_size=2))
    assert "1,280 samples" in other["effective batch"]
    assert "320 samples a data-parallel rank and step = 10 micro-batches of 32" in other["micro-batches"]


def test_a_reference_or_lora_is_told_only_where_verl_makes_one() -> None:
    assert "none: use_kl_loss" in facts(verl_file())["reference"]
    assert "a second copy of the model, actor.kl_loss_coef 0.001" in facts(verl_file(use_kl_loss=True))["reference"]
    lora = {**verl_file(use_kl_loss=True), "actor_rollout_ref.model.lora_rank": 32}
    assert facts(lora)["reference"].startswith("the model without its adapters, no second copy, actor.kl_loss_coef")
    assert facts(verl_file(lora_rank=0))["trained"] == "all weights"
    assert facts(verl_file(lora_rank=32))["trained"] == "LoRA of rank 32"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"ppo_micro_batch_size_per_gpu": 7},
            "7 must divide the 160 samples .*; verl ends after the first rollout; 5, 8, 10 work|4, 5, 8, 10 work",
        ),
        ({"log_prob_micro_batch_size_per_gpu": 7}, "rollout.log_prob_micro_batch_size_per_gpu 7 must divide the 640"),
        ({"lora_rank": 1024}, "above vLLM's largest, 512"),
        ({"ppo_mini_batch_size": 300, "n": 1}, "= 300 must be a multiple of the 8 data-parallel ranks"),
        (
            {"ppo_mini_batch_size": 304, "use_v1": False},
            "train_batch_size 1,024 must be a multiple of ppo_mini_batch_size 304",
        ),
        ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size must be 1 or more; got 0"),
        ({"tensor_model_parallel_size": 3}, "engine of 3 GPUs .*must divide the 8 GPUs; verl ends when the workers"),
        ({"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 100}, "100 x sequence parallel 1 is below .*= 1024"),
        ({"use_dynamic_bsz": True, "log_prob_use_dynamic_bsz": False}, "must equal actor.use_dynamic_bsz"),
        ({"train_batch_size": 128}, "train_batch_size 128 must be at least ppo_mini_batch_size 256"),
        ({"train_batch_size": 257, "n": 1}, "= 257 must be a multiple of the 8 GPUs; verl refuses"),
        ({"ppo_micro_batch_size_per_gpu": None}, "ppo_micro_batch_size_per_gpu must be set"),
        ({"use_kl_loss": True}, "ref.log_prob_micro_batch_size_per_gpu must be set"),
        ({"ulysses_sequence_parallel_size": 2, "use_remove_padding": False}, "needs use_remove_padding"),
    ],
)
def test_a_rule_that_verl_applies_late_or_at_the_start_is_told_before(changed: dict[str, object], message: str) -> None:
    wrong = verl_rules.explain(verl_file(**changed)).wrong
    assert any(re.search(message, text) for text in wrong), wrong
    if not changed.get("use_kl_loss"):
        assert not verl_rules.explain(verl_file()).wrong


@pytest.mark.parametrize("key", ["use_kl_loss", "use_dynamic_bsz", "lora_rank", "ulysses_sequence_parallel_size", "n"])
def test_a_reference_to_another_key_takes_no_default_in_its_place(key: str) -> None:
    found = verl_rules.explain(verl_file(**{key: "${oc.env:MINE}"}))
    said = dict(found.lines)
    assert said["micro-batches"].startswith("not known")
    assert key in said["micro-batches"]
    assert "reference" not in said
    assert not found.wrong


def test_another_engine_than_fsdp_has_an_effective_batch_and_no_micro_batches_that_are_not_certain() -> None:
    said = facts(verl_file(strategy="megatron"))
    assert "1,280 samples over all GPUs" in said["effective batch"]
    assert said["micro-batches"] == "not known: megatron is not read, only FSDP"


SCRIPT = """
set -x
NNODES=${NNODES:-2}
mini=64
max_len=$((1024 * 2 + 512))
# data.train_batch_size=7
ARGS=(
    data.train_batch_size=${BATCH:-512}
    data.max_response_length=$max_len
)
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo "${ARGS[@]}" \\
    actor_rollout_ref.rollout.n=8 +actor_rollout_ref.actor.ppo_mini_batch_size=${mini} \\
    actor_rollout_ref.model.path=$HOME/model trainer.nnodes="$NNODES" \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 $@
"""


def test_a_script_is_read_with_its_variables_defaults_and_sums_and_nothing_of_it_is_run(tmp_path: Path) -> None:
    found, unread = verl.overrides(SCRIPT)
    assert found["data.train_batch_size"] == 512
    assert found["data.max_response_length"] == 2560
    assert found["actor_rollout_ref.actor.ppo_mini_batch_size"] == 64
    assert found["trainer.nnodes"] == 2
    assert unread == ("actor_rollout_ref.model.path",)
    (tmp_path / "run.sh").write_text(SCRIPT)
    said = dict(explain(tmp_path / "run.sh").lines)
    assert "64 prompts x 8 = 512 samples an optimizer step, over all 16 GPUs" in said["effective batch"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("n=8\nx.y=$n", 8), ("n=8\nif [ $A ]; then\n  n=16\nfi\nx.y=$n", None), ("[ $A ] && n=8\nx.y=$n", None),
        ("case $A in\n  gpu)\n    n=8\n  ;;\n  npu)\n    n=16\n  ;;\nesac\nx.y=$n", None),
        ("N=${N:-}\nx.y=${N:-4}", 4), ("a=$((2 * 3))\nx.y=$(((a + 2) * 2))", 16), ("x.y=${N:-$((1024 * 2))}", 2048),
        ("x.y=$(nproc)", None), ("x.y=$N", None), ("x.y=1 x.y=2", 2), ("x.y=1\nx.y=2", None),
        ("A=gpu\ncase $A in\n  gpu)\n    n=8\n  ;;\n  npu)\n    n=16\n  ;;\nesac\nx.y=$n", 8),
        ("case b in a|b) n=8;; *) n=16;; esac\nx.y=$n", 8), ("case c in a) ;; b) n=1;; *) n=16; esac\nx.y=$n", 16),
        ("case b in $A) n=1;; b) n=2;; esac\nx.y=$n", None), ("n=1\nif [ a = b ]; then n=2; fi\nx.y=$n", 1),
        ('n=1\nif [ "${A:-}" = "" ]; then\nn=2\nelse\nn=3\nfi\nx.y=$n', 2), ("if [ 2 -gt 1 ]; then\nx.y=1\nfi", 1),
        ("if [ a = b ]; then n=1\nelif [[ a == a ]]\nthen n=2\nelse n=3; fi\nx.y=$n", 2),
        ("n=1\nif [ a = a ] && [ $B ]; then n=2; fi\nx.y=$n", None),
        ("n=1\nif [ $B ]; then n=2; elif [ a = a ]; then n=3; fi\nx.y=$n", None),
        ("n=1\nif [ a = b ]; then if [ $B ]; then n=2; else n=3; fi; fi\nx.y=$n", 1),
        ("for i in 1 2; do if [ a = a ]; then n=2; fi; done\nx.y=$n", None),
        ("A=$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)\nx.y=$A", "gpu"),
        ("if true; then\nx.y=1\nfi", None), ("x.y=1  # x.y=2", 1), ("a=$b\nb=$a\nx.y=$a", None),
    ],
)  # fmt: skip
def test_a_value_of_a_script_is_told_only_where_it_is_certain(text: str, told: object) -> None:
    found, unread = verl.overrides(text.replace("x.y=", "python3 -m verl.trainer.main_ppo x.y="))
    assert (found.get("x.y"), unread) == (told, () if told is not None else ("x.y",))


def test_an_array_or_a_variable_of_several_words_is_read_as_bash_splits_it() -> None:
    text = (
        "a=(-v  # of the script\n  x.y=1 'x.z=[1, 2]'\n)\na+=(x.u=3)\nif [ $B ]; then a+=(x.v=4); fi\n"
        "more='x.w=5 x.t=6'\n"
        'python3 -m verl.trainer.main_ppo "${a[@]}" $more\n'
    )
    assert verl.overrides(text) == ({"x.y": 1, "x.z": [1, 2], "x.u": 3, "x.w": 5, "x.t": 6}, ("x.v",))


def test_where_every_training_of_a_script_hangs_on_a_condition_the_first_is_likely() -> None:
    text = "if [ $A ]; then\nGO x.y=1\nelse\nGO x.y=2\nfi".replace("GO", "python3 -m verl.trainer.main_ppo")
    assert verl.overrides(text) == ({}, ("x.y",))
    assert verl.likely_overrides(text) == {"x.y": 1}


def test_a_value_that_only_the_machine_knows_takes_no_default_in_its_place(tmp_path: Path) -> None:
    text = SCRIPT.replace("${NNODES:-2}", "$SLURM_NNODES")
    (tmp_path / "run.sh").write_text(text)
    found = explain(tmp_path / "run.sh")
    assert found.unread == ("trainer.nnodes",)
    assert "512 samples over all GPUs" in dict(found.lines)["effective batch"]
    assert dict(found.lines)["micro-batches"].startswith("not known")
    told = explain(tmp_path / "run.sh", ranks=32)
    assert told.unread == ()
    assert "over all 32 GPUs" in dict(told.lines)["effective batch"]


def test_a_script_that_asks_for_npus_is_read_for_the_cards_that_are_simulated_and_says_so(tmp_path: Path) -> None:
    asks = "A=${A:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}\n"
    text = SCRIPT.replace("\n", f"\n{asks}case $A in gpu) c=8;; npu) c=16;; esac\n", 1)
    (tmp_path / "run.sh").write_text(f"{text.rstrip()} trainer.n_gpus_per_node=$c\n")
    found = explain(tmp_path / "run.sh")
    assert (found.unread, found.notes) == ((), (verl.NVIDIA,))
    assert "over all 16 GPUs" in dict(found.lines)["effective batch"]


def test_a_script_with_another_engine_is_not_taken_for_fsdp(tmp_path: Path) -> None:
    others = (
        "model_engine=megatron",
        "--config-name='ppo_megatron_trainer.yaml'",
        "actor@actor_rollout_ref.actor=megatron",
    )
    for option in others:
        (tmp_path / "run.sh").write_text(SCRIPT.replace("algorithm.adv", f"{option} algorithm.adv"))
        assert "megatron" in dict(explain(tmp_path / "run.sh").lines)["micro-batches"]


@pytest.mark.parametrize(
    ("tool", "values", "ranks", "message"),
    [
        (LLAMA_FACTORY, LLAMA, None, "1 x gradient_accumulation_steps 8 = 8 samples on each data-parallel rank"),
        (LLAMA_FACTORY, LLAMA, 4, "= 8 samples x 4 ranks = 32"),
        (LLAMA_FACTORY, {"stage": "dpo", "cutoff_len": 9}, 2, "8 (the default) x gradient_accumulation_steps 1 "
                                                              "(the default) = 8 samples x 2 ranks = 16"),
        (LLAMA_FACTORY, {"stage": "ppo", "cutoff_len": 9}, 2, "not known"),
        (AXOLOTL, AXO, None, "micro_batch_size 2 x gradient_accumulation_steps 4 = 8 samples on each"),
        (AXOLOTL, {"base_model": "m", "micro_batch_size": 2, "gradient_accumulation_steps": None, "batch_size": 12},
         None, "x 6, from batch_size 12 = 12 samples"),
        (MS_SWIFT, SWIFT, None, "2 x as many as make 16 samples or more over all ranks"),
        (MS_SWIFT, SWIFT, 4, "x 2, with which ms-swift makes 16 samples or more = 4 samples x 4 ranks = 16"),
        (MS_SWIFT, {**SWIFT, "rlhf_type": "grpo"}, None, "x gradient_accumulation_steps 1 (the default) = 2 samples"),
    ],
)  # fmt: skip
def test_the_effective_batch_of_a_flat_file_is_its_tools_own(
    tool: Any, values: dict[str, object], ranks: int | None, message: str
) -> None:
    assert message in dict(tools.explain(tool, values, ranks=ranks).lines)["effective batch"]


@pytest.mark.parametrize("values", [LLAMA, AXO, SWIFT, verl_file()])
def test_a_command_that_trains_refuses_a_foreign_file_with_its_batch_in_a_line_that_is_not_cut(
    values: dict[str, object],
) -> None:
    with pytest.raises(ConfigError) as error:
        trainer_for(values, None)
    assert len(str(error.value)) <= MOST_OF_A_LINE
    assert "trl grpo" not in str(error.value)
    assert trainer_for(values, "mine:TRAINER") == "mine:TRAINER"  # whose keys may have these names
    if values is LLAMA:
        assert "LLaMA-Factory (stage, finetuning_type)" in str(error.value)
        assert "stage sft" in str(error.value)


def test_a_recipe_of_trl_is_not_refused() -> None:
    assert refusal({"model_name_or_path": "m", "num_generations": 8, "reward_funcs": ["a.b"]}) is None


def test_explain_says_the_batch_and_ends_with_1_where_a_rule_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(verl_file()))
    assert main(["explain", str(path)]) == 0
    assert "1,280 samples" in capsys.readouterr().out
    path.write_text(yaml.safe_dump(verl_file(ppo_micro_batch_size_per_gpu=7)))
    assert main(["explain", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["tool"] == "verl"  # one object, and nothing beside it
    path.write_text("model_name_or_path: m\nstage: 2\n")
    assert main(["explain", str(path)]) == 2
    known = "verl, LLaMA-Factory, Axolotl, ms-swift, open-r1, alignment-handbook"
    assert f"is not recognised as a file of {known} (it has stage of LLaMA-Factory)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["swift", "sft", "--model", "Qwen/Qwen2.5-7B-Instruct", "--max_length", "512"],
        ["--", "swift", "sft", "--model", "Qwen/Qwen2.5-7B-Instruct", "--max_length", "512"],
        ["swift sft --model Qwen/Qwen2.5-7B-Instruct --max_length 512"],
        ["--set", "max_length=512", "swift", "sft", "--model", "Qwen/Qwen2.5-7B-Instruct", "--max_length", "2048"],
        ["llamafactory-cli", "train", "run.yaml", "cutoff_len=512"],
        ["--set", "cutoff_len=512", "llamafactory-cli", "train", "run.yaml", "cutoff_len=64"],
        ["run.yaml", "--set", "cutoff_len=512", "--num-processes", "2"],
        ["run.sh", "--set", "learning_rate=0.1", "--set", "max_length=512"],
        ["run.sh", "--set", "max_length=512", "--set", "deepspeed=null"],
    ],
    ids=lambda words: " ".join(words)[:20],
)
def test_explain_takes_a_command_as_words_and_changes_of_its_file(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(yaml.safe_dump({"template": "qwen", **LLAMA}))
    Path("run.sh").write_text("swift sft \\\n  --deepspeed zero2 \\\n  --model Qwen/Qwen2.5-7B-Instruct\n")
    assert main(["explain", *words]) == 0
    out = capsys.readouterr().out
    assert "up to 512 tokens" in out
    assert ("ZeRO-2" in out) == (words[0] == "run.sh" and "deepspeed=null" not in words)


@pytest.mark.parametrize(
    "words",
    [
        ["trl sft --model_name_or_path m --learning_rate abc --per_device_train_batch_size -1"],
        ["swift sft --model m --learning_rate abc --per_device_train_batch_size -1"],
        ["open-r1.yaml"],
    ],
)
def test_explain_ends_with_1_for_values_that_the_tool_does_not_take_and_names_each(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = {"learning_rate": "abc", "per_device_train_batch_size": -1}
    Path("open-r1.yaml").write_text(yaml.safe_dump({"model_name_or_path": "m", "benchmarks": [], **wrong}))
    assert main(["explain", *words]) == 1
    (error,) = [line for line in capsys.readouterr().out.splitlines() if "error: " in line]
    assert "learning_rate must be a number; got" in error
    assert re.search(r"per_device_train_batch_size must be .*1 or more; got -1", error)


def test_what_lies_on_another_machine_is_not_wrong_in_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = "trl sft --model_name_or_path /no/such/model --dataset_name /no/such/data.json"
    assert main(["explain", words]) == 0
    assert main(["explain", words, "--set", "learnin_rate=3"]) == 2
    assert "the nearest valid one is 'learning_rate'" in " ".join(capsys.readouterr().err.split())


def test_a_variable_of_a_script_of_ms_swift_says_nothing_of_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("LENGTH=512\nswift sft --model Qwen/Qwen2.5-0.5B --max_length $LENGTH\n")
    assert "up to 512 tokens" in str(autofit.explain(tmp_path / "run.sh"))


def test_what_axolotl_does_not_take_is_told_together() -> None:
    values = {
        "base_model": "m", "micro_batch_size": -1, "learning_rate": "abc", "adapter": "qlora", "lora_r": "x",
        "bf16": "maybe", "plugins": ["axolotl.integrations.no.Such"],
    }  # fmt: skip
    wrong = ("datasets is missing", "at least two of", "micro_batch_size must", "bf16 must", "lora_r must",
             "qlora needs load_in_4bit", "plugins: ")  # fmt: skip
    with pytest.raises(ConfigError) as raised:
        axolotl.recipe(values, folder=Path())
    assert [said for said in wrong if said not in str(raised.value)] == []
    assert "lora_r is missing" not in str(raised.value)


@pytest.mark.parametrize("values", [SWIFT, {"do_train": True, "template": "qwen", **LLAMA}])
def test_a_change_that_the_tool_does_not_know_is_no_explanation(
    values: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    assert main(["explain", str(path), "--set", "gradient_accumulation_stepz=4"]) == 2
    assert "unknown key 'gradient_accumulation_stepz'; the nearest" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", {"distributed_type": "FSDP", "num_processes": 2}, "of accelerate .*--accelerate_config a.yaml"),
        ("z.json", {"zero_optimization": {"stage": 3}}, "config of DeepSpeed .* in a recipe: `deepspeed: z.json`"),
    ],
)  # fmt: skip
def test_a_file_that_goes_beside_a_recipe_is_told_as_such(
    name: str, content: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        autofit.explain(tmp_path / name)
    assert refusal(content) is not None
    assert refusal({"model_name_or_path": "m", **content}) is None


def test_weights_without_a_dtype_are_held_in_float32(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model_name_or_path: m\ndataset_mixer: {d: 1.0}\npreprocessing_num_workers: 4\n")
    assert "all weights trained, held in float32" in str(autofit.explain(tmp_path / "run.yaml"))


def test_explain_asks_for_no_model_where_the_hub_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**LLAMA, "model_name_or_path": "of/nobody"}))
    assert autofit.explain(path).explanation.wrong == ()


def test_python_explains_a_file_and_a_command_in_the_words_of_the_screen(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(verl_file(ppo_micro_batch_size_per_gpu=7)))
    found = autofit.explain(path, changes={"trainer.n_gpus_per_node": 4})
    assert "error: ppo_micro_batch_size_per_gpu 7 must divide the 320 samples" in str(found)
    assert found.explanation.wrong
    command = autofit.explain("swift sft --model Qwen/Qwen2.5-7B-Instruct", num_processes=2)
    assert "8 samples x 2 ranks = 16" in str(command.to_dict()["facts"])


def test_explain_says_that_a_file_is_missing_and_not_that_its_options_are_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = {"run --json": "the file run does not exist", "run.yaml --jsn": "the nearest valid one is '--json'",
             "ls -l": "no training is started in the command", "": "required: FILE|COMMAND;"}  # fmt: skip
    for words, said in wrong.items():
        assert main(["explain", *words.split()]) == 2
        assert said in capsys.readouterr().err
    for name in ("my run.yaml", "my run.sh"):
        assert main(["explain", name]) == 2
        err = capsys.readouterr().err
        assert name in err
        assert re.search("does not exist|No such file", err)


def test_explain_loads_no_torch() -> None:
    code = "import sys; from autofit.cli import main; assert main(['explain', 'trl sft --model_name_or_path m']) == 0; "
    code += "assert not {'torch', 'transformers', 'optuna', 'trl'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "value", [math.inf, math.nan, 10**400, "1e400", "nan"], ids=["inf", "nan", "int", "1e", "text"]
)
def test_a_number_that_is_not_finite_is_refused_by_its_key_and_never_raises(value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cutoff_len must be a whole number of 1 or more"):
        llama_factory.recipe(LLAMA | {"cutoff_len": value}, folder=tmp_path)
    with pytest.raises(ConfigError, match="lr must be a number"):
        verl_recipe._finite("lr", value)


def test_a_sum_of_a_script_rounds_as_the_shell_does_and_has_no_size_at_which_it_breaks() -> None:
    assert command._sum("7 / 2 * 3") == "9"
    assert command._sum("9" * 5000) == command._sum(f"{'9' * 400} / 3") == command.UNSURE
