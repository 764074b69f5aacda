"""What several commands share of their output."""

from __future__ import annotations

from pydantic import BaseModel

from lcplan.errors import InputError


def print_json(record: BaseModel) -> None:
    """One record as JSON on stdout."""
    print(record.model_dump_json(indent=2))  # noqa: T201


def check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value outside a closed set.

    Raises:
        InputError: naming the flag, the value and the choices.
    """
    if value not in choices:
        raise InputError("bad-choice", f"{flag} {value!r} is not one of: {', '.join(choices)}.")
