"""What a block changes, and how it is restored: every action runs, whatever the others or the block raise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

Entered = TypeVar("Entered")


class Undo:
    """A list of actions that run in reverse. Add an action before the change that it takes back."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], object]] = []

    def add(self, action: Callable[..., object], *args: object) -> None:
        self._actions.append(partial(action, *args))

    def enter(self, manager: AbstractContextManager[Entered]) -> Entered:
        """Enter a context manager; it is left like any other action, without the block's exception."""
        value = manager.__enter__()
        self.add(manager.__exit__, None, None, None)
        return value

    def run(self) -> list[BaseException]:
        """Run all actions once, the latest first; returns what they raised."""
        errors: list[BaseException] = []
        while self._actions:
            try:
                self._actions.pop()()
            except BaseException as error:
                errors.append(error)
        return errors
