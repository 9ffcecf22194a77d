"""The cells in which the simulation is compared with real daemons."""

from __future__ import annotations

import pytest

from scripts.benchmarks._link import NUM_PEERS
from scripts.benchmarks.predict import BYTES_PER_MBIT, CELLS, FRAMING, ODD, Cell, Row, missed

ADDRESSES = [f"10.99.0.{number + 1}" for number in range(NUM_PEERS)]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_daemons_and_the_simulation_get_the_same_links(cell: Cell) -> None:
    cell = cell.stretched(2)
    links, topology = cell.links(ADDRESSES, ODD), cell.topology([number % 3 for number in range(NUM_PEERS)], ODD)
    for way in links.ways:
        a, b = ADDRESSES.index(way.origin), ADDRESSES.index(way.target)
        assert topology.delay_s[a][b] == pytest.approx(way.delay_ms / 1000)
    for number, address in enumerate(ADDRESSES):
        mbit = links.rates[address].up if address in links.rates else links.mbit_per_s
        assert topology.peers[number].up == (pytest.approx(mbit * BYTES_PER_MBIT / FRAMING) if mbit else float("inf"))


def test_what_is_off_by_more_than_allowed_is_named() -> None:
    good = Row(cell="free", step_s=10.0, foretold_s=10.4, sent_mb=100.0, foretold_mb=101.0)
    bad = Row(cell="slow", step_s=10.0, foretold_s=8.9, sent_mb=100.0, foretold_mb=96.0)
    assert missed([good]) == []
    assert [reason.split(":")[0] for reason in missed([good, bad])] == ["slow", "slow", "times are off by 7.5% in the mean"]
