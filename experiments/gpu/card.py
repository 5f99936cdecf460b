"""The card that a campaign measures: found, idle, with a driver that starts, and known to compute."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from autofit.errors import EnvironmentFault
from autofit.files import read_json, write_json
from autofit.hardware.hardware import card_of
from autofit.hardware.health import Look, look_at_cards
from autofit.hardware.nvml import why_none
from autofit.probing.fork_server import ForkServer
from autofit.probing.slots import cuda_start, start_problem
from gpu.children import on_one_card

_COMPUTES_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The first visible card, and how many are visible."""

    name: str
    uuid: str
    driver: str
    visible: int
    alike: bool  # all of the visible ones, and none a slice: ranks may take them
    simulated: str | None  # the card of the table that predicts it
    about: str  # how that one differs, or why there is none
    is_null: bool  # the libraries of tests/null_gpu: no card at all

    @property
    def words(self) -> str:
        """What was measured, for the head of a table."""
        if self.is_null:
            return (
                "the real CUDA build without a card (tests/null_gpu), so no figure is a GPU's, and seconds mean nothing"
            )
        return f"{self.name}, driver {self.driver}"

    @property
    def folder_name(self) -> str:
        if self.is_null:
            return "null-gpu"
        return self.simulated or "".join(c if c.isalnum() else "-" for c in self.name.lower())

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def card_here(fork_server: ForkServer, folder: Path) -> Card:
    """The card. Raises EnvironmentFault where there is none, where others hold it, or where CUDA does not start."""
    look = look_at_cards()
    if problem := refusal(look):
        raise EnvironmentFault(problem)
    if problem := start_problem(look, cuda_start(fork_server, folder, look.cards)):
        raise EnvironmentFault(problem)
    return described(look, is_null="FAKE_CARDS" in os.environ or not _computes(fork_server, folder))


def refusal(look: Look) -> str:
    """Why nothing may be measured on these cards; "" where it may."""
    if not look.cards:
        return f"a campaign needs a CUDA card, but {'; '.join((*look.faults, *look.refused)) or why_none()}"
    if look.faults:
        return f"{'; '.join(look.faults)}; name other cards in CUDA_VISIBLE_DEVICES"
    if look.held:
        return (f"{'; '.join(look.held)}; end these programs, or name other cards in CUDA_VISIBLE_DEVICES: bytes and "
                f"seconds that are measured beside them are not the configuration's")  # fmt: skip
    return ""


def described(look: Look, *, is_null: bool) -> Card:
    """The first of the cards that `look` found."""
    first = look.cards[0]
    spec, about = card_of(first.name)
    alike = len({gpu.name for gpu in look.cards}) == 1 and not any(gpu.is_slice for gpu in look.cards)
    return Card(
        name=first.name, uuid=first.uuid, driver=look.driver, visible=len(look.cards), alike=alike,
        simulated=None if spec is None else spec.name, about=about, is_null=is_null,
    )  # fmt: skip


def _computes(fork_server: ForkServer, folder: Path) -> bool:
    """Whether 3 + 3 is 6 there: kernels of the null GPU do nothing."""
    answer = folder / "computes.json"
    answer.unlink(missing_ok=True)
    fork_server.call({
        "entry": "gpu.card:compute", "argument": str(answer.resolve()), "cwd": str(Path.cwd()), "env": on_one_card(),
        "log": str(folder / "computes.log"), "deadline_s": _COMPUTES_S,
    })  # fmt: skip
    told = read_json(answer)
    return told is not None and told["sum"] == 6.0


def compute(answer: str) -> int:
    """In the child: write the sum that the card finds."""
    import torch

    write_json(Path(answer), {"sum": (torch.ones(2, device="cuda") * 3).sum().item()})
    return 0
