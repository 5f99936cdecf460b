"""Let fake tensors live on `cuda:0` where torch has no CUDA: the only module that touches torch's C++ tables.

A CPU-only build lacks two things: a device guard for CUDA (the registry slot is null), and hooks that report CUDA as
available (autograd refuses otherwise). Both are C++ objects with a table of virtual functions. We copy the table of an
existing object (the no-op guard of `meta`; the stub hooks), point some entries at functions that return a constant, and
install the copy. `remove` restores the original.

Entry numbers are read from the headers in torch's wheel, so they match the version, and are checked before any write by
calling entries with a known answer. Any mismatch raises `GuardUnavailableError`, and the caller falls back to fake
`cpu` tensors. Tested with torch 2.13 (CPU build, Linux x86-64).
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

_CUDA, _META = 1, 14  # c10::DeviceType
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_HEAD = 2  # an Itanium-ABI table has two words (offset, type) before its first function

# Machine code: return a c10::Stream (DEFAULT, cuda:0), a 16-byte struct that comes back in two registers.
_STREAM_CODE = {
    "x86_64": bytes.fromhex("b80100000031d2c3"),  # mov eax, 1; xor edx, edx; ret
    "aarch64": bytes.fromhex("20008052010080d2c0035fd6"),  # mov w0, 1; mov x1, 0; ret
}
_Pointers = ctypes.POINTER(ctypes.c_void_p)


class GuardUnavailableError(RuntimeError):
    """The guard does not support this torch or this machine."""


class CudaGuard:
    """Installs and removes the CUDA guard and hooks. Calls nest by a counter."""

    def __init__(self) -> None:
        self._count = 0
        self._kept: list[object] = []
        self._undo: list[tuple[ctypes.c_void_p, int | None]] = []
        self._prepared: list[tuple[int, int]] | None = None

    def install(self) -> None:
        """Install the tables; on a CUDA build, its own guard stays and only the hooks are replaced."""
        if self._count == 0:
            if self._prepared is None:
                self._prepared = self._prepare()
            for address, value in self._prepared:
                slot = ctypes.c_void_p.from_address(address)
                self._undo.append((slot, slot.value))
                slot.value = value
        self._count += 1

    def remove(self) -> None:
        self._count -= 1
        if self._count == 0:
            while self._undo:
                slot, value = self._undo.pop()
                slot.value = value

    def _prepare(self) -> list[tuple[int, int]]:
        """(address, value) pairs to write. Looks up and checks all of them, writes none."""
        machine = platform.machine()
        if sys.platform != "linux" or machine not in _STREAM_CODE:
            raise GuardUnavailableError(
                f"the CUDA guard knows Linux on x86_64 and aarch64, not {sys.platform} {machine}"
            )
        try:
            library = Path(torch.__file__).parent / "lib"
            core, cpu = ctypes.CDLL(str(library / "libc10.so")), ctypes.CDLL(str(library / "libtorch_cpu.so"))
            registry = (ctypes.c_void_p * (_META + 1)).in_dll(core, _REGISTRY)
            writes = [self._hooks_write(cpu)]
            if not registry[_CUDA]:
                writes.append(self._guard_write(registry, _STREAM_CODE[machine]))
        except (OSError, ValueError, AttributeError) as error:
            raise GuardUnavailableError(f"torch {torch.__version__} is laid out differently: {error}") from error
        return writes

    def _guard_write(self, registry: ctypes.Array[ctypes.c_void_p], stream_code: bytes) -> tuple[int, int]:
        slots = _virtual_functions("c10/core/impl/DeviceGuardImplInterface.h", "C10_API DeviceGuardImplInterface")
        old = _table_of(registry[_META])
        _check(old, slots, {"type": _META, "deviceCount": 1, "getDevice": _META})
        one, nothing = old[slots.index("deviceCount")], old[slots.index("setDevice")]
        stream = self._executable(stream_code)
        table = _Table(old, slots)
        table.put(("record", "block", "synchronizeEvent", "synchronizeDevice", "recordDataPtrOnStream"), nothing)
        table.put(("type", "exchangeDevice", "getDevice", "queryEvent"), one)  # DeviceType::CUDA and cuda:0 are both 1
        table.put(("getStream", "getDefaultStream", "getNewStream", "getStreamFromGlobalPool"), stream)
        table.put(("exchangeStream",), stream)
        instance = (ctypes.c_void_p * 2)(table.address, 0)
        self._kept += [table, instance]
        return ctypes.addressof(registry) + _CUDA * ctypes.sizeof(ctypes.c_void_p), ctypes.addressof(instance)

    def _hooks_write(self, cpu: ctypes.CDLL) -> tuple[int, int]:
        slots = [
            *_virtual_functions("ATen/detail/AcceleratorHooksInterface.h", "TORCH_API AcceleratorHooksInterface"),
            *_virtual_functions("ATen/detail/CUDAHooksInterface.h", "TORCH_API CUDAHooksInterface"),
        ]
        get_hooks = cpu[_HOOKS]
        get_hooks.restype = ctypes.c_void_p
        hooks = get_hooks()
        old = _table_of(hooks)
        if torch.version.cuda is None:
            _check(old, slots, {"hasCUDA": 0, "isBuilt": 0})
        table = _Table(old, slots)
        one = self._executable(_ONE_CODE[platform.machine()])
        table.put(("isBuilt", "isAvailable", "hasCUDA", "hasPrimaryContext", "deviceCount"), one)
        self._kept.append(table)
        return hooks, table.address

    def _executable(self, code: bytes) -> int:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        self._kept.append(page)
        return ctypes.addressof(ctypes.c_char.from_buffer(page))


_ONE_CODE = {
    "x86_64": bytes.fromhex("b801000000c3"),  # mov eax, 1; ret
    "aarch64": bytes.fromhex("20008052c0035fd6"),  # mov w0, 1; ret
}


class _Table:
    """A copy of a table of virtual functions, with some entries replaced."""

    def __init__(self, old: ctypes._Pointer[ctypes.c_void_p], slots: list[str]) -> None:
        self._slots = slots
        self._words = (ctypes.c_void_p * (len(slots) + _HEAD))(*[old[i] for i in range(-_HEAD, len(slots))])

    @property
    def address(self) -> int:
        return ctypes.addressof(self._words) + _HEAD * ctypes.sizeof(ctypes.c_void_p)

    def put(self, names: Iterable[str], function: int | None) -> None:
        for name in names:
            if name in self._slots:
                self._words[self._slots.index(name) + _HEAD] = function


def _table_of(instance: object) -> ctypes._Pointer[ctypes.c_void_p]:
    return ctypes.cast(ctypes.cast(instance, _Pointers)[0], _Pointers)  # type: ignore[arg-type]


def _check(table: ctypes._Pointer[ctypes.c_void_p], slots: list[str], expected: dict[str, int]) -> None:
    """Call entries without arguments and with a known low byte; a mismatch means that the header was misread."""
    for name, value in expected.items():
        function = ctypes.CFUNCTYPE(ctypes.c_uint8, ctypes.c_void_p)(table[slots.index(name)])
        answer = function(None)
        if answer != value:
            raise GuardUnavailableError(f"virtual function {name!r} answered {answer}, not {value}")


def _virtual_functions(header: str, class_name: str) -> list[str]:
    """Names of a class's virtual functions in table order, from its header; a destructor takes two entries."""
    text = (Path(torch.__file__).parent / "include" / header).read_text()
    body = text[text.index("{", text.index(class_name)) :]
    depth = end = 0
    for end, character in enumerate(body):  # noqa: B007
        depth += (character == "{") - (character == "}")
        if depth == 0:
            break
    body = re.sub(r"/\*.*?\*/", "", re.sub(r"//.*", "", body[:end]), flags=re.S)
    names: list[str] = []
    for match in re.finditer(r"virtual\s+([^;{]*?)(~?\w+)\s*\(", body):
        names += ["~", "~~"] if match.group(2).startswith("~") else [match.group(2)]
    return names


CUDA_GUARD = CudaGuard()
