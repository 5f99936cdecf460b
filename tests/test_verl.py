"""verl's configs as recipes, and its phases on a simulated card."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from recipes import grpo_recipe
from verl_files import ACTOR, FSDP, QWEN, ROLLOUT, ULYSSES, nested, origin_of, script

from autofit.api.reading import source_of
from autofit.errors import ConfigError
from autofit.frontends import verl, verl_recipe, verl_rules
from autofit.frontends.reading import explain
from autofit.frontends.verl import VerlSettings
from autofit.frontends.writing import changed
from autofit.plugin.protocol import Inspection, WorstCase
from autofit.probing.prepare import _said_in_file
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import Recipe, sizes_of_ranks, spread, with_launch
from autofit.trainers.verl import TRAINER

pytestmark = pytest.mark.usefixtures("own_environment")
PPO: dict[str, object] = {
    "algorithm.adv_estimator": "gae", "critic.model.path": "Qwen/Qwen2.5-7B-Instruct", "critic.use_dynamic_bsz": True,
}  # fmt: skip


def test_a_script_becomes_a_recipe_with_the_batch_of_verls_own_arithmetic(tmp_path: Path) -> None:
    path = tmp_path / "run_qwen.sh"
    path.write_text(script(QWEN))
    source = source_of(path)
    assert source.trainer == "verl"
    assert source.name == "run_qwen"
    assert source.notes[0] == "a file of verl: verl's FSDP worker, all weights trained, held in fp32"
    values = source.values
    assert values["ppo_micro_batch_size_per_gpu"] == 16
    assert values["gradient_accumulation_steps"] == 10  # 256 x 5 / 8 / 16
    assert values["steps_per_generation"] == 40
    assert values["log_prob_micro_batch_size_per_gpu"] == 32
    assert values["ref_log_prob_micro_batch_size_per_gpu"] == 8
    assert values["reference"] is True
    assert values["calculate_entropy"] is False
    assert values["gpu_memory_utilization"] == 0.5  # verl's default, of the whole card
    assert values["launch"]["ranks"] == 8  # type: ignore[index]
    assert values["launch"]["sharding"] == "fsdp1"  # type: ignore[index]
    TRAINER.parse({key: value for key, value in values.items() if key != "launch"})  # knows all of them


def test_a_config_that_verl_ends_with_is_no_recipe_and_under_a_condition_it_is_told(tmp_path: Path) -> None:
    path, wrong = tmp_path / "run_qwen.sh", {**QWEN, f"{ACTOR}.loss_agg_mode": "mean"}
    path.write_text(script(wrong))
    with pytest.raises(ConfigError, match=r"a file of verl: actor.loss_agg_mode must be one of .* verl refuses it"):
        source_of(path)
    path.write_text(script(wrong, "if [ $A = 1 ]; then B=1; else B=2; fi").replace(" $@", " trainer.save_freq=$B"))
    assert any("actor.loss_agg_mode must be one of" in note for note in source_of(path).notes)


def test_the_note_on_linear_attention_is_on_every_model_that_has_it() -> None:
    def told(model: str) -> bool:
        notes = verl_recipe.recipe({**QWEN, "actor_rollout_ref.model.path": model}).notes
        return any("linear attention" in note for note in notes)

    assert told("Qwen/Qwen3.5-4B")
    assert told("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert not told("Qwen/Qwen3-8B")


def test_other_gpus_than_the_files_are_told_in_its_keys_and_refused_where_verl_would(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script({**QWEN, f"{ROLLOUT}.tensor_model_parallel_size": 4}))
    recipe = replace(grpo_recipe(world_size=8), trainer="verl", foreign=origin_of(path))

    def on(ranks: int, machines: int = 1) -> tuple[str, ...]:
        launch = Launch(ranks=ranks, machines=machines)
        return _said_in_file(with_launch(recipe, launch), recipe).notes

    assert on(8) == recipe.notes
    assert on(16, 2)[-1] == "the file says 8 GPUs; for 16 set trainer.n_gpus_per_node=8 trainer.nnodes=2"
    with pytest.raises(ConfigError, match=r"run.sh with trainer.n_gpus_per_node=2: .* must divide the 2 GPUs"):
        on(2)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        (f"{ROLLOUT}.gpu_memory_utilisation", f"{ROLLOUT}.gpu_memory_utilization"),
        (f"{ACTOR}.gpu_memory_utilization", f"{ROLLOUT}.gpu_memory_utilization"),  # of another part
        (f"{ACTOR}.fsdp_config.optimiser_offload", f"{ACTOR}.fsdp_config.optimizer_offload"),
        ("trainer.wandb_colour", None),
        (f"+{ACTOR}.my_own", ""),
        (f"{ROLLOUT}.engine_kwargs.vllm.block_size", ""),
        (f"{FSDP}.use_no_sync_for_gradient_accumulation", ""),  # newer than the table
    ],
)
def test_a_change_of_a_key_that_verl_does_not_have_is_refused_with_the_nearest(
    key: str, near: str | None, tmp_path: Path
) -> None:
    """With --set it was taken, written into the script and without effect."""
    path = tmp_path / "run.sh"
    path.write_text(script(QWEN))
    if near == "":
        changed(source_of(path), {key: 1})
        return
    message = f"verl has no key {key}, and hydra refuses it at the start" + (f"; write {near}" if near else "")
    with pytest.raises(ConfigError, match=f"{re.escape(message)}$"):
        changed(source_of(path), {key: 1})


def test_keys_of_a_yaml_that_verl_does_not_have_are_a_note(tmp_path: Path) -> None:
    """hydra adds a file's own keys to the config; it refuses those of overrides alone."""
    path = tmp_path / "run.yaml"
    nested: dict[str, Any] = {}
    for key, value in {**QWEN, f"{ROLLOUT}.gpu_memory_utilisation": 0.3, f"{ACTOR}.optim._target_": "a"}.items():
        *sections, name = key.split(".")
        part = nested
        for section in sections:
            part = part.setdefault(section, {})
        part[name] = value
    path.write_text(yaml.safe_dump(nested))
    note = f"verl 0.9 has no key {ROLLOUT}.gpu_memory_utilisation (write {ROLLOUT}.gpu_memory_utilization); hydra"
    assert [said for said in explain(path).notes if said.startswith(note)]
    assert [said for said in source_of(path).notes if note in said]


