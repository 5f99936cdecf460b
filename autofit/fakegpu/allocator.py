"""torch's CUDA caching allocator in Python: same pools, rounding, best fit, splits, merges, retries. Free of torch.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` (torch 2.11 to 2.13); constants carry its names. Addresses
are invented, so the choice between two free blocks of the same size may differ from a real run.
"""

from __future__ import annotations

import copy
import os
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIB = 1 << 20
MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = MIB  # kSmallSize: largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: a smaller request gets a segment of kLargeBuffer
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge
UNLIMITED = 1 << 62
_ADDRESS_BITS = 60  # of a free block's key: its size, then its address


class OutOfCapacityError(Exception):
    """An allocation fails, even after cached blocks were freed."""

    def __init__(self, requested_bytes: int) -> None:
        super().__init__(f"no room for {requested_bytes} bytes")
        self.requested_bytes = requested_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """The options of PYTORCH_CUDA_ALLOC_CONF that affect block placement."""

    expandable_segments: bool = False
    max_split_size_bytes: int = UNLIMITED
    roundup_power2_divisions: int = 0
    max_non_split_rounding_bytes: int = 20 * MIB

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Settings from the text of PYTORCH_CUDA_ALLOC_CONF; options irrelevant to placement are ignored."""
        options = dict(part.split(":", 1) for part in text.replace(" ", "").split(",") if ":" in part)
        divisions = options.get("roundup_power2_divisions", "0")
        split_mib = options.get("max_split_size_mb")
        return cls(
            expandable_segments=options.get("expandable_segments", "False").lower() == "true",
            max_split_size_bytes=int(split_mib) * MIB if split_mib else UNLIMITED,
            roundup_power2_divisions=int(divisions) if divisions.isdigit() else 0,
            max_non_split_rounding_bytes=int(options.get("max_non_split_rounding_mb", "20")) * MIB,
        )

    @classmethod
    def from_environment(cls) -> AllocatorSettings:
        """Settings from PYTORCH_ALLOC_CONF or its older name PYTORCH_CUDA_ALLOC_CONF, as torch reads them at start."""
        return cls.parse(os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


class Block:
    """A piece of a segment: in use, free, or (in an expandable segment) an unmapped address range."""

    __slots__ = ("address", "free", "key", "mapped", "next", "pool", "prev", "requested_bytes", "size")

    def __init__(self, pool: BlockPool, address: int, size: int, free: bool, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.free = free
        self.key = 0  # its place in the pool's list of free blocks
        self.mapped = mapped
        self.requested_bytes = 0
        self.prev: Block | None = None
        self.next: Block | None = None

    def __lt__(self, other: Block) -> bool:
        return self.address < other.address


class BlockPool:
    """Free blocks of one stream and size class, sorted by size, and unmapped ranges, sorted by address.

    `keys` are sorted whole numbers, because a search compares them several times faster than tuples or blocks.
    """

    __slots__ = ("granule", "keys", "of_key", "small", "unmapped")

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.granule = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.keys: list[int] = []  # of the free blocks, by size and then address
        self.of_key: dict[int, Block] = {}
        self.unmapped: list[Block] = []

    @property
    def free(self) -> list[Block]:
        return [self.of_key[key] for key in self.keys]

    def insert(self, block: Block) -> None:
        block.key = key = block.size << _ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.of_key[key] = block

    def remove(self, block: Block) -> None:
        del self.keys[bisect_left(self.keys, block.key)]
        del self.of_key[block.key]

    def twin(self, block: Block) -> Block:
        """A copy of another pool's block, still to be linked to neighbours."""
        twin = Block(self, block.address, block.size, block.free, block.mapped)
        twin.key, twin.requested_bytes = block.key, block.requested_bytes
        return twin


