"""Mass models of structures: built in the fork server, and kept on disk under a hash of all their inputs."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from autofit.errors import EnvironmentFault
from autofit.fakegpu.formula.formula import MassModel
from autofit.files import read_json, write_json
from autofit.forecast.evaluation import Evaluated
from autofit.forecast.structures import Structure, variables
from autofit.hardware import calibration
from autofit.hardware.hardware import host_memory_bytes, threads_of_each
from autofit.probing.fork_server import ForkServer
from autofit.probing.kept import by_content, code_hash
from autofit.recipe.keys import BatchKeys

EXACT_SHARE = 1e-4  # a model with a larger hold-out error (relative) rules out no candidate
SECONDS_SHARE = 0.05  # the same of the seconds of an update
_DEADLINE_S = 300.0
_MOST_PROCESSES = 3  # that trace one structure, of five to eight traces
_PROCESS_BYTES = 2 << 30  # memory of the machine for each of them
_UNREAD = ("output_dir", "run_name", "logging_dir", "seed", "learning_rate", "max_steps", "num_train_epochs")

Request = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What came of one structure: its mass model, or the reason why there is none."""

    model: MassModel | None = None
    layers: int = 0  # of the architecture
    mismatch: float = 0.0  # relative error of the bytes at the hold-out, which has all layers
    seconds_mismatch: float = 0.0  # and of the seconds of its update: below 0 where the forecast is too fast
    evaluated: Evaluated | None = None  # where the model's phases have no evaluation, and the recipe does evaluate
    reason: str = ""
    crashed: bool = False  # whether the reason is an error of the training itself

    @property
    def problem(self) -> str:
        """Why the model rules out no candidate; "" where it may."""
        if self.model is None:
            return self.reason
        if self.mismatch > EXACT_SHARE:
            return f"a training traced as a test took {self.mismatch:.2%} more or less than was forecast"
        if abs(self.seconds_mismatch) > SECONDS_SHARE:
            way = "short" if self.seconds_mismatch < 0 else "long"
            return f"the update of a training traced as a test was forecast {abs(self.seconds_mismatch):.0%} too {way}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """Makes the mass models that are requested, `workers` at once, or reads them from the folder `kept`."""

    worst_case: Path
    server: ForkServer
    scratch: Path
    kept: Path
    workers: int = 2

    def make(
        self, whole: Mapping[Structure, Request], sketches: Mapping[Structure, Request]
    ) -> tuple[dict[Structure, Made], dict[Structure, Made]]:
        """What came of the requests of each kind; the whole ones, which take longer, begin first.

        After a Ctrl-C the running traces stop too.
        """
        self.scratch.mkdir(parents=True, exist_ok=True)
        requests = [*whole.values(), *sketches.values()]
        at_once = max(1, min(self.workers, len(requests)))
        made_by = partial(self._made, processes=_processes(at_once))
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                made = list(pool.map(made_by, requests))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._cancel.touch()
                raise
        return dict(zip(whole, made, strict=False)), dict(zip(sketches, made[len(whole) :], strict=True))

    @property
    def _cancel(self) -> Path:
        return self.scratch / "cancel"

    def _made(self, request: Request, *, processes: int) -> Made:
        name = _key(request, self.worst_case)
        kept = self.kept / name
        found = _read(kept)
        if found is None:
            folder = self.scratch / name
            folder.mkdir(parents=True, exist_ok=True)
            told = {"answer": str(folder / "model.json"), "processes": processes}
            write_json(folder / "request.json", {**request, **told})
            try:
                self.server.call(
                    {
                        "entry": "autofit.forecast.worker:run", "argument": str(folder / "request.json"),
                        "cwd": str(Path.cwd()), "log": str(folder / "forecast.log"), "env": {},
                        "deadline_s": _DEADLINE_S, "cancel": str(self._cancel),
                    }
                )  # fmt: skip
            except EnvironmentFault as error:
                return Made(reason=str(error))
            found = _read(folder)
            if found is None:
                return Made(reason=_reason(folder), crashed="error" in (read_json(folder / "model.json") or {}))
            _keep(folder, kept)
        return found


def _processes(at_once: int) -> int:
    """Processes for each of so many structures that are traced at once, by the machine's cores and memory."""
    return max(1, min(_MOST_PROCESSES, threads_of_each(at_once), host_memory_bytes() // _PROCESS_BYTES // at_once))


def _read(folder: Path) -> Made | None:
    """What an earlier trace made; None where there is nothing that counts another time."""
    answer = read_json(folder / "model.json")
    if answer is None or "error" in answer:
        return None
    if "refused" in answer:
        return Made(reason=str(answer["refused"]))
    if not (folder / "model.npz").exists():
        return None
    return Made(
        model=MassModel.load(folder / "model.npz"), layers=int(str(answer["layers"])),
        mismatch=float(str(answer["mismatch"])), seconds_mismatch=float(str(answer["seconds_mismatch"])),
        evaluated=Evaluated(**cast(dict[str, Any], answer["evaluated"])) if answer["evaluated"] else None,
    )  # fmt: skip


def _reason(folder: Path) -> str:
    """Why a trace failed, as its worker said."""
    answer = read_json(folder / "model.json") or {}
    return f"a trace failed: {answer.get('error', f'no answer within {_DEADLINE_S:.0f} s')}"


def _keep(folder: Path, kept: Path) -> None:
    """Move a model to the folder where the next search finds it. Ignores a full disk or another search's copy."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(kept)
    except OSError:
        pass


def _key(request: Request, worst_case: Path) -> str:
    """A hash of all inputs of a mass model: the traced recipe, and the code that traces it."""
    keys = BatchKeys.from_json(cast(Mapping[str, "str | None"], request["keys"]))
    unread = (*_UNREAD, *variables(keys))
    values = by_content({k: v for k, v in cast(Mapping[str, object], request["values"]).items() if k not in unread})
    rest = {k: v for k, v in request.items() if k not in ("values", "worst_case", "answer")}
    parts = [values, rest, code_hash(), read_json(worst_case), calibration.fingerprint(str(request["device"]))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
