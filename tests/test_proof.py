"""The gradient proof: what it compares, what it says, and that a promotion waits for it."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import command_line
import optuna
import pytest
import yaml

import autofit.proof.proof
from autofit import promote
from autofit.api.tables import trial_line
from autofit.errors import ConfigError, EnvironmentFault
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.proof.proof import PARAMETER_ROUNDING, ROUNDING, Proof, Verdict, checked, lines, prove, reach
from autofit.proof.worker import run as run_worker
from autofit.recipe.keys import Tier
from autofit.space.traits import Reach
from autofit.trainers.grpo import TRAINER
from autofit.trainers.keys import ROLLOUTS
from autofit.trainers.proofs.small_model import END, LONGEST, sample
from autofit.trainers.trl_config import parse
from autofit.tuning.record import StudyRecord, keep_record, kept_proof, record_of
from autofit.tuning.study import load_study, note_candidate, open_storage, tell, trials_of

pytestmark = pytest.mark.filterwarnings("ignore")
Claim = tuple[Tier, dict[str, object]]
SPLIT: dict[str, object] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
}


def make_study(
    folder: Path, values: Mapping[str, object], trials: list[Claim], needs: tuple[str, ...] = ()
) -> optuna.Study:
    """A study with the baseline and a fitting trial for each (tier, changes), as a search would have left it."""
    study = optuna.create_study(
        study_name="told", storage=open_storage(folder, create=True), directions=["minimize", "minimize"]
    )
    resolved = parse("grpo", values, overrides={"use_cpu": True}).resolved
    record = StudyRecord(
        trainer="grpo", values=dict(values), resolved=resolved, device="cpu", target_bytes=10**9, cwd=Path.cwd(),
        keys=ROLLOUTS, compared=TRAINER.compared, command="trl grpo --config",
    )  # fmt: skip
    keep_record(study, record)
    baseline: Claim = ("neutral", {})
    for tier, changes in [baseline, *trials]:
        trial = study.ask()
        note_candidate(trial, tier=tier, changes=changes, yaml_changes=changes, needs=needs)
        fit = ProbeResult(
            status=ProbeStatus.FIT, device="cpu", device_used_bytes=1, step_s=(1.0,), completions_per_step=16
        )
        tell(study, trial.number, fit, target_bytes=10**9)
    return study


def autofit_(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return command_line.run(Path.cwd(), *arguments)


@pytest.mark.slow
def test_verify_and_promote_tell_a_neutral_trial_from_one_that_only_claims_to_be(tiny_recipe: Path) -> None:
    values = yaml.safe_load(tiny_recipe.read_text()) | {"gradient_accumulation_steps": 4, "loss_type": "dapo"}
    folder = Path("autofit-studies")
    false: dict[str, object] = {"steps_per_generation": 1, "gradient_checkpointing": False}
    make_study(folder, values, [("neutral", false), ("neutral", {**SPLIT, "gradient_checkpointing": False})])

    refused = autofit_("verify", "1", "--json")
    assert refused.returncode == 1, refused.stderr
    proof = json.loads(refused.stdout)
    assert proof["verdict"] == "refused"
    assert proof["relative_difference"] > 0.01
    assert list(proof["because_of"]) == ["steps_per_generation"]  # and not the checkpointing
    stopped = autofit_("promote", "1")
    assert stopped.returncode == 2
    assert "claimed neutral, but is not" in stopped.stderr
    assert "steps_per_generation" in stopped.stderr
    assert len(stopped.stderr.splitlines()) == 2  # the study, and the reason
    assert not (folder / "promoted").exists()

    proven = autofit_("promote", "2", "--write-only", "--out", "tuned.yaml")
    assert proven.returncode == 0, proven.stderr
    assert "# gradient proven neutral: relative difference" in Path("tuned.yaml").read_text()
    content = kept_proof(load_study(folder, None), 2)
    assert content is not None
    kept = Proof.from_json(content)
    assert kept.verdict is Verdict.PROVEN
    assert kept.relative_difference is not None
    assert kept.relative_difference < 1e-6

    nothing = autofit_("verify", "0")
    assert (nothing.returncode, "no proof is needed" in nothing.stdout) == (0, True)
    assert autofit_("verify", "9").returncode == 2


@pytest.mark.usefixtures("warm")
def test_where_a_server_is_kept_the_proof_is_a_fork_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(subprocess, "run")
    request, answer = tmp_path / "request.json", tmp_path / "answer.json"
    request.write_text(json.dumps({"trainer": "nowhere:TRAINER", "answer": str(answer)}))
    code, said = autofit.proof.proof._run_worker(request, tmp_path)
    assert code == 0, said
    assert "error" in json.loads(answer.read_text())


# -- verdicts, with a worker of a known answer ------------------------------------------------------------------------


@pytest.fixture
def values(tiny_recipe: Path) -> dict[str, object]:
    return dict(yaml.safe_load(tiny_recipe.read_text())) | {"gradient_accumulation_steps": 4}


def answering(monkeypatch: pytest.MonkeyPatch, relative: float, parameter: float | None = None) -> list[Any]:
    """The worker answers with this difference; returns the questions that it was asked."""
    asked: list[Any] = []
    difference = {"relative": relative, "steps": [relative], "parameter": "w",
                  "parameter_relative": relative if parameter is None else parameter}  # fmt: skip

    def answer(question: Any) -> dict[str, object]:
        asked.append(question)
        return {"difference": difference, "parts": {}, "model": "m", "versions": {}, "samples_per_step": 16}

    monkeypatch.setattr(autofit.proof.proof, "_ask", answer)
    return asked


@pytest.mark.parametrize(
    ("tier", "relative", "verdict"),
    [("neutral", 2e-7, "proven"), ("neutral", 2e-5, "refused"),
     ("approximate", 0.1, "approximate"), ("approximate", 2e-7, "approximate"), ("recipe", 0.1, "recipe")],
)  # fmt: skip
def test_the_verdict_follows_from_the_claim_and_the_number(
    values: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tier: Tier,
    relative: float,
    verdict: str,
) -> None:
    answering(monkeypatch, relative)
    study = make_study(tmp_path, values, [(tier, dict(SPLIT))])
    proof = prove(study, trials_of(study)[1])
    assert proof.verdict == verdict
    assert Proof.from_json(json.loads(json.dumps(proof.to_json()))) == proof
    assert lines(proof, record_of(study).resolved)


def test_one_wrong_parameter_is_refused_though_the_whole_gradient_hardly_differs(
    values: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, ROUNDING / 2, PARAMETER_ROUNDING * 2)
    study = make_study(tmp_path, values, [("neutral", dict(SPLIT))])
    with pytest.raises(ConfigError, match=r"trial 1 claimed neutral, but is not.*not promoted"):
        checked(study, trials_of(study)[1])


@pytest.mark.parametrize(
    "key",
    [
        "optim",
        "bf16",
        "learning_rate",
        "lora_dropout",
        "lora_r",
        "top_p",
        "anything",
        "epsilon",
        "delta",
        "cast_lm_head_to_fp32",
    ],
)
def test_what_the_proof_holds_fixed_cannot_be_claimed_neutral(
    values: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    asked = answering(monkeypatch, 0.0)
    study = make_study(tmp_path, values, [("neutral", {**SPLIT, key: 1})])
    proof = prove(study, trials_of(study)[1])
    assert (proof.verdict, list(proof.because_of), asked) == (Verdict.REFUSED, [key], [])
    assert f"no gradient can show it: {key}: it " in proof.sentence


def test_what_cannot_be_compared_is_said_and_not_called_proven(
    values: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(monkeypatch, 0.0)
    env = {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
    flash: dict[str, object] = {"attn_implementation": "flash_attention_2"}
    study = make_study(tmp_path, values, [("neutral", {**env, **flash}), ("neutral", {**SPLIT, **flash})])
    alone, mixed = (prove(study, trial) for trial in trials_of(study)[1:])
    assert alone.verdict is Verdict.NOT_COMPARED
    assert set(alone.not_compared) == {"env", "attn_implementation"}
    assert mixed.verdict is Verdict.PROVEN
    assert "does not run on a CPU" in mixed.not_compared["attn_implementation"]
    assert len(asked) == 1
    assert "attn_implementation" not in asked[0].candidate


def test_changes_of_the_recipe_are_in_both_and_the_rest_is_compared(
    values: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(monkeypatch, 2e-7)
    study = make_study(tmp_path, values, [("recipe", {**SPLIT, "lora_r": 2, "lora_alpha": 4})])
    proof = prove(study, trials_of(study)[1])
    assert asked[0].baseline["lora_r"] == asked[0].candidate["lora_r"] == 2
    assert (dict(proof.in_both), dict(proof.compared)) == ({"lora_r": 2, "lora_alpha": 4}, SPLIT)
    assert proof.sentence.startswith("the recipe is changed; the other changes alone differ by 2.0e-07")


@pytest.mark.usefixtures("warm")
def test_a_trial_is_not_launched_without_the_packages_that_it_needs(values: dict[str, object]) -> None:
    changes: dict[str, object] = {"optim": "adamw_8bit", "activation_checkpointing_kwargs.use_reentrant": False}
    study = make_study(Path("autofit-studies"), values, [("approximate", changes)], needs=("no_such_package", "yaml"))
    trial = trials_of(study)[1]
    missing = "needs no_such_package, which is not installed (pip install no-such-package)"
    assert trial_line(trial, record_of(study).resolved).endswith(
        f"use_reentrant False ({missing}): fit, 0.0 MB, 1.00 s a step, 16.00 completions/s"
    )
    written = promote(1, launch=False)
    inner = yaml.safe_load(written.yaml_path.read_text())["activation_checkpointing_kwargs"]
    assert inner == {"use_reentrant": False}
    with pytest.raises(ConfigError, match=f"^trial 1 {re.escape(missing)}; install it and run the same command again"):
        promote(1)


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("activation_checkpointing_kwargs.every_n_layers", Reach.COMPARED),
        ("activation_checkpointing_kwargs.offload", Reach.KERNEL),  # it needs pinned memory, which a CPU has none of
        ("transformers_continuous_batching_config.max_memory_percent", Reach.HARMLESS),
        ("model_init_kwargs.anything", Reach.OTHER),
    ],
)
def test_a_key_inside_a_mapping_is_compared_where_the_mapping_is(key: str, found: Reach) -> None:
    assert reach(TRAINER.compared, key, 1, None)[0] is found


def test_a_kernel_of_the_recipe_itself_that_no_cpu_runs_is_not_compared_either() -> None:
    assert reach(TRAINER.compared, "attn_implementation", "sdpa", "flash_attention_2")[0] is Reach.KERNEL
    assert reach(TRAINER.compared, "attn_implementation", "eager", None)[0] is Reach.COMPARED


def test_a_trial_is_proven_once_and_anew_when_the_versions_change(
    values: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(monkeypatch, 2e-7)
    study = make_study(tmp_path, values, [("neutral", dict(SPLIT))])
    trial = trials_of(study)[1]
    first = prove(study, trial)
    assert prove(load_study(tmp_path, "told"), trial) == first
    assert len(asked) == 1
    monkeypatch.setattr(autofit.proof.proof, "version", lambda _: "another")
    prove(study, trial)
    assert len(asked) == 2


def test_the_parts_keep_the_effective_batch_and_change_one_thing(values: dict[str, object], tmp_path: Path) -> None:
    change = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    study = make_study(tmp_path, values, [("neutral", {**change, "gradient_checkpointing": False})])
    parts = autofit.proof.proof._Question.of(study, trials_of(study)[1]).parts()
    sizes = {name: [part.get(key) for key in change] for name, part in parts.items()}
    assert sizes["micro-batch x accumulation"] == [8, 2, 2]
    assert sizes["steps_per_generation"] == [4, 4, 2]
    assert parts["gradient_checkpointing"] == {**values, "gradient_checkpointing": False}


def test_a_comparison_that_fails_is_one_clear_line(
    values: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(question: Any) -> dict[str, object]:
        request = {"trainer": "grpo", "baseline": question.baseline, "candidate": question.candidate, "parts": {},
                   "answer": str(tmp_path / "answer.json")}  # fmt: skip
        (tmp_path / "request.json").write_text(json.dumps(request))
        run_worker(str(tmp_path / "request.json"))
        return dict(json.loads((tmp_path / "answer.json").read_text()))

    monkeypatch.setattr(autofit.proof.proof, "_ask", ask)
    study = make_study(tmp_path, values | {"model_name_or_path": "/nowhere"}, [("neutral", dict(SPLIT))])
    with pytest.raises(EnvironmentFault, match=r"gradients of trial 1 could not be compared: the config of '/nowhere"):
        prove(study, trials_of(study)[1])


# -- samples and models -----------------------------------------------------------------------------------------------


def test_the_samples_differ_in_length_reward_and_ending() -> None:
    found = [sample(prompt, generation) for prompt in range(32) for generation in range(8)]
    assert found == [sample(prompt, generation) for prompt in range(32) for generation in range(8)]
    lengths = [len(s.completion) for s in found]
    assert (min(lengths), max(lengths)) == (1, LONGEST)
    cut = [s for s in found if s.completion[-1] != END]
    assert 0.15 < len(cut) / len(found) < 0.35
    assert {min(4, len(s.completion)) for s in cut} == {1, 2, 4}  # short and long ones
    groups = [{s.reward for s in found[i : i + 8]} for i in range(0, len(found), 8)]
    assert [len(rewards) for rewards in groups] == [8, 8, 8, 1] * 8


@pytest.mark.parametrize("longest", range(2, LONGEST + 1))
@pytest.mark.parametrize("masked", [False, True], ids=["all", "truncated masked"])
def test_two_rollouts_never_hold_as_many_tokens_so_a_loss_that_divides_by_them_shows(
    longest: int, masked: bool
) -> None:
    for completions in (*range(2, 17), 32, 64):
        groups = [[sample(p, g, longest=longest).completion for g in range(completions)] for p in range(4)]
        tokens = [sum(len(c) for c in group if not masked or c[-1] == END) for group in groups]
        assert all(tokens)
        assert tokens[0] != tokens[1], completions
        assert tokens[0] + tokens[1] != tokens[2] + tokens[3], completions
        assert all(len({len(c) for c in group}) > 1 for group in groups[::2] if longest > 3)


@pytest.mark.parametrize(
    "name", ["LlamaConfig", "Qwen3Config", "Qwen3MoeConfig", "Gemma2Config", "Gemma3Config", "DeepseekV3Config",
             "GPT2Config", "GptOssConfig", "Llama4TextConfig", "Qwen3NextConfig"]
)  # fmt: skip
def test_a_small_model_keeps_the_architecture(name: str, tmp_path: Path) -> None:
    import transformers

    from autofit.trainers.proofs.small_model import small_model

    config = getattr(transformers, name)()
    given = config.get_text_config()
    text, stand_in = small_model(config, tmp_path)
    small = transformers.AutoConfig.from_pretrained(tmp_path)
    assert stand_in is None, text
    assert type(small) is type(given)
    assert small.tie_word_embeddings == given.tie_word_embeddings
    assert sum(f.stat().st_size for f in tmp_path.glob("*.safetensors")) < 40_000_000
    kinds, small_kinds = (set(getattr(c, "layer_types", None) or []) for c in (given, small))
    assert kinds == small_kinds
    if getattr(given, "num_key_value_heads", None) and name != "DeepseekV3Config":
        assert small.num_attention_heads // small.num_key_value_heads == (
            given.num_attention_heads // given.num_key_value_heads
        )


def test_an_architecture_that_cannot_be_small_gets_a_stand_in_and_the_reason(tmp_path: Path) -> None:
    from transformers import MambaConfig, Qwen2VLConfig

    from autofit.trainers.proofs.small_model import small_model

    assert small_model(MambaConfig(), tmp_path / "mamba")[1] is None
    text, why = small_model(Qwen2VLConfig(), tmp_path / "vl")
    assert text.startswith("LlamaForCausalLM")
    assert why


def test_a_mixture_that_cannot_be_small_gets_a_mixture_for_its_stand_in(tmp_path: Path) -> None:
    from transformers import AutoConfig, JambaConfig

    from autofit.trainers.proofs.small_model import small_model

    far = JambaConfig(router_aux_loss_coef=0.3, attn_layer_period=32, attn_layer_offset=20)  # attention in layer 20
    text, why = small_model(far, tmp_path)
    assert text.startswith("Mixtral")
    assert why
    assert AutoConfig.from_pretrained(tmp_path).router_aux_loss_coef == 0.3


SMALLEST: dict[str, object] = {
    "dataset_name": "none", "reward_funcs": ["a.b"], "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4, "steps_per_generation": 4, "num_generations": 4, "loss_type": "grpo",
}  # fmt: skip


def differences(
    folder: Path, base: Mapping[str, object], changes: Mapping[str, object], trainer: str = "grpo"
) -> tuple[float, int]:
    """The candidate's relative difference, and over how many optimizer steps."""
    from autofit.proof.worker import GradientProof

    worker = GradientProof(trainer, {"baseline": base, "candidate": {**base, **changes}}, folder)
    found = worker.difference("candidate")
    return found.relative, len(found.steps)


