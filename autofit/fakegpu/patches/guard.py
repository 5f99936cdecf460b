"""Let fake tensors live on `cuda:0` in CPU builds of torch: the only module that touches torch's C++ tables.

Two things are missing without a card. One is a device guard for CUDA: torch has a no-op guard for exactly this use, but
puts it only in the place of a guard that counts no devices (`_ensureCUDADeviceGuardSet`, which FakeTensorMode calls on
CUDA builds), and a CPU build has none to replace. So a copy of the guard of `meta` that counts no devices takes the
slot for a moment. The other is hooks that report CUDA as available, without which autograd refuses: a copy of the table
of the hooks' virtual functions, in which a few entries point at a function of torch that returns 1. No code is written
to memory, and `remove` restores both pointers.

Entry numbers are read from the headers in torch's wheel, so they match the version, and are checked before any write by
calling entries with a known answer. Any mismatch raises `GuardUnavailableError`, and the caller falls back to fake
`cpu` tensors. Tested on Linux x86-64 with torch 2.13 (CPU build) and 2.11 and 2.15 (CUDA builds without a card).
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

_CUDA, _META = 1, 14  # c10::DeviceType
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_HEAD = 2  # an Itanium-ABI table has two words (offset, type) before its first function

_Pointers = ctypes.POINTER(ctypes.c_void_p)


class GuardUnavailableError(RuntimeError):
    """This torch or this machine is unsupported by the guard."""


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
        """(address, value) pairs to write; all of them are looked up and checked, and the old values are in place."""
        if sys.platform != "linux":
            raise GuardUnavailableError(f"the CUDA guard knows Linux, not {sys.platform}")
        try:
            library = Path(torch.__file__).parent / "lib"
            core, cpu = ctypes.CDLL(str(library / "libc10.so")), ctypes.CDLL(str(library / "libtorch_cpu.so"))
            registry = (ctypes.c_void_p * (_META + 1)).in_dll(core, _REGISTRY)
            guard = _table_of(registry[_META])
            guard_slots = _virtual_functions(
                "c10/core/impl/DeviceGuardImplInterface.h", "C10_API DeviceGuardImplInterface"
            )
            _check(guard, guard_slots, {"type": _META, "deviceCount": 1, "getDevice": _META})
            hooks = cpu[_HOOKS]
            hooks.restype = ctypes.c_void_p
            instance = hooks()
            old, slots = _table_of(instance), _hooks_slots()
            if torch.version.cuda is None:
                _check(old, slots, {"hasCUDA": 0, "isBuilt": 0})
            table = _Table(old, slots)
            table.put(_ANSWER_ONE, guard[guard_slots.index("deviceCount")])
            self._kept.append(table)
            writes = [(instance, table.address)]
            if not registry[_CUDA]:
                slot = ctypes.addressof(registry) + _CUDA * ctypes.sizeof(ctypes.c_void_p)
                writes.append((slot, _no_op_guard(slot, guard, guard_slots, old[slots.index("hasCUDA")])))
        except (OSError, ValueError, AttributeError) as error:
            raise GuardUnavailableError(f"torch {torch.__version__} is laid out differently: {error}") from error
        return writes


_ANSWER_ONE = ("isBuilt", "isAvailable", "hasCUDA", "hasPrimaryContext", "deviceCount")


def _no_op_guard(
    address: int, guard: ctypes._Pointer[ctypes.c_void_p], slots: list[str], answers_zero: int | None
) -> int:
    """The address of torch's no-op guard for CUDA, which torch puts into the slot at `address`; the slot is cleared."""
    table = _Table(guard, slots)
    table.put(("deviceCount",), answers_zero)
    without_devices = (ctypes.c_void_p * 2)(table.address, 0)
    slot = ctypes.c_void_p.from_address(address)
    slot.value = ctypes.addressof(without_devices)
    try:
        torch._C._ensureCUDADeviceGuardSet()
        made = slot.value
    finally:
        slot.value = None
    if made is None or made == ctypes.addressof(without_devices):
        raise GuardUnavailableError("torch did not install its no-op guard for CUDA")
    return made


def _hooks_slots() -> list[str]:
    return [
        *_virtual_functions("ATen/detail/AcceleratorHooksInterface.h", "TORCH_API AcceleratorHooksInterface"),
        *_virtual_functions("ATen/detail/CUDAHooksInterface.h", "TORCH_API CUDAHooksInterface"),
    ]


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
    """Call argument-free entries with a known low byte; a mismatch means that the header was misread."""
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


# The fallback for builds where fake CUDA tensors do not work: device `cuda` becomes `cpu`.


class CudaToCpu(TorchFunctionMode):
    """Rewrites device arguments of torch functions and methods; `.cuda()` returns the tensor itself."""

    def __torch_function__(
        self, func: Callable[..., object], types: Sequence[type], args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:  # fmt: skip
        if func is torch.Tensor.cuda:
            return args[0]
        changed = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.to:
            args = [_on_cpu(a) for a in args]
        return func(*args, **changed)


def _on_cpu(value: object) -> object:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return torch.device("cpu")
    return value
