"""Whether CUDA starts here with the torch that is installed, and whether the cards are free: before the first probe.

CUDA is asked in a child of the fork server, which has torch imported and starts no CUDA itself.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autofit.errors import EnvironmentFault, one_line, option
from autofit.files import last_line, read_json, write_json
from autofit.hardware.health import Look, look_at_cards
from autofit.hardware.nvml import Gpu
from autofit.probing.fork_server import ForkServer
from autofit.probing.oom import is_oom
from autofit.probing.slots import is_taken

_START_S = 120.0  # the first context of a machine without a persistence daemon takes tens of seconds
# The oldest driver for each CUDA, by its minor version compatibility (CUDA Toolkit 13.0 release notes, table 2).
_OLDEST_DRIVER = {13: 580, 12: 525, 11: 450}
_ELSEWHERE = f"or simulate a card ({option('gpu', 'NAME')}), or train on the CPU ({option('device', 'cpu')})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaStart:
    """How CUDA started: the versions of torch and of the CUDA it is built for, and why it did not start."""

    torch: str = ""  # "": it could not be asked
    cuda: str | None = None  # None: torch is built for the CPU
    error: str = ""  # "": it started

    @property
    def major(self) -> int:
        """Of the CUDA that torch is built for; 0 where it is built for none."""
        return _first_number(self.cuda or "")


def check_cuda(server: ForkServer, folder: Path) -> Look:
    """The visible cards, on which CUDA programs of this environment can compute, and alone.

    Raises EnvironmentFault where CUDA does not start, with what to install, and where other programs compute on a card:
    bytes and seconds that are measured beside them are not the recipe's.
    """
    look = look_at_cards()
    if held := held_cards(look) and held_cards(look := look_at_cards()):  # a search of this user may just have ended
        raise EnvironmentFault(
            f"{'; '.join(held)}; end these programs, or name other cards in CUDA_VISIBLE_DEVICES, {_ELSEWHERE}"
        )
    if problem := start_problem(look, cuda_start(server, folder, look.cards)):
        raise EnvironmentFault(f"{problem}, {_ELSEWHERE}")
    return look


def held_cards(look: Look) -> tuple[str, ...]:
    """A line for each card that others hold. For one on which this user's own search probes, the next one waits."""
    free = [gpu.uuid for gpu in look.cards if not is_taken(f"cuda-{gpu.uuid}")]
    return tuple(line for line in look.held if any(uuid in line for uuid in free))


def cuda_start(server: ForkServer, folder: Path, cards: tuple[Gpu, ...]) -> CudaStart:
    """How CUDA starts on the first of `cards`, in a child of `server`."""
    if not cards:
        return CudaStart(error="no card works")
    folder.mkdir(parents=True, exist_ok=True)
    answer, log = folder / f"cuda-start-{os.getpid()}.json", folder / f"cuda-start-{os.getpid()}.log"
    try:
        ending = server.call(
            {"entry": "autofit.probing.cuda_start:run", "argument": str(answer.resolve()), "cwd": str(Path.cwd()),
             "log": str(log), "env": {"CUDA_VISIBLE_DEVICES": cards[0].uuid}, "deadline_s": _START_S}
        )  # fmt: skip
        told = read_json(answer)
        if told is None:
            late = f"no answer within {_START_S:.0f} s"
            said = one_line(last_line(log), 300) or f"exit {ending.exit_code}"
            return CudaStart(error=late if ending.deadline_passed else said)
        return _of_json(told)
    finally:
        for path in (answer, log):
            path.unlink(missing_ok=True)


def run(answer: str) -> int:
    """In the child: write the versions of torch and CUDA, and why CUDA does not start ("" where it does)."""
    import torch

    error = ""
    try:
        torch.zeros(1, device="cuda").item()
    except Exception as problem:
        error = "" if is_oom(problem) else one_line(str(problem), 300)  # a full card has started
    write_json(Path(answer), {"torch": torch.__version__, "cuda": torch.version.cuda, "error": error})
    return 0


def start_problem(look: Look, start: CudaStart) -> str:
    """Why CUDA does not start on the cards of `look`, and what mends it; "" where it does."""
    if not start.error:
        return ""
    if not look.cards:
        return "; ".join((*look.faults, *look.refused)) or start.error
    cards = ", ".join(dict.fromkeys(gpu.name for gpu in look.cards))
    driver = _first_number(look.driver)
    build = next((cuda for cuda, oldest in _OLDEST_DRIVER.items() if driver >= oldest), None)
    install = f"install a torch that is built for CUDA {build} (pytorch.org/get-started)" if build else ""
    versions = f"{cards} (driver {look.driver or 'unknown'}, torch {start.torch or 'unknown'}"
    if start.torch and start.cuda is None:
        return f"{versions}): this torch is built for the CPU; {install or 'update the driver'}"
    words = f"CUDA does not start on {versions} for CUDA {start.cuda or 'unknown'})"
    oldest = _OLDEST_DRIVER.get(start.major)
    if oldest is not None and 0 < driver < oldest:
        return f"{words}: it needs driver {oldest} or newer; update the driver{f', or {install}' if install else ''}"
    if refused := _refused(look.cards):
        return f"{words}: no permission to open {refused}; ask its administrator (often for the group video or render)"
    return f"{words}: {start.error}"


def _of_json(told: Mapping[str, object]) -> CudaStart:
    cuda = told["cuda"]
    return CudaStart(torch=str(told["torch"]), cuda=None if cuda is None else str(cuda), error=str(told["error"]))


def _first_number(version: str) -> int:
    number = version.partition(".")[0]
    return int(number) if number.isdigit() else 0


def _refused(cards: tuple[Gpu, ...]) -> str:
    """The first device file that this user may not open; "" where there is none."""
    files = ["/dev/nvidiactl", "/dev/nvidia-uvm", *(f"/dev/nvidia{gpu.index}" for gpu in cards)]
    return next((file for file in files if os.path.exists(file) and not os.access(file, os.R_OK | os.W_OK)), "")
