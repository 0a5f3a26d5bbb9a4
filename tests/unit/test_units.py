"""Time limits and memory sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config.units import is_memory_size, time_limit_minutes


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90m", 90),
        ("24h", 1440),
        ("2d", 2880),
        ("2 h", 120),
        ("00:01:00", 1),
        ("00:00:01", 1),
        ("01:30:00", 90),
        ("01:30:01", 91),
        ("100:00:00", 6000),
        ("1-0", 1440),
        ("1-02", 1560),
        ("1-02:03", 1563),
        ("1-02:03:04", 1564),
        ("0-00:01", 1),
    ],
)
def test_time_limit(text: str, minutes: int) -> None:
    assert time_limit_minutes(text) == minutes


@pytest.mark.parametrize(
    "text",
    ["", "abc", "60", "86400", "1:30", "24:00", "25:99:00", "00:00:60", "1-24", "1-24:00:00", "1-02:60", "-5m", "+5m"]
    + ["1.5h", "5 minutes", "5M", "5m 3s", "5m\n", " 5m", "00:00:00", "0m", "0-0", "1-", "-1-02:00:00", "1e3m"],
)
def test_no_time_limit(text: str) -> None:
    with pytest.raises(ValueError, match=r"90m|at least one minute"):
        time_limit_minutes(text)


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_all_spellings_agree(days: int, hours: int, minutes: int, seconds: int) -> None:
    whole = (days * 24 + hours) * 60 + minutes + (seconds > 0)
    spellings = [
        f"{days}-{hours:02}:{minutes:02}:{seconds:02}",
        f"{days * 24 + hours:02}:{minutes:02}:{seconds:02}",
        f"{whole}m",
    ]
    for text in spellings:
        if whole:
            assert time_limit_minutes(text) == whole
        else:
            with pytest.raises(ValueError, match="at least one minute"):
                time_limit_minutes(text)


@given(st.text(max_size=12) | st.from_regex(r"[\d:mhd-]{1,10}"))
def test_any_text_is_a_limit_or_a_clear_refusal(text: str) -> None:
    try:
        minutes = time_limit_minutes(text)
    except ValueError as error:
        assert "write 90m" in str(error) or "at least one minute" in str(error)
    else:
        assert minutes >= 1


@pytest.mark.parametrize("text", ["0", "4000", "200G", "4000M", "1T", "64g", "512K", "2GB"])
def test_memory_size(text: str) -> None:
    assert is_memory_size(text)


@pytest.mark.parametrize("text", ["", "lots", "-1G", "1.5G", "200GG", "200 G", "G", "200P", "1G\n"])
def test_no_memory_size(text: str) -> None:
    assert not is_memory_size(text)
