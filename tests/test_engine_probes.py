"""Probes of real trainings beside a vLLM engine in their own process, on the CPU with a stand-in for vLLM.

The stand-in allows one engine in a process, as vLLM does with sleep mode. It writes who made each engine.
"""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import tiny

from autofit.probing.fork_server import ForkServer
from autofit.probing.launch import Launcher
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import Cause, ProbeRequest, ProbeResult, ProbeStatus
from autofit.recipe.launch import LAUNCH, Launch

pytestmark = pytest.mark.slow

_MODULES = {  # what TRL imports of it (trl/generation/vllm_generation.py, vllm_client.py), with vLLM 0.31's names
    "__init__.py": """
import os
import random
import time
from types import SimpleNamespace

__version__ = "0.31.0"
RequestOutput = object

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    made = 0

    def __init__(self, **given):
        assert LLM.made == 0, "Sleep mode can only be used for one instance per process."
        assert given["enable_sleep_mode"] and given["load_format"] == "dummy"
        LLM.made = 1
        with open(os.environ["ENGINES"], "a") as file:
            file.write(f"{os.getpid()} {os.getppid()} {os.environ['RANK']}\\n")
        while os.path.exists(os.environ["ENGINES"] + ".hang"):
            time.sleep(0.05)
        if os.path.exists(os.environ["ENGINES"] + ".full"):
            raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`")
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda weights: None))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=SimpleNamespace(max_model_len=256))

    def sleep(self, level):
        pass

    def wake_up(self, tags=None):
        pass

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, sampling_params, use_tqdm):
        def completion():
            ids = [random.randrange(50) for _ in range(sampling_params.max_tokens)]
            return SimpleNamespace(token_ids=ids, logprobs=[{i: SimpleNamespace(logprob=-1.0, rank=1)} for i in ids])
        return [SimpleNamespace(prompt_token_ids=one["prompt_token_ids"], outputs=[completion()]) for one in prompts]
""",
    "sampling_params.py": "StructuredOutputsParams = object\n",
    "utils/__init__.py": "",
    "utils/network_utils.py": "get_ip = None\n",
    "distributed/__init__.py": "",
    "distributed/weight_transfer/__init__.py": "",
    "distributed/weight_transfer/nccl_common.py": "trainer_init = None\n",
    "distributed/weight_transfer/nccl_engine.py": "NCCLTrainerSendWeightsArgs = NCCLWeightTransferEngine = object\n",
    "distributed/weight_transfer/packed_tensor.py": "packed_nccl_broadcast_producer = None\n",
}


@pytest.fixture
def request_of_one(
    tmp_path: Path, tiny_model: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> ProbeRequest:
    """A probe of GRPO beside an engine, in processes that find the stand-in."""
    monkeypatch.chdir(tmp_path)
    for name, text in _MODULES.items():
        path = tmp_path / "modules/vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setenv("ENGINES", str(tmp_path / "engines"))
    path = tiny.write_recipe(tmp_path, tiny_model)
    read = prepare(path, trainer="grpo", device="cpu", folder=tmp_path, server=fork_server)
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    return ProbeRequest(
        folder=tmp_path / "p", trainer="grpo", values={**read.values, **engine}, device="cpu", limit_bytes=None,
        worst_case=worst_case_path(tmp_path), cwd=tmp_path, deadline_s=240, server_socket=None,
    )  # fmt: skip


def engines(request: ProbeRequest) -> list[list[int]]:
    """(process, its parent, rank) of each engine that was made."""
    path = request.cwd / "engines"
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


def test_the_run_resumes_beside_an_engine_in_a_second_process(request_of_one: ProbeRequest) -> None:
    result = Launcher().run(request_of_one)
    assert result.status is ProbeStatus.FIT, result.reason + request_of_one.log_path.read_text()
    (first, second) = engines(request_of_one)
    assert first[1] == second[0]  # which started the first
    names = [phase.name for phase in result.phases]
    assert {"load", "rollout", "scoring", "update", "optimizer", "save", "resume"} <= set(names)
    assert names.index("save") < names.index("resume")  # so the first process' phases come first
    assert all(phase.peak_allocated_bytes > 0 for phase in result.phases)
    assert len(result.step_s) == len(result.rollout_s) == 2
    assert result.device_used_bytes == max(phase.device_used_bytes for phase in result.phases)
    assert not (request_of_one.folder / "checkpoints").exists()
    assert not request_of_one.saved_path.exists()


def test_ranks_resume_in_second_processes_too(request_of_one: ProbeRequest) -> None:
    values = {**request_of_one.values, LAUNCH: Launch(ranks=2, sharding="ddp").to_values()}
    result = Launcher().run(replace(request_of_one, values=values))
    assert result.status is ProbeStatus.FIT, result.reason
    assert [one.rank for one in result.ranks] == [0, 1]
    assert sorted(rank for _, _, rank in engines(request_of_one)) == [0, 0, 1, 1]
    assert {"load", "rollout", "save", "resume"} <= {phase.name for phase in result.phases}


def test_an_engine_that_finds_no_room_is_an_oom_of_the_first_process(request_of_one: ProbeRequest) -> None:
    (request_of_one.cwd / "engines.full").touch()
    result = Launcher().run(request_of_one)
    assert result.status is ProbeStatus.OOM, result.reason
    assert "No available memory" in result.reason
    assert result.oom_phase == "load"
    assert len(engines(request_of_one)) == 1
    assert not (request_of_one.folder / "checkpoints").exists()


def test_a_first_process_that_is_killed_is_a_killed_probe_and_a_cancelled_probe_leaves_none(
    request_of_one: ProbeRequest,
) -> None:
    (request_of_one.cwd / "engines.hang").touch()
    launcher = Launcher()
    launcher.submit(request_of_one)
    os.kill(_waits_for_engine(request_of_one, 1), signal.SIGKILL)
    result = _end_of(launcher, request_of_one)
    assert (result.status, result.cause) == (ProbeStatus.LOST, Cause.KILLED), result.reason
    assert "(SIGKILL)" in result.reason

    again = replace(request_of_one, folder=request_of_one.cwd / "q")
    launcher.submit(again)
    left = psutil.Process(_waits_for_engine(again, 2))
    launcher.cancel(again.folder)
    psutil.wait_procs([left], timeout=60)
    assert not left.is_running()


def _end_of(launcher: Launcher, request: ProbeRequest) -> ProbeResult:
    ends = time.monotonic() + 120
    while (result := launcher.result(request.folder)) is None and time.monotonic() < ends:
        time.sleep(0.1)
    assert result is not None
    return result


def _waits_for_engine(request: ProbeRequest, count: int) -> int:
    """The process of engine `count`, once it is being made."""
    ends = time.monotonic() + 120
    while len(engines(request)) < count and time.monotonic() < ends:
        time.sleep(0.1)
    return engines(request)[count - 1][0]
