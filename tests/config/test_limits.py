"""The owner's limits as text and as a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.limits import (
    Wishes,
    from_fields,
    load_wishes,
    parse_hours,
    parse_power,
    parse_rate,
    parse_share,
    parse_size,
    save_wishes,
    to_fields,
)
from peerd.config.paths import Home
from peerd.errors import DiskError, UsageError
from peerd.policy.owner.governor import Hours, Limits

amounts = st.floats(0, 1e15) | st.just(0)
minutes = st.integers(0, 1439)
limits = st.builds(
    Limits,
    upload=amounts,
    download=amounts,
    daily=st.integers(0, 10**15),
    monthly=st.integers(0, 10**15),
    memory=st.integers(0, 10**12),
    disk=st.integers(0, 10**15),
    duty=st.floats(0.01, 1),
    power=st.floats(0, 10_000),
    hours=st.none() | st.tuples(minutes, minutes).filter(lambda both: both[0] != both[1]).map(lambda both: Hours(*both)),
    max_temperature=st.floats(0, 150),
    while_used=st.booleans(),
    on_battery=st.booleans(),
    on_metered=st.booleans(),
)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("20Mbit", 2.5e6),
        ("20mbit/s", 2.5e6),
        ("2.5MB/s", 2.5e6),
        ("2.5 MB", 2.5e6),
        ("1Gbps", 1.25e8),
        ("8kbit", 1000),
        ("none", 0),
        ("1Gbit", 1.25e8),
    ],
)
def test_rates_in_bits_and_bytes(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "fast", "-5Mbit", "5", "5M", "1e9bit", "1bit", "\u0663Mbit", "20Mb", "5Mbit extra"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_rate(text)


def test_sizes_shares_and_hours() -> None:
    assert parse_size("6GB") == 6 * 10**9
    assert parse_size("none") == 0
    assert parse_share("50%") == parse_share("50") == 0.5
    assert parse_hours("22:00-07:00") == Hours(22 * 60, 7 * 60)
    assert parse_hours("none") is None


@pytest.mark.parametrize("text", ["", "22-07", "25:00-07:00", "22:60-07:00", "22:00", "22:00-22:00", "24:00-01:00"])
def test_what_is_no_span_of_hours_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="22:00-07:00"):
        parse_hours(text)


def test_watts_with_and_without_their_letter() -> None:
    assert parse_power("200W") == parse_power("200") == parse_power("0.2 kW") == 200
    assert parse_power("none") == 0


@pytest.mark.parametrize("text", ["", "-5W", "0W", "much", "200V", "2MW", "11kW", "\u0663W"])
def test_what_is_no_power_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="200W"):
        parse_power(text)


@given(limits)
def test_limits_survive_json(kept: Limits) -> None:
    assert from_fields(json.loads(json.dumps(to_fields(kept)))) == kept


@given(st.sampled_from(sorted(to_fields(Limits()))), st.sampled_from([None, "x", [], {}, True, -3, float("nan")]))
def test_a_field_of_another_kind_is_an_error_and_no_surprise(name: str, value: object) -> None:
    fields = {**to_fields(Limits()), name: value}
    try:
        from_fields(fields)
    except (ValueError, TypeError):
        return
    assert value is True
    assert name in ("while_used", "on_battery", "on_metered")


def test_wishes_come_back_from_the_home(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert load_wishes(home) == Wishes()
    wishes = Wishes(limits=Limits(upload=1e6, hours=Hours(1, 2)), paused=True, paused_until_s=1e9)
    save_wishes(home, wishes)
    assert load_wishes(home) == wishes


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"limits": {"upload": "much"}}', '{"limits": {}, "paused": 3}', '{"limits": {"odd": 1}}', "[" * 9000]
)
def test_a_damaged_file_is_said_and_not_passed_over(tmp_path: Path, text: str) -> None:
    home = Home(tmp_path)
    home.limits.write_text(text)
    with pytest.raises(UsageError, match="damaged"):
        load_wishes(home)


def test_a_home_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError):
        save_wishes(Home(tmp_path / "file"), Wishes(paused=True))


def test_each_verb_of_the_owner_changes_what_it_names_and_nothing_else() -> None:
    limited = Wishes().after("limits", {"change": {"upload": 1e6}})
    assert limited == Wishes(limits=Limits(upload=1e6))
    paused = limited.after("pause", {"for_s": 60.0})
    assert (paused.paused, paused.limits, paused.paused_until_s > 0) == (True, limited.limits, True)
    assert limited.after("pause", {}).paused_until_s == 0
    assert paused.after("resume", {}) == limited.after("limits", {}) == limited


@pytest.mark.parametrize(
    ("verb", "request_"),
    [
        *(("pause", {"for_s": for_s}) for for_s in (True, "2h", -1, 1e9)),
        *(("limits", {"change": change}) for change in ("upload", {"upload": "fast"}, {"speed": 1})),
    ],
)
def test_what_no_owner_can_ask_for_is_refused(verb: str, request_: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Wishes().after(verb, request_)
