"""The lines around the table: the heading, and the notes on my daemon, its health and what happened."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from peerd.cli.top.ink import Ink, Line, amount, fixed, line_fitted, width_of
from peerd.cli.top.picture import Picture

_DONE, _TO_DO = "\u2501", "\u2500"
_INK_OF_SEVERITY = {"problem": Ink.PROBLEM, "warning": Ink.WARNING}
LEAST_EVENTS = 2
ROOMY = 14
"""Lines from which on long entries are wrapped and not cut."""
LABEL_WIDTH = 11


def heading(picture: Picture, state: str, width: int) -> tuple[Line, Line]:
    """Run and step on the left, how fresh this is on the right; below, how far the run has come."""
    step = "no step yet" if picture.step is None else f"step {picture.step}"
    end = f" of {picture.last_step}" if picture.last_step and picture.step is not None else ""
    count = f"{picture.num_peers} peers in {len(picture.stages)} stages"
    left: Line = ((picture.run, Ink.STRONG), (f"  {step}{end}  ", Ink.PLAIN), (count, Ink.QUIET))
    gap = max(2, width - width_of(left) - len(state))
    return line_fitted((*left, (" " * gap, Ink.PLAIN), (state, Ink.QUIET)), width), _progress(picture, width)


def _progress(picture: Picture, width: int) -> Line:
    share = min(1.0, max(0.0, (picture.step or 0) / picture.last_step)) if picture.last_step > 0 else 0.0
    done = round(share * width)
    return ((_DONE * done, Ink.ACCENT), (_TO_DO * (width - done), Ink.QUIET))


def loss_title(picture: Picture, width: int) -> Line:
    return line_fitted((("loss ", Ink.QUIET), (fixed(picture.loss), Ink.STRONG), (f"  {picture.step_span}", Ink.QUIET)), width)


def speed_title(picture: Picture, width: int) -> Line:
    return line_fitted((("tokens/s ", Ink.QUIET), (amount(picture.tokens_per_second), Ink.STRONG)), width)


def notes(picture: Picture, width: int, height: int) -> tuple[Line, ...]:
    """What is wrong first, then my daemon, then what happened, the latest at the end; what does not fit is left out."""
    wrong = [line for severe, line in _health(picture, width) if severe]
    fine = [line for severe, line in _health(picture, width) if not severe]
    own = [line for name, value in picture.own for line in entry(name, value, width, most=1 if height < ROOMY else 3)]
    about = (wrong + own + fine)[: max(0, height - min(len(picture.events), LEAST_EVENTS))]
    room = height - len(about)
    gap = [line_fitted((), width)] if room > len(picture.events) > 0 or room > LEAST_EVENTS + 2 else []
    events = [line_fitted(((f"{event.clock}  ", Ink.QUIET), (event.text, Ink.PLAIN)), width) for event in picture.events]
    left = room - len(gap)
    return (*about, *gap, *(events[-left:] if left > 0 else ()))


def _health(picture: Picture, width: int) -> Iterator[tuple[bool, Line]]:
    """Each item, and whether it is more than a remark."""
    for item in picture.health:
        ink = _INK_OF_SEVERITY.get(item["severity"], Ink.PLAIN)
        remedy = f"; {item['remedy']}" if item["remedy"] else ""
        yield ink is not Ink.PLAIN, line_fitted(((f"{item['severity']}: ".ljust(LABEL_WIDTH), ink), (item["title"] + remedy, ink)), width)


def entry(name: str, value: str, width: int, *, most: int) -> Iterator[Line]:
    indent = LABEL_WIDTH
    wrapped = textwrap.wrap(value, max(10, width - indent), max_lines=most, placeholder="\u2026") or [""]
    for index, text in enumerate(wrapped):
        yield line_fitted(((name.ljust(indent) if index == 0 else " " * indent, Ink.QUIET), (text, Ink.PLAIN)), width)
