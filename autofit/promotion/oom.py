"""An OOM of a full run, as its training process tells it: oom.json. No torch here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from autofit.files import read_json, write_json
from autofit.plugin.protocol import LOAD, SampleFacts

_FILE = "oom.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Oom:
    """Where a run was out of memory, and where it goes on."""

    message: str
    phase: str = LOAD
    finished: int = 0  # optimizer steps that were finished
    resumes_from: int = 0  # the step of the newest whole checkpoint; 0: there is none
    evaluating: bool = False  # it was between two steps, in the evaluation
    samples: SampleFacts | None = None
    unused_frac: float = 0.0  # of what torch's allocator held, the share that no tensor used: fragments
    rank: int | None = None  # of several ranks, the one whose memory ran out

    @property
    def repeated(self) -> int:
        """Finished optimizer steps that are trained again, with the same result."""
        return self.finished - self.resumes_from

    @property
    def where(self) -> str:
        """`step 37: out of memory in the rollout (CUDA out of memory ...)`."""
        out = "out of memory" if self.rank is None else f"rank {self.rank} out of memory"
        if self.phase == LOAD:
            place = f"{out} before the first step"
        elif self.evaluating:
            place = f"step {self.finished}: {out} in the evaluation"
        else:
            place = f"step {self.finished + 1}: {out} in the {self.phase}"
        return f"{place} ({self.message})"


def keep_oom(folder: Path, oom: Oom) -> None:
    """Write what the run in `folder` was doing when memory ran out."""
    write_json(folder / _FILE, asdict(oom))


def read_oom(folder: Path) -> Oom | None:
    """The OOM with which the last start of the run ended; None if it ended otherwise."""
    content = read_json(folder / _FILE)
    if content is None:
        return None
    facts = cast("Mapping[str, object] | None", content.pop("samples", None))
    return Oom(**content, samples=None if facts is None else SampleFacts(**facts))  # type: ignore[arg-type]


def forget_oom(folder: Path) -> None:
    """Called when the training starts again."""
    (folder / _FILE).unlink(missing_ok=True)


def in_words(error: BaseException) -> str:
    """The first sentences of an error about memory, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rsplit(' ', 1)[0]} ..."


_LONGEST = 160
