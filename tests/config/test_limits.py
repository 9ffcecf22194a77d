"""The owner's limits as text and as a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.config import laptop
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
    inference=st.floats(0, 1),
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


@pytest.mark.parametrize(("text", "num_devices", "most"), [("5kW", 1, "2000W"), ("2001W", 1, "2000W"), ("5kW", 2, "4000W")])
def test_more_power_than_devices_draw_is_refused_in_a_sentence_with_the_most(text: str, num_devices: int, most: str) -> None:
    with pytest.raises(ValueError, match=rf"^{text}: no .* that much; name at most {most}, like 200W, or none$"):
        parse_power(text, num_devices)
    assert parse_power("5kW", 8) == 5000


@pytest.mark.parametrize("text", ["500Gbit", "2Tbit", "60GB/s"])
def test_a_rate_that_no_line_carries_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="at most 400Gbit"):
        parse_rate(text)


def test_a_size_that_no_machine_has_is_refused() -> None:
    assert parse_size("10000TB") == 10**16
    with pytest.raises(ValueError, match="at most 10000TB"):
        parse_size("10001TB")


@pytest.mark.parametrize("battery", [False, True])
def test_a_laptop_pauses_on_battery_and_while_used_until_its_owner_says_otherwise(
    battery: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laptop, "has_battery", lambda: battery)
    home, usual = Home(tmp_path / "home"), laptop.usual_limits()
    assert usual == Limits(while_used=not battery, on_battery=not battery)
    found = load_wishes(home, usual)
    assert found.limits == usual
    save_wishes(home, found.after("limits", {"change": {"upload": 1e6}}))
    assert load_wishes(home, usual).limits == replace(usual, upload=1e6)
    save_wishes(home, found.after("limits", {"change": {"on_battery": True, "while_used": True}}))
    assert load_wishes(home, usual).limits == Limits(), "switched off"


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