def test_an_override_of_what_is_not_in_verls_config_is_written_with_the_plus_that_hydra_wants() -> None:
    foreign = verl_recipe.recipe(QWEN)
    said = verl_recipe.say(foreign, {"param_dtype": "bf16", "param_offload": True})
    assert said == {f"++{FSDP}.mixed_precision.param_dtype": "bf16", f"{FSDP}.param_offload": True}


def test_a_key_of_the_batch_with_a_letter_wrong_is_named_and_its_default_stands_for_nothing(tmp_path: Path) -> None:
    """hydra refuses it; the batch was told with ppo_mini_batch_size 256, and the recipe fitted."""
    path = tmp_path / "run.sh"
    right = "actor_rollout_ref.actor.ppo_mini_batch_size"
    wrong = right.replace("mini_batch", "minibatch")
    path.write_text(script({wrong if key == right else key: value for key, value in QWEN.items()}))
    message = f"verl has no key {wrong}; write {right}"
    assert message in explain(path).wrong
    with pytest.raises(ConfigError, match=re.escape(message)):
        source_of(path)
    path.write_text(script({**QWEN, "actor_rollout_ref.actor.ppo_infer_micro_batch_size_per_gpu": 4}))
    assert not any("no key" in line for line in explain(path).wrong)  # a key of verl that is like another one


def test_a_nested_yaml_says_the_same_as_the_script() -> None:
    assert verl_recipe.recipe(nested(QWEN)).values == verl_recipe.of_script(script(QWEN)).values