class CachingAllocator:
    """One device's allocator. `malloc` returns a Block; `free` takes it back; the counters are those of torch."""

    def __init__(self, *, capacity_bytes: int = UNLIMITED, settings: AllocatorSettings | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.settings = settings or AllocatorSettings()
        self._splits_all = self.settings.max_split_size_bytes == UNLIMITED
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.requested_bytes = self.peak_requested_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.segment_count = self.retry_count = self.oom_count = 0
        self._pools: dict[tuple[int, bool], BlockPool] = {}
        self._next_address = 0

    # ------------------------------------------------------------------ public
    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """A block for `nbytes`, or `OutOfCapacityError` after cached blocks were freed and the request retried."""
        size = self.round_size(nbytes)
        pool = self._pool(stream, small=size <= SMALL_BYTES)
        block = self._best_fit(pool, size) or self._made(pool, size, nbytes)
        self._take(block, size)
        block.requested_bytes = nbytes
        self._count(block)
        return block

    def free(self, block: Block) -> None:
        """Free a block: merge it with its free neighbours and keep it cached (reserved)."""
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested_bytes
        block = _coalesce(block)
        block.free = True
        block.pool.insert(block)

    def play(
        self, ids: Sequence[int], sizes: Sequence[int], blocks: dict[int, Block], streams: Mapping[int, int]
    ) -> int | None:
        """`malloc` (+) or `free` (-) the `sizes` of the storages `ids` in order; `blocks` has those that are live.

        Returns the place of the first that does not fit, or None. With one stream and blocks that are all split,
        requested bytes are not counted, and one loop has the steps of both methods: an estimate replays 10^6 events.
        """
        if self._splits_all and not streams:
            return self._play_inline(ids, sizes, blocks)
        for place, (storage, nbytes) in enumerate(zip(ids, sizes, strict=True)):
            if nbytes < 0:
                self.free(blocks.pop(storage))
                continue
            try:
                blocks[storage] = self.malloc(nbytes, streams.get(storage, 0))
            except OutOfCapacityError:
                return place
        return None

    def _play_inline(self, ids: Sequence[int], sizes: Sequence[int], blocks: dict[int, Block]) -> int | None:
        allocated, peak = self.allocated_bytes, self.peak_allocated_bytes
        small_pool, large_pool = self._pool(0, small=True), self._pool(0, small=False)
        pop, missing, expands = blocks.pop, None, self.settings.expandable_segments
        rounded: dict[int, int] = {}
        for place, (storage, nbytes) in enumerate(zip(ids, sizes, strict=True)):
            if nbytes < 0:
                block = pop(storage)
                allocated -= block.size
                pool = block.pool
                keys, of_key = pool.keys, pool.of_key
                after = block.next
                if after is not None and after.free and after.mapped:
                    del keys[bisect_left(keys, after.key)], of_key[after.key]
                    block.size += after.size
                    after = block.next = after.next
                    if after is not None:
                        after.prev = block
                before = block.prev
                if before is not None and before.free and before.mapped:
                    del keys[bisect_left(keys, before.key)], of_key[before.key]
                    before.size += block.size
                    after = before.next = block.next
                    if after is not None:
                        after.prev = before
                    block = before
                block.free = True
                block.key = key = block.size << _ADDRESS_BITS | block.address
            else:
                if (size := rounded.get(nbytes, 0)) == 0:
                    size = rounded[nbytes] = self.round_size(nbytes)
                pool = small_pool if size <= SMALL_BYTES else large_pool
                keys, of_key = pool.keys, pool.of_key
                at = bisect_left(keys, size << _ADDRESS_BITS)
                if at < len(keys):
                    if expands and at + 1 < len(keys):
                        at = _prefer_inner(pool, at)
                    block = of_key.pop(keys.pop(at))
                else:
                    try:
                        block = self._made(pool, size, nbytes)
                    except OutOfCapacityError:
                        missing = place
                        break
                block.free = False
                blocks[storage] = block
                rest = block.size - size
                split = rest >= MIN_BLOCK_BYTES if expands or pool is small_pool else rest > SMALL_BYTES
                allocated += size if split else block.size
                if allocated > peak:
                    peak = allocated
                if not split:
                    continue
                block = _split(block, size)
                key = block.key = rest << _ADDRESS_BITS | block.address
            insort(keys, key)
            of_key[key] = block
        self.allocated_bytes, self.peak_allocated_bytes = allocated, peak
        return missing

    def _made(self, pool: BlockPool, size: int, nbytes: int) -> Block:
        """A new block, or `OutOfCapacityError` after cached blocks were freed and the request retried."""
        block = self._new_block(pool, size)
        if block is None:
            self.retry_count += 1
            if self._release_oversized(pool, size):
                block = self._new_block(pool, size)
            if block is None:
                self.empty_cache()
                block = self._new_block(pool, size)
        if block is None:
            self.oom_count += 1
            raise OutOfCapacityError(nbytes)
        return block

    def empty_cache(self) -> None:
        """Return every fully free segment to the driver (of an expandable segment, every free granule)."""
        for pool in self._pools.values():
            for block in pool.free:
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    self._release(block)

    def reset_peaks(self) -> None:
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_requested_bytes = self.requested_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def copy(self, live: Mapping[int, Block]) -> tuple[CachingAllocator, dict[int, Block]]:
        """A deep copy of the allocator, and `live` (name -> block in use) with the blocks of the copy."""
        other = copy.copy(self)
        other._pools = {key: BlockPool(small=pool.small) for key, pool in self._pools.items()}
        twins: dict[Block, Block] = {}
        for key, pool in self._pools.items():
            twins |= {block: other._pools[key].twin(block) for block in pool.of_key.values()}
            twins |= {block: other._pools[key].twin(block) for block in pool.unmapped}
        names = {id(pool): key for key, pool in self._pools.items()}
        mine = {name: other._pools[names[id(block.pool)]].twin(block) for name, block in live.items()}
        twins |= {block: mine[name] for name, block in live.items()}
        for block, twin in twins.items():
            twin.prev = twins[block.prev] if block.prev is not None else None
            twin.next = twins[block.next] if block.next is not None else None
        for key, pool in self._pools.items():
            other._pools[key].keys = pool.keys.copy()
            other._pools[key].of_key = {name: twins[block] for name, block in pool.of_key.items()}
            other._pools[key].unmapped = [twins[block] for block in pool.unmapped]
        return other, mine

    @property
    def state(self) -> tuple[object, ...]:
        """The same for two moments from which every request is answered alike, besides the blocks in use."""
        pools = tuple(
            (key, tuple(pool.keys), tuple((b.address, b.size) for b in pool.unmapped))
            for key, pool in sorted(self._pools.items(), key=lambda entry: entry[0])
        )
        return self.reserved_bytes, self.allocated_bytes, pools

    def round_size(self, nbytes: int) -> int:
        """Size of a request after rounding: to 512 B, or to power-of-two divisions if the settings enable them."""
        if nbytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        divisions = self.settings.roundup_power2_divisions
        if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
            return _roundup_power2(nbytes, divisions)
        return -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    # ------------------------------------------------------------------ finding room
    def _pool(self, stream: int, *, small: bool) -> BlockPool:
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = BlockPool(small=small)
        return pool

    def _best_fit(self, pool: BlockPool, size: int) -> Block | None:
        at = bisect_left(pool.keys, size << _ADDRESS_BITS)
        if at == len(pool.keys):
            return None
        if self.settings.expandable_segments:
            at = _prefer_inner(pool, at)
        block = pool.of_key[pool.keys[at]]
        settings = self.settings
        if size < settings.max_split_size_bytes <= block.size:
            return None
        if size >= settings.max_split_size_bytes and block.size >= size + settings.max_non_split_rounding_bytes:
            return None
        pool.remove(block)
        return block

    def _new_block(self, pool: BlockPool, size: int) -> Block | None:
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        segment = segment_bytes(size)
        if self.reserved_bytes + segment > self.capacity_bytes:
            return None
        block = Block(pool, self._next_address, segment, False)
        self._next_address += segment + (1 << 40)
        self.segment_count += 1
        self._reserve(segment)
        return block

    def _take(self, block: Block, size: int) -> None:
        block.free = False
        rest = block.size - size
        if block.pool.small or self.settings.expandable_segments:
            split = rest >= MIN_BLOCK_BYTES
        else:
            split = size < self.settings.max_split_size_bytes and rest > SMALL_BYTES
        if split:
            _split_off(block, size)

    def _count(self, block: Block) -> None:
        self.allocated_bytes += block.size
        self.requested_bytes += block.requested_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes

    def _reserve(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.size
        self.segment_count -= 1

    def _release_oversized(self, pool: BlockPool, size: int) -> bool:
        """With max_split_size set: free the smallest sufficient oversized block, or several, largest first."""
        limit = self.settings.max_split_size_bytes
        if limit == UNLIMITED or self.settings.expandable_segments:
            return False
        wanted = max(size, limit)
        whole = [b for b in pool.free if b.size >= limit and b.prev is None and b.next is None]
        enough = next((b for b in whole if b.size >= wanted), None)
        if enough is not None:
            self._release(enough)
            return True
        freed = 0
        for block in reversed(whole):
            self._release(block)
            freed += block.size
            if freed >= wanted:
                return True
        return False

    # ------------------------------------------------------------------ expandable segments
    def _expand(self, pool: BlockPool, size: int) -> Block | None:
        """Map memory after (or before) free blocks until `size` contiguous bytes are available."""
        block = self._expandable_range(pool, size)
        if not block.mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            hole = block.next
            assert hole is not None
            mapped = self._map(hole, min(hole.size, size - block.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _expandable_range(self, pool: BlockPool, size: int) -> Block:
        for hole in pool.unmapped:
            before = hole.prev
            start = before if before is not None and before.free and before.mapped else hole
            room, block = 0, start
            while block is not None and block.free and room < size:
                room, block = room + block.size, block.next  # type: ignore[assignment]
            if room >= size:
                return start
        address_bytes = max(1 << 45, 2 * size)
        self._next_address = -(-self._next_address // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES  # align to a granule
        tail = Block(pool, self._next_address, address_bytes, True, mapped=False)
        self._next_address += address_bytes + (1 << 40)
        self.segment_count += 1
        insort(pool.unmapped, tail)
        return tail

    def _map(self, hole: Block, nbytes: int) -> Block | None:
        """Map the first `nbytes` of an unmapped range, in whole granules; merge with free neighbours."""
        pool = hole.pool
        nbytes = min(-(-nbytes // pool.granule) * pool.granule, hole.size)
        if self.reserved_bytes + nbytes > self.capacity_bytes:
            return None
        self._reserve(nbytes)
        pool.unmapped.remove(hole)
        if nbytes < hole.size:
            insort(pool.unmapped, _split(hole, nbytes))
        hole.mapped = True
        block = _coalesce(hole)
        pool.insert(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Unmap all whole granules inside a free block of an expandable segment."""
        pool = block.pool
        start = -(-block.address // pool.granule) * pool.granule
        end = (block.address + block.size) // pool.granule * pool.granule
        if end <= start:
            return
        pool.remove(block)
        if start > block.address:
            inner = _split(block, start - block.address)
            pool.insert(block)
            block = inner
        if end < block.address + block.size:
            _split_off(block, end - block.address)
        block.mapped = False
        self.reserved_bytes -= block.size
        after, before = block.next, block.prev
        if after is not None and not after.mapped:
            pool.unmapped.remove(after)
            _absorb_next(block, after)
        if before is not None and not before.mapped:
            pool.unmapped.remove(before)
            _absorb_next(before, block)
            block = before
        insort(pool.unmapped, block)


def segment_bytes(size: int) -> int:
    """Size of the new segment for a request that no cached block can serve."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def _roundup_power2(nbytes: int, divisions: int) -> int:
    floor = 1 << (nbytes.bit_length() - 1)
    if nbytes == floor:
        return nbytes
    step = floor // divisions
    return -(-nbytes // step) * step if step else nbytes


def _prefer_inner(pool: BlockPool, at: int) -> int:
    """Rank a block by its size plus the unmapped range after it, so inner blocks are preferred (get_free_block)."""

    keys, of_key = pool.keys, pool.of_key
    reach = _reach(of_key[keys[at]])
    while at + 1 < len(keys) and (further := _reach(of_key[keys[at + 1]])) < reach:
        at, reach = at + 1, further
    return at


def _reach(block: Block) -> int:
    after = block.next
    return block.size if after is None or after.mapped else block.size + after.size


def _split(block: Block, size: int) -> Block:
    """Shrink `block` to `size`; returns the remainder as a new free block linked after it."""
    rest = Block(block.pool, block.address + size, block.size - size, True, block.mapped)
    rest.prev, rest.next = block, block.next
    if block.next is not None:
        block.next.prev = rest
    block.next = rest
    block.size = size
    return rest


def _split_off(block: Block, size: int) -> None:
    """Shrink `block` to `size`; the remainder becomes a free block of its pool."""
    block.pool.insert(_split(block, size))


def _coalesce(block: Block) -> Block:
    """Merge `block` with its free, mapped neighbours and remove those from the pool; returns the merged block."""
    before, after = block.prev, block.next
    if after is not None and after.free and after.mapped:
        block.pool.remove(after)
        _absorb_next(block, after)
    if before is not None and before.free and before.mapped:
        block.pool.remove(before)
        _absorb_next(before, block)
        block = before
    return block


def _absorb_next(block: Block, after: Block) -> None:
    block.size += after.size
    block.next = after.next
    if after.next is not None:
        after.next.prev = block
