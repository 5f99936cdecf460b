"""Simulated cards of one kind, one after another, ask torch for the outputs of each operation once a process.

As the traces of a forecast do. Where each card asked for itself, a fifth of a short training's time was that.
"""

from collections.abc import Mapping, Sequence

from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.fakegpu import device
from autofit.fakegpu.op_cache import Known, Shortcut
from autofit.fakegpu.patches.cuda_api import active_gpu

_of_kinds: dict[object, Known] = {}


def install() -> None:
    """From now on, cards of this process share."""
    device.Shortcut = _Shared  # type: ignore[attr-defined]


class _Shared(Shortcut):
    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__(mode)
        gpu = active_gpu()
        assert gpu is not None
        self.known = _of_kinds.setdefault((gpu.spec, gpu.mode), {})
        self._ran: set[OpOverload] = set()

    @property
    def functions(self) -> set[OpOverload]:
        """Those of this card."""
        return self._ran

    def run(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        self._ran.add(func)
        return super().run(func, args, kwargs)
