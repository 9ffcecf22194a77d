"""Hypothesis strategies for the table's values, in one place."""

from __future__ import annotations

from hypothesis import strategies as st

from peerd.table.record import AverageId, Lineage, PeerId, PeerRecord, Phase, Suspicion
from peerd.table.view import LiveView

NUM_MICROBATCHES = 6
FULL = (1 << NUM_MICROBATCHES) - 1

peer_ids = st.sampled_from([PeerId(f"peer{n}") for n in range(5)])
ledgers = st.integers(0, FULL)
lineages = st.builds(Lineage, st.integers(0, 1), st.sampled_from([b"a", b"b"]))
average_ids = st.sampled_from([AverageId(b"x"), AverageId(b"y")])
suspicions = st.builds(Suspicion, peer_ids, st.integers(0, 2), st.integers(0, 3))


@st.composite
def records(draw: st.DrawFn, peer: st.SearchStrategy[PeerId] = peer_ids, num_stages: int = 2) -> PeerRecord:
    """Any record that one of a few peers may have published, in a run whose steps overlap or in one whose do not."""
    phase = draw(st.sampled_from(Phase))
    next_ledger_no = draw(st.sampled_from([0, 3]))
    return PeerRecord(
        peer=draw(peer),
        incarnation=draw(st.integers(0, 2)),
        version=draw(st.integers(0, 3)),
        stage=draw(st.integers(0, num_stages - 1)),
        step=draw(st.integers(0, 3)),
        phase=phase,
        done=draw(ledgers),
        ledger_no=draw(st.integers(0, 2)),
        next_done=draw(ledgers) if next_ledger_no else 0,
        next_ledger_no=next_ledger_no,
        average_id=draw(average_ids) if phase is Phase.AVERAGED else AverageId(b""),
        lineage=draw(lineages),
        leaving=draw(st.booleans()),
        trains=draw(st.booleans()),
        suspects=tuple(draw(st.lists(suspicions, max_size=2))),
        throughput=draw(st.sampled_from([0.0, 1.0, 2.5])),
    )


@st.composite
def live_views(draw: st.DrawFn, num_stages: int = 2) -> LiveView:
    """Distinct live peers, mine among them."""
    found = draw(st.lists(records(num_stages=num_stages), min_size=1, max_size=5, unique_by=lambda record: record.peer))
    return view_of(*found)


def view_of(*found: PeerRecord) -> LiveView:
    """A live view of exactly these records; the first is mine."""
    return LiveView(me=found[0].peer, records=tuple(sorted(found, key=lambda record: record.peer)))


def member(name: str, **fields: object) -> PeerRecord:
    """A serving peer, the rest by keyword."""
    return PeerRecord(peer=PeerId(name), **{"phase": Phase.ACCUMULATING, **fields})  # type: ignore[arg-type]


def stage_of(stage: int, how_many: int, **fields: object) -> list[PeerRecord]:
    return [member(f"s{stage}p{number:03}", stage=stage, **fields) for number in range(how_many)]
