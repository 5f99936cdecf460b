"""Changes of a verl config and trials as verl's own overrides, and verl's logs held against a promise."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from recipes import grpo_recipe
from verl_files import ACTOR, FSDP, GIB, QWEN, ROLLOUT, ULYSSES, nested, origin_of, script

from autofit.api.card_advice import CardAdvice
from autofit.api.verl import Export, export_of, read_log, rows_of
from autofit.errors import ConfigError
from autofit.forecast.offers import Offer, OfferVerdict
from autofit.frontends import verl, verl_recipe
from autofit.frontends.writing import OwnFile, can_say, in_own_keys, own_text, own_words, wrong_with
from autofit.probing.result import PhasePeak, ProbeResult, ProbeStatus
from autofit.recipe.launch import Launch
from autofit.tuning.record import StudyRecord

pytestmark = pytest.mark.usefixtures("own_environment")
CHANGES = {
    "ppo_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 20, "steps_per_generation": 80,
    "param_offload": True, "attn_implementation": "sdpa",
}  # fmt: skip


def test_changes_are_told_as_overrides_and_written_into_the_users_script(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "set -x\nmicro=16\n" + script({**QWEN, f"{ACTOR}.ppo_micro_batch_size_per_gpu": "${micro}"}) + "date\n"
    )
    origin = origin_of(path)
    assert own_words(origin, CHANGES) == (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=8 {FSDP}.param_offload=true "
        "++actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    )
    assert own_words(origin, {"launch.sharding": "fsdp2"}) == "sharding fsdp2 (in its launch)"
    text = own_text(origin, CHANGES)
    assert f"  {ACTOR}.ppo_micro_batch_size_per_gpu=8 \\\n" in text
    assert f" $@ \\\n    {FSDP}.param_offload=true \\\n    ++actor" in text
    assert text.endswith("=sdpa\ndate\n")
    again = verl_recipe.of_script(text).values
    assert {key: again[key] for key in CHANGES} == CHANGES
    assert OwnFile.of(origin, CHANGES).command == "bash"


def test_a_change_is_written_behind_redirections_too(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script(QWEN).replace(" $@\n", " 2>&1 | tee run.log\n"))
    text = own_text(origin_of(path), {"param_offload": True})
    assert text.endswith(f" 2>&1 \\\n    {FSDP}.param_offload=true | tee run.log\n")
    assert verl_recipe.of_script(text).values["param_offload"] is True


def test_no_attention_is_written_that_ulysses_does_not_reach() -> None:
    shared = verl_recipe.recipe({**QWEN, ULYSSES: 2})
    assert not can_say(shared, "attn_implementation", "sdpa")
    assert can_say(shared, "attn_implementation", "flash_attention_2")
    assert can_say(verl_recipe.recipe(QWEN), "attn_implementation", "sdpa")


def test_an_override_that_stands_in_several_places_is_set_behind_them(tmp_path: Path) -> None:
    path, key = tmp_path / "run.sh", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    path.write_text("common=(\n" + "\n".join(f"  {k}={v}" for k, v in QWEN.items())
                    + f'\n)\npython3 -m verl.trainer.main_ppo "${{common[@]}}" {key}=4\n')  # fmt: skip
    text = own_text(origin_of(path), CHANGES)
    assert text.count(f"{key}=") == 3
    assert verl_recipe.of_script(text).values["ppo_micro_batch_size_per_gpu"] == 8


def test_changes_are_written_into_a_yaml_at_their_place(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(nested(QWEN)) + "# the end\n")
    text = own_text(origin_of(path), CHANGES)
    assert text.endswith("# the end\n")
    values = verl_recipe.recipe(yaml.safe_load(text)).values
    assert {key: values[key] for key in CHANGES} == CHANGES
    with pytest.raises(ConfigError, match="max_steps: 9 has no key in verl"):
        in_own_keys(verl_recipe.recipe(QWEN), {"max_steps": 9})


TRL = {
    "model_name_or_path": "Qwen/Qwen3-8B", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8,
    "steps_per_generation": 16, "num_generations": 16, "num_iterations": 1, "max_completion_length": 2048,
    "learning_rate": 2e-6, "max_grad_norm": 0.5, "epsilon": 0.1, "epsilon_high": 0.28, "beta": 0.04,
    "loss_type": "dr_grpo", "scale_rewards": "none", "lr_scheduler_type": "linear", "dtype": "bfloat16",
    "use_vllm": True, "vllm_gpu_memory_utilization": 0.4, "vllm_tensor_parallel_size": 2, "max_steps": 100,
    "activation_checkpointing": False, "use_peft": False, "launch": Launch(ranks=8, sharding="fsdp2").to_values(),
}  # fmt: skip


def test_a_grpo_trial_goes_to_verl_with_its_batch_and_the_differences_are_named() -> None:
    record = StudyRecord(trainer="grpo", values={"optim": "sgd", "epsilon": 0.1}, resolved=TRL)
    made = export_of(record, 3, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16,
                                 "steps_per_generation": 32}, "study")  # fmt: skip
    values = verl_recipe.recipe(made.overrides).values
    assert values["ppo_micro_batch_size_per_gpu"] == 2
    assert values["gradient_accumulation_steps"] == 16  # 256 completions an optimizer step, 16 prompts x 16
    assert values["steps_per_generation"] == 32
    assert values["reference"] is True
    assert values["launch"]["sharding"] == "fsdp2"  # type: ignore[index]
    said = made.overrides
    assert said["data.train_batch_size"] == 32
    assert said[f"{ACTOR}.loss_agg_mode"] == "seq-mean-token-sum-norm"
    assert said[f"{ACTOR}.loss_scale_factor"] == 2048
    assert (said[f"{ACTOR}.clip_ratio_low"], said[f"{ACTOR}.clip_ratio_high"]) == (0.1, 0.28)
    assert said["trainer.total_training_steps"] == 50  # of two optimizer steps each
    assert said["actor_rollout_ref.model.enable_gradient_checkpointing"] is False  # True in verl
    assert said["algorithm.norm_adv_by_std_in_grpo"] is False
    text = str(made)
    assert "# lr_scheduler_type linear: verl has constant and cosine" in text
    assert "# not carried over: optim, per_device" not in text
    assert "# not carried over: optim" in text
    command = text[text.index("python3") :]
    assert verl.overrides(command)[0].items() >= {k: v for k, v in said.items() if v is not None}.items()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps_per_generation": 12}, "must be a multiple of the effective batch 256"),
        ({"num_generations": 12}, "that of num_generations=12"),
        ({"vllm_tensor_parallel_size": 3}, "must divide the 8 GPUs"),
    ],
)
def test_a_batch_that_verl_cannot_hold_is_not_exported(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export_of(StudyRecord(trainer="grpo", resolved={**TRL, **changed}), 0, {}, "study")
    with pytest.raises(ConfigError, match="takes a study of a verl config or a grpo recipe; s is of sft"):
        export_of(StudyRecord(trainer="sft"), 0, {}, "s")


def test_a_trial_of_a_verl_config_is_overrides_behind_the_users_command(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script(QWEN))
    record = StudyRecord(trainer="verl", foreign=origin_of(path))
    made = export_of(record, 1, {**CHANGES, "env": {"NCCL_NVLS_ENABLE": "0"}}, "study")
    assert str(made).splitlines() == [
        "# NCCL_NVLS_ENABLE 0 (in the environment)",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=8 {FSDP}.param_offload=true "
        "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    ]
    told = str(Export(trial=0, whole=False, overrides={}, changes=("data: " + "a few words " * 12,)))
    assert all(line.startswith("#") and len(line) < 80 for line in told.splitlines()), "no word is broken at 80 columns"
    assert str(export_of(record, 0, {}, "study")) == "# the trial changes nothing of the config"


def test_another_number_of_gpus_is_said_in_verls_keys_and_its_batch_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script(QWEN))
    origin = origin_of(path)
    assert own_words(origin, {"launch.ranks": 4}) == "trainer.n_gpus_per_node=4"
    several = {"launch.ranks": 16, "launch.machines": 2}
    assert own_words(origin, several) == "trainer.n_gpus_per_node=8 trainer.nnodes=2"
    path.write_text(script({**QWEN, f"{ROLLOUT}.tensor_model_parallel_size": 8}))
    (refused,) = wrong_with(origin_of(path), {"launch.ranks": 4})
    assert "must divide the 4 GPUs" in refused
    assert wrong_with(origin, {"launch.ranks": 4}) == ()
    recipe = replace(grpo_recipe(world_size=8), trainer="verl", foreign=origin)
    made = [
        Offer(card="h100", count=count, capacity_bytes=80 * GIB, verdict=OfferVerdict.FITS, device_used_bytes=GIB)
        for count in (4, 8)
    ]
    told = [str(CardAdvice(recipe=recipe, offers=(one,), prices={})) for one in made]
    assert "in your file: trainer.n_gpus_per_node=4" in " ".join(told[0].split())
    assert "n_gpus_per_node" not in told[1]


LOG = """
(TaskRunner pid=9) step:1 - perf/max_memory_allocated_gb:1.5 - timing_s/gen:30.0 - timing_s/step:99.0
(TaskRunner pid=9) step:2 - actor/loss:-1e-3 - perf/max_memory_allocated_gb:2.0 - perf/max_memory_reserved_gb:3.0 \
- timing_s/gen:np.float64(20.0) - timing_s/update_actor:5.0 - timing_s/step:25.0
Training Progress: step:3 of 9
""".replace("\\\n", "")


def test_a_log_of_verl_is_read_from_the_console_and_from_jsonl_alike(tmp_path: Path) -> None:
    console, jsonl = tmp_path / "train.log", tmp_path / "run.jsonl"
    console.write_text(LOG)
    memory = "perf/max_memory_allocated_gb"
    steps = [{memory: 1.5, "timing_s/gen": 30, "timing_s/step": 99},
             {memory: 2.0, "perf/max_memory_reserved_gb": 3.0, "timing_s/gen": 20, "timing_s/update_actor": 5.0,
              "timing_s/step": 25, "name": "x"}]  # fmt: skip
    jsonl.write_text("".join(json.dumps({"step": n, "data": data}) + "\n" for n, data in enumerate(steps)) + "{torn")
    assert read_log(console) == read_log(jsonl)
    found = read_log(console)
    assert (found.steps, found.allocated_bytes, found.reserved_bytes) == (2, 2 << 30, 3 << 30)  # verl's gb are GiB
    assert found.seconds == {"gen": 20.0, "update_actor": 5.0, "step": 25.0}  # of the steps behind the first
    console.write_text(
        LOG.replace(" perf/", " actor/perf/").replace("actor/loss", "critic/perf/max_memory_allocated_gb")
    )
    assert read_log(console) == found  # as verl 0.9 names them; the critic's is another worker's
    console.write_text("step:1 - nothing:1\n")
    with pytest.raises(ConfigError, match="has no step with perf/max_memory_allocated_gb"):
        read_log(console)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_log(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: reading would wait for ever
    for path, kind in ((tmp_path / "pipe", "a pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "a folder")):
        with pytest.raises(ConfigError, match=f"must be a log of verl, and is {kind}"):
            read_log(path)


def test_a_log_is_held_against_the_actors_bytes_and_all_optimizer_steps_of_a_generation(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    peaks = {"rollout": 9 << 30, "update": 3 << 30, "loading": 4 << 30}
    promised = ProbeResult(
        status=ProbeStatus.FIT, device="sim:h100",
        phases=tuple(PhasePeak(name=name, peak_allocated_bytes=size, peak_reserved_bytes=size, device_used_bytes=size)
            for name, size in peaks.items()),
        categories={"rollout": {"vLLM": 8 << 30}, "update": {"vLLM": 1 << 29, "logits": 1 << 30}},
        phase_s={"rollout": 5.5, "update": 1.0, "optimizer": 0.25, "loading": 0.125},
    )  # fmt: skip
    rows = {row.name: row for row in rows_of(read_log(tmp_path / "log"), promised, 4)}
    assert rows["allocated"].promised == 5 << 29  # of the update: vLLM is a process of its own
    assert rows["allocated"].off == pytest.approx(0.25)
    assert rows["timing_s/gen"].off == pytest.approx(0.1)
    assert rows["timing_s/update_actor"].promised == 5.5
    assert rows["reserved"].off is None
    assert "timing_s/ref" not in rows
    assert rows["timing_s/gen"].text().split() == ["timing_s/gen", "22.0", "s", "20.0", "s", "+10.0%"]
