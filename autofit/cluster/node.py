"""What keeps a node of a cluster from taking probes: its cards, and the folder that all nodes share. No torch here."""

import contextlib
import os
import tempfile
from pathlib import Path

from autofit.errors import ConfigError
from autofit.files import is_full
from autofit.hardware.card_kind import is_of_kind, kind_of
from autofit.hardware.hardware import slices_fault
from autofit.hardware.health import Look, look_at_cards
from autofit.hardware.nvml import Gpu

# Words of an error that names a broken or occupied card, not the program: another node may do better. The first seven
# are cudaGetErrorString's, as torch prints them after "CUDA error: " (CUDA runtime API, enum cudaError); "unspecified
# launch failure" and "an illegal memory access" are not among them, since bugs of kernels cause them too.
_BROKEN = (
    "uncorrectable ECC error encountered",  # cudaErrorECCUncorrectable, 214
    "no CUDA-capable device is detected",  # cudaErrorNoDevice, 100
    "CUDA-capable device(s) is/are busy or unavailable",  # cudaErrorDevicesUnavailable, 46
    "all CUDA-capable devices are busy or unavailable",  # the same, before CUDA 11
    "CUDA error: initialization error",  # cudaErrorInitializationError, 3
    "hardware stack error",  # cudaErrorHardwareStackError, 714
    "system not yet initialized",  # cudaErrorSystemNotReady, 802: the fabric manager does not run
    "GPU has fallen off the bus",  # Xid 79, in the driver's log
    "GPU is lost",  # NVML_ERROR_GPU_IS_LOST
    "GPU requires reset",  # NVML_ERROR_RESET_REQUIRED
    "Found no NVIDIA driver on your system",  # torch, torch/csrc/utils/device_lazy_init.cpp and torch/cuda
    "No CUDA GPUs are available",  # torch, c10/cuda/CUDAFunctions.cpp
)


def node_fault(device: str, folder: Path, *, card: str | None = None, cards: int = 1) -> str | None:
    """One line: why this node must not run probes on `device` in `folder`; None where it may.

    On "cuda" at least `cards` cards must be visible, all of the kind `card` (None: any), unharmed and held by nobody.
    The driver is asked in a child, so this takes a second or so, and a minute at most where the driver hangs.
    """
    return _folder_fault(folder) or (card_fault(card, cards) if device == "cuda" else None)


def card_fault(card: str | None, cards: int = 1) -> str | None:
    """As `node_fault`, of the cards alone: for a run, which has its own words for its folder."""
    try:
        found = look_at_cards()
    except ConfigError as error:
        return str(error)
    if wrong := (*found.faults, *found.held):
        return "; ".join(wrong)
    if not found.cards:
        return f"no card is visible there{_refused(found)}; ask for one with --gpus-per-node"
    if len(found.cards) < cards:
        count = f"{cards} cards are needed, and {len(found.cards)} are visible there{_refused(found)}"
        return f"{count}; see --gpus-per-node"
    if fault := slices_fault(found.cards, cards):
        return fault
    return None if card is None else wrong_kind(found.cards, card)


def _refused(found: Look) -> str:
    return f" ({'; '.join(found.refused)})" if found.refused else ""


def only_cards(count: int) -> dict[str, str]:
    """The variable that leaves a program the first `count` of the cards that this process may use."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(card) for card in range(count)] if given is None else given.split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[:count])}


def wrong_kind(gpus: tuple[Gpu, ...], card: str) -> str | None:
    """One line where one of the cards is not of the kind `card`."""
    others = sorted({kind_of(gpu) for gpu in gpus if not is_of_kind(gpu, card)})
    return f"its card is {', '.join(others)}, and the study is of {card}" if others else None


def is_card_broken(text: str) -> bool:
    """Whether an error's text, or the end of a log, says that the card itself is broken or cannot be used."""
    return any(words in text for words in _BROKEN)


def _folder_fault(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"autofit")
        with contextlib.suppress(OSError):  # a file system that does not tell its size
            if is_full(folder):
                return f"no space left in {folder}"
    except OSError as error:
        return f"the node cannot write in {folder}: {error.strerror or error}"
    return None
