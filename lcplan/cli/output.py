"""What several commands share of their output."""

from __future__ import annotations

from typing import cast, get_args

from pydantic import BaseModel

from lcplan.errors import InputError
from lcplan.units import ByteUnits


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


def check_units(value: str) -> ByteUnits:
    """``--units`` as one of its two values.

    Raises:
        InputError: for any other.
    """
    check_choice("--units", value, get_args(ByteUnits))
    return cast("ByteUnits", value)