def test_a_token_budget_takes_the_place_of_micro_batches_and_is_the_log_probs_too() -> None:
    values = {**QWEN, f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 24576}
    made = dict(verl_recipe.of_script(script(values)).values)
    made.pop("launch")
    settings = TRAINER.parse(made)
    assert isinstance(settings, VerlSettings)
    assert settings.log_prob_max_token_len_per_gpu == 24576
    sizes = settings.split(settings.samples, rows=1, budget=settings.ppo_max_token_len_per_gpu, sharers=1)
    assert sum(sizes) == 160
    assert max(sizes) * settings.tokens <= 24576


def test_ranks_that_share_their_samples_count_as_one_in_the_batch() -> None:
    made = verl_recipe.recipe({**QWEN, ULYSSES: 4}).values
    assert made["gradient_accumulation_steps"] == 40  # 256 x 5 / (8 / 4) / 16: verl's data-parallel size is GPUs / 4
    assert made["ref_ulysses_sequence_parallel_size"] == 4
    newer = verl_recipe.recipe({**QWEN, f"{FSDP}.ulysses_sequence_parallel_size": 4}).values
    assert {**newer, "ref_ulysses_sequence_parallel_size": 4} == made  # but verl's reference does not follow this key
    assert newer["ref_ulysses_sequence_parallel_size"] == 1
    launch = Launch(ranks=8, sharding="fsdp1")
    recipe = Recipe(trainer="verl", values=made, resolved=made, keys=TRAINER.keys, launch=launch)
    assert recipe.effective_batch_size == 256 * 5
    assert "2 group(s) of 4 ranks that share their samples" in dict(recipe.describe())["effective batch"]
    assert spread(recipe, 16).effective_batch_size == recipe.effective_batch_size
    with pytest.raises(ConfigError, match="4 must divide the ranks; got 6; numbers that work: 4, 8"):
        spread(recipe, 6)


def test_on_other_ranks_passes_without_gradients_divide_a_ranks_rollout() -> None:
    """Told to fit on 8 cards with 32 samples of 80 in a pass, which verl refuses after the first rollout."""
    made = verl_recipe.recipe(QWEN).values
    sizes: dict[str, object] = {"log_prob_micro_batch_size_per_gpu": 128, "ref_log_prob_micro_batch_size_per_gpu": 10}
    recipe = Recipe(
        trainer="verl", values={**made, **sizes}, resolved={**made, **sizes}, keys=TRAINER.keys,
        launch=Launch(ranks=8, sharding="fsdp1"),
    )  # fmt: skip
    more = spread(recipe, 16)
    each = cast(int, more.values["ppo_micro_batch_size_per_gpu"]) * cast(int, more.values["steps_per_generation"])
    assert each % 128
    assert more.values["log_prob_micro_batch_size_per_gpu"] == 80
    assert more.values["ref_log_prob_micro_batch_size_per_gpu"] == 10
    assert more.notes[-1].endswith("; log_prob_micro_batch_size_per_gpu 80, to divide a rank's samples")
    assert spread(recipe, 1).launch == replace(recipe.launch, ranks=1)  # verl's engine is FSDP's there too


def test_on_fewer_ranks_the_rollouts_engine_has_as_many_as_divide_them() -> None:
    """Told to fit on 4 cards with an engine of 8, with which verl ends when its workers start."""
    made = verl_recipe.recipe({**QWEN, f"{ROLLOUT}.tensor_model_parallel_size": 8}).values
    recipe = Recipe(
        trainer="verl", values=made, resolved=made, keys=TRAINER.keys, launch=Launch(ranks=8, sharding="fsdp1")
    )
    assert [spread(recipe, n).values["tensor_model_parallel_size"] for n in (1, 2, 4, 8, 16)] == [1, 2, 4, 8, 8]
    fewer = spread(recipe, 4)
    assert fewer.notes[-1].endswith("; tensor_model_parallel_size 4, to divide the ranks")
    assert sizes_of_ranks(fewer, recipe) == {"tensor_model_parallel_size": 4}


def test_a_token_budget_is_of_each_rank_that_shares_a_sample() -> None:
    settings = VerlSettings(model_path="m", use_dynamic_bsz=True, max_prompt_length=100, max_response_length=100)
    assert settings.split(12, rows=1, budget=800, sharers=1) == [4, 4, 4]
    assert settings.split(12, rows=1, budget=800, sharers=2) == [6, 6]


