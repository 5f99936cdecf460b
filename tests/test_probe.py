"""The probe on the CPU device: real TRL training of a tiny model, through the fork server and submitit."""

import gc
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import tiny
import yaml
from at_once import probed
from rank_peaks import allocator_bytes
from slurm_cluster import lives

from autofit.plugin.protocol import Report, Task, WorstCase
from autofit.plugin.registry import load
from autofit.probing.fork_server import ForkServer
from autofit.probing.job import cancel
from autofit.probing.launch import Launcher, is_alive
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import Cause, ProbeRequest, ProbeResult, ProbeStatus
from autofit.recipe.recipe import Recipe, merge

PHASES = {"load", "rollout", "scoring", "update", "optimizer", "save", "resume"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, fork_server: ForkServer) -> Recipe:
    folder = tmp_path_factory.mktemp("recipe")
    path = tiny.write_recipe(folder, tiny_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = prepare(path, trainer="grpo", device="cpu", folder=folder, server=fork_server)
    return replace(found, folder=folder)


@pytest.fixture(scope="module")
def fit(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> tuple[ProbeResult, Path]:
    """The result of a probe of the recipe as it is, and its folder."""
    folder = tmp_path_factory.mktemp("fit") / "p"
    return probe(recipe, folder, fork_server, {}), folder


def offline_recipe(
    trainer: str, folder: Path, model: Path, server: ForkServer, changes: Mapping[str, object] | None = None
) -> Recipe:
    """A recipe of a trainer that does not generate, with its worst case beside it."""
    path = tiny.write_offline_recipe(trainer, folder, model, **(changes or {}))
    found = prepare(path, trainer=trainer, device="cpu", folder=folder, server=server)
    return replace(found, folder=folder)


def probe(
    recipe: Recipe, folder: Path, warm: ForkServer | None, changes: Mapping[str, object], *,
    limit_bytes: int | None = None, deadline_s: float = 500,
) -> ProbeResult:  # fmt: skip
    request = ProbeRequest(
        folder=folder, trainer=recipe.trainer, values=merge(recipe.values, changes), device="cpu",
        limit_bytes=limit_bytes, worst_case=worst_case_path(recipe.folder), cwd=recipe.folder, deadline_s=deadline_s,
        server_socket=None if warm is None else warm.socket_path,
    )  # fmt: skip
    return Launcher().run(request) if warm is None else probed(request)


def test_the_recipe_knows_its_worst_case(recipe: Recipe) -> None:
    from autofit.trainers.common import read_worst_case

    assert (recipe.effective_batch_size, recipe.prompts_per_step) == (8, 2)
    assert (recipe.longest_prompt_tokens, recipe.max_completion_tokens) == (7, 8)
    row = read_worst_case(WorstCase(path=worst_case_path(recipe.folder)))["rows"][0]
    assert len(row["prompt"].split()) == 7


def test_a_fit_has_every_phase_time_and_version(fit: tuple[ProbeResult, Path]) -> None:
    result, folder = fit
    assert result.status is ProbeStatus.FIT, result.reason
    assert {p.name for p in result.phases} == PHASES
    assert result.device_used_bytes == max(p.device_used_bytes for p in result.phases)
    assert len(result.step_s) == len(result.rollout_s) == len(result.update_s) == 2
    for step_s, rollout_s, update_s in zip(result.step_s, result.rollout_s, result.update_s, strict=True):
        assert 0 < rollout_s + update_s <= step_s * 1.001
    assert result.completions_per_step == 8
    assert result.tokens_per_step == 8 * (7 + 8)
    assert {"torch", "transformers", "trl"} <= set(result.versions)
    assert not (folder / "checkpoints").exists()
    assert ProbeResult.from_json(json.loads(json.dumps(result.to_json()))) == result


@pytest.mark.slow
def test_the_same_candidate_needs_the_same_bytes_warm_and_cold(
    recipe: Recipe, tmp_path: Path, fit: tuple[ProbeResult, Path]
) -> None:
    warm = fit[0]
    cold = probe(recipe, tmp_path / "cold", None, {})
    assert (warm.phases, warm.peak_allocated_bytes) == (cold.phases, cold.peak_allocated_bytes)


def test_completions_are_forced_to_full_length_however_early_the_model_would_stop(
    recipe: Recipe, tmp_path: Path, fork_server: ForkServer
) -> None:
    changes = {"generation_kwargs": {"suppress_tokens": [i for i in range(tiny.WORDS) if i != tiny.WORDS - 3]}}
    result = probe(recipe, tmp_path / "p", fork_server, changes)
    assert result.status is ProbeStatus.FIT, result.reason
    assert "'completions/mean_length': '8'" in (tmp_path / "p" / "probe.log").read_text()


def test_a_limit_makes_a_real_oom_with_its_phase_and_bytes(
    recipe: Recipe, tmp_path: Path, fork_server: ForkServer, fit: tuple[ProbeResult, Path]
) -> None:
    free = fit[0]
    assert free.device_used_bytes is not None
    exact = probe(recipe, tmp_path / "exact", fork_server, {}, limit_bytes=free.device_used_bytes)
    below = probe(recipe, tmp_path / "below", fork_server, {}, limit_bytes=free.device_used_bytes - 1)
    assert exact.status is ProbeStatus.FIT
    assert below.status is ProbeStatus.OOM
    assert below.oom_phase == max(free.phases, key=lambda p: p.device_used_bytes).name
    assert below.device_used_bytes is not None
    assert below.device_used_bytes >= free.device_used_bytes - 1


@pytest.mark.parametrize(
    ("changes", "named"),
    # CI has the peak of a full GRPO training, evaluations in bfloat16 and with the adapter off, real ranks with 4 bits
    [*(pytest.param(*case, marks=pytest.mark.thorough) for case in [
        ({"use_peft": False, "beta": 0.04}, "full"), ({"bf16": True, "dtype": "bfloat16"}, "bf16"),
        ({"beta": 0.1}, "adapter off"), ({"load_in_4bit": True}, "4bit")]),
     ({"load_in_8bit": True}, "8bit"), ({"steps_per_generation": 1}, "chunks")],
)  # fmt: skip
def test_other_recipes_run(
    recipe: Recipe, tmp_path: Path, fork_server: ForkServer, changes: dict[str, object], named: str
) -> None:
    result = probe(recipe, tmp_path / "p", fork_server, changes)
    assert result.status is ProbeStatus.FIT, f"{named}: {result.reason}"


@pytest.mark.parametrize(
    ("trainer", "own", "changes", "longest", "tokens"),
    [
        ("sft", {}, {}, 10, 80),  # 2 words, 7 words and the end
        ("sft", {"max_length": 8}, {"max_length": 4}, 8, 32),
        ("sft", {"max_length": 8}, {"max_length": 16}, 8, 128),  # nobody knows how long the cut ones are
        ("sft", {"max_length": 16, "packing": True}, {}, 16, 128),
        ("dpo", {}, {}, 10, 8 * (10 + 4)),
        ("dpo", {"max_length": 6}, {"max_length": 2}, 6, 8 * 4),  # where the prompt alone would fill it
        ("dpo", {"use_peft": False}, {"precompute_ref_log_probs": True}, 10, 8 * (10 + 4)),
        ("reward", {}, {}, 8, 8 * (8 + 3)),
        ("reward", {"max_length": 5}, {}, 5, 8 * (5 + 3)),  # longer pairs are dropped
        ("reward", {"max_length": 5}, {"max_length": 6}, 5, 8 * (6 + 6)),
    ],
)
def test_the_longest_sample_is_trls_own_under_each_candidates_length(
    tmp_path: Path, tiny_model: Path, fork_server: ForkServer, trainer: str, own: dict[str, object],
    changes: dict[str, object], longest: int, tokens: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from autofit.trainers.common import read_worst_case
    from autofit.trainers.trl_config import parse

    monkeypatch.chdir(tmp_path)
    recipe = offline_recipe(trainer, tmp_path, tiny_model, fork_server, own)
    assert (recipe.longest_sample_tokens, recipe.effective_batch_size) == (longest, 8)
    values = merge(recipe.values, {**changes, "use_cpu": True})
    plug_in: Any = load(trainer)
    config = parse(trainer, values, overrides={})
    assert plug_in.tokens_per_step(config, read_worst_case(WorstCase(path=worst_case_path(tmp_path)))) == tokens
    if changes and "max_length" not in changes:
        result = probe(recipe, tmp_path / "p", fork_server, changes)
        assert result.status is ProbeStatus.FIT, result.reason
        assert {p.name for p in result.phases} == {"load", "scoring", "update", "optimizer", "save", "resume"}
        assert all(r > 0 for r in result.rollout_s)


@pytest.mark.parametrize("trainer", ["sft", "dpo", "reward"])
@pytest.mark.parametrize("max_length", [6, 64])
def test_a_long_dataset_is_read_no_further_than_it_must_be_to_the_same_end(
    tmp_path: Path, tiny_model: Path, trainer: str, max_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autofit.trainers.trl_config import parse

    values = yaml.safe_load(tiny.write_offline_recipe(trainer, tmp_path, tiny_model).read_text())
    plug_in: Any = load(trainer)
    found = []
    for largest in (1000, 5):
        monkeypatch.setattr("autofit.trainers.common.LARGEST", largest)
        rows, facts, _ = plug_in.worst_case(
            parse(trainer, values, overrides={"use_cpu": True, "max_length": max_length})
        )
        for name in ("row", "row_trained_on"):  # of several that are cut to the same length, any may be named
            facts.pop(name)
        found.append((facts, plug_in.tokens_per_step(parse(trainer, values, overrides={"use_cpu": True}),
                                                     {**facts, "rows": rows})))  # fmt: skip
    assert found[0] == found[1]
    assert found[0][0]["longest_tokens"] == min(max_length, {"reward": 8}.get(trainer, 10))


@pytest.mark.parametrize(
    ("reward", "status", "cause", "words"),
    [("reward_that_exits", ProbeStatus.FAILED, Cause.EXITED, "sys.exit(5) was called during scoring"),
     ("reward_that_crashes", ProbeStatus.FAILED, Cause.CRASHED, "crashed (SIGSEGV) during scoring"),
     ("reward_that_raises", ProbeStatus.FAILED, Cause.RAISED, "KeyError: 'answer' (during scoring; see "),
     pytest.param("reward_that_hangs", ProbeStatus.LOST, Cause.DEADLINE, "the deadline of 12 s passed during scoring",
                  marks=pytest.mark.slow)],
)  # fmt: skip
def test_every_end_of_a_probe_is_classified(
    recipe: Recipe,
    tmp_path: Path,
    fork_server: ForkServer,
    reward: str,
    status: ProbeStatus,
    cause: Cause,
    words: str,
) -> None:
    deadline = 12 if reward == "reward_that_hangs" else 500
    result = probe(recipe, tmp_path / "p", fork_server, {"reward_funcs": [f"endings.{reward}"]}, deadline_s=deadline)
    assert result.status is status
    assert result.cause is cause
    assert words in result.reason


@pytest.mark.parametrize("warm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_cancelled_or_killed_probe_leaves_no_process(
    recipe: Recipe, tmp_path: Path, fork_server: ForkServer, warm: bool
) -> None:
    for name in ("cancel", "kill the job") if warm else ("kill the job",):
        folder = tmp_path / name.replace(" ", "-")
        request = ProbeRequest(
            folder=folder, trainer="grpo", values={**recipe.values, "reward_funcs": ["endings.reward_that_hangs"]},
            device="cpu", limit_bytes=None, worst_case=worst_case_path(recipe.folder), cwd=recipe.folder,
            server_socket=fork_server.socket_path if warm else None,
        )  # fmt: skip
        launcher = Launcher()
        launcher.submit(request)
        _until(lambda folder=folder: _phase(folder) == "scoring", 300)
        pids = [p.pid for p in psutil.process_iter() if _holds(p, folder)]
        assert pids
        if name == "cancel":
            cancel(folder)
        else:
            psutil.Process(int(json.loads((folder / "started.json").read_text())["pid"])).kill()
        _until(lambda pids=pids: not any(map(lives, pids)), 120)
        _until(lambda folder=folder: not is_alive(folder), 120)
        assert launcher.result(folder).status is ProbeStatus.LOST  # type: ignore[union-attr]


def _phase(folder: Path) -> str:
    path = folder / "phase"
    return path.read_text() if path.exists() else ""


def _holds(process: psutil.Process, folder: Path) -> bool:
    """Whether the process has the probe's log open: the probe itself, and nobody else."""
    try:
        return any(file.path == str(folder / "probe.log") for file in process.open_files())
    except psutil.Error:
        return False


def _until(condition: object, seconds: float) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("entry", "code"), [("segfault", -11), ("killed", -9), ("leaves", 3), ("has_sets_in_one_order", 0)],
)  # fmt: skip
def test_the_warm_server_reports_how_a_child_ended(
    fork_server: ForkServer, tmp_path: Path, entry: str, code: int
) -> None:
    ending = fork_server.call(_message(entry, tmp_path))
    assert (ending.exit_code, ending.deadline_passed) == (code, False)


def test_a_hanging_child_meets_its_deadline(fork_server: ForkServer, tmp_path: Path) -> None:
    ending = fork_server.call(_message("hangs", tmp_path) | {"deadline_s": 0.5})
    assert (ending.exit_code, ending.deadline_passed) == (-9, True)


def test_no_grandchild_outlives_its_probe(fork_server: ForkServer, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    ending = fork_server.call(_message("leaves_grandchildren", tmp_path) | {"argument": str(pids)})
    assert ending.exit_code == 0
    assert not [pid for pid in map(int, pids.read_text().split()) if lives(pid)]


def _message(entry: str, folder: Path) -> dict[str, object]:
    return {"entry": f"endings:{entry}", "argument": "", "cwd": str(folder), "log": str(folder / "log"), "env": {},
            "deadline_s": 500}  # fmt: skip


@pytest.mark.parametrize(
    ("trainer", "changes"),
    [pytest.param("grpo", {}, marks=pytest.mark.thorough),  # with LoRA CI has it of ranks (test_evaluation.py)
     pytest.param("grpo", {"use_peft": False, "beta": 0.04}, marks=pytest.mark.slow),
     *(pytest.param(*case, marks=pytest.mark.thorough) for case in [
        ("sft", {}), ("dpo", {"use_peft": False}), ("reward", {}),
        ("grpo", {"bf16": True, "dtype": "bfloat16"}), ("dpo", {"precompute_ref_log_probs": True}),
        ("grpo", {"attn_implementation": "eager", "gradient_checkpointing": False})])],
)  # fmt: skip
def test_the_peak_is_the_profilers_but_for_boxes_of_python_numbers(
    recipe: Recipe, tmp_path: Path, trainer: str, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch,
    fork_server: ForkServer, tiny_model: Path,
) -> None:  # fmt: skip
    from torch.profiler import ProfilerActivity, profile

    from autofit.probing.memory import CpuMemory

    if trainer != "grpo":
        recipe = offline_recipe(trainer, tmp_path, tiny_model, fork_server)
    monkeypatch.chdir(recipe.folder)
    plug_in = load(trainer)
    model = tiny.write_model(tmp_path / "model", hidden=128, layers=3)
    worst_case = WorstCase(path=worst_case_path(recipe.folder))
    memory = CpuMemory(None)

    def train() -> None:
        longer = {"max_completion_length": 24} if trainer == "grpo" else {}
        values = {**recipe.values, **changes, **longer, "model_name_or_path": str(model)}
        training = plug_in.build(values, Task(device="cpu", output=tmp_path / "out", worst_case=worst_case, steps=2))
        training.train(Report())
        del training
        gc.collect()

    train()  # what is made once (caches, constants) is not the trainer's
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        memory.start()
        train()
        memory.stop()
    ours = memory.switch("all", "end").peak_allocated_bytes
    missing = allocator_bytes(profiled)[0] - ours
    assert 0 <= missing <= 256
    assert missing % 8 == 0


@pytest.mark.slow
def test_an_error_of_peft_that_names_no_key_says_which_to_change(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from autofit.probing.worker import _failure

    few = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "num_experts": 2,
           "num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 8, "head_dim": 8}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **few))
    lora = LoraConfig(target_modules="all-linear", lora_dropout=0.05, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="lora_dropout") as raised:
        get_peft_model(model, lora)
    request = mock.Mock(device="cpu", folder=tmp_path, log_path=tmp_path / "probe.log")
    reason = _failure(request, raised.value, []).reason
    assert "set lora_dropout: 0, or leave the experts out of lora_target_modules (during load;" in reason


@pytest.mark.parametrize(("device", "emptied"), [("cuda", 1), ("cpu", 0)])
def test_what_resumes_on_a_card_finds_an_empty_allocator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, emptied: int
) -> None:
    """Built in what the first run had left in the cache, a model took 0.6 of 7.6 GB more on a real card."""
    from autofit.probing import worker

    called: list[str] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: called.append("emptied"))
    monkeypatch.setattr("torch._C._cuda_clearCublasWorkspaces", lambda: called.append("cleared"), raising=False)
    run, recorder = mock.Mock(), mock.Mock(phase="load")
    recorder.enter.side_effect = lambda phase: called.append(phase)
    request = mock.Mock(device=device, values={}, rank=None, folder=tmp_path, worst_case=tmp_path)
    worker._train_until_saved(request, recorder, mock.Mock(build=lambda *_: run))
    assert called == ["load", *["cleared", "emptied"] * emptied, "resume"]
