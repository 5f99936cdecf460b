"""The `cuda` path without a card: the fork server, the cap, a whole probe, and OOMs that only words tell."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import trl.generation.vllm_generation as vllm_generation
import yaml
from accelerate import DistributedType
from datasets import Dataset
from drivers import Card, Driver
from transformers import AutoConfig, LlamaForCausalLM, modeling_utils

from autofit.errors import ConfigError, EnvironmentFault
from autofit.hardware.nvml import Gpu
from autofit.plugin.protocol import SCORING
from autofit.probing.fork_server import ForkServer, call
from autofit.probing.job import classified
from autofit.probing.memory import CpuMemory, CudaMemory
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import Cause, ProbeRequest, ProbeResult, ProbeStatus, exited_for_oom, is_oom
from autofit.probing.supervise import ProcessEnding
from autofit.probing.worker import PhaseRecorder, StepClock
from autofit.trainers import grpo
from autofit.trainers.common import random_checkpoint, random_model

GIB = 1 << 30


def in_child(server: ForkServer, entry: str, folder: Path, libraries: Path) -> Any:
    """What `cuda_on_fakes.ENTRY` answers in a child of the fork server."""
    message = {
        "entry": f"cuda_on_fakes:{entry}", "cwd": str(folder), "log": str(folder / "log"), "env": {}, "deadline_s": 120,
        "argument": json.dumps({"folder": str(folder), "libraries": str(libraries)}),
    }  # fmt: skip
    ending = server.call(message)
    assert ending.exit_code == 0, (folder / "log").read_text()[-3000:]
    return json.loads((folder / "answer.json").read_text())


# -- the fork server --------------------------------------------------------------------------------------------------


def test_imports_learn_of_cards_without_starting_cuda_and_it_is_seen_where_one_does(
    fork_server: ForkServer, tmp_path: Path, libraries: Path
) -> None:
    told = in_child(fork_server, "capability", tmp_path, libraries)
    assert told == {"found": [[9, 0]] * 3, "count": 2, "available": True, "started": [False, True]}


def test_a_server_whose_imports_started_cuda_begins_again_without_them_so_that_its_forks_can(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="autofit-") as home:  # a socket's path is short
        path = str(Path(home) / "warm")
        code = (
            "import sys, types; from autofit.probing import fork_server\n"
            "def preload(): sys.modules['torch'] = types.SimpleNamespace("
            "cuda=types.SimpleNamespace(is_initialized=lambda: True))\n"
            f"fork_server._preload = preload; fork_server.serve({path!r})"
        )
        with (tmp_path / "server.log").open("wb") as log:
            server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=log)
        try:
            message = {"entry": "cuda_on_fakes:imported", "argument": json.dumps({"folder": str(tmp_path)}),
                       "cwd": str(tmp_path), "log": str(tmp_path / "log"), "env": {}, "deadline_s": 60}  # fmt: skip
            ending = call(path, message, alive=lambda: server.poll() is None)
        finally:
            server.communicate(b"", timeout=30)
    assert ending.exit_code == 0, (tmp_path / "log").read_text()
    assert json.loads((tmp_path / "answer.json").read_text()) is False
    assert "started CUDA" in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize("device", ["cuda", "sim:l4"])
def test_the_child_that_inspects_a_recipe_sees_one_of_the_cards(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """With several, transformers makes TRL's trainers train by nn.DataParallel, which SFT, DPO and reward refuse."""
    cards = tuple(Gpu(name="NVIDIA L4", uuid=f"GPU-{i}", capacity_bytes=24 * GIB) for i in range(8))
    monkeypatch.setattr("autofit.probing.prepare.gpus", lambda: cards)
    path = tiny.write_offline_recipe("sft", tmp_path, tiny_model)
    asked: dict[str, Any] = {}

    def refuse(message: dict[str, Any]) -> ProcessEnding:
        asked.update(message)
        return ProcessEnding(exit_code=1)

    server: Any = SimpleNamespace(call=refuse)
    with pytest.raises(EnvironmentFault, match="exit code 1"):
        prepare(path, trainer="sft", device=device, folder=tmp_path / "i", server=server)
    assert asked["env"] == {"CUDA_VISIBLE_DEVICES": "GPU-0"}


