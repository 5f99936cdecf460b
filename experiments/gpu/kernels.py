"""The kernels of one step on a card, by torch.profiler, and the seconds of each. Imports torch."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Protocol

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpu.folder import Row

_LISTED = 30
_NAME = 100  # characters: those of templates have thousands


class Event(Protocol):
    """An event of the profiler, as torch gives it."""

    def name(self) -> str: ...
    def device_type(self) -> object: ...
    def duration_ns(self) -> int: ...
    def is_user_annotation(self) -> bool: ...


class Kernels:
    """Records the step between `begin` and `end`."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._profile: profile | None = None  # not before it is needed: it takes memory of the card
        self._began_s = 0.0

    def begin(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()
        self._began_s = self._now_s()

    def end(self) -> Row:
        """The seconds of the step, which the profiler lengthens, and of its kernels together and by name."""
        assert self._profile is not None
        step_s = self._now_s() - self._began_s
        self._profile.stop()
        recorded = self._profile.profiler
        assert recorded is not None
        assert recorded.kineto_results is not None
        return {"step_s": step_s, **times(recorded.kineto_results.events())}


def times(events: Iterable[Event]) -> Row:
    """Seconds of all kernels and copies, their number, and [name, number, seconds] of those that take longest.

    {"missing": the reason} where there is none.
    """
    found: defaultdict[str, list[int]] = defaultdict(list)
    for event in events:  # of the ranges that programs name a copy stands on the card: no kernel
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            found[event.name()].append(event.duration_ns())
    if not found:
        return {"missing": "the profiler saw no kernel"}
    by_time = sorted(found.items(), key=lambda item: -sum(item[1]))
    return {
        "device_s": sum(sum(spans) for spans in found.values()) / 1e9,
        "launches": sum(len(spans) for spans in found.values()),
        "longest": [[name[:_NAME], len(spans), sum(spans) / 1e9] for name, spans in by_time[:_LISTED]],
    }
