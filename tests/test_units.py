from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lcplan.errors import InputError
from lcplan.units import ceil_div, exact_bytes, format_bytes, format_parameters, parse_bytes, parse_count, pow2_ceil


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("2TB", 2 * 10**12),
        ("7B", 7),
        ("1_000kB", 10**6),
    ],
)
def test_parse_bytes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["80G", "80", "", "GB", "-1GB", "1e9B", "80 GBs", "٣GB", "9" * 50 + "GB"])
def test_an_ambiguous_or_broken_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="80GB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1M", 10**6), ("1Mi", 2**20), ("1048576", 2**20), ("128K", 128_000), ("128ki", 2**17), ("1.5M", 1_500_000)],
)
def test_parse_count(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["1.5", "0.0001K", "", "1MB", "-4", "nan", "1 M i"])
def test_a_broken_count_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="1048576"):
        parse_count(text)


@given(st.integers(1, 2**50))
def test_exact_bytes_are_read_back(num_bytes: int) -> None:
    assert parse_bytes(exact_bytes(num_bytes)) == num_bytes


def test_exact_bytes_are_short() -> None:
    sizes = {
        2**41: "2TiB",
        1152 * 2**30: "1152GiB",
        512 * 10**9: "512GB",
        10**12: "1TB",
        7: "7B",
        2**30 + 1: "1073741825B",
    }
    assert {size: exact_bytes(size) for size in sizes} == sizes


def test_the_label_matches_the_divisor() -> None:
    assert format_bytes(56_200_000_000, "GB") == "56.20 GB"
    assert format_bytes(3 * 2**30, "GiB") == "3.00 GiB"
    assert format_bytes(2**20, "GiB") == "1.0 MiB"
    assert format_bytes(10**6, "GB") == "1.0 MB"
    assert format_parameters(8_190_735_360) == "8.19 B"
    assert format_parameters(596_049_920) == "596.0 M"


@given(st.integers(1, 10**15), st.integers(1, 10**6))
def test_ceil_div_is_the_smallest_share_that_covers(total: int, ranks: int) -> None:
    share = ceil_div(total, ranks)
    assert (share - 1) * ranks < total <= share * ranks


@given(st.integers(1, 10**15))
def test_pow2_ceil_is_the_next_power_of_two(value: int) -> None:
    power = pow2_ceil(value)
    assert power & (power - 1) == 0
    assert power // 2 < value <= power
    assert pow2_ceil(0) == 0


@given(st.integers(0, 10**14), st.sampled_from(["B", "kB", "MB", "GiB", "MiB"]))
def test_whole_sizes_come_back_exactly(number: int, unit: str) -> None:
    factor = {"B": 1, "kB": 10**3, "MB": 10**6, "GiB": 2**30, "MiB": 2**20}[unit]
    assert parse_bytes(f"{number}{unit}") == number * factor
