"""The contract of a full run: promised against actual, from its folder, while it trains, and at its end."""

import json
from collections.abc import Iterable
from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from autofit.api.promoted import PromotedRun, promoted_runs
from autofit.errors import ConfigError
from autofit.files import write_json
from autofit.hardware.nvml import Gpu
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.probing.supervise import note_of
from autofit.promotion import place
from autofit.promotion.place import training_device
from autofit.tuning.comparison import NOISE_FRAC
from autofit.watching.contract import (
    Actual,
    Promise,
    Row,
    StepFacts,
    Watched,
    contract,
    contract_of,
    verdict,
    verdict_of,
)
from autofit.watching.events import EventKind, RunEvent, keep_event, keep_progress
from autofit.watching.memory import CardPeak
from autofit.watching.watchers import ContractWatcher

CPU = "a fast CPU x 2"
PROMISE = Promise(
    device_name=CPU, fidelity="measured", device_used_bytes=2 * 10**9, limit_bytes=3 * 10**9, step_s=1.0,
    samples_per_s=8.0, effective_batch_size=8, proof="gradient proven neutral",
)  # fmt: skip
ACTUAL = Actual(
    device="cpu", device_name=CPU, step_s=(1.0, 0.9, 1.04), samples_per_step=8, effective_batch_size=8,
    device_used_bytes=19 * 10**8,
)  # fmt: skip


def rows(promise: Promise = PROMISE, **actual: object) -> dict[str, Row]:
    return {row.key: row for row in contract(promise, replace(ACTUAL, **actual))}  # type: ignore[arg-type]


def test_a_run_as_promised_keeps_every_row() -> None:
    assert [row.kept for row in rows().values()] == [True] * 5
    assert verdict(list(rows().values())) == (
        "the promise is kept: device-used 1.90 GB (2.00 GB promised); step 1 s; samples/s 8.00; effective batch 8; "
        "the same recipe"
    )


def test_a_step_is_broken_above_the_noise_of_two_probes_and_not_below() -> None:
    for seconds, kept in ((1 + NOISE_FRAC - 0.001, True), (1 + NOISE_FRAC + 0.001, False), (0.2, True)):
        found = rows(step_s=(seconds,))
        assert (found["step_s"].kept, found["samples_per_s"].kept) == (kept, kept), seconds
    slow = rows(step_s=(1.5,))
    assert slow["step_s"].promised_text == "1 s (at most 1.06 s)"
    assert verdict(list(slow.values())).startswith(
        "the promise is broken: step 1.5 s (1 s promised); samples/s 5.33 (8.00 promised). kept: device-used"
    )


def test_predicted_seconds_may_be_wrong_by_their_own_interval() -> None:
    predicted = replace(PROMISE, fidelity="predicted", log_error=log(1.3))
    assert rows(predicted, step_s=(1.29,))["step_s"].kept
    assert rows(predicted, step_s=(1.31,))["step_s"].kept is False


def test_the_median_is_compared_and_the_mean_where_one_rollout_serves_several_steps() -> None:
    steps = (0.1, 0.1, 2.0)
    assert rows(step_s=steps)["step_s"].actual == 0.1
    assert rows(replace(PROMISE, steps_alike=False), step_s=steps)["step_s"].actual == pytest.approx(2.2 / 3)


def test_bytes_must_stay_under_the_limit_whatever_was_promised() -> None:
    assert rows(device_used_bytes=29 * 10**8)["device_used_bytes"].kept
    assert rows(device_used_bytes=31 * 10**8)["device_used_bytes"].kept is False
    without = replace(PROMISE, limit_bytes=None)
    assert rows(without, device_used_bytes=29 * 10**8)["device_used_bytes"].kept is False


def test_bytes_that_nothing_measured_are_not_made_up() -> None:
    row = rows(device_used_bytes=None, host_rss_bytes=7 * 10**8)["device_used_bytes"]
    assert (row.actual, row.kept) == (None, None)
    assert row.actual_text == ("not measured on the CPU (the whole process held 0.70 GB resident, libraries included)")


def test_a_changed_batch_or_a_rescue_of_a_lower_tier_breaks_the_promise() -> None:
    assert rows(effective_batch_size=4)["effective_batch_size"].kept is False
    assert rows(rescues=("halved",), same_gradient=True)["proof"].kept
    assert rows(rescues=("a lower tier",), same_gradient=False)["proof"].kept is False


def test_a_script_of_ones_own_or_a_trial_without_a_proof_proves_nothing() -> None:
    own = rows(of_trial=False)["proof"]
    assert (own.kept, own.text) == (None, "gradient, unknown: a script's recipe is its own")
    assert rows(replace(PROMISE, proof=""))["proof"].kept is None


