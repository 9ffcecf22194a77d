"""Parameters as symbols: a theta is its whole history, so exactness is read off its content. Part of the protocol model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

ThetaId = NewType("ThetaId", int)
UNSEALED = ThetaId(-1)


@dataclass(frozen=True, slots=True, order=True)
class Gradient:
    """The gradient of one microbatch: of which step, and the parameters of every stage it was computed with."""

    step: int
    index: int
    thetas: tuple[ThetaId, ...]
    sealed: ThetaId = field(default=UNSEALED, repr=False)
    """With local steps, what its update made of the peer's parameters. It is not in the text, of which norms are made."""


Average = tuple[Gradient, ...]
"""What an average holds, sorted: the very gradients that were summed, each as often as it was."""


def is_made_up(average: Average) -> bool:
    """Whether some of its numbers are no gradient's."""
    return any(gradient.index < 0 for gradient in average)


class Thetas:
    """Histories by number: equal histories have equal numbers, whoever made them."""

    def __init__(self) -> None:
        self._ids: dict[tuple[object, ...], ThetaId] = {}
        self._steps: list[int] = []
        self._before: list[ThetaId | None] = []
        self._locals: dict[ThetaId, tuple[ThetaId, Average]] = {}
        self._made_up = set[ThetaId]()

    def first(self, stage: int) -> ThetaId:
        return self._intern(("first", stage), 0, None)

    def after(self, theta: ThetaId, average: Average, rounding: bytes = b"", norm: float | None = None) -> ThetaId:
        """`rounding` sets apart averages of one content that were summed in another order; `norm` is what was applied with it."""
        return self._intern((theta, average, rounding, norm), self.step_of(theta) + 1, theta)

    def skipped(self, theta: ThetaId) -> ThetaId:
        return self._intern((theta, "skipped"), self.step_of(theta) + 1, theta)

    def with_copy(self, theta: ThetaId, copy: ThetaId) -> ThetaId:
        """With the other stage's copy of the weight that both hold."""
        before = self._before[theta]
        return self._intern((theta, "copy", copy), self.step_of(theta), None if before is None else self.with_copy(before, self.late(copy)))

    def torn(self, front: ThetaId, back: ThetaId) -> ThetaId:
        """Half of one and half of the other, as a download of moving parameters would give."""
        return front if front == back else self._intern(("torn", front, back), self.step_of(front), self._before[front])

    def made_up(self, theta: ThetaId) -> ThetaId:
        """Something else of the same step."""
        made = self._intern(("made up", theta), self.step_of(theta), self._before[theta])
        self._made_up.add(made)
        return made

    def is_made_up(self, theta: ThetaId) -> bool:
        return theta in self._made_up

    def local(self, version: ThetaId, batch: Average) -> ThetaId:
        """After an update of a peer's own within a step, by a batch of gradients."""
        made = self._intern(("local", version, batch), self.step_of(version), self._before[version])
        self._locals[made] = version, batch
        return made

    def base_of(self, version: ThetaId) -> ThetaId:
        """The parameters that all began the step with, of which local steps made this."""
        while version in self._locals:
            version = self._locals[version][0]
        return version

    def made_of(self, version: ThetaId) -> tuple[ThetaId, Average] | None:
        """The version before and the batch; None: this is no version of a peer's own."""
        return self._locals.get(version)

    def step_of(self, theta: ThetaId) -> int:
        return self._steps[theta]

    def late(self, theta: ThetaId) -> ThetaId:
        """The parameters without their last update, or the first ones: what a step is computed with where updates are delayed."""
        before = self._before[theta]
        return theta if before is None else before

    def _intern(self, history: tuple[object, ...], step: int, before: ThetaId | None) -> ThetaId:
        if history not in self._ids:
            self._ids[history] = ThetaId(len(self._ids))
            self._steps.append(step)
            self._before.append(before)
        return self._ids[history]


def why_wrong(average: Average, *, stage: int, theta: ThetaId, num_microbatches: int, thetas: Thetas, delayed: bool) -> str | None:
    """I1: None when the average counts every microbatch of theta's step once, computed with that step's parameters.

    Those lack one update where updates are delayed, in every stage.
    """
    step = thetas.step_of(theta)
    counted = [(gradient.step, gradient.index) for gradient in average]
    if sorted(counted) != [(step, index) for index in range(num_microbatches)]:
        return f"the average of step {step} counts {sorted(counted)}"
    for gradient in average:
        if thetas.base_of(gradient.thetas[stage]) != (thetas.late(theta) if delayed else theta):
            return f"({step}, {gradient.index}) was computed with other parameters of its own stage"
        if any(thetas.step_of(used) != (max(0, step - 1) if delayed else step) for used in gradient.thetas):
            return f"({step}, {gradient.index}) was computed with another stage's parameters of another step"
        if any(thetas.is_made_up(used) for used in gradient.thetas):
            return f"({step}, {gradient.index}) was made up"
    return None
