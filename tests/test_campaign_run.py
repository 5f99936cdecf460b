"""`python -m experiments.gpu run`: its order, targets, refusals, resuming. The whole: test_null_gpu.py."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu import campaign, card, configs, kernels, measure, predict, report, searches
from gpu.allowance import Allowance
from gpu.campaign import Plan, run
from gpu.folder import Folder, Row, rows
from torch._C._autograd import DeviceType

from autofit.errors import ConfigError
from autofit.hardware.health import Look
from autofit.hardware.nvml import Gpu
from autofit.probing.result import ProbeRequest

GB = 10**9
H100 = Gpu(name="NVIDIA H100 80GB HBM3", uuid="GPU-1", capacity_bytes=80 * GB)
LOOK = Look(cards=(H100,), driver="580.65.06")


# -- before the first measurement -------------------------------------------------------------------------------------


def test_a_card_that_others_hold_is_refused_with_their_names_and_bytes() -> None:
    assert card.refusal(LOOK) == ""
    held = "NVIDIA H100 80GB HBM3 (GPU-1) is held by process 4711 of ann (python) with 30.00 GB"
    assert card.refusal(replace(LOOK, held=(held,))).startswith(f"{held}; end these programs")
    assert "the driver does not answer within 60 s" in card.refusal(
        Look(faults=("the driver does not answer within 60 s",))
    )
    assert "ECC errors" in card.refusal(replace(LOOK, faults=("NVIDIA H100 (GPU-1) has 3 uncorrectable ECC errors",)))


def test_what_the_null_gpu_says_is_never_called_a_gpu() -> None:
    real, null = (card.described(LOOK, is_null=is_null) for is_null in (False, True))
    assert (real.simulated, real.folder_name, real.words) == ("h100", "h100", f"{H100.name}, driver 580.65.06")
    assert null.folder_name == "null-gpu"
    assert null.words.startswith("the real CUDA build without a card")
    assert "H100" not in null.words
    unknown = card.described(replace(LOOK, cards=(replace(H100, name="NVIDIA X1"),)), is_null=False)
    assert (unknown.simulated, unknown.folder_name) == (None, "nvidia-x1")


def test_vllm_comes_after_the_first_part_where_it_is_installed_and_ranks_where_two_cards_are_alike() -> None:
    names = [config.name for config in Plan().configs(vllm=True)]
    assert (names[0], names[12], len(names)) == ("g1", "v1", len(configs.CONFIGS) + 1)
    assert "v1" not in [config.name for config in Plan().configs(vllm=False)]
    one = card.described(LOOK, is_null=False)
    two, other = (replace(one, visible=2, alike=alike) for alike in (True, False))
    assert [len(Plan().ranks(which)) for which in (one, two, other)] == [0, 6, 0]
    assert not Plan(tiny=True).ranks(two)
    with pytest.raises(ConfigError, match="--minutes"):
        Plan(minutes=0)


# -- targets and tables -----------------------------------------------------------------------------------------------


def test_targets_are_bytes_of_the_grid_so_that_a_third_and_two_thirds_of_it_fit(tmp_path: Path) -> None:
    grid: list[Row] = [{"device_used_bytes": n * GB} for n in range(1, 12)]
    assert searches.targets_of(grid) == {"T1": 4 * GB + 10**6, "T2": 7 * GB + 10**6}
    assert searches.targets_of([{"device_used_bytes": GB + 1}, {"device_used_bytes": 2 * GB}])["T1"] == GB + 2 * 10**6
    assert searches.targets_of(grid[:1]) == {}
    assert searches.targets(tmp_path, configs.CONFIGS) == {}  # a part of the grid makes no quantiles
    (tmp_path / searches.TARGETS).write_text('{"T1": 5, "T2": 6}')
    assert searches.targets(tmp_path, configs.CONFIGS) == {"T1": 5, "T2": 6}  # the ones that searches began with


def test_a_winner_is_told_beside_the_fastest_of_the_grid_that_fits() -> None:
    grid: dict[str, Row] = {
        "small": {"status": "fit", "device_used_bytes": 4 * GB, "step_s": [3.0]},
        "best": {"status": "fit", "device_used_bytes": 6 * GB, "step_s": [2.0, 2.5, 9.0]},
        "large": {"status": "fit", "device_used_bytes": 9 * GB, "step_s": [1.0]},
    }
    answer = {"target_bytes": 7 * GB, "rule": {"limit_bytes": 7 * GB - 1}, "counts": {"asked": 5},
              "winner": {"device_used_bytes": 6 * GB, "step_s": 2.5}}  # fmt: skip
    fastest = "the grid's fastest that fits: best, 2.500 s"
    assert searches.verdict("T1", answer, grid) == f"T1: 7.00 GB: winner 6.00 GB, 2.500 s a step; {fastest}"
    assert (
        searches.verdict("T1", answer | {"winner": None}, grid) == f"T1: 7.00 GB: no winner after 5 trials; {fastest}"
    )


def test_kernels_are_summed_by_name_without_the_ranges_that_programs_name() -> None:
    def event(name: str, us: int, *, on: DeviceType = DeviceType.CUDA, named: bool = False) -> Any:
        return SimpleNamespace(name=lambda: name, device_type=lambda: on, duration_ns=lambda: us * 1000,
                               is_user_annotation=lambda: named)  # fmt: skip

    found = kernels.times([event("gemm", 5), event("copy", 3), event("gemm", 2), event("AdamW.step", 99, named=True),
                           event("aten::mm", 50, on=DeviceType.CPU)])  # fmt: skip
    assert found == {"device_s": 10e-6, "launches": 3, "longest": [["gemm", 2, 7e-6], ["copy", 1, 3e-6]]}
    assert kernels.times([]) == {"missing": "the profiler saw no kernel"}


def test_drift_is_the_change_of_the_first_configuration_from_the_beginning_to_the_end() -> None:
    first: Row = {"at": 0.0, "step_s": [2.0], "device_used_bytes": GB}
    second: Row = {"at": 1800.0, "step_s": [2.1], "device_used_bytes": GB + 2 * 10**6}
    assert report.drift({"g1": first, "g1-again": second}) == [
        "drift: g1 again after 30 min: step +5.0%, device-used +2.0 MB"
    ]


# -- the whole, over probes that obey a law ---------------------------------------------------------------------------


def test_everything_that_is_done_is_kept_and_nothing_is_measured_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    found = card.described(LOOK, is_null=True)

    @contextmanager
    def no_server(folder: Path) -> Iterator[None]:
        yield None

    def answered(server: None, entry: str, request: ProbeRequest) -> Row:
        name = request.worst_case.parent.name
        asked.append(f"{'predict' if request.device == 'sim:h100' else 'measure'} {name}")
        if len(asked) == 2:
            raise KeyboardInterrupt  # the first command ends here
        used = {"s1": 3, "w1": 5}[name] * GB
        return {"status": "fit", "reason": "", "device_used_bytes": used, "peak_reserved_bytes": used,
                "peak_allocated_bytes": used, "step_s": [0.5], "rollout_s": [0.0], "update_s": [0.5]}  # fmt: skip

    def search(folder: Folder, config: configs.Config, out: Path, name: str, target_bytes: int, **_: Any) -> bool:
        asked.append(f"search {config.name} {name} {target_bytes // GB}")
        answer = {"target_bytes": target_bytes, "rule": {"limit_bytes": target_bytes}, "winner": None,
                  "counts": {"asked": 1}}  # fmt: skip
        searches.result_path(out, name).write_text(json.dumps(answer))
        return True

    for module, name, value in (
        (campaign, "server", no_server), (campaign, "card_here", lambda *_: found), (campaign, "search", search),
        (campaign, "_prepare", lambda *_, **__: None), (measure, "answered", answered), (predict, "answered", answered),
        (measure, "facts", lambda _: {"name": "facts"}),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("HF_HUB_CACHE", "")
    plan = Plan(tiny=True, only=("s1", "w1"))
    with pytest.raises(KeyboardInterrupt):
        run(Folder(home=tmp_path), plan)
    for _ in range(2):  # the second of these finds everything done
        run(Folder(home=tmp_path), plan)
    assert asked == ["measure s1", "measure w1", "measure w1", "search w1 T1 3", "search w1 T2 5", "measure s1",
                     "predict s1", "predict w1"]  # fmt: skip
    out = tmp_path / "results" / "null-gpu"
    assert [row["name"] for row in rows(out / "measured.jsonl") if "status" in row] == ["s1", "w1", "s1-again"]
    table = (out / "table.md").read_text()
    assert "allocated: n 2, error median +0.00%" in table
    assert "search T2: 5.00 GB: no winner after 1 trials; the grid's fastest that fits: s1" in table
    assert [line for line in table.splitlines() if "LEFT OUT" in line] == [
        "- LEFT OUT: vLLM: it is not installed", "- LEFT OUT: ranks: not in a part of the campaign",
    ]  # fmt: skip
    monkeypatch.setattr(predict, "versions", lambda: {"torch": "9"})
    predict.predict(None, Folder(home=tmp_path), plan.configs(vllm=False)[:1], tmp_path / "results", card="h100",  # type: ignore[arg-type]
                    allowance=Allowance.of(9, 9))  # fmt: skip
    assert asked[-1] == "predict s1"  # another torch: predicted anew


def test_a_campaign_whose_time_is_over_says_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def no_server(folder: Path) -> Iterator[None]:
        yield None

    monkeypatch.setattr(campaign, "server", no_server)
    monkeypatch.setattr(campaign, "card_here", lambda *_: card.described(LOOK, is_null=True))
    monkeypatch.setattr(campaign, "_prepare", lambda *_, **__: None)
    monkeypatch.setattr(measure, "facts", lambda _: {"name": "facts"})
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("HF_HUB_CACHE", "")
    run(Folder(home=tmp_path), Plan(tiny=True, minutes=1e-9))
    said = capsys.readouterr().out
    for line in ("not measured: s1 g1 d1 r1 w1", "search: T1 T2", "measured again for drift: s1", "least capacity: s1",
                 "predictions (the step predict needs no card): s1 g1 d1 r1 w1"):  # fmt: skip
        assert f"LEFT OUT: {line}" in said
