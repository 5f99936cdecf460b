"""What of a question of `autofit web` reaches a trainer."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from recipes import grpo_recipe
from web_served import MODEL, SWIFTS, VERL, kept

from autofit.api.reading import source_of
from autofit.errors import ConfigError
from autofit.files import TornFile
from autofit.recipe.yaml_file import Source, only_below
from autofit.web.allowed import allowed, allowed_launch, write_config, write_training
from autofit.web.answering import TOLD, batch_words, run
from autofit.web.simulator import Line, Question


@pytest.mark.parametrize(
    ("yaml", "values"),
    [("reward_funcs: [os.system, think_format_reward]", {"reward_funcs": ["think_format_reward"] * 2}),
     ("reward_funcs: os.system", {"reward_funcs": ["think_format_reward"]}),
     ("trust_remote_code: true", {}), ("output_dir: /etc", {}), ("report_to: wandb", {}), ("torch_compile: true", {}),
     ("dataset_name: /etc/passwd", {}), ("datasets: [{path: /etc, data_files: passwd}]", {}),
     ("env: {LD_PRELOAD: /tmp/x.so, PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True}",
      {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}),
     ("model_init_kwargs: {trust_remote_code: true, dtype: bfloat16}", {"model_init_kwargs": {"dtype": "bfloat16"}}),
     ("made_up: /etc/passwd", {"made_up": None}), ("lora_rank: 8", {"lora_rank": None}),
     ("model_name_or_path: qwen/qwen3-8b", {"model_name_or_path": MODEL}),
     ("lora_target_modules: 'layers.[\\d]+.(mlp|self_attn).(up|q)_proj'",
      {"lora_target_modules": r"layers.[\d]+.(mlp|self_attn).(up|q)_proj"}),
     ("eval_strategy: steps\nper_device_eval_batch_size: 4\neval_steps: 9",
      {"eval_strategy": "steps", "per_device_eval_batch_size": 4}),
     ("qat: {weight_dtype: int4, group_size: 32}", {"qat": {"weight_dtype": "int4", "group_size": 32}}),
     ("lora_target_modules: [q_proj, v_proj]", {"lora_target_modules": ["q_proj", "v_proj"]}),
     ("per_device_train_batch_size: 8", {"per_device_train_batch_size": 8})],
)  # fmt: skip
def test_code_files_and_addresses_of_a_recipe_are_left_out(yaml: str, values: dict[str, object]) -> None:
    assert kept(yaml) == values


@pytest.mark.parametrize(
    "yaml",
    ["model_name_or_path: /etc", "model_name_or_path: ../model", "model_name_or_path: me/private", "dtype: ../x",
     "reward_model_name_or_path: ./model", "attn_implementation: kernels-community/flash-attn2", "deepspeed: ds.json",
     "deepspeed: {zero_optimization: {offload_param: {nvme_path: /etc}}}", "fsdp_config: /etc/passwd",
     "accelerate_config: /etc/passwd", "accelerator_config: ../a.json", "optim: a/b", "optim: {a: b}",
     "generation_kwargs: {custom_generate: me/code}", "env: {PYTORCH_CUDA_ALLOC_CONF: '$(id)'}", "env: 1",
     "lora_target_modules: [/etc]", "per_device_train_batch_size: 100000", "max_length: .inf",
     "gradient_checkpointing_kwargs: {a: {b: {c: {d: {e: 1}}}}}"],
)  # fmt: skip
def test_a_file_or_an_address_in_the_place_of_a_setting_is_refused(yaml: str) -> None:
    with pytest.raises(ConfigError):
        kept(yaml)


def test_a_pasted_config_loses_what_names_code(tmp_path: Path) -> None:
    given = {"model_type": "qwen3", "auto_map": {"AutoModel": "evil.py"}, "_name_or_path": "/etc", "hidden_size": 64}
    folder, notes = write_config(json.dumps(given), tmp_path / "model")
    assert notes == ()
    assert json.loads((Path(folder) / "config.json").read_text()) == {"model_type": "qwen3", "hidden_size": 64}
    _, notes = write_config(json.dumps({**given, "quantization_config": {"bits": 4}}), tmp_path / "four")
    assert "quantization_config of config.json is left out" in notes[0]
    for wrong in ("[]", "{", "{}", "[" * 100_000):
        with pytest.raises(ConfigError):
            write_config(wrong, tmp_path / "other")


def test_the_batch_is_said_in_a_sentence_of_one_prompt_or_of_several() -> None:
    one = grpo_recipe(num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    assert batch_words(one).endswith("4 at a time x 1 accumulation step x 1 card, of 1 prompt with 4 completions.")
    two = grpo_recipe(num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert batch_words(two).endswith("which are 2 prompts with 4 completions each.")


def pasted(text: str, folder: Path) -> Source:
    """What a pasted text means, read as an answer reads it."""
    with only_below(folder):
        return source_of(write_training(text, folder))


LLAMA = """stage: sft
finetuning_type: lora
cutoff_len: 64
model_name_or_path: Qwen/Qwen3-4B
do_train: true
dataset: a
"""
LLAMAS = "--stage sft --do_train --model_name_or_path Qwen/Qwen3-4B --dataset a --finetuning_type lora --cutoff_len 64"


@pytest.mark.parametrize(
    ("text", "trainer", "ranks"),
    [
        ("CUDA_VISIBLE_DEVICES=0 trl grpo \\\n --model_name_or_path Qwen/Qwen3-4B --use-peft --lora_r=8", "grpo", 1),
        ("accelerate launch --num_processes 4 trl/scripts/dpo.py --model_name_or_path Qwen/Qwen3-4B", "dpo", 4),
        (f"export CUDA_VISIBLE_DEVICES=0,1\ntorchrun --nproc_per_node 2 src/train.py {LLAMAS}\n", "hf", 2),
        (LLAMA, "hf", None),
        (f"#!/bin/bash\n# starts it\nNPROC_PER_NODE=2 {SWIFTS}\n", "hf", 2),
        (f"%%bash\n{SWIFTS}", "hf", None),
        (f"!{SWIFTS}", "hf", None),
        (f"$ {SWIFTS}", "hf", None),
        ("torchrun --nproc_per_node 2 t.py --model_name_or_path Qwen/Qwen3-4B --bf16 True --block_size 64", "hf", 2),
        ("python -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-4B actor_rollout_ref.rollout.n=2 "
         "algorithm.adv_estimator=grpo trainer.n_gpus_per_node=2 actor_rollout_ref.actor.use_dynamic_bsz=True "
         "actor_rollout_ref.actor.ppo_mini_batch_size=256", "verl", 2),
        ("%%writefile a.yaml\nbase_model: Qwen/Qwen3-4B\nmicro_batch_size: 2\nsequence_len: 64\nadapter: lora\n"
         "lora_r: 8\nlora_alpha: 8\nlora_target_linear: true\ngradient_accumulation_steps: 1\n"
         "datasets: [{path: a, type: alpaca}]", "hf", None),
        ("# trl sft --config this.yaml\nmodel_name_or_path: Qwen/Qwen3-4B\nmax_length: 64\n", None, None),
        ("%%writefile a.yaml\nbase_model: Qwen/Qwen3-4B\nmicro_batch_size: 2\nsequence_len: 64\nval_set_size: 0.1\n"
         "gradient_accumulation_steps: 1\ndatasets: [{path: a, type: alpaca}]", "hf", None),
    ],
)  # fmt: skip
def test_what_the_commands_read_as_a_file_the_page_reads_too(
    text: str, trainer: str | None, ranks: int | None, tmp_path: Path
) -> None:
    found = pasted(text, tmp_path)
    model = found.values.get("model_name_or_path") or found.values["model_path"]
    assert (found.trainer, found.launch.get("num_processes"), model) == (trainer, ranks, "Qwen/Qwen3-4B")
    kept = allowed(found.values, known=(), trainer=trainer or "").values
    assert kept.keys() == found.values.keys() - {"trust_remote_code"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trl grpo --config run.yaml", "'run.yaml' is a file, and no file that is named is read here: paste its lines"),
        ("llamafactory-cli train secret.yaml", "'secret.yaml' is a file, .*: paste its lines"),
        ("accelerate launch --config_file secret.yaml trl/scripts/sft.py --model_name_or_path a/b", "choose beside"),
        (f"{SWIFTS} --deepspeed secret.json", "leave it out, and choose beside the file how the cards share"),
        ("torchrun t.py --model_name_or_path a/b --deepspeed secret.json", "leave it out"),
        (f"{LLAMA}deepspeed: secret.json", "leave it out"),
        ("python train.py", "no training is started in"),
        ("hello", "no training is started in"),
        ("a: 1\n  b: 2", "not valid YAML"),
        ('{"model_type": "qwen3", "hidden_size": 64}', "this is the config.json of a model"),
        ("from trl import SFTTrainer\nSFTTrainer('a').train()", "this is Python code, and the page runs none"),
        ("import os\n!trl sft --config run.yaml", "run.yaml"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "the error of a training"),
        ("Traceback (most recent call last):\n  File", "the error of a training"),
        ("[rank0]: torch.OutOfMemoryError: CUDA out of memory.", "the error of a training"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "the error of a training"),
        ("", "paste a recipe"),
        ("   ", "paste a recipe"),
    ],
)
def test_no_file_that_is_named_is_read_and_the_page_says_what_to_paste(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answer").mkdir()
    monkeypatch.chdir(tmp_path)  # where the readers of the commands look first
    for name in ("secret.yaml", "run.yaml"):
        Path(name).write_text(LLAMA)
    Path("secret.json").write_text('{"zero_optimization": {"stage": 3}}')
    with pytest.raises(ConfigError, match=says):
        pasted(text, tmp_path / "answer")


def test_an_accelerate_config_of_trls_examples_is_known_by_its_name(tmp_path: Path) -> None:
    start = "accelerate launch --config_file examples/accelerate_configs/deepspeed_zero3.yaml --num_processes 4"
    found = pasted(f"{start} trl/scripts/sft.py --model_name_or_path {MODEL}", tmp_path)
    assert found.values["accelerate_config"] == "zero3"
    assert any("deepspeed_zero3.yaml is not here: the zero3 that TRL ships" in note for note in found.notes)


def test_what_another_tools_file_says_of_its_launch_names_no_file(tmp_path: Path) -> None:
    inline = "deepspeed: {zero_optimization: {stage: 3, offload_param: {device: %s}}}"
    found = pasted(LLAMA + inline % "cpu", tmp_path)
    assert allowed_launch(found.launch) == found.launch
    found = pasted(LLAMA + inline % "nvme, nvme_path: /etc", tmp_path)
    with pytest.raises(ConfigError, match=r"offload_param.nvme_path must be .* names here; got '/etc'"):
        allowed_launch(found.launch)


def test_the_settings_of_a_command_of_verl_are_all_in_the_list_and_its_model_is_one_of_the_catalogue(
    tmp_path: Path,
) -> None:
    values = dict(pasted(VERL.replace("a/b", MODEL), tmp_path).values)
    found = allowed(values, known=(), trainer="verl")
    assert found.notes == ()
    assert found.values == {key: value for key, value in values.items() if key != "trust_remote_code"}
    assert allowed(values, known=(), trainer="verl", model="/tmp/model").values["model_path"] == "/tmp/model"
    with pytest.raises(ConfigError, match="model_path must be one of the"):
        allowed({**values, "model_path": "/etc"}, known=(), trainer="verl")


def test_no_folder_that_a_command_of_verl_names_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole answer: the folder's config.json would be read to know whether the embeddings are tied."""
    monkeypatch.setattr("tempfile.tempdir", None)  # an answer sets it in its process, which is this one
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("not JSON")
    text = VERL.replace("a/b", str(tmp_path / "model"))
    with pytest.raises(TornFile):
        source_of(_script(tmp_path, text))
    (tmp_path / "answer").mkdir()
    *_, last = told_without_simulation(text, tmp_path / "answer")
    assert last["is"] == "error"
    assert "model_path must be one of the" in str(last["text"])


