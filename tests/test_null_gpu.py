"""The `cuda` device on the real CUDA build of torch without a card: null_gpu/. Runs in `nox -s cuda`."""

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from at_once import probed
from engine_stand_in import BESIDE_ENGINE, HELD_BYTES, engine_env, engines_in
from null_gpu.build import NullGpu, h100s
from test_rank_probes import Killer, no_process_names

from autofit.cli import main
from autofit.probing import kept_server
from autofit.probing.fork_server import ForkServer
from autofit.probing.launch import Launcher
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import Cause, ProbeRequest, ProbeStatus
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch, Sharding
from autofit.recipe.launching import LaunchOptions
from autofit.recipe.recipe import Recipe, TrainerName

pytestmark = pytest.mark.cuda
MIB, GB = 1 << 20, 10**9
ROOT = Path(__file__).parents[1]
TRAINERS: tuple[TrainerName, ...] = ("sft", "dpo", "reward", "grpo", "rloo")


@pytest.fixture(scope="module")
def server(null_gpu: NullGpu, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server whose children see the cards that `null_gpu` has at that moment."""
    null_gpu.has(h100s(1))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in null_gpu.env().items():
            patch.setenv(name, value)
        found = ForkServer(tmp_path_factory.mktemp("warm-cuda"))
    yield found
    found.close()


@pytest.fixture
def cards(null_gpu: NullGpu, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives this process and the server's children so many cards."""
    monkeypatch.setenv("FAKE_CARDS", str(null_gpu.home / "cards"))
    monkeypatch.setenv("FAKE_HELD", str(null_gpu.home / "held"))
    ctypes.CDLL(str(null_gpu.libraries / "libnvidia-ml.so.1"))  # by its name it is found from then on
    return lambda count, **used: null_gpu.has(h100s(count, **used))


def recipe_of(
    trainer: TrainerName, folder: Path, model: Path, server: ForkServer, *, ranks: int = 1, **changes: object
) -> Recipe:
    generates = trainer in ("grpo", "rloo")
    path = (tiny.write_recipe(folder, model, **changes) if generates
            else tiny.write_offline_recipe(trainer, folder, model, **changes))  # fmt: skip
    options = LaunchOptions(num_processes=ranks) if ranks > 1 else LaunchOptions()
    recipe = prepare(path, trainer=trainer, device="cuda", folder=folder, server=server, launch=options)
    return replace(recipe, folder=folder)


def request_of(
    recipe: Recipe, server: ForkServer, slots: tuple[str, ...], *, sharding: Sharding = "fsdp2",
    limit_bytes: int | None = None, **changes: object,
) -> ProbeRequest:  # fmt: skip
    assert recipe.folder is not None
    values: dict[str, object] = {**recipe.values, **changes}
    if len(slots) > 1:
        values[LAUNCH] = Launch(ranks=len(slots), sharding=sharding).to_values()
    return ProbeRequest(
        folder=recipe.folder / "p", trainer=recipe.trainer, values=values, device="cuda", limit_bytes=limit_bytes,
        worst_case=worst_case_path(recipe.folder), cwd=recipe.folder, deadline_s=200, server_socket=server.socket_path,
        slots=slots,
    )  # fmt: skip


def slots_of(count: int) -> tuple[str, ...]:
    return tuple(f"cuda-{line.split(';')[2]}" for line in h100s(count))


def ranks_end(
    null_gpu: NullGpu, operation: str, folder: Path, *, values: bool, ranks: int = 2, missing: int = 0
) -> None:
    """Run `operation` of collectives.py on its ranks, less the `missing` last ones, to their ends."""
    null_gpu.has(h100s(ranks))
    env = {**os.environ, **null_gpu.env(values=values), **({"NULL_NCCL_WAIT_S": "2"} if missing else {})}
    command = [sys.executable, str(ROOT / "tests" / "collectives.py"), operation, str(folder), str(ranks)]
    done = subprocess.run([*command, str(ranks - missing)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def printed(null_gpu: NullGpu, code: str) -> tuple[int, str]:
    """(the process, what it printed) of Python that runs `code` on the null GPU to its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **null_gpu.env()}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return process.pid, out


def test_torch_runs_on_the_null_gpu_and_its_bytes_are_told_by_the_driver(null_gpu: NullGpu) -> None:
    null_gpu.has(h100s(2))
    code = (
        "import torch, pynvml, json, os\n"
        "x = torch.ones(1 << 20, device='cuda:1', requires_grad=True); (x * x).sum().backward()\n"
        "pynvml.nvmlInit(); card = pynvml.nvmlDeviceGetHandleByIndex(1)\n"
        "try: torch.empty(200 << 30, dtype=torch.uint8, device='cuda'); oom = False\n"
        "except torch.OutOfMemoryError: oom = True\n"
        "print(json.dumps([torch.cuda.device_count(), oom, torch.cuda.memory_reserved(1),\n"
        "    pynvml.nvmlDeviceGetMemoryInfo(card, version=pynvml.nvmlMemory_v2).used,\n"
        "    [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(card)]]), flush=True)\n"
        "os._exit(0)\n"  # else a thread of torch that still starts may meet the end of the interpreter
    )
    pid, out = printed(null_gpu, code)
    count, oom, reserved, used, pids = json.loads(out.splitlines()[-1])
    assert (count, oom, pids) == (2, True, [pid])
    assert used == reserved + (500 + 4) * MIB  # the context, and what others hold


def test_a_measured_probe_starts_with_an_empty_allocator_as_a_run_does(null_gpu: NullGpu) -> None:
    null_gpu.has(h100s(1))
    code = (
        "import os, torch\n"
        "from autofit.probing.memory import memory_of\n"
        "with memory_of('cuda', None): print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), flush=True)\n"
        "os._exit(0)\n"
    )
    assert printed(null_gpu, code)[1].split() == ["0", "0"]


def test_every_operation_of_the_null_nccl_brings_the_numbers_of_all_ranks(null_gpu: NullGpu, tmp_path: Path) -> None:
    ranks_end(null_gpu, "moves", tmp_path, values=True)


def test_without_values_ranks_wait_for_each_other_and_untouched_memory_stays_so(
    null_gpu: NullGpu, tmp_path: Path
) -> None:
    ranks_end(null_gpu, "waits", tmp_path, values=False)


def test_a_rank_that_does_not_come_ends_the_others_with_an_error(null_gpu: NullGpu, tmp_path: Path) -> None:
    ranks_end(null_gpu, "is_alone", tmp_path, values=False, missing=1)


def test_a_sample_of_operators_takes_the_bytes_of_torchs_own_dispatch(null_gpu: NullGpu) -> None:
    from oracle.operators import NOT_RUN, SEEN, compared, is_exact

    null_gpu.has(h100s(1))
    calls = [json.loads(line) for line in SEEN.read_text().splitlines()]
    sample = set(sorted({call["op"] for call in calls} - NOT_RUN.keys())[::3])
    rows = compared([call for call in calls if call["op"] in sample], null_gpu.env(), shapes=2)
    ran = [row for found in rows.values() for row in found if not isinstance(row["real"], str)]
    assert len(ran) >= len(sample)
    assert [row for row in ran if not is_exact(row)] == []


@pytest.mark.parametrize(
    ("trainer", "visible"),  # two: the tests of ranks
    [*((trainer, 8) for trainer in TRAINERS if trainer != "rloo"),  # one: 4-bit weights, below
     *(pytest.param(trainer, 1, marks=pytest.mark.thorough) for trainer in TRAINERS),
     pytest.param("rloo", 8, marks=pytest.mark.thorough)],
)  # fmt: skip
def test_every_trainer_is_read_and_probed_with_so_many_cards_visible(
    trainer: TrainerName, visible: int, cards: Callable[..., None], server: ForkServer, tmp_path: Path,
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cards(visible)
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(trainer, tmp_path, tiny_model, server)
    result = probed(request_of(recipe, server, slots_of(visible)[:1]))
    assert result.status is ProbeStatus.FIT, result.reason
    assert result.peak_reserved_bytes is not None
    assert result.device_used_bytes is not None
    assert result.device_used_bytes >= result.peak_reserved_bytes + 500 * MIB


@pytest.mark.parametrize("bits", ["load_in_4bit", pytest.param("load_in_8bit", marks=pytest.mark.thorough)])
def test_quantised_weights_are_probed_by_bitsandbytes_own_cuda_library(
    bits: str, cards: Callable[..., None], server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(1)
    monkeypatch.chdir(tmp_path)
    model = tiny.write_model(tmp_path / "model", hidden=256)
    recipe = recipe_of("sft", tmp_path, model, server, **{bits: True})
    result = probed(request_of(recipe, server, slots_of(1)))
    assert result.status is ProbeStatus.FIT, result.reason


@pytest.mark.parametrize("sharding", ["fsdp2"])  # DDP compares numbers, which are zeros without values
@pytest.mark.parametrize("trainer", [pytest.param("sft", marks=pytest.mark.thorough), "grpo"])
def test_two_ranks_are_probed_on_two_cards(
    trainer: TrainerName, sharding: Sharding, cards: Callable[..., None], server: ForkServer, tmp_path: Path,
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cards(2)
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(trainer, tmp_path, tiny_model, server, ranks=2)
    result = probed(request_of(recipe, server, slots_of(2), sharding=sharding))
    assert result.status is ProbeStatus.FIT, result.reason
    assert [one.rank for one in result.ranks] == [0, 1]


@pytest.mark.thorough  # CI has the two processes on the CPU (test_engine_probes.py)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_resumes_beside_one_engine_and_not_the_first_ones_bytes_too(
    ranks: int, null_gpu: NullGpu, cards: Callable[..., None], server: ForkServer, tmp_path: Path, tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cards(ranks)
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of("grpo", tmp_path, tiny_model, server, ranks=ranks)
    alone = probed(request_of(recipe, server, slots_of(ranks)))
    engine = engine_env(tmp_path)
    for name, value in {**null_gpu.env(), **engine}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((engine["PYTHONPATH"], null_gpu.env()["PYTHONPATH"])))
    request = request_of(recipe, server, slots_of(ranks))
    beside = Launcher().run(replace(  # not by the server, whose TRL has found no vLLM
        request, folder=tmp_path / "q", server_socket=None, values={**request.values, **BESIDE_ENGINE},
    ))  # fmt: skip
    assert beside.status is ProbeStatus.FIT, beside.reason
    assert len(engines_in(tmp_path)) == 2 * ranks
    assert alone.peak_allocated_bytes is not None
    assert beside.peak_allocated_bytes is not None
    assert HELD_BYTES <= beside.peak_allocated_bytes - alone.peak_allocated_bytes + 2 * MIB < 1.5 * HELD_BYTES


def test_a_target_below_the_card_is_an_oom_in_its_phase(
    cards: Callable[..., None], server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(1)
    monkeypatch.chdir(tmp_path)
    model = tiny.write_model(tmp_path / "model", hidden=2048)
    recipe = recipe_of("sft", tmp_path, model, server, use_peft=False)
    result = probed(request_of(recipe, server, slots_of(1), limit_bytes=int(1.2 * GB)))
    assert result.status is ProbeStatus.OOM, result.reason
    assert result.oom_phase in ("load", "update", "optimizer")


def test_an_oom_of_one_rank_whose_card_others_fill_is_told_with_the_rank(
    cards: Callable[..., None], server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(1)
    monkeypatch.chdir(tmp_path)
    model = tiny.write_model(tmp_path / "model", hidden=2048)
    recipe = recipe_of("sft", tmp_path, model, server, ranks=2, use_peft=False)
    cards(2, used_mib={1: 81559 - 530 - 1200})  # 700 MiB beside the context
    result = probed(request_of(recipe, server, slots_of(2)))
    assert (result.status, result.rank) == (ProbeStatus.OOM, 1), result.reason


def test_a_killed_rank_ends_all_and_gives_its_card_back(
    cards: Callable[..., None], server: ForkServer, null_gpu: NullGpu, tmp_path: Path, tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cards(2)
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of("sft", tmp_path, tiny_model, server, ranks=2)
    request = request_of(recipe, server, slots_of(2))
    killer: threading.Thread = Killer(request, 1, "update")
    request.folder.mkdir()
    killer.start()
    result = probed(request)
    killer.join()
    assert (result.status, result.cause, result.rank) == (ProbeStatus.LOST, Cause.KILLED, 1)
    assert no_process_names(request.folder)


# CI has changes on a card from the simulated one, and confirmations by a law (test_confirmation.py).
SHORT = ("--trials", "1", "--no-confirm", "--no-advice", "--space", "one_knob.yaml")
ONE_KNOB = "trainer: sft\nknobs: {per_device_train_batch_size: {tier: neutral, values: solved, memory: ascending}}\n"


def search_and_promotion(folder: Path, model: Path, *how: str) -> Iterator[list[str]]:
    """The words of two commands, the first of which searches in `folder` for a recipe that is written there."""
    recipe = tiny.write_offline_recipe("sft", folder, model)
    (folder / "one_knob.yaml").write_text(ONE_KNOB)
    yield ["search", str(recipe), "--trainer", "sft", "--device", "cuda", "--target-vram", "40GB", *how,
           "--dir", str(folder / "study"), "--json"]  # fmt: skip
    yield ["promote", "best", "--dir", str(folder / "study")]


def test_search_and_promote_run_on_one_card(
    null_gpu: NullGpu, cards: Callable[..., None], server: ForkServer, tmp_path: Path, tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The server of this file answers the commands' calls: each would import for itself. The full run is a process."""
    cards(1)
    monkeypatch.chdir(tmp_path)
    for name, value in null_gpu.env().items():
        monkeypatch.setenv(name, value)
    assert server.is_ready()
    monkeypatch.setattr(kept_server, "_here", server.socket_path)
    for command in search_and_promotion(tmp_path, tiny_model, *SHORT):
        assert main(command) == 0
    assert list((tmp_path / "study").rglob("final.json"))


@pytest.mark.thorough  # CI has the same two within this process, above
def test_search_and_promote_run_on_one_card_as_processes_of_their_own(
    null_gpu: NullGpu, tmp_path: Path, tiny_model: Path
) -> None:
    null_gpu.has(h100s(1))
    for command in search_and_promotion(tmp_path, tiny_model, "--trials", "3"):
        done = subprocess.run(
            [sys.executable, "-m", "autofit", *command], cwd=tmp_path, env={**os.environ, **null_gpu.env()},
            capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough  # 40 s; CI has the campaign on answers made up for it (test_campaign_run.py)
def test_a_campaign_that_is_killed_goes_on_and_says_that_no_card_was_measured(
    null_gpu: NullGpu, tmp_path: Path
) -> None:
    null_gpu.has(h100s(1))
    out = tmp_path / "results" / "null-gpu"
    command = [sys.executable, "-m", "experiments.gpu", "run", str(tmp_path), "--tiny", "--only", "s1", "w1",
               "--minutes", "9", "--trials", "1"]  # fmt: skip
    env = {**os.environ, **null_gpu.env(), "PYTHONPATH": os.pathsep.join([str(ROOT), null_gpu.env()["PYTHONPATH"]])}

    def started() -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)

    first = started()
    assert first.stdout is not None
    said = ""
    while " fit " not in said:
        said = first.stdout.readline()
        assert said, "it ended before its first line"
    first.kill()
    first.communicate()
    told = started().communicate(timeout=200)[0]
    assert "LEFT OUT: vLLM: it is not installed" in told
    lines = [json.loads(line) for line in (out / "measured.jsonl").read_text().splitlines()]
    measured = [row for row in lines if "status" in row]
    assert [(row["name"], row["status"]) for row in measured] == [("s1", "fit"), ("w1", "fit"), ("s1-again", "fit")]
    assert all(row["kernels"]["missing"] == "the profiler saw no kernel" for row in measured), measured
    table = (out / "table.md").read_text()
    assert table.startswith("Measured: the real CUDA build without a card")
    assert "H100" not in table
    for line in (
        "drift: s1 again",
        "least capacity of s1",
        "search T1: 0.62 GB: no winner",
        "GB: winner",
        "the grid's fastest that fits: ",  # s1 or w1: seconds mean nothing here
        "allocated: n 2",
    ):
        assert line in table, table
    null_gpu.has(h100s(1, used_mib={0: 3000}))
    busy = started()
    assert "is held: 3.1" in busy.communicate(timeout=300)[0]
    assert busy.returncode == 2