@pytest.mark.parametrize("device", ["cuda", "sim:l4"])
def test_a_recipe_with_a_vllm_server_is_only_simulated_and_said_so_before_its_first_probe(
    fork_server: ForkServer, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tiny.write_recipe(tmp_path, tiny_model, use_vllm=True, vllm_mode="server")
    if device == "cuda":
        with pytest.raises(ConfigError, match=r"no probe starts, so such a recipe is only simulated: give --gpu"):
            prepare(path, trainer="grpo", device=device, folder=tmp_path / "i", server=fork_server)
    else:
        prepare(path, trainer="grpo", device=device, folder=tmp_path / "i", server=fork_server)


# -- the cap ----------------------------------------------------------------------------------------------------------


def test_what_loads_later_is_taken_from_the_cap_at_the_next_phase(
    fork_server: ForkServer, tmp_path: Path, libraries: Path
) -> None:
    told = in_child(fork_server, "cap", tmp_path, libraries)
    assert told["context"] == 600 << 20
    assert told["before"] == [True, False]
    assert told["used"] == told["reserved"] + (600 << 20) + 5 * GIB
    assert told["after"] == [True, False]  # 14 GiB were given before
    assert told["beyond"] == [False]


def test_a_limit_that_the_context_fills_is_an_oom_from_the_start(
    fork_server: ForkServer, tmp_path: Path, libraries: Path
) -> None:
    assert "already holds 0.63 GB" in in_child(fork_server, "too_small", tmp_path, libraries)


def test_a_sleeping_engine_holds_nothing_in_an_update_and_all_of_it_where_it_may_wake_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """25 GB of an engine are given back to the driver, which counts 1 GB; torch's books hold them all the time."""
    caps: list[float] = []
    for name, value in {"synchronize": None, "memory_reserved": 30, "max_memory_reserved": 35,
                        "reset_peak_memory_stats": None}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", caps.append)
    memory = object.__new__(CudaMemory)
    memory._nvml = memory._handle = None
    memory._limit_bytes, memory._total_bytes, memory._awake_bytes = 40, 100, 0
    used = {"awake": 31, "asleep": 6}  # 1 outside torch, and 5 of 30 that torch holds besides the engine's 25
    monkeypatch.setattr("autofit.probing.memory.used_bytes", lambda *_: used["awake"])
    assert memory.switch("load", "rollout").device_used_bytes == 36
    monkeypatch.setattr("autofit.probing.memory.used_bytes", lambda *_: used["asleep"])
    assert memory.switch("rollout", "update").device_used_bytes == 36
    assert memory.switch("update", "rollout").device_used_bytes == 35 - 24
    assert caps == pytest.approx([0.39, 0.64, 0.39])


# -- a whole probe ----------------------------------------------------------------------------------------------------


def test_a_probe_runs_on_the_cuda_device_and_keeps_the_cards_clock(
    fork_server: ForkServer, tmp_path: Path, libraries: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tiny.write_offline_recipe("sft", tmp_path, tiny_model)
    recipe = prepare(path, trainer="sft", device="cpu", folder=tmp_path / "i", server=fork_server)
    request = ProbeRequest(
        folder=tmp_path, trainer="sft", values={k: v for k, v in recipe.values.items() if k != "use_cpu"},
        device="cuda", limit_bytes=None, worst_case=worst_case_path(tmp_path / "i"),
    )  # fmt: skip
    request.request_path.write_text(json.dumps(request.to_json()))
    result = ProbeResult.from_json(in_child(fork_server, "probe", tmp_path, libraries))
    assert result.status is ProbeStatus.FIT, result.reason
    assert {p.name for p in result.phases} >= {"load", "update", "optimizer", "save", "resume"}
    assert result.device_used_bytes == (result.peak_reserved_bytes or 0) + (600 << 20)
    assert len(result.step_s) == len(result.card_states) == 2
    assert result.card_states[0].sm_clock_mhz == 1980
    assert result.card_states[0].power_w == pytest.approx(412.345)


@pytest.mark.parametrize(("round_of", "step_s", "steps"), [(2, 0.3, 4), (1, 0.3, 4), (3, 0.3, 6), (2, 2.0, 2)])
def test_steps_too_short_for_a_cards_power_are_measured_in_more_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, round_of: int, step_s: float, steps: int
) -> None:
    now_s = 0.0
    memory = CpuMemory(None)
    monkeypatch.setattr(memory, "now_s", lambda: now_s)
    monkeypatch.setattr(memory, "least_measured_s", 1.0)
    run = SimpleNamespace(scoring_share=0.0)
    clock = StepClock(run, PhaseRecorder(memory, tmp_path / "phase"), memory, measure_after=0, round_of=round_of)
    stops = 0
    while not stops:
        clock.step_begins(len(clock.step_s))
        now_s += step_s
        stops += clock.step_ends(len(clock.step_s) + 1).stop
    assert len(clock.step_s) == steps


def test_a_reference_scored_before_training_counts_without_the_pass_that_loads_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H100 the first pass of a DPO took 0.74 s a step's share, and the kernels of one 0.03 s."""
    now_s = 0.0
    memory = CpuMemory(None)
    monkeypatch.setattr(memory, "now_s", lambda: now_s)
    recorder = PhaseRecorder(memory, tmp_path / "phase")
    clock = StepClock(SimpleNamespace(scoring_share=2.0), recorder, memory, measure_after=0, round_of=1)
    for seconds in (9.0, 0.25):
        before = recorder.enter(SCORING)
        now_s += seconds
        recorder.enter(before)
    clock.train_begins()
    clock.step_begins(0)
    now_s += 1.0
    clock.step_ends(1)
    assert clock.step_s == [1.5]
    assert clock.rollout_s == [0.5]


def test_an_oom_in_a_job_is_graded_although_submitit_hides_every_card(tmp_path: Path, libraries: Path) -> None:
    driver = Driver(libraries=libraries, cards=tmp_path / "cards")
    driver.has(Card())
    request = ProbeRequest(folder=tmp_path, trainer="sft", values={}, device="cuda", limit_bytes=24 * 10**9,
                           worst_case=tmp_path, slots=("cuda-GPU-0",))  # fmt: skip
    request.request_path.write_text(json.dumps(request.to_json()))
    request.answer_path.write_text(json.dumps(ProbeResult(status=ProbeStatus.OOM, device="cuda").to_json()))
    code = (
        "from pathlib import Path; from autofit.probing import job; from autofit.probing.result import ProbeRequest\n"
        f"request = ProbeRequest.read(Path({str(request.request_path)!r}))\n"
        f"print(job._can_say_how_far_over(request, 'cuda-{Card().uuid}'), job._can_say_how_far_over(request, 'cpu-0'))"
    )
    env = driver.env(CUDA_VISIBLE_DEVICES="")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_the_weights_of_a_quantised_model_take_no_memory_before_they_are_quantised(tiny_model: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_model)
    state = random_checkpoint(LlamaForCausalLM, config, device="cpu", dtype=torch.bfloat16)
    with torch.device("meta"):
        whole = LlamaForCausalLM(config).state_dict()
    assert {name: one.get_shape() for name, one in state.items()} == {n: list(t.shape) for n, t in whole.items()}
    norm, matrix = state["model.norm.weight"], state["model.layers.1.mlp.up_proj.weight"]
    assert not any(isinstance(value, torch.Tensor) for value in vars(matrix).values())
    assert matrix.get_dtype() == "BF16"
    assert norm[...].eq(1).all()
    assert matrix[...].float().std().item() == pytest.approx(config.initializer_range, rel=0.2)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_one_in_the_checkpoint_so_that_a_quantised_model_ties_them_too(
    tiny_model: Path, tied: bool
) -> None:
    config = AutoConfig.from_pretrained(tiny_model, tie_word_embeddings=tied)
    state = random_checkpoint(LlamaForCausalLM, config, device="cpu", dtype=torch.bfloat16)
    assert ("lm_head.weight" in state) is not tied
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=torch.bfloat16)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_zero3_does_not_divide_the_parameters_whose_shapes_a_checkpoint_takes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_utils, "is_deepspeed_zero3_enabled", lambda: True)
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # zero.Init, which would divide them, cannot be imported
    config = AutoConfig.from_pretrained(tiny_model)
    assert random_checkpoint(LlamaForCausalLM, config, device="cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("launch", "expected"), [("NO", {"": 0}), ("MULTI_GPU", None), ("DEEPSPEED", None)]
)  # as TRL's trainers set it beside create_model_from_path
def test_a_quantised_model_is_placed_by_the_rank_and_not_by_a_device_map_which_zero3_refuses(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, launch: str, expected: object
) -> None:
    state = SimpleNamespace(distributed_type=DistributedType(launch), device=torch.device("cuda"))
    monkeypatch.setattr("accelerate.PartialState", lambda: state)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked: dict[str, Any] = {}

    def from_pretrained(_: object, **given: Any) -> LlamaForCausalLM:
        asked.update(given)
        return LlamaForCausalLM(given["config"])

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", from_pretrained)
    random_model(str(tiny_model), dtype="bfloat16", quantization_config=object())
    assert asked["device_map"] == expected