def test_a_critic_is_packed_by_tokens_whatever_its_own_sizes_say() -> None:
    values = {**QWEN, **PPO, "critic.ppo_mini_batch_size": 512, "critic.ppo_epochs": 2,
              "critic.ppo_micro_batch_size_per_gpu": 4, "critic.ppo_max_token_len_per_gpu": 9999,
              "critic.fsdp.param_offload": True}  # fmt: skip
    made = dict(verl_recipe.recipe(values).values)
    assert made["critic_steps_per_generation"] == 4  # 1,024 / 512 x 2
    assert made["critic_max_token_len_per_gpu"] == 32768  # trainer_base.py, line 252: what its engine is given
    assert made["critic_param_offload"] is True
    made.pop("launch")
    settings = TRAINER.parse(made)
    assert isinstance(settings, VerlSettings)
    assert settings.judged == 640
    assert settings.judged_at_once == 320
    older = verl_recipe.recipe({**values, "trainer.use_v1": False}).values
    assert older["critic_max_token_len_per_gpu"] == 9999
    line = next(line.text for line in verl_rules.explain(values).lines if line.name == "critic")
    assert "packed by tokens: 32768 a GPU" in line
    assert (
        "critic.ppo_micro_batch_size_per_gpu, critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu without" in line
    )


def test_what_hangs_on_a_condition_is_taken_with_a_note() -> None:
    head = 'util=${UTIL:-}\nif [ "$DEVICE" = gpu ]; then\n  util=${util:-0.6}\nelse\n  util=0.3\nfi'
    made = verl_recipe.of_script(script({**QWEN, f"{ROLLOUT}.gpu_memory_utilization": "${util}"}, head))
    assert made.values["gpu_memory_utilization"] == 0.6
    assert any("gpu_memory_utilization 0.6" in note for note in made.notes)


def test_a_model_in_a_folder_that_the_environment_names_is_known_by_the_folders_name() -> None:
    path = "actor_rollout_ref.model.path"
    made = verl_recipe.of_script(script({**QWEN, path: "${DATA}/models/Qwen3-32B"}, "DATA=${DATA:-$HOME/verl}"))
    assert made.values["model_path"] == "Qwen/Qwen3-32B"
    assert any(f"{path} Qwen/Qwen3-32B" in note for note in made.notes)
    with pytest.raises(ConfigError, match="no model of its folder's name my-own is known"):
        verl_recipe.of_script(script({**QWEN, path: "${DATA}/models/my-own"}))
    with pytest.raises(ConfigError, match="Qwen3-VL-8B trains on images"):
        verl_recipe.of_script(script({**QWEN, path: "${DATA}/models/Qwen3-VL-8B"}))
    with pytest.raises(ConfigError, match="takes it from a variable that it does not set; set it there"):
        verl_recipe.of_script(script({**QWEN, path: "$MODEL_PATH"}))


def test_a_micro_batch_that_only_the_deprecated_key_says_is_told_with_the_key_to_give(tmp_path: Path) -> None:
    older = {key: value for key, value in QWEN.items() if key != f"{ACTOR}.ppo_micro_batch_size_per_gpu"}
    text = script({**older, f"{ACTOR}.ppo_micro_batch_size": 64})
    with pytest.raises(ConfigError, match=r"counts over all 8 GPUs; give .*ppo_micro_batch_size_per_gpu, here 8"):
        verl_recipe.of_script(text)
    path = tmp_path / "run.sh"
    path.write_text(text)
    found = dict(explain(path).lines)
    assert found["micro-batches"].startswith("not known: ppo_micro_batch_size 64 is deprecated")
    assert any("verl ends when the workers start" in line for line in explain(path).wrong)


