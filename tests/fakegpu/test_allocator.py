"""The allocator's rules, checked on small hand-made requests. No torch."""

from __future__ import annotations

import random

import pytest

from autofit.fakegpu import replay as replay_module
from autofit.fakegpu.allocator import MIB, UNLIMITED, AllocatorSettings, Block, CachingAllocator, OutOfCapacityError
from autofit.fakegpu.replay import EventLog, Unlimited, least_capacity, replay


def test_requests_are_rounded_to_512_bytes_and_segments_follow_the_size_classes() -> None:
    allocator = CachingAllocator()
    for nbytes, reserved in ((1, 2 * MIB), (MIB + 1, 22 * MIB), (21 * MIB, 22 * MIB + 22 * MIB)):
        allocator.malloc(nbytes)
        assert allocator.reserved_bytes == reserved
    assert allocator.allocated_bytes == 512 + (MIB + 512) + 22 * MIB  # a rest of 1 MiB or less is not split off


def test_a_freed_block_is_reused_and_neighbours_merge() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(4 * MIB) for _ in range(5)]
    for block in blocks:
        allocator.free(block)
    allocator.malloc(20 * MIB)
    assert allocator.reserved_bytes == allocator.peak_reserved_bytes == 20 * MIB


def test_a_replay_gives_unused_memory_back_where_the_program_did() -> None:
    log = EventLog()
    for number, nbytes in enumerate((40 * MIB, 60 * MIB)):
        log.add(number, nbytes)
        log.add(number, -nbytes)
        log.emptied.append(len(log))
    assert replay(log).peak_reserved_bytes == 60 * MIB
    log.emptied.clear()
    assert replay(log).peak_reserved_bytes == 100 * MIB


def test_cached_segments_are_given_back_before_running_out() -> None:
    allocator = CachingAllocator(capacity_bytes=64 * MIB)
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(60 * MIB)
    assert (allocator.retry_count, allocator.reserved_bytes) == (1, 60 * MIB)
    with pytest.raises(OutOfCapacityError):
        allocator.malloc(8 * MIB)


def test_expandable_segments_grow_instead_of_fragmenting() -> None:
    log = EventLog()
    live: dict[int, int] = {}
    for step in range(100):  # a cache that grows by concatenation: the new copy lives beside the old
        log.add(step, (30 + step) * MIB)
        if step:
            log.add(step - 1, -live[step - 1])
        live[step] = (30 + step) * MIB
    native, expandable = replay(log), replay(log, settings=AllocatorSettings(expandable_segments=True))
    assert expandable.peak_reserved_bytes < native.peak_reserved_bytes
    assert expandable.peak_allocated_bytes == (128 + 129) * MIB


def test_expandable_segments_unmap_free_granules_when_memory_is_short() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB, settings=AllocatorSettings(expandable_segments=True))
    first, second = allocator.malloc(40 * MIB), allocator.malloc(20 * MIB)
    allocator.free(first)
    allocator.malloc(60 * MIB)
    assert allocator.retry_count == 1
    assert allocator.reserved_bytes <= 100 * MIB
    allocator.free(second)


def test_max_split_size_keeps_large_blocks_whole() -> None:
    settings = AllocatorSettings.parse("max_split_size_mb:64,expandable_segments:False")
    allocator = CachingAllocator(settings=settings)
    allocator.free(allocator.malloc(128 * MIB))
    allocator.malloc(32 * MIB)
    assert allocator.reserved_bytes == (128 + 32) * MIB


def test_counters_stay_consistent_under_random_load_in_every_mode() -> None:
    for expandable in (False, True):
        generator = random.Random(1)
        allocator = CachingAllocator(
            capacity_bytes=600 * MIB, settings=AllocatorSettings(expandable_segments=expandable)
        )
        live: list[Block] = []
        for _ in range(3000):
            if live and generator.random() < 0.5:
                allocator.free(live.pop(generator.randrange(len(live))))
                continue
            try:
                live.append(allocator.malloc(generator.choice([100, 9000, 2 * MIB, 15 * MIB, 70 * MIB])))
            except OutOfCapacityError:
                allocator.free(live.pop())
        assert allocator.allocated_bytes == sum(block.size for block in live) <= allocator.reserved_bytes <= 600 * MIB
        for block in live:
            allocator.free(block)
        allocator.empty_cache()
        assert allocator.allocated_bytes == allocator.reserved_bytes == 0