def test_a_colocated_engine_makes_up_its_weights_and_ignores_end_tokens_in_vllms_words(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: dict[str, Any] = {}

    def made(kind: object, config: Any, **_: object) -> Any:
        asked.update(engine=vllm_generation.LLM(model="m"), generation=config.training.generation_kwargs)
        return SimpleNamespace()

    monkeypatch.setattr(vllm_generation, "LLM", lambda **given: given, raising=False)
    monkeypatch.setattr(grpo, "made", made)
    monkeypatch.setattr(grpo, "padded", lambda *_: False)
    path = tiny.write_recipe(tmp_path, tiny_model, use_vllm=True)
    config = grpo.TRAINER.parse(yaml.safe_load(path.read_text()), overrides={"max_steps": 1})
    rows = Dataset.from_list([{"prompt": "w1 w2"}])
    grpo.TRAINER.probed(config, {"prompt_tokens": 2, "rows": rows})
    assert asked == {"engine": {"model": "m", "load_format": "dummy"}, "generation": {"ignore_eos": True}}
    assert vllm_generation.LLM() == {}  # a run reads the checkpoint


# -- OOMs that only words tell ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
        ValueError(
            "Free memory on device cuda:0 (7.3/15.5 GiB) on startup is less than desired GPU memory utilization"
        ),
        MemoryError(),
        *(
            RuntimeError(
                f"NVML_SUCCESS == {asked} INTERNAL ASSERT FAILED at "
                '"/__w/pytorch/pytorch/c10/cuda/CUDACachingAllocator.cpp":1407, please report a bug to PyTorch. '
            )
            for asked in ("r", "DriverAPI::get()->nvmlInit_v2_()")
        ),
    ],
    ids=lambda error: f"{type(error).__name__}: {error}"[:50],
)
def test_a_failed_allocation_is_an_oom_whoever_tells_it(error: Exception) -> None:
    assert is_oom(error)
    with pytest.raises(KeyError) as raised:
        raise KeyError("what came of it") from error
    assert is_oom(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"),
        ValueError("max_length must be larger"),
        OSError("No space left on device"),
        RuntimeError(
            "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
            '"/__w/pytorch/pytorch/c10/cuda/PeerToPeerAccess.cpp":83, please report a bug to PyTorch. '
        ),
    ],
    ids=str,
)
def test_another_failure_is_no_oom(error: Exception) -> None:
    assert not is_oom(error)


