"""Shows how an item's bytes were worked out: the same code, run on integers that remember their arithmetic.

Under ``showing_working`` every item gets its arguments as ``Working`` integers and returns one, so that the text that a
user reads is what was computed. ``min`` and ``max`` keep the one they chose; other functions give a plain number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_showing: ContextVar[bool] = ContextVar("showing_working", default=False)
TIMES, MINUS = "\u00d7", "\u2212"
SIDES = ("names", "numbers")
"""The two texts of an expression, as attributes of ``Working``."""
SUM, PRODUCT, ATOM = 0, 1, 2
"""How tightly an expression binds."""


class Working(int):
    """An integer with the expression it came from, in names and in numbers."""

    names: str
    numbers: str
    binds: int
    negated: Working | None
    """What this is the negative of."""

    @classmethod
    def of(cls, value: int, names: str, numbers: str, binds: int = ATOM, negated: Working | None = None) -> Working:
        """A value with both texts."""
        self = cls(value)
        self.names, self.numbers, self.binds, self.negated = names, numbers, binds, negated
        return self

    @classmethod
    def argument(cls, name: str, value: int) -> Working:
        """An argument of an item."""
        return cls.of(value, name, f"{value:,}")

    def _joined(self, left: int, sign: str, right: int, value: int, binds: int) -> Working:
        # the right side of a division or a difference must bind more tightly than the whole
        tighter = binds + 1 if sign in ("/", MINUS) else binds
        names, numbers = (f"{_text(left, side, binds)} {sign} {_text(right, side, tighter)}" for side in SIDES)
        return Working.of(value, names, numbers, binds)

    def __add__(self, other: int) -> int:
        if not self or not other:
            return self or other
        return self._joined(self, "+", other, int(self) + int(other), SUM)

    def __radd__(self, other: int) -> int:
        return self._joined(other, "+", self, int(other) + int(self), SUM) if other else self

    def __sub__(self, other: int) -> int:
        return self._joined(self, MINUS, other, int(self) - int(other), SUM) if other else self

    def __mul__(self, other: int) -> int:
        return self._joined(self, TIMES, other, int(self) * int(other), PRODUCT)

    def __rmul__(self, other: int) -> int:
        return self._joined(other, TIMES, self, int(other) * int(self), PRODUCT) if other != 1 else self

    def __floordiv__(self, other: int) -> int:
        if other == 1:
            return self
        if self.negated is None:
            return self._joined(self, "/", other, int(self) // int(other), PRODUCT)
        # -(-a // b) is how a division is rounded up
        whole = self.negated
        return -self._joined(whole, "/", other, -(int(self) // int(other)), PRODUCT)

    def __neg__(self) -> int:
        if self.negated is not None:
            return self.negated
        names, numbers = (f"{MINUS}{_text(self, side, ATOM)}" for side in SIDES)
        return Working.of(-int(self), names, numbers, SUM, negated=self)


def _text(part: int, side: str, binds: int) -> str:
    if not isinstance(part, Working):
        return f"{part:,}"
    text: str = getattr(part, side)
    return text if part.binds >= binds else f"({text})"


@contextmanager
def showing_working() -> Iterator[None]:
    """Items called within return ``Working`` integers."""
    token = _showing.set(True)
    try:
        yield
    finally:
        _showing.reset(token)


def named(arguments: dict[str, Any]) -> dict[str, Any]:
    """An item's arguments, which remember their names while working is shown."""
    if not _showing.get():
        return arguments
    return {
        name: Working.argument(name, value) if type(value) in (int, Working) else value
        for name, value in arguments.items()
    }
