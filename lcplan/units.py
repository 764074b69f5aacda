"""Sizes and counts: ``int`` inside, parsed and printed here only.

Bytes are powers of 1024 with an ``i`` (GiB) and of 1000 without (GB); the label always matches the divisor.
"""

from __future__ import annotations

import re
from typing import Literal

from lcplan.errors import InputError

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4
GB = 10**9

ByteUnits = Literal["GiB", "GB"]
_BYTE_UNITS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB,
}  # fmt: skip
_COUNT_UNITS = {
    "": 1,
    "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9,
    "KI": 1024, "MI": 1024**2, "GI": 1024**3,
}  # fmt: skip
MAX_NUMBER_LENGTH = 40
"""Characters; a longer number is a mistake, and Python refuses to convert very long ones."""
_NUMBER = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer not below ``numerator / denominator`` (shards are padded up)."""
    return -(-numerator // denominator)


def pow2_ceil(num_bytes: int) -> int:
    """Smallest power of two not below ``num_bytes``; 0 stays 0."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


def _parse(text: str, units: dict[str, int], *, what: str, examples: str) -> tuple[int, int]:
    """The number as a fraction ``(numerator, denominator)`` of whole units, exact."""
    match = _NUMBER.match(text)
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in units or len(text) > MAX_NUMBER_LENGTH:
        raise InputError("bad-number", f"{what} {text!r:.60} is not understood. Write it as {examples}.")
    whole, _, fraction = match.group(1).replace("_", "").partition(".")
    return int(whole + fraction) * units[unit], int(10 ** len(fraction))


def parse_bytes(text: str) -> int:
    """``"80GB"`` or ``"79.6GiB"`` as bytes, to the nearest byte; a bare ``"80G"`` is refused: it could be either.

    Raises:
        InputError: for anything else.
    """
    numerator, denominator = _parse(text, _BYTE_UNITS, what="size", examples="80GB (10^9) or 80GiB (2^30)")
    return round(numerator / denominator) if numerator % denominator else numerator // denominator


def parse_count(text: str) -> int:
    """``"1048576"``, ``"1Mi"`` (2^20) or ``"1M"`` (10^6) as an integer.

    Raises:
        InputError: for anything else, and for a fraction of one.
    """
    examples = "1048576, 1Mi (2^20) or 1M (10^6)"
    numerator, denominator = _parse(text, _COUNT_UNITS, what="count", examples=examples)
    if numerator % denominator:
        raise InputError("bad-number", f"count {text!r} is not a whole number. Write it as {examples}.")
    return numerator // denominator


def format_bytes(num_bytes: int, units: ByteUnits = "GiB") -> str:
    """``56.2 GB``-style text: three significant places around the chosen unit, smaller ones in MiB or MB."""
    big, small, small_name = (GIB, MIB, "MiB") if units == "GiB" else (GB, 10**6, "MB")
    if abs(num_bytes) >= big // 10 or num_bytes == 0:
        return f"{num_bytes / big:,.2f} {units}"
    return f"{num_bytes / small:,.1f} {small_name}"


def exact_bytes(num_bytes: int) -> str:
    """The shortest text of whole units that ``parse_bytes`` reads as just so many bytes: ``2TiB``."""
    whole = [
        f"{num_bytes // size}{name.replace('I', 'i')}" for name, size in _BYTE_UNITS.items() if not num_bytes % size
    ]
    return min(whole, key=len)


def format_parameters(count: int) -> str:
    """Parameters in 10^9 (``8.19 B``) or 10^6 (``596.0 M``)."""
    return f"{count / 1e9:.2f} B" if count >= 10**9 else f"{count / 1e6:.1f} M"
