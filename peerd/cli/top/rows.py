"""The swarm as lines of a table: its rows, the columns that fit, and the content of each cell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from peerd.cli.render import held_by, plain
from peerd.cli.top.ink import NONE, Ink, Line, Span, amount, bar, duration, fitted, line_fitted
from peerd.cli.top.picture import PeerRow, Picture, StageRow

Row = StageRow | PeerRow
Key = tuple[int, str]
"""Identity of a row: its stage and peer id, which is empty for the stage's own row."""

_OPEN, _FOLDED, _CURSOR = "\u25be", "\u25b8", "\u2502"
_INK_OF_PHASE = {
    **dict.fromkeys(("suspect", "nobody"), Ink.PROBLEM),
    **dict.fromkeys(("leaving", "paused", "pausing", "sidelined", "unaveraged"), Ink.WARNING),
    "joining": Ink.QUIET,
}
LEAST_FULL_QUEUE = 8
_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    width: int
    right: bool = True
    from_width: int = 0
    """Smallest width of the table that shows the column."""


NAME = Column("stage / peer", 16, right=False)
STEP = Column("step", 6)
PHASE = Column("phase", 12, right=False)
DONE = Column("done", 9)
QUEUE = Column("queue", 13, right=False)
SPEED = Column("samples/s", 9)
TOKENS = Column("tokens", 7, from_width=92)
FLIGHT = Column("in flight", 9, from_width=104)
DEVICE = Column("device", 8, right=False, from_width=116)
MEMORY = Column("memory", 7, from_width=128)
HEARD = Column("heard", 8, from_width=140)
COLUMNS = (NAME, STEP, PHASE, DONE, QUEUE, SPEED, TOKENS, FLIGHT, DEVICE, MEMORY, HEARD)
MOST_BAR, MOST_NAME = 24, 26


def rows_of(picture: Picture, folded: frozenset[int]) -> tuple[Row, ...]:
    return tuple(_rows(picture, folded))


def _rows(picture: Picture, folded: frozenset[int]) -> Iterator[Row]:
    for part in picture.stages:
        yield part.row
        if part.row.stage not in folded:
            yield from part.peers


def key_of(row: Row) -> Key:
    return (row.stage, "") if isinstance(row, StageRow) else (row.peer["stage"], row.peer["id"])


def columns_for(width: int, *, has_names: bool = False) -> tuple[tuple[Column, int], ...]:
    """The columns that fit, each with its width. Remaining space widens the names, where peers have any, and then the bars."""
    chosen = [column for column in COLUMNS if width >= column.from_width]
    spare = width + len(_GAP) - sum(column.width + len(_GAP) for column in chosen)
    named = min(max(0, spare), MOST_NAME) if has_names else 0
    more = {NAME: named, QUEUE: min(max(0, spare - named), MOST_BAR)}
    return tuple((column, column.width + more.get(column, 0)) for column in chosen)


def head_line(width: int, *, has_names: bool = False) -> Line:
    titles = [fitted(column.title, wide, right=column.right) for column, wide in columns_for(width, has_names=has_names)]
    return line_fitted(((_GAP.join(titles), Ink.QUIET),), width)


def row_line(row: Row, picture: Picture, width: int, *, folded: bool = False) -> Line:
    """A row in exactly `width` columns."""
    cells = _stage_cells(row, picture, folded=folded) if isinstance(row, StageRow) else _peer_cells(row, picture)
    spans: list[Span] = []
    for column, wide in columns_for(width, has_names=picture.has_names):
        if spans:
            spans.append((_GAP, Ink.PLAIN))
        if column is QUEUE:
            spans += _queue_cell(row, picture, wide)
        else:
            text, ink = cells.get(column, ("", Ink.PLAIN))
            spans.append((fitted(text, wide, right=column.right), ink))
    return line_fitted(spans, width)


def _stage_cells(row: StageRow, picture: Picture, *, folded: bool) -> dict[Column, Span]:
    of = picture.num_microbatches
    return {
        NAME: (f"{_FOLDED if folded else _OPEN} stage {row.stage} ({row.num_peers})", Ink.STRONG),
        STEP: (_step(row.step) if row.num_peers else NONE, Ink.STRONG),
        PHASE: (f"! {row.num_doubtful} in doubt", Ink.WARNING) if folded and row.num_doubtful else _phase_cell(row.phase, Ink.STRONG),
        DONE: (f"{row.done}/{of}" if row.num_peers else NONE, Ink.STRONG),
        SPEED: (amount(row.throughput), Ink.STRONG),
    }


def _peer_cells(row: PeerRow, picture: Picture) -> dict[Column, Span]:
    peer = row.peer
    ink = Ink.QUIET if peer["suspect"] else Ink.PLAIN
    return {
        NAME: (
            f"  {row.name}" + (" you" if row.mine else "") + (f" {row.own_name}" if row.own_name else ""),
            Ink.ACCENT if row.mine else ink,
        ),
        STEP: (_step(peer["step"]), ink),
        PHASE: _phase_cell(row.phase, ink),
        DONE: (held_by(peer, amount), ink),
        SPEED: (amount(peer["throughput"]), ink),
        TOKENS: (amount(peer["tokens"]), ink),
        FLIGHT: (amount(peer["in_flight"]), ink),
        DEVICE: (plain(peer["device"], 20), ink),
        MEMORY: (amount(peer["memory_bytes"]) + "B", ink),
        HEARD: (f"{duration(peer['age_s'])} ago" if peer["age_s"] >= 1 else "now", ink),
    }


def _phase_cell(phase: str, usual: Ink) -> Span:
    ink = _INK_OF_PHASE.get(phase, usual)
    return (f"! {phase}" if ink in (Ink.PROBLEM, Ink.WARNING) else phase, ink)


def _queue_cell(row: Row, picture: Picture, width: int) -> list[Span]:
    """The number and a bar. The bar's scale is a power of two, so that it rarely changes; a stage's bar is the mean of its peers."""
    waiting, peers = (row.queue, max(1, row.num_peers)) if isinstance(row, StageRow) else (row.peer["queue"], 1)
    full = LEAST_FULL_QUEUE
    while full < picture.greatest_queue:
        full *= 2
    number = (f"{amount(waiting):>5} ", Ink.STRONG if isinstance(row, StageRow) else Ink.PLAIN)
    return [number, (fitted(bar(waiting / peers / full, width - 6), width - 6), Ink.ACCENT)]


def _step(step: int) -> str:
    return str(step) if abs(step) < 100_000 else amount(step)
