"""A search of a tiny model whose probes are real gloo ranks on the CPU, end to end."""

import os
import signal
import threading
from pathlib import Path

import pytest
import tiny

import autofit
from autofit.files import read_json


class Killer(threading.Thread):
    """Kills rank 1 of the first probe of trial 1 once it trains."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.over, self.killed = folder, threading.Event(), False

    def run(self) -> None:
        while not self.over.wait(0.005) and not self.killed:
            for phase in self.folder.glob("probes/*/trial-*1-1/rank-1.phase"):
                if phase.read_text() not in ("", "load", "end"):
                    os.kill(int(phase.with_suffix(".pid").read_text()), signal.SIGKILL)
                    self.killed = True


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("sharding", "ranks"),
    [("multi_gpu", 2),
     *(pytest.param(*case, marks=pytest.mark.thorough) for case in [("fsdp2", 2), ("multi_gpu", 4), ("fsdp2", 4)])],
)  # fmt: skip
def test_a_search_on_ranks_holds_the_batch_and_loses_no_trial_when_a_rank_is_killed(
    sharding: str, ranks: int, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tiny.write_offline_recipe("sft", tmp_path, tiny_model, gradient_accumulation_steps=2)
    killer = Killer(tmp_path / "d")
    killer.start()
    try:
        result = autofit.search(
            path, trainer="sft", device="cpu", target_vram="32MB", accelerate_config=sharding, num_processes=ranks,
            trials=2, confirm=False, advice=False, mlflow=False, folder=tmp_path / "d",
        )  # fmt: skip
    finally:
        killer.over.set()
        killer.join()
    assert killer.killed
    assert [trial.status for trial in result.trials] == ["fit", "fit"]
    assert result.winner is not None
    answers = sorted((tmp_path / "d").glob("probes/*/trial-*/answer.json"))
    killed = [answer for answer in answers if (read_json(answer) or {})["status"] == "lost"]
    assert [answer.parent.name.rsplit("-", 1)[1] for answer in killed] == ["1"]  # the second attempt answered
    for answer in set(answers) - set(killed):
        content = read_json(answer) or {}
        assert content["completions_per_step"] == 2 * 2 * ranks
        assert len(content["ranks"]) == ranks  # type: ignore[arg-type]
