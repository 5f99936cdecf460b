"""What is told before the first probe: cards that others hold, and a CUDA that does not start, with what to install."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drivers import Card, Driver

from autofit.cli import main
from autofit.commands.common import DONE
from autofit.commands.doctor import Printed, _cards_work
from autofit.errors import EnvironmentFault
from autofit.hardware.health import Look, look_at_cards
from autofit.hardware.nvml import Gpu
from autofit.probing import job
from autofit.probing.fork_server import ForkServer
from autofit.probing.launch import Next, to_mend, what_next
from autofit.probing.result import Cause, ProbeRequest, ProbeResult, ProbeStatus
from autofit.probing.slots import CudaStart, check_cuda, cuda_start, held_cards, slots, start_problem
from autofit.probing.supervise import ProcessEnding

H100 = Gpu(name="NVIDIA H100", uuid="GPU-1", capacity_bytes=80 << 30)
OF_TORCH = CudaStart(torch="2.13.0+cu130", cuda="13.0", error="CUDA error: initialization error")


@pytest.fixture
def driver(libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The fake driver of this process's children, with one card that is free."""
    made = Driver(libraries=libraries, cards=tmp_path / "cards")
    for name, value in made.env(FAKE_PROCESSES=str(tmp_path / "processes")).items():
        monkeypatch.setenv(name, value)
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    made.has(Card())
    return made


def hold(tmp_path: Path, pid: int = 1) -> None:
    (tmp_path / "processes").write_text(f"{Card().uuid} {pid} 30000\n")


def test_a_card_that_others_hold_ends_the_search_with_the_program_and_its_bytes(
    driver: Driver, fork_server: ForkServer, tmp_path: Path
) -> None:
    hold(tmp_path)
    with pytest.raises(EnvironmentFault, match=r"is held by process 1 of .* with 31.46 GB; end these programs"):
        check_cuda(fork_server, tmp_path / "s")


def test_a_card_that_another_search_of_this_user_probes_on_is_waited_for(driver: Driver, tmp_path: Path) -> None:
    hold(tmp_path)
    look = look_at_cards()
    with slots((f"cuda-{Card().uuid}",), 1):
        assert held_cards(look) == ()
    assert held_cards(look) == look.held


def test_a_card_that_works_and_a_torch_for_the_cpu_are_told_before_anything_is_read(
    driver: Driver, fork_server: ForkServer, tmp_path: Path
) -> None:
    driver.has(Card(kind="lost", uuid="GPU-lost"), Card())
    look = look_at_cards()
    start = cuda_start(fork_server, tmp_path / "s", look.cards)
    assert (start.cuda, start.torch) == (torch.version.cuda, torch.__version__)
    assert start.error
    assert not list((tmp_path / "s").iterdir())
    with pytest.raises(EnvironmentFault, match=rf"driver 580.65.06, torch {re.escape(torch.__version__)}"):
        check_cuda(fork_server, tmp_path / "s")


