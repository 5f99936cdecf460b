"""One run of the campaign: a folder, a recipe, and the processes that train it."""

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from autofit.files import read_json, write_json
from autofit.plugin.registry import load
from autofit.probing.fork_server import ForkServer
from autofit.probing.supervise import ProcessEnding
from autofit.promotion.job import carried, goes_on
from autofit.promotion.ladder import RescueLadder
from autofit.watching.events import EventKind, events_of, read_progress

METRICS = ("step", "loss", "grad_norm", "learning_rate", "reward")


@dataclass(kw_only=True)
class FaultyRun:
    """A training in `folder`, whose checkpoints go to `output`."""

    folder: Path
    output: Path
    trainer: str
    values: Mapping[str, object]
    cwd: Path
    server: ForkServer
    mirror: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    rescues: bool = False
    _thread: threading.Thread | None = None
    _ending: ProcessEnding | None = None

    def start(self) -> None:
        """Start the process, which goes on from the newest whole checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("pid", "failed.json", "stop"):
            (self.folder / name).unlink(missing_ok=True)
        values = {**self.values, "output_dir": str(self.output), "use_cpu": True}
        request = {
            "folder": str(self.folder), "study_folder": str(self.folder), "study": "campaign", "trial": 0,
            "device": "cpu", "trainer": self.trainer, "output_dir": str(self.output), "mirror": self.mirror,
            "generates": self.trainer == "grpo", "values": values,
        }  # fmt: skip
        if self.rescues:
            ladder = self._ladder(values)
            request |= {"cwd": str(self.cwd), "ladder": ladder.to_json(), **carried(self.folder, ladder)}
        write_json(self.folder / "request.json", request)
        self._thread = threading.Thread(target=self._call)
        self._thread.start()

    def wait(self) -> ProcessEnding:
        """The end of the process."""
        assert self._thread is not None
        self._thread.join()
        assert self._ending is not None, (self.folder / "log").read_text()
        return self._ending

    def wait_for_step(self, step: int) -> None:
        """Wait until `step` optimizer steps are logged, or the process has ended."""
        while self.is_alive and self.step < step:
            time.sleep(0.005)

    def send(self, number: signal.Signals) -> None:
        os.kill(int((self.folder / "pid").read_text()), number)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def step(self) -> int:
        lines = read_progress(self.folder)
        return int(str(lines[-1]["step"])) if lines else 0

    @property
    def curves(self) -> list[list[object]]:
        """What was logged of each step, without times."""
        return [[line.get(key) for key in METRICS] for line in read_progress(self.folder)]

    @property
    def final(self) -> Mapping[str, object] | None:
        return read_json(self.folder / "final.json")

    def weights_apart(self, other: "FaultyRun") -> float:
        """The relative difference of the trained weights to those of `other`: 0 where every bit is the same."""
        ours, theirs = (load_file(run.output / "adapter_model.safetensors") for run in (self, other))
        apart = sum(float((ours[name] - theirs[name]).norm()) ** 2 for name in theirs)
        return float((apart / sum(float(weight.norm()) ** 2 for weight in theirs.values())) ** 0.5)

    @property
    def events(self) -> list[str]:
        told = (EventKind.CHECKPOINT, EventKind.RESUME, EventKind.RESCUE)
        return [event.text for event in events_of(self.folder) if event.kind in told]

    def _call(self) -> None:
        message = {
            "entry": "faults.child:run", "argument": str(self.folder / "request.json"), "cwd": str(self.cwd),
            "log": str(self.folder / "log"), "env": dict(self.env), "deadline_s": 900,
        }  # fmt: skip
        again = True
        while again:  # as the job of a promoted run does it
            self._ending = self.server.call(json.loads(json.dumps(message)))
            again = self.rescues and goes_on(
                self.folder / "request.json", ProcessEnding(exit_code=self._ending.exit_code)
            )

    def _ladder(self, values: Mapping[str, object]) -> RescueLadder:
        """What a study's record tells of the recipe."""
        plugin: Any = load(self.trainer)
        return RescueLadder(
            trial=0, trainer=self.trainer, device="cpu", keys=plugin.keys, compared=plugin.compared, values=values,
            resolved=plugin.parse(values, overrides={"use_cpu": True}).resolved, space=str(plugin.space),
        )  # fmt: skip
