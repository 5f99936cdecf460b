"""The campaign of experiments/gpu, without a card: each of its commands on the CPU device, or on the fake driver."""

import json
from pathlib import Path
from typing import Any

import pytest
from gpu import bisect, children, compare, configs, measure, predict
from gpu.allowance import Allowance
from gpu.folder import Folder, Row, append, by_name, rows

from autofit.errors import ConfigError
from autofit.probing.fork_server import ForkServer
from autofit.probing.result import ProbeRequest

GB = 10**9
GIB = 1 << 30


def test_there_are_sixty_configurations_or_more_with_the_most_valuable_first() -> None:
    names = [config.name for config in configs.CONFIGS]
    assert len(names) == len(set(names)) >= 60
    assert {config.trainer for config in configs.CONFIGS[:12]} == {"grpo", "sft", "dpo", "reward"}
    assert {config.trainer for config in configs.CONFIGS} == {"grpo", "rloo", "sft", "dpo", "reward"}
    for config in configs.CONFIGS:
        if config.trainer in ("grpo", "rloo"):
            micro, accumulation, chunk, group = (
                int(str(config.values[key])) for key in ("per_device_train_batch_size", "gradient_accumulation_steps",
                                                         "steps_per_generation", "num_generations"))  # fmt: skip
            assert accumulation % chunk == 0, config.name  # no rollout serves two optimizer steps
            assert micro * chunk % group == 0, config.name  # no group is split
    with pytest.raises(ConfigError, match="no-such-name"):
        configs.chosen(only=("no-such-name",))


# -- results ----------------------------------------------------------------------------------------------------------


def test_a_line_that_was_cut_off_is_not_a_result_and_the_last_line_of_a_name_counts(tmp_path: Path) -> None:
    path = tmp_path / "out" / "measured.jsonl"
    append(path, {"name": "s1", "status": "lost"})
    append(path, {"name": "s1", "status": "fit"})
    with path.open("a") as file:
        file.write('{"name": "g1", "sta')
    assert by_name(path) == {"s1": {"name": "s1", "status": "fit"}}
    assert rows(tmp_path / "none.jsonl") == []


def _in_time(until_s: float = 100, each_s: float = 100) -> Allowance:
    return Allowance.of(until_s, each_s)


def test_a_second_measure_goes_on_where_the_first_one_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = {"s1": "fit", "g1": "lost", "d1": "oom"}
    asked: list[str] = []

    def answered(server: None, entry: str, request: ProbeRequest) -> Row:
        name = request.worst_case.parent.name
        asked.append(name)
        return {"status": statuses[name], "reason": "", "step_s": [0.5]}

    monkeypatch.setattr(measure, "answered", answered)
    three = configs.chosen(tiny=True, only=("s1", "g1", "d1"))

    def measured(of: tuple[configs.Config, ...] = three, until_s: float = 100, again: bool = False) -> None:
        measure.measure(None, Folder(home=tmp_path), of, tmp_path, device="cpu",  # type: ignore[arg-type]
                        allowance=_in_time(until_s), again=again)  # fmt: skip

    measured()
    statuses["g1"] = "fit"
    measured()
    assert asked == ["s1", "g1", "d1", "g1"]
    measured(configs.chosen(tiny=True), until_s=0)
    assert asked == ["s1", "g1", "d1", "g1"]  # out of time
    measured(three[:1], again=True)
    measured(three[:1], again=True)
    assert asked == ["s1", "g1", "d1", "g1", "s1"]
    statuses_now = {row["name"]: row.get("status") for row in rows(tmp_path / measure.RESULTS)}
    assert statuses_now == {"facts": None, "s1": "fit", "g1": "fit", "d1": "oom", "s1-again": "fit"}
    monkeypatch.setattr(measure, "versions", lambda: {"torch": "9"})
    measured(three[:1])
    assert asked[-1] == "s1"  # bytes of another torch are other bytes


def test_an_oom_under_a_limit_is_measured_without_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answered(server: None, entry: str, request: ProbeRequest) -> Row:
        return {"status": "fit" if request.limit_bytes is None else "oom", "device_used_bytes": 30 * GB}

    monkeypatch.setattr(measure, "answered", answered)
    row = measure.measured(None, Folder(home=tmp_path), configs.TINY[0], device="cuda", limit_bytes=24 * GB,  # type: ignore[arg-type]
                           deadline_s=10)  # fmt: skip
    assert (row["status"], row["uncapped"]) == ("oom", {"status": "fit", "device_used_bytes": 30 * GB})


# -- the least capacity -----------------------------------------------------------------------------------------------


def _law(needs_bytes: int, tried: list[Row]) -> Any:
    """Attempts at a configuration that uses 20 GiB, of which 12 are live, and runs under `needs_bytes`."""

    def attempt(limit_bytes: int | None) -> Row:
        fits = limit_bytes is None or limit_bytes >= needs_bytes
        row: Row = {"name": "s1", "limit_bytes": limit_bytes, "status": "fit" if fits else "oom",
                    "device_used_bytes": 20 * GIB, "peak_reserved_bytes": 19 * GIB,
                    "peak_allocated_bytes": 12 * GIB}  # fmt: skip
        tried.append(row)
        return row

    return attempt


