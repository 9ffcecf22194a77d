"""The lines around the table: the heading, and notes on this daemon, its health and events."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from peerd.cli.top.ink import ELLIPSIS, NONE, Ink, Line, amount, fitted, fixed, line_fitted, width_of
from peerd.cli.top.picture import Picture
from peerd.control.protocol import HealthItem

_DONE, _TO_DO = "\u2501", "\u2500"
_INK_OF_SEVERITY = {"problem": Ink.PROBLEM, "warning": Ink.WARNING}
LEAST_EVENTS = 2
ROOMY = 14
"""Number of lines from which long entries are wrapped instead of cut."""
LABEL_WIDTH = 11


def heading(picture: Picture, state: str, width: int) -> tuple[Line, Line]:
    """Run and step on the left, the age of the picture on the right; below, the progress of the run."""
    step = "no step yet" if picture.step is None else f"step {picture.step}"
    end = f" of {picture.last_step}" if picture.last_step and picture.step is not None else ""
    count = f"{_counted(picture.num_peers, 'peer')} in {_counted(len(picture.stages), 'stage')}"
    left: Line = ((picture.run, Ink.STRONG), (f"  {step}{end}  ", Ink.PLAIN), (count, Ink.QUIET))
    gap = max(2, width - width_of(left) - len(state))
    return line_fitted((*left, (" " * gap, Ink.PLAIN), (state, Ink.QUIET)), width), _progress(picture, width)


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _progress(picture: Picture, width: int) -> Line:
    share = min(1.0, max(0.0, (picture.step or 0) / picture.last_step)) if picture.last_step > 0 else 0.0
    done = round(share * width)
    return ((_DONE * done, Ink.ACCENT), (_TO_DO * (width - done), Ink.QUIET))


def loss_title(picture: Picture, width: int) -> Line:
    """The loss, and after it as many whole parts of what is told of it as there is room for."""
    line: Line = (("loss ", Ink.QUIET), (fixed(picture.loss), Ink.STRONG))
    for number, part in enumerate(picture.step_span.split("; ")):
        told: Line = (*line, (f"{'; ' if number else '  '}{part}", Ink.QUIET))
        if number and width_of(told) > width:
            break
        line = told
    return line_fitted(line, width)


def speed_title(picture: Picture, width: int) -> Line:
    speed = amount(picture.tokens_per_second) if picture.tokens_per_second > 0 else NONE  # a speed needs two steps
    return line_fitted((("tokens/s ", Ink.QUIET), (speed, Ink.STRONG)), width)


def notes(picture: Picture, width: int, height: int) -> tuple[Line, ...]:
    """Problems, then this daemon, then events with the latest at the end. Lines that do not fit are left out."""
    most = 1 if height < ROOMY else 3
    wrong = [item for item in picture.health if item["severity"] in _INK_OF_SEVERITY]
    fine = [item for item in picture.health if item["severity"] not in _INK_OF_SEVERITY]
    about = [line for item in wrong for line in _health(item, width, most)]
    about += [line for name, value in picture.own for line in entry(name, value, width, most=most)]
    about += [line for item in fine for line in _health(item, width, most)]
    del about[max(0, height - min(len(picture.events), LEAST_EVENTS)) :]
    room = height - len(about)
    gap = [line_fitted((), width)] if room > len(picture.events) > 0 or room > LEAST_EVENTS + 2 else []
    events = [line_fitted(((f"{event.clock}  ", Ink.QUIET), (event.text, Ink.PLAIN)), width) for event in picture.events]
    left = room - len(gap)
    return (*about, *gap, *(events[-left:] if left > 0 else ()))


def _health(item: HealthItem, width: int, most: int) -> Iterator[Line]:
    ink = _INK_OF_SEVERITY.get(item["severity"], Ink.PLAIN)
    remedy = f"; {item['remedy']}" if item["remedy"] else ""
    return entry(f"{item['severity']}:", item["title"] + remedy, width, most=most, inks=(ink, ink))


def entry(name: str, value: str, width: int, *, most: int, inks: tuple[Ink, Ink] = (Ink.QUIET, Ink.PLAIN)) -> Iterator[Line]:
    """A name and its value, wrapped to at most `most` lines."""
    wrapped = textwrap.wrap(value, max(10, width - LABEL_WIDTH), max_lines=most, placeholder=ELLIPSIS) or [""]
    for index, text in enumerate(wrapped):
        label = fitted(name if index == 0 else "", LABEL_WIDTH)
        yield line_fitted(((label, inks[0]), (text, inks[1])), width)