@pytest.mark.parametrize(
    ("section", "ends"),
    [
        (ROLLOUT, "rollout.* ends when the workers start"),
        ("actor_rollout_ref.ref", "ref.* ends at the reference's first pass"),
    ],
)
def test_a_pass_whose_micro_batch_only_the_deprecated_key_says_is_named(
    section: str, ends: str, tmp_path: Path
) -> None:
    key = f"{section}.log_prob_micro_batch_size"
    (tmp_path / "run.sh").write_text(script({k: v for k, v in QWEN.items() if k != f"{key}_per_gpu"} | {key: 64}))
    assert [line for line in explain(tmp_path / "run.sh").wrong if re.search(ends, line)]


def test_verls_critic_takes_no_deprecated_micro_batch(tmp_path: Path) -> None:
    key = "critic.ppo_micro_batch_size"
    (tmp_path / "run.sh").write_text(script({**QWEN, **PPO, "critic.use_dynamic_bsz": False, key: 64}))
    assert [line for line in explain(tmp_path / "run.sh").wrong if line.startswith(f"{key}_per_gpu must be set")]


def test_a_null_of_a_script_is_said_for_certain(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(script({**QWEN, f"{ACTOR}.ppo_micro_batch_size_per_gpu": "null"}))
    assert any("ppo_micro_batch_size_per_gpu must be set" in line for line in explain(tmp_path / "run.sh").wrong)


SIMULATED = [
    ({"actor_rollout_ref.model.enable_activation_offload": True}, "which needs at least as many bytes"),
    ({**PPO, "critic.model.enable_activation_offload": True}, "critic.model.enable_activation_offload is simulated as"),
    ({f"{FSDP}.offload_policy": True}, "the optimizer works on the processor"),
    ({f"{ACTOR}.use_prefix_grouper": True}, "use_prefix_grouper has no effect"),
    ({f"{ACTOR}.calculate_sum_pi_squared": True}, "calculate_sum_pi_squared has no effect"),
    ({f"{ROLLOUT}.name": "sglang"}, "SGLang was not run: vLLM stands for it"),
    ({"distillation.enabled": True}, "teachers of distillation work on GPUs of their own"),
    ({"actor_rollout_ref.model.path": "Qwen/Qwen3-Next-80B-A3B-Instruct"}, "linear attention runs in transformers"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), SIMULATED)
def test_a_key_that_is_bounded_or_has_no_effect_is_told_in_a_note(changed: dict[str, object], message: str) -> None:
    assert any(message in note for note in verl_recipe.recipe({**QWEN, **changed}).notes)


def test_gradients_that_wait_for_the_last_micro_batch_are_told_with_what_turns_them_off() -> None:
    def told(**changed: object) -> bool:
        notes = verl_recipe.recipe({**QWEN, **changed}).notes
        return any("holds the gradient of all weights" in note for note in notes)

    assert told()
    assert not told(**{f"{FSDP}.use_no_sync_for_gradient_accumulation": False})
    assert not told(**{"actor_rollout_ref.model.lora_rank": 8})
    assert not told(**{f"{ACTOR}.ppo_micro_batch_size_per_gpu": 160})  # one micro-batch a step
    packed = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 16384}
    assert told(**packed)
    assert not told(**packed | {f"{ACTOR}.ppo_max_token_len_per_gpu": 160 * 1536})


def test_host_memory_is_told_as_verl_loads_and_as_vllm_sleeps() -> None:
    def once(model: str) -> object:
        launch: Any = verl_recipe.recipe({**QWEN, "actor_rollout_ref.model.path": model}).values["launch"]
        return launch["config"]["fsdp_config"]["fsdp_cpu_ram_efficient_loading"]

    assert once("Qwen/Qwen2.5-7B-Instruct") is True
    assert once("Qwen/Qwen2.5-0.5B-Instruct") is False  # one weight for embedding and head: each rank loads it
    plain = verl_recipe.recipe(QWEN).notes
    assert any("Ray ends a worker at 95 %" in note for note in plain)
    assert not any("sleeps at level 1" in note for note in plain)
    lora = verl_recipe.recipe({**QWEN, "actor_rollout_ref.model.lora_rank": 8}).notes
    assert any("sleeps at level 1" in note for note in lora)