@pytest.mark.slow
def test_a_kernel_for_gpus_does_not_stop_the_proof_of_an_architecture_without_sdpa(tmp_path: Path) -> None:
    from transformers import Gemma2Config

    Gemma2Config().save_pretrained(tmp_path / "gemma")
    base = {**SMALLEST, "model_name_or_path": str(tmp_path / "gemma"), "attn_implementation": "flash_attention_2"}
    assert differences(tmp_path, base, {"gradient_checkpointing": False})[0] < ROUNDING


def test_an_adapter_on_numbered_layers_is_put_on_those_that_the_small_model_has(
    tiny_model: Path, tmp_path: Path
) -> None:
    base = {**SMALLEST, "model_name_or_path": str(tiny_model), "use_peft": True, "lora_r": 2,
            "lora_target_modules": ["model.layers.31.self_attn.q_proj", "v_proj"]}  # fmt: skip
    assert differences(tmp_path, base, {"gradient_checkpointing": False})[0] < ROUNDING


def test_what_a_recipe_has_for_its_gpu_or_its_own_rows_does_not_reach_the_proof(
    tiny_model: Path, tmp_path: Path
) -> None:
    mine: dict[str, object] = {
        "torch_compile_backend": "no such backend", "dataset_num_proc": 64, "auto_find_batch_size": True,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }  # fmt: skip
    base = {"model_name_or_path": str(tiny_model), "dataset_name": "none", "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2}  # fmt: skip
    split = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    assert differences(tmp_path, base | mine, split, "sft")[0] < ROUNDING


def test_an_adaptive_entropy_bonus_is_seen_whatever_entropy_it_aims_at(tiny_model: Path, tmp_path: Path) -> None:
    base = {**SMALLEST, "model_name_or_path": str(tiny_model), "use_adaptive_entropy": True, "entropy_target": 0.01}
    split = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
    found, steps = differences(tmp_path, base, split)
    assert found > ROUNDING * 3
    assert steps == 2


@pytest.mark.parametrize(
    ("changes", "steps"),
    [({}, 1), ({"steps_per_generation": 8}, 2), ({"num_iterations": 2}, 2),
     ({"steps_per_generation": 2, "num_iterations": 3}, 2), ({"steps_per_generation": 2, "num_iterations": 2}, 1)],
)  # fmt: skip
def test_every_kind_of_optimizer_step_is_taken(tmp_path: Path, changes: dict[str, object], steps: int) -> None:
    from autofit.trainers.proofs.grpo import steps_of_a_round

    values = {**SMALLEST, "model_name_or_path": "m", "output_dir": str(tmp_path), "use_cpu": True}
    assert steps_of_a_round(parse("grpo", values | changes, overrides={})) == steps


@pytest.mark.slow
def test_a_large_step_is_made_smaller_alike_in_both(tiny_model: Path, tmp_path: Path) -> None:
    from autofit.proof.worker import GradientProof

    base = {"model_name_or_path": str(tiny_model), "dataset_name": "none", "reward_funcs": ["a.b"],
            "per_device_train_batch_size": 16, "gradient_accumulation_steps": 64, "steps_per_generation": 32,
            "num_generations": 8, "loss_type": "grpo"}  # fmt: skip
    other = {**base, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 32, "steps_per_generation": 16}
    worker = GradientProof("grpo", {"baseline": base, "candidate": other}, tmp_path)
    assert (worker.small.divided_by, worker.small.samples_per_step) == (4, 256)
    assert worker.difference("candidate").relative < ROUNDING


def test_gradients_of_other_parameters_are_not_compared() -> None:
    import torch

    from autofit.proof.worker import compare

    with pytest.raises(ConfigError, match="must train the same parameters"):
        compare([{"w": torch.ones(2)}], [{"w": torch.ones(3)}])
    with pytest.raises(ConfigError, match=r"must be finite and above zero; it is 0\.0"):
        compare([{"w": torch.zeros(2)}], [{"w": torch.ones(2)}])
    with pytest.raises(ConfigError, match="the candidate's gradient must be finite"):
        compare([{"w": torch.ones(2)}], [{"w": torch.full((2,), float("nan"))}])