def test_on_another_device_only_batch_and_gradient_are_compared() -> None:
    simulated = replace(PROMISE, device_name="NVIDIA A100-SXM4-40GB (simulated)", fidelity="predicted")
    found = rows(simulated)
    assert [row.kept for row in found.values()] == [None, None, None, True, True]
    assert "the promise is for NVIDIA A100-SXM4-40GB (simulated), the run is on a fast CPU x 2" in found["step_s"].text
    on_card = rows(simulated, device="cuda", device_name="NVIDIA A100-SXM4-40GB")
    assert [row.kept for row in on_card.values()] == [True] * 5


def test_a_promise_is_the_median_of_a_probe_with_its_error() -> None:
    figures = ProbeResult(
        status=ProbeStatus.FIT, device="cpu", device_name=CPU, step_s=(1.0, 3.0, 2.0), completions_per_step=8,
        device_used_bytes=5, log_error=0.1,
    )  # fmt: skip
    made = Promise.of(figures, limit_bytes=9, effective_batch_size=8, proof="p")
    assert (made.step_s, made.samples_per_s, made.log_error, made.steps_alike) == (2.0, 4.0, 0.1, True)
    assert Promise.from_json(json.loads(json.dumps(made.to_json()))) == made
    uneven = replace(figures, step_s=(1.0, 5.0), rollout_s=(0.0, 4.0))
    assert Promise.of(uneven, limit_bytes=9, effective_batch_size=8, proof="").step_s == 3.0


class Run:
    """A run with a law: it writes its folder as a promoted one does, without training."""

    def __init__(self, folder: Path, promise: Promise | None = PROMISE) -> None:
        self.folder, self.promise, self.watcher = folder, promise, ContractWatcher()
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, done: int = 0) -> list[RunEvent]:
        from autofit.watching.events import read_progress

        return self._keep(self.watcher.begins(Watched(
            folder=self.folder, trainer="sft", values={}, device="cpu", generates=False, samples_per_step=8,
            first_step=done, last_step=99, promise=self.promise, lines=tuple(read_progress(self.folder)),
        )))  # fmt: skip

    def steps(self, numbers: Iterable[int], seconds: float, used: int | None = None) -> list[RunEvent]:
        said = []
        for n in numbers:
            facts = StepFacts(number=n, step_s=seconds, device_used_bytes=used)
            said += self._keep(self.watcher.step_ends(facts))
            line = {"step": n, "max_steps": 99, "step_s": seconds, "host_rss_bytes": 10**8}
            keep_progress(self.folder, line | ({} if used is None else {"device_used_bytes": used}))
            self._keep(self.watcher.logs(line))
        return said

    def end(self) -> list[RunEvent]:
        return self._keep(self.watcher.ends())

    def _keep(self, events: Iterable[RunEvent]) -> list[RunEvent]:
        found = list(events)
        for event in found:
            keep_event(self.folder, event)
        return found


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.probing.memory.cpu_name", lambda: CPU)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.usefixtures("here")
def test_a_run_says_its_promise_and_its_verdict_and_nothing_between_where_it_keeps_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (said,) = run.start()
    assert said.text == (
        f"promised (measured on {CPU}): 2.00 GB device-used of at most 3.00 GB, 1 s a step, 8.00 samples/s, "
        f"effective batch 8"
    )
    assert run.steps([1], 30.0) == []  # the first step of a start is a warm-up
    assert run.steps(range(2, 60), 1.01) == []
    assert {row.key: row.kept for row in contract_of(tmp_path) or ()}["step_s"] is True
    assert verdict_of(tmp_path) == ""
    (ended,) = run.end()
    assert (ended.kind, ended.data["kept"]) == (EventKind.VERDICT, True)
    assert verdict_of(tmp_path) == ended.text == run.watcher.verdict


@pytest.mark.usefixtures("here")
def test_a_broken_promise_is_told_after_a_few_steps_and_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start()
    said = run.steps(range(1, 100), 2.0, used=4 * 10**9)
    assert [(e.step, e.kind) for e in said] == [(6, EventKind.PROMISE)] * 3  # bytes, seconds, samples/s
    assert said[0].text == "the promise is broken so far: device-used 4.00 GB (2.00 GB promised)"
    assert run.end()[0].data["kept"] is False