def test_the_trainer_v1_of_verl_pads_a_generation_to_whole_optimizer_steps() -> None:
    made = verl_recipe.recipe({**QWEN, "data.train_batch_size": 1000})
    whole = verl_recipe.recipe(QWEN)
    assert made.values["steps_per_generation"] == whole.values["steps_per_generation"]
    assert any("adds 120 samples of two tokens and without loss to the 5,000" in note for note in made.notes)
    assert not any("samples of two tokens" in note for note in whole.notes)
    # a critic of 240 prompts: both kinds of steps are whole at the least common multiple of 256 and 240 prompts
    critic = verl_recipe.recipe({**QWEN, **PPO, "critic.ppo_mini_batch_size": 240})
    assert critic.values["critic_steps_per_generation"] == 16
    said = dict(verl_rules.explain({**QWEN, "data.train_batch_size": 1000}).lines)
    assert "4 a generation (5,000 samples and 120 without loss, which verl adds, = 5,120 / 1,280)" in said.values()


def test_keys_that_hydra_does_not_find_are_named_for_a_script_and_those_with_a_plus_are_not(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo actor.strategy=fsdp2 trainer.made_up=3 +trainer.mine=4 "
        "actor_rollout_ref.rollout.swap_space=8 trainer.nnodes=1\n"
    )
    assert explain(script).notes == (
        "verl 0.9 has no key actor.strategy (write actor_rollout_ref.actor.strategy), trainer.made_up, "
        "actor_rollout_ref.rollout.swap_space; hydra refuses them at the start (an older verl may have them)",
    )
    script.write_text("python3 -m verl.trainer.main_ppo --config-name=$MINE trainer.made_up=3\n")
    assert not explain(script).notes


@pytest.mark.parametrize(
    "program", ["-m recipe.dapo.main_dapo", "-m verl_tool.trainer.main_ppo", "-m a.main_retrieval", "main_ppo_split.py"]
)
def test_a_projects_own_trainer_with_verls_keys_is_read_as_verls_and_its_own_keys_are_told(
    program: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script(QWEN).replace("-m verl.trainer.main_ppo", program).replace("$@", "retriever.url=x"))
    name = program.removeprefix("-m ")
    notes = explain(path).notes
    assert f"{name} is taken for verl's main_ppo: what it does besides is not simulated" in notes
    assert f"verl 0.9 has no key retriever.url; hydra refuses it at the start ({name} may have it)" in notes
    plain = tmp_path / "plain.sh"
    plain.write_text(script(QWEN))
    assert (source_of(path).trainer, source_of(path).values) == ("verl", source_of(plain).values)


@pytest.mark.parametrize("program", ["verl.trainer.main_generation", "verl.trainer.main_eval", "a.serve"])
def test_what_generates_or_judges_with_verls_keys_is_no_training(program: str) -> None:
    assert not verl.starts_verl(script(QWEN).replace("verl.trainer.main_ppo", program))


def test_what_of_the_batch_is_no_number_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script({**QWEN, "trainer.nnodes": "TO_BE_FILLED"}))
    said = dict(explain(path).lines)["micro-batches"]
    assert said == "not known: trainer.nnodes must be a whole number; got 'TO_BE_FILLED'"