def test_a_bisection_ends_close_above_the_least_capacity_and_goes_on_after_a_break() -> None:
    tried: list[Row] = []
    left = iter([True, True, True])  # one attempt without a limit, and two with
    bisect.least_capacity(tried, _law(14 * GIB, tried), in_time=lambda: next(left, False))
    assert len(tried) == 3
    found = bisect.least_capacity(list(tried), _law(14 * GIB, tried), in_time=lambda: True)
    assert found is not None
    assert found[0] < 14 * GIB <= found[1] <= found[0] + bisect.CLOSE_BYTES
    assert all(13 * GIB < int(str(row["limit_bytes"])) < 20 * GIB for row in tried[1:])  # live bytes and context
    assert len(tried) == 1 + 7  # 7 GiB halved to 64 MiB


def test_what_does_not_run_without_a_limit_has_no_least_capacity() -> None:
    def attempt(limit_bytes: int | None) -> Row:
        return {"name": "z1", "limit_bytes": limit_bytes, "status": "oom"}

    assert bisect.least_capacity([], attempt, in_time=lambda: True) is None


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_table_has_each_error_its_quantiles_and_where_the_drivers_bytes_differ(tmp_path: Path) -> None:
    told, found = tmp_path / "predicted-h100.jsonl", tmp_path / "measured.jsonl"
    readings: Row = {"context": 500 << 20, "cublas": 600 << 20}
    for i, name in enumerate(("g1", "s1", "d1")):
        sizes = {"peak_allocated_bytes": (i + 1) * GB, "peak_reserved_bytes": (i + 2) * GB}
        append(told, {"name": name, "status": "fit", **sizes, "device_used_bytes": (i + 2) * GB + (600 << 20),
                      "step_s": [1.0 + i], "rollout_s": [0.0], "update_s": [1.0 + i]})  # fmt: skip
        at_end = {"nvml_v2_used": (i + 2) * GB + (700 << 20), "reserved": (i + 2) * GB,
                  "nvml_v1_used": (i + 2) * GB + (1315 << 20), "cuda_used": (i + 2) * GB + (702 << 20)}  # fmt: skip
        append(found, {"name": name, "status": "fit", **sizes, "device_used_bytes": (i + 2) * GB + (700 << 20),
                       "step_s": [2.0 + i, 2.0 + i, 9.0], "rollout_s": [0.0], "update_s": [1.0 + i],
                       "readings": readings | {"loaded": at_end, "end": at_end},
                       "kernels": {"device_s": 0.75 + i}})  # fmt: skip
    append(told, {"name": "z1", "status": "oom", "least_capacity_bytes": 118 * GB, "reason": "exceeded"})
    append(found, {"name": "z1", "status": "oom", "oom_phase": "optimizer", "reason": "OutOfMemoryError: 2 GiB"})
    append(told, {"name": "r1", "status": "fit"})
    append(told, {"name": "s2", "status": "fit", "peak_allocated_bytes": 9 * GB, "versions": {"torch": "2.11.0"}})
    append(found, {"name": "s2", "status": "fit", "peak_allocated_bytes": 5 * GB, "versions": {"torch": "2.13.0"}})
    table = compare.compare(told, found, context_bytes=600 << 20)
    lines = table.splitlines()
    first = next(line for line in lines if line.lstrip().startswith("g1 ")).split()
    assert first[1:4] == ["1.000", "1.000", "+0.0%"]
    assert first[-1] == "0.750"  # its kernels
    assert first[-8:-1] == ["1.000", "2.000", "-50.0%", "-", "1.000", "1.000", "+0.0%"]  # step, no rollout, update
    assert "z1  oom in optimizer, predicted to need 118.00 GB: OutOfMemoryError: 2 GiB" in table
    assert "allocated: n 3, error median +0.00%" in table
    step = next(line for line in lines if line.lstrip().startswith("step:"))
    assert "error median -33.33%" in step  # 1/2, 2/3 and 3/4 of the measured steps, whose median is taken
    assert "worst 50.00%" in step
    assert "rank 1.000" in step
    outside = lines[-5].split()
    assert outside == ["g1", "500", "600", "700", "-", "700", "615", "-2"]
    assert lines[-2:] == ["not measured: r1", "predicted by other versions, and not compared: s2"]
    assert next(line for line in lines if line.lstrip().startswith("s2 ")).split()[1:4] == ["-", "5.000", "-"]


