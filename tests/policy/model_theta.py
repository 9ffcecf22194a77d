"""Parameters as symbols: a theta is its whole history, so exactness is read off its content. Part of the protocol model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

ThetaId = NewType("ThetaId", int)


@dataclass(frozen=True, slots=True, order=True)
class Gradient:
    """The gradient of one microbatch: of which step, and the parameters of every stage it was computed with."""

    step: int
    index: int
    thetas: tuple[ThetaId, ...]


Average = tuple[Gradient, ...]
"""What an average holds, sorted: the very gradients that were summed, each as often as it was."""


class Thetas:
    """Histories by number: equal histories have equal numbers, whoever made them."""

    def __init__(self) -> None:
        self._ids: dict[tuple[object, ...], ThetaId] = {}
        self._steps: list[int] = []

    def first(self, stage: int) -> ThetaId:
        return self._intern(("first", stage), 0)

    def after(self, theta: ThetaId, average: Average, rounding: bytes = b"", norm: float | None = None) -> ThetaId:
        """`rounding` sets apart averages of one content that were summed in another order; `norm` is what was applied with it."""
        return self._intern((theta, average, rounding, norm), self.step_of(theta) + 1)

    def skipped(self, theta: ThetaId) -> ThetaId:
        return self._intern((theta, "skipped"), self.step_of(theta) + 1)

    def with_copy(self, theta: ThetaId, copy: ThetaId) -> ThetaId:
        """With the other stage's copy of the weight that both hold."""
        return self._intern((theta, "copy", copy), self.step_of(theta))

    def torn(self, front: ThetaId, back: ThetaId) -> ThetaId:
        """Half of one and half of the other, as a download of moving parameters would give."""
        return front if front == back else self._intern(("torn", front, back), self.step_of(front))

    def step_of(self, theta: ThetaId) -> int:
        return self._steps[theta]

    def _intern(self, history: tuple[object, ...], step: int) -> ThetaId:
        if history not in self._ids:
            self._ids[history] = ThetaId(len(self._ids))
            self._steps.append(step)
        return self._ids[history]


def why_wrong(average: Average, *, stage: int, theta: ThetaId, num_microbatches: int, thetas: Thetas) -> str | None:
    """I1: None when the average counts every microbatch of theta's step once, computed with that step's parameters."""
    step = thetas.step_of(theta)
    counted = [(gradient.step, gradient.index) for gradient in average]
    if sorted(counted) != [(step, index) for index in range(num_microbatches)]:
        return f"the average of step {step} counts {sorted(counted)}"
    for gradient in average:
        if gradient.thetas[stage] != theta:
            return f"({step}, {gradient.index}) was computed with other parameters of its own stage"
        if any(thetas.step_of(used) != step for used in gradient.thetas):
            return f"({step}, {gradient.index}) was computed with another stage's parameters of another step"
    return None