def test_doctor_without_a_recipe_tells_of_the_cards_and_of_cuda(
    driver: Driver, fork_server: ForkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # a lock that a killed build has left would be told too
    driver.has(Card(kind="lost", uuid="GPU-lost"), Card())
    assert not _cards_work(look_at_cards(), fork_server, tmp_path, Printed(as_json=False, streaming=False))
    card, error, warning = capsys.readouterr().out.splitlines()
    assert card.strip() == f"card: NVIDIA H200 ({Card().uuid}), 150.75 GB"
    assert f"driver 580.65.06, torch {torch.__version__}" in error
    assert warning.strip() == "warning: card 0 is left out, its driver says: GPU is lost"


def test_doctor_without_a_recipe_or_a_card_says_so(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    driver.cards.unlink()
    assert main(["doctor"]) == DONE
    assert "card: none, the driver lists none; probes are simulated" in capsys.readouterr().out
    assert main(["doctor", "--stream"]) == DONE
    line, whole = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["is"], line["label"]) == ("note", "card")
    assert whole == {"ok": True, "lines": [{"label": "card", "text": line["text"]}]}


def test_what_a_desktop_draws_with_is_nobodys_fault(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.has(Card(used_mib=2000))
    assert "2.10 GB are in use" in look_at_cards().held[0]
    monkeypatch.setenv("FAKE_DESKTOP", "1")
    assert look_at_cards() == Look(cards=look_at_cards().cards, driver="580.65.06")


@pytest.mark.parametrize(
    ("driver_version", "start", "words"),
    [
        ("535.104.05", OF_TORCH, "needs driver 580 or newer; update the driver, or install a torch .* for CUDA 12 "),
        ("390.12", OF_TORCH, "needs driver 580 or newer; update the driver$"),
        ("580.65.06", OF_TORCH, r"driver 580.65.06, torch 2.13.0\+cu130 for CUDA 13.0\): CUDA error: initialization"),
        ("", CudaStart(error="exit 1"), r"driver unknown, torch unknown for CUDA unknown\): exit 1"),
        ("560.1", replace(OF_TORCH, cuda=None), "is built for the CPU; install a torch that is built for CUDA 12 "),
        ("580.65.06", replace(OF_TORCH, error=""), "^$"),
    ],
)
def test_cuda_that_does_not_start_is_told_with_versions_and_what_to_install(
    driver_version: str, start: CudaStart, words: str
) -> None:
    assert re.search(words, start_problem(Look(cards=(H100,), driver=driver_version), start))


def test_a_device_file_that_this_user_may_not_open_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.exists", lambda _: True)
    monkeypatch.setattr("os.access", lambda path, _: path != "/dev/nvidia-uvm")
    assert "no permission to open /dev/nvidia-uvm; ask" in start_problem(Look(cards=(H100,), driver="580.1"), OF_TORCH)


def test_cards_of_which_none_works_are_named_without_asking_cuda() -> None:
    nowhere: ForkServer = None  # type: ignore[assignment]
    start = cuda_start(nowhere, Path("nowhere"), ())
    assert start_problem(Look(refused=("card 0 is left out",)), start) == "card 0 is left out"


def probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ending: ProcessEnding, meanwhile: bool
) -> ProbeResult | None:
    """The answer of a probe that fits on the fake card; another program comes to it while it runs, if `meanwhile`."""
    (tmp_path / "probe").mkdir()
    request = ProbeRequest(folder=tmp_path / "probe", trainer="sft", values={}, device="cuda", limit_bytes=None,
                           worst_case=tmp_path / "worst", slots=(f"cuda-{Card().uuid}",))  # fmt: skip
    request.request_path.write_text(json.dumps(request.to_json()))

    def kept(asked: ProbeRequest, slot_name: str, of: ProbeRequest) -> ProcessEnding:
        fit = ProbeResult(status=ProbeStatus.FIT, device="cuda", device_used_bytes=32 * 10**9)
        asked.answer_path.write_text(json.dumps(fit.to_json()))
        if meanwhile:
            hold(tmp_path)
        return ending

    monkeypatch.setattr(job, "_keep", kept)
    job.run_probe(str(request.request_path))
    return ProbeResult.read(request.answer_path)


def test_a_probe_beside_another_program_does_not_count_and_is_repeated_once_before_the_search_ends(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = probed(tmp_path, monkeypatch, ending=ProcessEnding(exit_code=0), meanwhile=True)
    assert result is not None
    assert (result.status, result.cause, result.device_used_bytes) == (ProbeStatus.LOST, Cause.SHARED, None)
    assert what_next(result, tmp_path, attempts=1) is Next.REPEAT
    assert what_next(result, tmp_path, attempts=2) is Next.MEND
    assert re.search("held by process 1 .*; end these programs, or", str(to_mend(result, tmp_path)))


def test_a_probe_alone_on_its_card_counts(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = probed(tmp_path, monkeypatch, ending=ProcessEnding(exit_code=0), meanwhile=False)
    assert result is not None
    assert result.status is ProbeStatus.FIT


def test_a_measured_probe_that_then_hangs_in_the_driver_counts_and_its_card_is_used_no_more(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside: list[tuple[tuple[str, ...], int]] = []
    monkeypatch.setattr(job, "set_aside", lambda names, pid: aside.append((names, pid)))
    result = probed(tmp_path, monkeypatch, ending=ProcessEnding(exit_code=-9, left_pid=1), meanwhile=True)
    assert result is not None
    assert result.status is ProbeStatus.FIT
    assert aside == [((f"cuda-{Card().uuid}",), 1)]