def test_an_accelerators_error_code_wins_over_its_words() -> None:
    error = torch.AcceleratorError("CUDA error: reworded")
    error.error_code = 2  # type: ignore[attr-defined]  # cudaErrorMemoryAllocation
    assert is_oom(error)
    error = torch.AcceleratorError("the words CUDA error: out of memory in another error")
    error.error_code = 700  # type: ignore[attr-defined]  # cudaErrorIllegalAddress
    assert not is_oom(error)


@pytest.mark.parametrize(("last", "status"), [("Error out of memory at line 90 in file ops.cu\n", ProbeStatus.OOM),
                                              ("Error invalid argument at line 90\n", ProbeStatus.FAILED)])  # fmt: skip
def test_a_library_that_exits_for_want_of_memory_is_an_oom(tmp_path: Path, last: str, status: ProbeStatus) -> None:
    request = ProbeRequest(folder=tmp_path, trainer="sft", values={}, device="cuda", limit_bytes=None,
                           worst_case=tmp_path)  # fmt: skip
    assert not exited_for_oom(request.log_path)
    request.log_path.write_text("step 1\n" * 2000 + last)
    request.phase_path.write_text("optimizer")
    result = classified(ProcessEnding(exit_code=1), request)
    assert result.status is status
    assert result.cause is (None if status is ProbeStatus.OOM else Cause.EXITED)
    assert result.oom_phase == ("optimizer" if status is ProbeStatus.OOM else None)
