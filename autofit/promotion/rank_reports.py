"""The reports of the ranks of a full run: rank 0 records it and decides, the others do as it does. Imports torch."""

from pathlib import Path

from autofit.plugin.protocol import Control
from autofit.promotion.rank_files import Place
from autofit.promotion.together import Together
from autofit.promotion.whereabouts import Locating, Where
from autofit.watching.peaks import since_beginning


class _Rank(Where):
    """What every rank does: keeps its place in a file, and saves and stops when all do."""

    together: Together
    place: Place
    began = stopped = False

    def joins(self, together: Together, place: Place) -> None:
        """Called before the training."""
        self.together, self.place, self.rank = together, place, together.rank

    def moved(self) -> None:
        self.place.keep(self.steps, self.at_work)

    def save_failed(self, checkpoint: Path, error: Exception) -> bool:
        """False: the other ranks are in the midst of saving, so none can go on."""
        return False


class Leading(_Rank, Locating):
    """The recorder of a run of several ranks, on rank 0. The peaks it tells are the largest of all ranks."""

    _largest: dict[str, int]

    def joins(self, together: Together, place: Place) -> None:
        super().joins(together, place)
        self.ranks, self._largest = together.ranks, {}

    def step_ends(self, step: int) -> Control:
        self._largest = self.together.most(since_beginning())
        return self.together.control(super().step_ends(step))

    def _peaks(self) -> dict[str, int]:
        return self._largest

    def saved(self, checkpoint: Path) -> None:
        self.together.wait()  # until every rank has written its files
        super().saved(checkpoint)


class Following(_Rank):
    """The report of every other rank."""

    def __init__(self, first_step: int) -> None:
        self.steps = first_step

    def step_begins(self, step: int) -> None:
        self.began = True
        super().step_begins(step)

    def step_ends(self, step: int) -> Control:
        super().step_ends(step)
        self.steps = step
        self.together.most(since_beginning())
        control = self.together.control()
        self.stopped = control.stop
        return control

    def saved(self, checkpoint: Path) -> None:
        self.together.wait()
