"""Typed reads from one JSON object: a wrong value becomes an error, never a wrong number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lcplan.errors import ModelError

MAX_SIZE = 10**9
"""A size above this is a typing error, not a model."""


class ConfigReader:
    """The values of one object of a config.json; ``prefix`` is the path to it."""

    def __init__(self, values: Mapping[str, Any], *, id: str, prefix: str = "") -> None:
        self.values = values
        self.id = id
        self.prefix = prefix

    def error(self, code: str, key: str, problem: str) -> ModelError:
        """An error about one key: what is wrong with it, the rule, the fix."""
        return ModelError(code, f"{self.id}: {self.prefix}{key} {problem}")

    def missing(self, key: str) -> ModelError:
        """An error about a key that must be there."""
        return self.error(
            "missing-key", key, "is missing. It is never guessed: add it, or use the model's own config.json."
        )

    def _wrong(self, code: str, key: str, rule: str) -> ModelError:
        return self.error(code, key, f"is {self.values[key]!r:.60}. It must be {rule}: correct config.json.")

    def has(self, key: str) -> bool:
        """The key is there and not null."""
        return self.values.get(key) is not None

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number; without a default the key must be there."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong("bad-size", key, f"a whole number from {least:,} to {most:,}")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._wrong("bad-number", key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong("bad-flag", key, "true or false")
        return value

    def object(self, key: str) -> ConfigReader:
        """A reader of the object under a key."""
        if not self.has(key):
            raise self.missing(key)
        value = self.values[key]
        if not isinstance(value, Mapping):
            raise self._wrong("bad-config", key, "a JSON object")
        return ConfigReader(value, id=self.id, prefix=f"{self.prefix}{key}.")
