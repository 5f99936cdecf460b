"""Bytes of all CUDA kernels in shared libraries, by compute capability: what eager loading puts on a card.

    python experiments/context/kernel_bytes.py libtorch_cuda.so libcublas.so.12 libcublasLt.so.12

A fat binary holds one ELF image a compute capability; the driver loads the newest one of the card's major version that
is not above it. Of compressed images the size before compression counts. The format is NVIDIA's; that of its header is
described in public decompressors (for example cubin tools), and every image found here starts with that header.
"""

import mmap
import struct
import sys
from collections import Counter
from pathlib import Path

CAPABILITIES = (70, 75, 80, 86, 89, 90)
_MAGIC = struct.pack("<I", 0xBA55ED50)
_ELF, _COMPRESSED = 2, 0xA000  # kind of an entry; flags of compressed ones


def kernel_bytes(path: Path) -> Counter[int]:
    """Bytes of code by capability (80 is 8.0)."""
    found: Counter[int] = Counter()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(_MAGIC)
        while at >= 0:
            version, header, size = struct.unpack_from("<HHQ", data, at + 4)
            if (version, header) == (1, 16):
                for capability, nbytes in _loaded(_images(data, at + header, at + header + size)).items():
                    found[capability] += nbytes
                at += header + size
            else:
                at += 4
            at = data.find(_MAGIC, at)
    return found


def _images(data: mmap.mmap, at: int, end: int) -> Counter[int]:
    images: Counter[int] = Counter()
    while at < end:
        kind, _, header, payload = struct.unpack_from("<HHIQ", data, at)
        (capability,) = struct.unpack_from("<I", data, at + 28)
        (flags,) = struct.unpack_from("<Q", data, at + 40)
        if kind == _ELF:
            (plain,) = struct.unpack_from("<Q", data, at + 56) if flags & _COMPRESSED else (payload,)
            images[capability] += plain or payload
        at += header + payload
    return images


def _loaded(images: Counter[int]) -> dict[int, int]:
    usable = {c: [i for i in images if i // 10 == c // 10 and i <= c] for c in CAPABILITIES}
    return {c: images[max(found)] for c, found in usable.items() if found}


if __name__ == "__main__":
    total: Counter[int] = Counter()
    for name in sys.argv[1:]:
        found = kernel_bytes(Path(name))
        total += found
        print(f"{Path(name).name:24}", *(f"{c / 10}: {found[c] / 1e6:6.1f} MB" for c in CAPABILITIES))
    print(f"{'all':24}", *(f"{c / 10}: {total[c] / 1e6:6.1f} MB" for c in CAPABILITIES))
