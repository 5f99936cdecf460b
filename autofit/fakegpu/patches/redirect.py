"""Let a name of torch or of another package mean the simulated card inside a block, for every holder of the name.

Setting an attribute is not enough: `from torch.cuda import is_available` keeps the function, not the attribute, and a
module imported inside the block would keep the replacement after it. So a Python function stays the object that it is,
and its code is exchanged while the block runs: everyone who has it, from before or from inside the block, calls the
card of the block, and the original afterwards. What has no Python code (a class, a function written in C, a name that
only CUDA builds have) gets a stand-in: one object per target and process, which is the attribute while a block runs,
passes calls to the original outside, and is redirected like a function inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from functools import partial
from inspect import CO_GENERATOR
from types import CodeType, FunctionType
from typing import TypeVar, cast

# What a block changes, and how it is restored: every action runs, whatever the others or the block raise.

Entered = TypeVar("Entered")
Target = tuple[object, str, object, str]  # the owner of a name, the name, its value, the reason


class Undo:
    """A list of actions that run in reverse. Add an action before the change that it takes back."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], object]] = []

    def add(self, action: Callable[..., object], *args: object) -> None:
        self._actions.append(partial(action, *args))

    def enter(self, manager: AbstractContextManager[Entered]) -> Entered:
        """Enter a context manager; it is left like any other action, and is told of no exception."""
        value = manager.__enter__()
        self.add(manager.__exit__, None, None, None)
        return value

    def run(self) -> list[BaseException]:
        """Run all actions once, the latest first; returns the exceptions that they raised."""
        errors: list[BaseException] = []
        while self._actions:
            try:
                self._actions.pop()()
            except BaseException as error:
                errors.append(error)
        return errors


MISSING = object()
Original = TypeVar("Original", bound=Callable[..., object])


def _redirected(*args: object, _to: Callable[..., object], **kwargs: object) -> object:
    return _to(*args, **kwargs)


def _with_a_cell(cell: object) -> FunctionType:
    def redirected(*args: object, _to: Callable[..., object], **kwargs: object) -> object:
        return _to(*args, **kwargs) if True else cell  # never read, as it may be empty

    return cast("FunctionType", redirected)


def _redirected_generator(
    *args: object, _to: Callable[..., Iterable[object]], **kwargs: object
) -> Generator[object, None, None]:
    yield from _to(*args, **kwargs)


# By the number of variables of outer functions, which a function keeps: the code that it gets must have as many, and
# be a generator's where its own is (from Python 3.13 on).
_CODES = {
    (0, False): _redirected.__code__, (1, False): _with_a_cell(None).__code__,
    (0, True): _redirected_generator.__code__,
}  # fmt: skip


def _kind(code: CodeType) -> tuple[int, bool]:
    return len(code.co_freevars), bool(code.co_flags & CO_GENERATOR)


def redirect(function: FunctionType, to: Callable[..., object], undo: Undo) -> None:
    """Let every call of `function` call `to`, until the undo. Redirections of one function nest."""
    code, defaults = function.__code__, function.__kwdefaults__
    undo.add(setattr, function, "__kwdefaults__", defaults)
    undo.add(setattr, function, "__code__", code)
    function.__kwdefaults__ = {**(defaults or {}), "_to": to}  # before the code, for threads that call it meanwhile
    function.__code__ = _CODES[_kind(code)]


def untouched(value: Original) -> Original:
    """A copy of function `value` that keeps the present code, so that a replacement can call the original."""
    function = _function(value)
    if function is None:
        return value
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return cast("Original", copy)


def replace(owner: object, name: str, value: object, undo: Undo) -> None:
    """Let `owner.name` be `value` until the undo, also for those who hold or take the old object."""
    held = vars(owner).get(name, MISSING)
    old = held if held is not MISSING else getattr(owner, name, MISSING)
    function = _function(held)
    to = value.__func__ if isinstance(value, staticmethod) else value
    if function is not None and _kind(function.__code__) in _CODES and callable(to):
        redirect(function, to, undo)
    elif callable(to) and (callable(old) or old is MISSING):
        made, entry = _stand_in(owner, name, old)
        redirect(entry, to, undo)
        put = staticmethod(made) if isinstance(value, staticmethod) else made
        _set(owner, name, put, held, undo, keep_others=True)
    else:
        _set(owner, name, value, held, undo)


def _set(owner: object, name: str, value: object, held: object, undo: Undo, *, keep_others: bool = False) -> None:
    """Set an attribute until the undo; with `keep_others`, the undo leaves what another package put there since."""

    def restore() -> None:
        if keep_others and vars(owner).get(name) is not value:
            return
        if held is not MISSING:
            setattr(owner, name, held)
        elif name in vars(owner):
            delattr(owner, name)

    undo.add(restore)
    setattr(owner, name, value)


def _function(value: object) -> FunctionType | None:
    if isinstance(value, staticmethod):
        value = value.__func__
    return value if isinstance(value, FunctionType) else None


# ---------------------------------------------------------------------- stand-ins
_STAND_INS: dict[tuple[int, str, int], tuple[Callable[..., object], FunctionType, object, object]] = {}


def _stand_in(owner: object, name: str, original: object) -> tuple[Callable[..., object], FunctionType]:
    """The stand-in of `owner.name`, always the same one, and the function through which its calls go."""
    key = (id(owner), name, id(original))
    if key not in _STAND_INS:
        made = _class(original) if isinstance(original, type) else _callable(original, name)
        _STAND_INS[key] = (*made, owner, original)  # keeps both alive, so that no other object gets their ids
    return _STAND_INS[key][:2]


def _callable(original: object, name: str) -> tuple[Callable[..., object], FunctionType]:
    call = cast("Callable[..., object]", _missing(name) if original is MISSING else original)

    def stand_in(*args: object, **kwargs: object) -> object:
        return call(*args, **kwargs)

    if original is not MISSING:
        functools.update_wrapper(stand_in, call)
    made = cast("FunctionType", stand_in)
    return made, made


def _missing(name: str) -> Callable[..., object]:
    def fail(*args: object, **kwargs: object) -> object:
        raise RuntimeError(f"{name} exists on the simulated card only, and its block has ended")

    return fail


def _class(original: type) -> tuple[Callable[..., object], FunctionType]:
    """A subclass of `original` whose calls go through a function, and whose instances are all those of `original`."""

    def make(*args: object, **kwargs: object) -> object:
        return original(*args, **kwargs)

    def call(cls: type, *args: object, **kwargs: object) -> object:
        return make(*args, **kwargs) if cls is made else type(original).__call__(cls, *args, **kwargs)

    def is_instance(cls: type, value: object) -> bool:
        return isinstance(value, original) if cls is made else type(original).__instancecheck__(cls, value)

    def is_subclass(cls: type, other: type) -> bool:
        return issubclass(other, original) if cls is made else type(original).__subclasscheck__(cls, other)

    checks = {"__call__": call, "__instancecheck__": is_instance, "__subclasscheck__": is_subclass}
    meta = type("StandIn", (type(original),), checks)
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    made = meta(original.__name__, (original,), names)
    return made, cast("FunctionType", make)
