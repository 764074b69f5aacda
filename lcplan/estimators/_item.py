"""An item is a pure function from sizes to bytes whose docstring says where the formula comes from.

The docstring's ``Formula:``, ``Source:`` and ``Confidence:`` lines are read once and printed with the number, so
the explanation a user sees cannot drift from the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, cast

from lcplan.estimators.working import named
from lcplan.ledger import Category, Confidence

P = ParamSpec("P")
_FIELD = re.compile(r"^(Formula|Live in|Rounding|Ignores|Source|Confidence): (.*)$")
_REQUIRED = ("Formula", "Live in", "Rounding", "Ignores", "Source", "Confidence")


def _parse(doc: str, name: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    current = None
    for line in doc.splitlines():
        match = _FIELD.match(line.strip())
        if match:
            current = match.group(1)
            fields[current] = match.group(2)
        elif current and line.strip():
            fields[current] += " " + line.strip()
        else:
            current = None
    missing = [field for field in _REQUIRED if field not in fields]
    if missing:
        raise TypeError(f"item {name}: docstring lacks {missing}")
    return fields


class Item(Generic[P]):
    """A named, sourced formula; call it with integers and it returns bytes."""

    def __init__(self, function: Callable[P, int], key: str, category: Category) -> None:
        fields = _parse(inspect.getdoc(function) or "", key)
        self.function = function
        self.key = key
        self.category = category
        self.formula = fields["Formula"].replace("``", "")
        self.source = fields["Source"]
        self.confidence = cast("Confidence", fields["Confidence"])
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> int:
        """Bytes of the item; see the wrapped function."""
        return self.function(*args, **cast("Any", named(kwargs)))


ITEMS: dict[str, Item[...]] = {}


def item(key: str, category: Category) -> Callable[[Callable[P, int]], Item[P]]:
    """Register a formula under ``group.name``; a key is taken once."""

    def register(function: Callable[P, int]) -> Item[P]:
        if key in ITEMS:
            raise TypeError(f"item {key} is defined twice")
        ITEMS[key] = Item(function, key, category)
        return cast("Item[P]", ITEMS[key])

    return register