def _script(folder: Path, text: str) -> Path:
    path = folder / "run.sh"
    path.write_text(text)
    return path


def test_a_deepspeed_file_that_the_tool_ships_is_known_by_its_name_though_no_file_is_read(tmp_path: Path) -> None:
    found = pasted(f"{LLAMA}deepspeed: /etc/examples/deepspeed/ds_z3_config.json", tmp_path)
    assert found.launch["deepspeed_config"]["zero_stage"] == 3  # type: ignore[index]
    assert any(
        "ds_z3_config.json is not here: the file of that name that LLaMA-Factory ships" in n for n in found.notes
    )


@pytest.mark.parametrize(
    "text", ["a: &a [x, x]\nb: &b [*a, *a]\n" + "c: [*b, *b]\n" * 9000, "[" * 5000, "a: !!python/x", "- a", "x"]
)
def test_a_yaml_that_would_blow_up_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        pasted(text, tmp_path)


def told_without_simulation(text: str, folder: Path, **more: object) -> list[Line]:
    """The lines of an answer that ends before it simulates anything."""
    asked = {"text": text, "card": "h100", **more}
    request = {"question": asdict(Question.from_json(asked)), "seconds": {"verdict": 60.0, "advice": 0.0}, "socket": ""}
    (folder / "question.json").write_text(json.dumps(request))
    run(str(folder / "question.json"))
    return [json.loads(line) for line in (folder / TOLD).read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\n  b: 2", "the recipe: not valid YAML: a ':' where no key may stand: the line is "
         "indented too far, or a text with ': ' has no quotes (line 2, column 4)"),
        ("python train.py", "no training is started in the file: it must call"),
        (f"{LLAMA}deepspeed: my.json", "read as a file of LLaMA-Factory: 'my.json' is a file, and no file that is "
         "named is read here: leave it out, and choose under More how the cards share the model"),
        (f"model_name_or_path: {MODEL}\nmax_length: 64\npacking: false\nper_device_train_batch_size: 2000",
         "per_device_train_batch_size must be at most 1,024 here"),
    ],
)  # fmt: skip
def test_an_error_names_no_place_of_this_machine_and_the_pages_own_fields(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)  # an answer sets it in its process, which is this one
    *_, last = told_without_simulation(text, tmp_path)
    assert last["is"] == "error"
    assert str(last["text"]).startswith(says)
    assert str(tmp_path) not in json.dumps(last)


def test_a_file_that_is_not_simulated_is_explained_by_its_own_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    (explained,) = told_without_simulation(f"{LLAMA}use_unsloth: true\n", tmp_path)
    assert (explained["is"], explained["tool"]) == ("explained", "LLaMA-Factory")
    assert str(explained["why"]).startswith("use_unsloth: Unsloth's kernels")
    assert "not simulated" not in dict(explained["facts"])  # type: ignore[call-overload]
    assert any("x gradient_accumulation_steps" in text for _, text in explained["facts"])  # type: ignore[attr-defined]
