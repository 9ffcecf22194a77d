"""`peerd simulate liars`: what is simulated, its table and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import click

from peerd import SCHEMA
from peerd.cli.options import is_printed
from peerd.errors import UsageError
from peerd.sim.liars import LIMIT, LiarRow, LiarSettings, Lie, simulate_liars

STAGES = ((4, 1), (9, 3))
SHARES = (1.0, 0.1)
QUANTILES = (0.5, 0.95, 0.99)
_COLUMNS = "{:<20} {:>5} {:>6} {:>6} {:>4} {:>10} {:>10} {:>9} {:>7}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLiars:
    """What is to be simulated, as the command line says it."""

    lies: Sequence[str]
    num_peers: int | None
    num_liars: int | None
    shares: Sequence[float]
    microbatches: int
    begins: int
    rate: float
    settled: float | None
    protects: bool
    num_runs: int
    seed: int

    def settings(self) -> list[LiarSettings]:
        """One for each row. Raises UsageError if not all peers of a stage can be liars."""
        if (self.num_peers is None) != (self.num_liars is None):
            raise UsageError("a stage has peers and liars", "give both --peers and --liars, or neither")
        if self.num_peers is not None and self.num_liars is not None and self.num_liars >= self.num_peers:
            raise UsageError(f"{self.num_liars} liars of {self.num_peers} peers leave nobody to find them", "name fewer with --liars")
        stages = STAGES if self.num_peers is None or self.num_liars is None else ((self.num_peers, self.num_liars),)
        lies, shares = dict.fromkeys(self.lies or Lie), dict.fromkeys(self.shares or SHARES)
        return [self._row(Lie(lie), *stage, share) for stage in stages for lie in lies for share in _shares_of(Lie(lie), shares)]

    def _row(self, lie: Lie, num_peers: int, num_liars: int, share: float) -> LiarSettings:
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name in _SHARED}
        return LiarSettings(lie=lie, num_peers=num_peers, num_liars=num_liars, share=share, **own)


_SHARED = {"rate", "settled", "microbatches", "begins", "protects", "num_runs", "seed"}


def _shares_of(lie: Lie, shares: dict[float, None]) -> list[float]:
    """A framer falsifies nothing of its own, so shares make no difference."""
    return [1.0] if lie is Lie.FRAMING else [*shares]


def run(wanted: WantedLiars, as_json: bool) -> None:
    """Simulate every row and print it."""
    rows, told = [], wanted.settings()
    if not as_json:
        click.echo(_COLUMNS.format("what was falsified until the liar was out", "", "", "", "", "", "", "", "").rstrip())
        click.echo(_COLUMNS.format("lie", "peers", "liars", "share", "50%", "95%", "99%", "in limit", "honest"))
    for settings in told:
        row = simulate_liars(settings)
        rows.append(_fields(row))
        if not as_json:
            click.echo(_line(row))
    if not is_printed({"schema": SCHEMA, "rows": rows}, as_json):
        click.echo(
            f"in microbatches; of parts and of framing in steps. In brackets: what the rate of audits alone leads to.\n"
            f"in limit: out before {LIMIT:g} / share, falsified or not. honest: honest peers that lost their standing"
        )


def _line(row: LiarRow) -> str:
    given = row.settings
    told = [
        f"{row.quantile(share)} ({expected})" if (expected := row.expected(share)) else str(row.quantile(share)) for share in QUANTILES[1:]
    ]
    cells = (given.lie, given.num_peers, given.num_liars, f"{given.share:g}", row.quantile(0.5), *told)
    return _COLUMNS.format(*cells, f"{row.num_within / len(row.found):.1%}", row.num_honest_lost)


def _fields(row: LiarRow) -> dict[str, Any]:
    given = row.settings
    found = {f"p{round(100 * share)}": row.quantile(share) for share in QUANTILES}
    expected = {f"expected_p{round(100 * share)}": row.expected(share) for share in QUANTILES}
    return {
        "lie": str(given.lie),
        "peers": given.num_peers,
        "liars": given.num_liars,
        "share": given.share,
        "unit": "steps" if given.lie.is_of_parts or given.lie is Lie.FRAMING else "microbatches",
        **found,
        **expected,
        "most": row.found[-1],
        "within_limit": row.num_within / len(row.found),
        "honest_lost": row.num_honest_lost,
    }