def _random_log(*, steps: int) -> EventLog:
    generator, log = random.Random(0), EventLog()
    live: list[tuple[int, int]] = []
    for step in range(steps):
        if live and generator.random() < 0.5:
            storage, nbytes = live.pop(generator.randrange(len(live)))
            log.add(storage, -nbytes)
        else:
            nbytes = generator.choice([700, 5000, 3 * MIB, 14 * MIB, 33 * MIB])
            log.add(step, nbytes)
            live.append((step, nbytes))
    return log


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("max_split", [UNLIMITED, 20 * MIB])
def test_a_replay_from_a_checkpoint_is_the_whole_replay(
    expandable: bool, max_split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "_CHECKPOINT_EVENTS", 64)
    settings = AllocatorSettings(expandable_segments=expandable, max_split_size_bytes=max_split)
    log = _random_log(steps=4000)
    unlimited = Unlimited(log, [0, 1000, 3000], settings=settings)
    whole = replay(log, settings=settings)
    assert unlimited.peaks == (whole.peak_allocated_bytes, whole.peak_reserved_bytes)
    assert unlimited.peaks == tuple(map(max, zip(*unlimited.phases, strict=True)))
    outcomes = set()
    for percent in range(80, 140, 3):
        capacity = unlimited.peaks[0] * percent // 100
        assert unlimited.replay(capacity) == replay(log, capacity_bytes=capacity, settings=settings)
        outcomes.add(unlimited.replay(capacity).fits)
    assert outcomes == {True, False}


@pytest.mark.parametrize("percent", [60, 101, 110, 1000])
@pytest.mark.parametrize("divisions", [0, 4])
def test_one_loop_over_a_log_does_what_single_requests_do_byte_for_byte(percent: int, divisions: int) -> None:
    log, settings = _random_log(steps=4000), AllocatorSettings(roundup_power2_divisions=divisions)
    capacity = replay(log, settings=settings).peak_allocated_bytes * percent // 100
    one_by_one = CachingAllocator(capacity_bytes=capacity, settings=settings)
    live: dict[int, Block] = {}
    missing = None
    for place, (storage, nbytes) in enumerate(zip(log.ids, log.nbytes, strict=True)):
        try:
            if nbytes > 0:
                live[storage] = one_by_one.malloc(nbytes)
            else:
                one_by_one.free(live.pop(storage))
        except OutOfCapacityError:
            missing = place
            break
    in_a_loop, blocks = CachingAllocator(capacity_bytes=capacity, settings=settings), dict[int, Block]()
    assert in_a_loop.play(log.ids, log.nbytes, blocks, log.streams) == missing
    assert (missing is None) == (percent > 101)
    for name in ("allocated", "peak_allocated", "reserved", "peak_reserved"):
        assert getattr(in_a_loop, f"{name}_bytes") == getattr(one_by_one, f"{name}_bytes")
    assert in_a_loop.retry_count == one_by_one.retry_count
    assert {k: (b.address, b.size) for k, b in blocks.items()} == {k: (b.address, b.size) for k, b in live.items()}


def test_least_capacity_runs_and_a_little_less_does_not() -> None:
    log = _random_log(steps=2000)
    least = least_capacity(log, tolerance_bytes=2 * MIB)
    assert replay(log, capacity_bytes=least).fits
    assert not replay(log, capacity_bytes=least - 2 * MIB).fits


def test_the_least_capacity_is_on_the_right_side_of_the_limit_that_was_tried_first() -> None:
    log = _random_log(steps=2000)
    least = least_capacity(log, tolerance_bytes=2 * MIB)
    for limit in (least - 4 * MIB, least + 4 * MIB):
        found = Unlimited(log).least_capacity(64 * MIB, first_bytes=limit)
        assert replay(log, capacity_bytes=found).fits
        assert (found <= limit) == replay(log, capacity_bytes=limit).fits
