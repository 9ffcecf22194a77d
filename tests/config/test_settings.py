"""Settings survive their JSON form, and invalid ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.settings import Settings


@given(
    st.builds(
        Settings,
        home=st.text(),
        run_file=st.just(""),
        join=st.text(min_size=1),
        port=st.integers(0, 65535),
        stage=st.integers(-1, 4095),
        slow_factor=st.floats(1, 1000),
        compute_stand_in_ms=st.floats(0, 1e6),
        ephemeral=st.booleans(),
    )
)
def test_settings_come_back_from_json_equal(settings: Settings) -> None:
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    "fields",
    [
        {"run_file": "a", "join": "b"},
        {"run_file": "a", "join_told": True},
        {"join": "b", "join_told": True},
        {"join": "b", "port": 65536},
        {"join": "b", "slow_factor": 0.5},
        {"join": "b", "compute_stand_in_ms": -1},
        {"join": "b", "nickname": "\x1b"},
        {"join": "b", "team": "x" * 25},
    ],
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Settings(home="h", **fields)