@pytest.mark.usefixtures("here")
def test_steps_before_a_resume_count_and_the_first_step_of_each_start_does_not(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.start()
    first.steps([1], 30.0)
    first.steps(range(2, 11), 1.0)
    second = Run(tmp_path)
    second.start(done=10)
    second.steps([11], 40.0)
    second.steps(range(12, 16), 1.5)
    second.end()
    by_watcher = {row.key: row.actual for row in second.watcher.rows}
    assert by_watcher["step_s"] == 1.0  # the median of 9 times 1.0 and 4 times 1.5
    assert {row.key: row.actual for row in contract_of(tmp_path) or ()} == by_watcher


@pytest.mark.usefixtures("here")
def test_on_a_card_the_bytes_outside_the_allocator_are_added_and_asked_for_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = iter((3 * 10**8, 5 * 10**8))
    monkeypatch.setattr("autofit.watching.watchers.card_use", lambda: CardPeak(lambda: next(outside)))
    monkeypatch.setattr("autofit.watching.watchers._device_name", lambda device: CPU)
    clock = iter((0.0, 0.4, 1.2, 1.3))
    monkeypatch.setattr("autofit.watching.memory.time.monotonic", lambda: next(clock))
    watcher = ContractWatcher()
    run = Watched(folder=tmp_path, trainer="sft", values={}, device="cuda", generates=False, samples_per_step=8,
                  first_step=0, last_step=9, promise=PROMISE)  # fmt: skip
    list(watcher.begins(run))
    assert [watcher.adds({"peak_reserved_bytes": 2 * 10**9})["device_used_bytes"] for _ in range(3)] == [
        2_300_000_000, 2_300_000_000, 2_500_000_000,
    ]  # fmt: skip
    for n in (1, 2):
        list(watcher.step_ends(StepFacts(number=n, step_s=1.0, peak_reserved_bytes=27 * 10**8)))
    list(watcher.ends())
    (row,) = [row for row in watcher.rows if row.key == "device_used_bytes"]
    assert (row.actual, row.kept) == (32 * 10**8, False)  # over the limit of 3.00 GB


@pytest.mark.usefixtures("here")
def test_rescues_are_named_in_the_verdict(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start()
    run.steps(range(1, 9), 1.0)
    keep_event(tmp_path, RunEvent(step=8, kind=EventKind.RESCUE, text="micro-batch 8 -> 4 after an OOM"))
    again = Run(tmp_path)
    again.start(done=8)
    again.steps(range(9, 12), 1.0)
    again.end()
    assert verdict_of(tmp_path).endswith("rescued from 1 OOM(s): micro-batch 8 -> 4 after an OOM")


def test_a_run_without_a_promise_has_no_contract(tmp_path: Path) -> None:
    run = Run(tmp_path, promise=None)
    assert run.start() + run.steps(range(1, 9), 1.0) + run.end() == []
    assert contract_of(tmp_path) is None


@pytest.mark.usefixtures("here")
def test_the_runs_of_a_study_are_found_and_shown(tmp_path: Path) -> None:
    for trial, study in ((3, "mine"), (1, "mine"), (0, "other")):
        folder = tmp_path / "promoted" / f"{study}-trial-{trial}"
        run = Run(folder)
        write_json(folder / "request.json", {"study": study, "trial": trial, "device": "cpu"})
        write_json(folder / "started.json", note_of(2**22 + 1))  # a process that is no more
        run.start()
        run.steps(range(1, 9), 2.0)
    found = promoted_runs(tmp_path, "mine")
    assert [(r.trial, r.state, r.step, r.last_step, r.kept) for r in found] == [
        (1, "interrupted", 8, 99, False), (3, "interrupted", 8, 99, False),
    ]  # fmt: skip
    assert json.loads(json.dumps(found[0].to_dict()))["contract"][1]["actual"] == 2.0
    text = shown(found[0])
    assert "Full run of trial 1 on cpu: interrupted, step 8 of 99" in text
    assert "step 6, promise: the promise is broken so far: step 2 s (1 s promised)" in text


def shown(run: PromotedRun) -> str:
    from autofit.api.tables import Shown

    class Page(Shown):
        def parts(self) -> list:  # type: ignore[type-arg]
            return run.parts()

    return str(Page())


def test_a_run_of_a_simulated_study_asks_where_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "gpus", tuple)
    with pytest.raises(ConfigError, match=r"simulated an NVIDIA A100-SXM4-40GB.*no CUDA card.*--device cpu.*--write-o"):
        training_device("sim:a100-40gb", "auto")
    assert training_device("sim:a100-40gb", "cpu") == "cpu"
    assert training_device("sim:a100-40gb", "auto", begun={"device": "cpu"}) == "cpu"  # the same call resumes it
    assert training_device("cpu", "auto") == "cpu"
    with pytest.raises(ConfigError, match="the study measured a CUDA card, and the driver lists none here"):
        training_device("cuda", "auto")
    with pytest.raises(ConfigError, match=r"--device cuda needs a CUDA card.*give --device cpu"):
        training_device("cpu", "cuda")


def test_the_simulated_card_itself_needs_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Gpu(name="NVIDIA A100-SXM4-40GB", uuid="GPU-1", capacity_bytes=42 * 10**9)
    monkeypatch.setattr(place, "gpus", lambda: (card,))
    assert training_device("sim:a100-40gb", "auto") == "cuda"
    with pytest.raises(ConfigError, match=r"another card \(NVIDIA A100-SXM4-40GB\)"):
        training_device("sim:t4", "auto")