REFUSED: list[tuple[dict[str, object], str]] = [
    ({f"{ACTOR}.calculate_sum_pi_squared": True, "trainer.use_v1": False}, "not simulated for verl's older trainer"),
    ({"model_engine": "megatron"}, "verl with megatron is not simulated"),
    ({f"{ROLLOUT}.name": "trtllm"}, "by TensorRT-LLM is not simulated"),
    ({f"{ROLLOUT}.disaggregation.enabled": True}, "on GPUs of its own"),
    ({"trainer.v1.trainer_mode": "separate_async"}, "on GPUs of its own"),
    ({f"{ROLLOUT}.multi_turn.enable": True}, "agent loops with tools"),
    ({f"{ROLLOUT}.layered_summon": True, "actor_rollout_ref.model.lora_rank": 8}, "layered_summon needs"),
    ({f"{ROLLOUT}.pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size must be 1; got 2"),
    ({f"{ROLLOUT}.gpu_memory_utilization": 1.2}, "must be above 0 and at most 1; got 1.2"),
    ({**PPO, "critic.strategy": "megatron"}, "critic with megatron is not simulated"),
    ({**PPO, "critic.model.lora_rank": 8}, "a critic with LoRA"),
    ({**PPO, "critic.ppo_mini_batch_size": 100}, "= 500 must be a multiple of the critic's 8 data-parallel ranks"),
    ({**PPO, "critic.ppo_mini_batch_size": 240, "trainer.use_v1": False},
     "multiple of critic.ppo_mini_batch_size x rollout.n = 1,200"),
    ({**PPO, "critic.fsdp.model_dtype": "fp8"}, "must be fp32 or bf16"),
    ({**PPO, "critic.use_dynamic_bsz": False}, "critic.ppo_micro_batch_size_per_gpu must be set"),
    ({ULYSSES: 3}, "3 must divide the 8 GPUs"),
    ({f"{ROLLOUT}.tensor_model_parallel_size": 0}, "tensor_model_parallel_size must be 1 or more; got 0"),
    ({ULYSSES: 2, "actor_rollout_ref.model.use_remove_padding": False}, "needs use_remove_padding: true"),
    ({ULYSSES: 2, "actor_rollout_ref.model.override_config.attn_implementation": "sdpa"}, "attend to its own part"),
    ({f"{FSDP}.fsdp_size": 4}, "shards over some of the 8 GPUs"),
    ({"distillation.enabled": True, "distillation.distillation_loss.loss_mode": "forward_kl_topk"},
     "distillation with forward_kl_topk, which computes on the logits"),
    ({"actor_rollout_ref.model.path": "openbmb/MiniCPM-o-2_6"}, "MiniCPM-o-2_6 trains on images, video or sound"),
    ({f"{ACTOR}.strategy": "fsdp2", "actor_rollout_ref.model.use_fused_kernels": True}, "reads the shards of a head"),
    ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 7}, "must divide the samples of a rank"),
    ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}, "must be set, or"),
    ({f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": None}, "log_prob_micro_batch_size_per_gpu must be"),
    ({"data.train_batch_size": "many"}, "not certain"),
    ({"data.train_batch_size": 300, "trainer.use_v1": False}, "must be a multiple of ppo_mini_batch_size 256"),
    ({f"{FSDP}.model_dtype": "fp8"}, "must be fp32 or bf16"),
    ({f"{FSDP}.param_offload": "perhaps"}, "must be True or False"),
    ({f"{ROLLOUT}.gpu_memory_utilization": "half"}, "must be a number"),
    ({f"{ROLLOUT}.max_num_seqs": 1.5}, "must be a whole number"),
    ({"actor_rollout_ref.model.path": None}, "must name its model"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_is_not_simulated_or_not_taken_by_verl_is_refused_by_name(
    changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        verl_recipe.recipe({**QWEN, **changed})


@pytest.mark.parametrize("key", ["pipeline_model_parallel_size", "gpu_memory_utilization", "layered_summon"])
def test_what_the_engine_does_not_take_is_named_before_a_start(key: str) -> None:
    """explain had no word of these; estimate told that an engine in two stages fits."""
    changed, message = next((c, m) for c, m in REFUSED if f"{ROLLOUT}.{key}" in c)
    assert re.search(message, " ".join(verl_rules.explain({**QWEN, **changed}).wrong))


def test_verl_trains_nothing_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**QWEN, "actor_rollout_ref": {}}))
    with pytest.raises(ConfigError, match="put the overrides that it finds behind verl's own command"):
        TRAINER.inspect({"model_path": "m"}, Inspection(device="cuda", worst_case=WorstCase(path=path)))
    with pytest.raises(ConfigError, match=r"export TRIAL --to verl. prints a trial's overrides"):
        TRAINER.small_trainings({}, tmp_path, most_samples=1, most_steps=1)