def test_ranks_of_ties_are_means_and_too_few_pairs_have_none() -> None:
    assert compare.rank_correlation([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)
    assert compare.rank_correlation([(1, 1), (1, 1), (2, 2)]) == pytest.approx(1)
    assert compare.rank_correlation([(1, 1), (2, 2)]) is None
    assert compare.rank_correlation([(1, 1), (1, 2), (1, 3)]) is None


# -- each command, on a tiny model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Folder:
    """A folder as `prepare --tiny` makes it."""
    home = tmp_path_factory.mktemp("campaign")
    message = {"entry": "cuda_on_fakes:prepared", "cwd": str(home), "log": str(home / "log"), "env": {},
               "deadline_s": 120, "argument": json.dumps({"folder": str(home), "only": ["s1", "g1"]})}  # fmt: skip
    assert fork_server.call(message).exit_code == 0, (home / "log").read_text()[-3000:]
    assert {"cases", "data", "models", "recipes"} <= set(json.loads((home / "answer.json").read_text()))
    return Folder(home=home)


@pytest.mark.slow
def test_measure_bisect_predict_and_compare_run_one_after_the_other(
    campaign: Folder, fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = configs.chosen(tiny=True, only=("s1", "g1"))
    for profiles in (False, True):  # the second time all of it is there
        measure.measure(fork_server, campaign, two, tmp_path, device="cpu", allowance=_in_time(), profiles=not profiles)
        bisect.bisect(fork_server, campaign, two, tmp_path, device="cpu", allowance=_in_time())
        predict.predict(fork_server, campaign, two[:1], tmp_path, card="t4", allowance=_in_time())
    found = by_name(tmp_path / measure.RESULTS)
    for name in ("s1", "g1"):
        row = found[name]
        assert row["status"] == "fit", row
        assert len(row["step_s"]) == 2  # type: ignore[arg-type]
        assert {p["name"] for p in row["phases"]} >= {"load", "update", "optimizer"}  # type: ignore[attr-defined]
    used = int(str(found["s1"]["device_used_bytes"]))
    over = measure.measured(fork_server, campaign, two[0], device="cpu", limit_bytes=used - 1, deadline_s=100)
    assert (over["status"], over["uncapped"]["status"]) == ("oom", "fit")  # type: ignore[index]
    assert over["oom_phase"] in ("update", "optimizer")
    assert over["device_used_bytes"] >= used - 1  # type: ignore[operator]
    assert over["uncapped"]["device_used_bytes"] == used  # type: ignore[index]
    assert "missing" in found["g1"]["kernels"]  # type: ignore[operator]
    assert len(rows(tmp_path / measure.RESULTS)) == 1 + 2
    assert not rows(tmp_path / bisect.RESULTS)  # a CPU's peaks are one number, which was measured
    assert len(rows(tmp_path / "predicted-t4.jsonl")) == 1
    table = compare.compare(tmp_path / "predicted-t4.jsonl", tmp_path / measure.RESULTS, context_bytes=1)
    assert "allocated: n 1" in table
    assert "step: n 1" in table


def test_a_configuration_is_measured_on_the_cuda_device_and_its_least_capacity_found(
    campaign: Folder, fork_server: ForkServer, libraries: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = configs.chosen(tiny=True, only=("s1",))[0]
    tried: list[Row] = []

    def attempt(limit_bytes: int | None) -> Row:
        place = tmp_path / str(len(tried))
        request = campaign.request(config, place, "cuda", limit_bytes=limit_bytes)
        place.mkdir()
        (place / "request.json").write_text(json.dumps(request.to_json()))
        argument = json.dumps({"folder": str(place), "libraries": str(libraries)})
        message = {"entry": "cuda_on_fakes:campaign", "argument": argument, "cwd": str(place),
                   "log": str(place / "log"), "env": {}, "deadline_s": 120}  # fmt: skip
        assert fork_server.call(message).exit_code == 0
        tried.append({"name": "s1", **json.loads((place / "answer.json").read_text())})
        return tried[-1]

    monkeypatch.setattr(bisect, "CLOSE_BYTES", 4 << 20)
    found = bisect.least_capacity([], attempt, in_time=lambda: len(tried) < 4)
    free = tried[0]
    assert free["status"] == "fit", free
    readings: Any = free["readings"]
    assert readings["context"] == 600 << 20
    assert set(readings) == {"context", "cublas", "loaded", "after a step", "end"}
    assert readings["end"]["nvml_v1_used"] == readings["end"]["nvml_v2_used"] + (615 << 20)
    assert len(free["card_states"]) == len(free["step_s"]) >= 2  # type: ignore[arg-type]
    assert found is not None
    assert {row["status"] for row in tried} <= {"fit", "oom"}
    assert found[0] < found[1] <= int(str(free["device_used_bytes"]))


def test_what_dies_in_its_child_is_told_with_the_end_of_its_log(
    campaign: Folder, fork_server: ForkServer, tmp_path: Path
) -> None:
    request = campaign.request(configs.TINY[0], tmp_path / "p", "cpu")
    row = children.answered(fork_server, "gpu.no_such_module:run", request)
    assert row["status"] == "failed"
    assert "no_such_module" in str(row["log"])
