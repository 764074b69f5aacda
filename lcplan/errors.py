"""Errors a user can act on.

LcplanError
├── InputError            bad flag, file or value                    exit 2
│   ├── ModelError        unknown, corrupt or unsupported model
│   ├── PlanError         impossible or refused combination
│   └── DataError         dataset missing, unreadable or too short
└── EnvironmentProblem    missing extra, missing GPU, failed launch  exit 2

Each carries a stable ``code`` and a message in three parts: what is wrong with which value, the rule, the fix.
"""

from __future__ import annotations


class LcplanError(Exception):
    """Base of every error that lcplan raises on purpose; the CLI prints its message and exits 2."""

    def __init__(self, code: str, message: str) -> None:
        """``code`` is kebab-case and stable; ``message`` says what is wrong, the rule and the fix."""
        super().__init__(message)
        self.code = code
        self.message = message


class InputError(LcplanError):
    """A value that a user gave cannot be used."""


class ModelError(InputError):
    """The model is unknown, its config is corrupt, or its architecture is refused."""


class PlanError(InputError):
    """The plan's values are impossible, or the stack refuses their combination."""


class DataError(InputError):
    """The dataset is missing, unreadable or too short."""


class EnvironmentProblem(LcplanError):
    """This machine lacks something that the command needs."""
