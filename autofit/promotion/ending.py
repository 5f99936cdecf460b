"""How the process of a full run ended before its last step, in words."""

import contextlib
import signal
from pathlib import Path

from autofit.errors import EnvironmentFault
from autofit.files import read_json, write_json
from autofit.probing.supervise import Ending
from autofit.promotion.interruption import asked_to_end, received

_FILE = "ended.json"


def write_ending(folder: Path, ending: Ending) -> None:
    """Keep the reason why the run in `folder` ended; nothing for one that is done or has failed with a reason."""
    if not any((folder / name).exists() for name in ("final.json", "failed.json")):
        who = "" if ending.rank is None or not ending.exit_code else f"rank {ending.rank}{on_node(ending)}: "
        tell_ending(folder, f"{who}{_reason(folder, ending)}")


def tell_ending(folder: Path, reason: str) -> None:
    """Keep `reason` as that why the run in `folder` ended early."""
    with contextlib.suppress(EnvironmentFault):  # a full disk
        write_json(folder / _FILE, {"reason": reason})


def on_node(ending: Ending) -> str:
    """ " on n2" for a rank of a run on several machines."""
    return f" on {ending.node}" if ending.node else ""


def ending_of(folder: Path) -> str | None:
    """Why the run in `folder` ended early; None where nobody could write it, as its job was killed too."""
    found = read_json(folder / _FILE)
    return None if found is None else str(found["reason"])


def forget_ending(folder: Path) -> None:
    """The run in `folder` starts again."""
    (folder / _FILE).unlink(missing_ok=True)


def _reason(folder: Path, ending: Ending) -> str:
    if ending.kernel_oom:
        return "killed by the kernel, as the machine had no memory left"
    if ending.exit_code == -signal.SIGKILL:
        return "killed by signal 9, perhaps by the host's out-of-memory killer"
    if ending.exit_code < 0:
        return f"killed by signal {-ending.exit_code} ({_name(-ending.exit_code)})"
    if ending.exit_code == 0 and asked_to_end(folder):
        sent = received()
        return f"asked to end{'' if sent is None else f' by {sent.name}'}"
    return f"its process ended with exit code {ending.exit_code}"


def _name(number: int) -> str:
    return signal.Signals(number).name if number in {int(s) for s in signal.Signals} else "unknown"
