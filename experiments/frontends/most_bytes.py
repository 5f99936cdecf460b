"""The most bytes that a profiled program held on the CPU beside those it began with."""

from torch.profiler import profile


def most_bytes(profiled: profile) -> int:
    """Of a run under `profile(activities=[ProfilerActivity.CPU], profile_memory=True)`."""
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = profiled.profiler.kineto_results.events()
    held = most = 0
    for _, count in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        held += count
        most = max(most, held)
    return most
