"""Simulates a run whose peers stay, or come and go: what each death costs, and that all averages are exact all the same.

A peer that goes takes what it has added to this step with it, as long as its stage has not averaged it, and a round that it is in
fails. Once the others have noticed, trainers launch what its stage lacks: the stages before that compute the forward pass only, those
after it nothing (the peer that holds the microbatch gives the gradient again), and callers send to others what they had sent to it. It
comes back as a joiner in the stage that needs it most, once it has that stage's state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from peerd.planner.steady import Members, RunCost
from peerd.sim.churn import STATE_SHARE, Churn
from peerd.sim.ledgers import Held, Ledgers
from peerd.sim.network import SimulatedLinks
from peerd.sim.passage import PipelinePeer
from peerd.sim.step_run import DELAYS_DRAWN, RunResult, RunSettings, StepRun, stage_for

GATHERED = 0.2
"""Of the time until a departure is noticed: news of a large stage is gathered for as long."""


def simulate_run(cost: RunCost, links: SimulatedLinks, members: Members, settings: RunSettings) -> RunResult:
    """Run the steps. The result depends on the arguments alone. ValueError if a stage has no peer, or no peer is reliable."""
    if settings.churn is None:
        return StepRun(cost, links, members, settings).run()
    return ChurningRun(cost, links, members, settings, settings.churn).run()


class ChurningRun(StepRun):
    def __init__(self, cost: RunCost, links: SimulatedLinks, members: Members, settings: RunSettings, churn: Churn) -> None:
        self._known = Ledgers(len(cost.stages), cost.microbatches_per_step)
        super().__init__(cost, links, members, settings, self._known)
        self._churn = churn
        self._random = Random(f"churn/{settings.seed}/run")
        self._rounds: dict[tuple[int, int], int] = {}
        """The number of the last round of a stage and step: one that failed has another."""
        self._unserved: set[int] = set()
        """Stages of which the news is not out yet."""
        unreliable = churn.unreliable(len(links.peers), settings.seed)
        for peer in self._everybody():
            peer.is_reliable = peer.number not in unreliable
        self.counts.least_reliable = min(sum(peer.is_reliable for peer in peers) for peers in self._stages)
        self._totals = [sum(peer.record.throughput for peer in peers) for peers in self._stages]
        self._reliable_totals = [sum(peer.record.throughput for peer in peers if peer.is_reliable) for peers in self._stages]
        everybody = {peer.record.peer: peer.is_reliable for peer in self._everybody()}
        self._trainers = {name: trainer for name, trainer in self._trainers.items() if everybody[name]}
        self._order = tuple(sorted(self._trainers))
        if not self._trainers:
            raise ValueError("no peer that launches is reliable")

    def _opened(self, step: int) -> None:
        self._known.open(step)
        self._live = self._view()
        self._draw_departures()

    def _closed(self, step: int) -> None:
        self._known.close(step)

    def _added(self, what: Held, number: int) -> None:
        stage, step, _ = what
        if self._known.add(*what, number):
            self._try_round(stage, step)

    def _try_round(self, stage: int, step: int) -> None:
        if self._known.is_complete(stage, step) and math.isnan(self._averaged_s[step][stage]):
            number = self._rounds[stage, step] = self._rounds.get((stage, step), 0) + 1
            self._clock.at(self._begin_round(stage), self._round_ended, stage, step, number)

    def _round_ended(self, stage: int, step: int, number: int) -> None:
        if self._rounds[stage, step] == number:
            self.counts.inexact += self._known.why_inexact(stage, step) is not None
            self._averaged(stage, step, self._clock.now_s - self._exchange(stage).took_s)

    def _draw_departures(self) -> None:
        """Let peers go during the step that begins. It will take about as long as the last one, or as its slowest stage's peers compute."""
        rates = [sum(1 / peer.microbatch_s for peer in peers) for peers in self._stages]
        step_s = (
            self._ends_s[-1] - (self._ends_s[-2] if len(self._ends_s) > 1 else 0.0) if self._ends_s else self._num_microbatches / min(rates)
        )
        peers = {peer.number: peer for peer in self._everybody() if not peer.is_reliable}
        for after_s, number in self._churn.departures(sorted(peers), step_s, self._random):
            self._clock.after(after_s, self._depart, peers[number], step_s)

    def _depart(self, peer: PipelinePeer, step_s: float) -> None:
        """A peer goes without a word. Its stage lacks what it held, and a round with it fails."""
        churn, ledgers, stage = self._churn, self._known, peer.record.stage
        if not peer.is_there or len(self._ends_s) >= self._settings.num_steps:
            return
        self.counts.departures += 1
        self._passages.gone(peer, churn.noticed_s)
        averaged = frozenset(step for step, ends in self._averaged_s.items() if not math.isnan(ends[stage]))
        lost = ledgers.drop(stage, peer.number, averaged)
        open_steps = [step for at, step in self._rounds if at == stage and step not in averaged]
        for step in open_steps:
            self.counts.rounds_failed += 1
            self._rounds[stage, step] += 1
            self._rounds_end_s[stage] = self._clock.now_s
        self._clock.after(churn.noticed_s, self._noticed, peer, lost, open_steps)
        state_s = STATE_SHARE * self._cost.stages[stage].gradient_bytes / self._links.peers[peer.number].down
        self._clock.after(max(step_s, churn.noticed_s) + state_s, self._return, peer)

    def _noticed(self, peer: PipelinePeer, lost: Sequence[Held], open_steps: Sequence[int]) -> None:
        """The others know that a peer is gone: they send it nothing more, and launch what its stage lacks."""
        stage = peer.record.stage
        self._stages[stage] = [other for other in self._stages[stage] if other is not peer]
        self._totals[stage] -= peer.record.throughput
        if self._stages[stage]:
            self._serve_stage(stage)
        self.counts.relaunched += len(lost)
        trainers = list(self._trainers.values())
        for turn, (_, step, index) in enumerate(lost):
            trainer = trainers[turn % len(trainers)]
            trainer.waiting.appendleft((step, index))
            trainer.left[step] = trainer.left.get(step, 0) + 1
            self._missing[step] = self._missing.get(step, 0) + 1
        for step in open_steps:
            self._try_round(stage, step)
        for trainer in trainers:
            self._launch(trainer)

    def _return(self, peer: PipelinePeer) -> None:
        """A peer is back as a joiner, in the stage that needs it most, with that stage's state."""
        stage = stage_for(peer.record.peer, self._totals, self._reliable_totals, peer.is_reliable)
        fresh = self._peer(peer.number, stage, keeps_spans=False)
        fresh.is_reliable = peer.is_reliable
        self._stages[stage] = [*self._stages[stage], fresh]
        self._totals[stage] += fresh.record.throughput
        self._serve_stage(stage)

    def _serve_stage(self, stage: int) -> None:
        """Let callers know who serves a stage: at once, or after a while where it is large, as telling costs as much as it has peers."""
        if len(self._stages[stage]) <= DELAYS_DRAWN:
            self._exchanges.pop(stage, None)
            self._passages.serve_stage(stage, self._stages[stage])
        elif stage not in self._unserved:
            self._unserved.add(stage)
            self._clock.after(self._churn.noticed_s * GATHERED, self._tell, stage)

    def _tell(self, stage: int) -> None:
        self._unserved.discard(stage)
        self._passages.serve_stage(stage, self._stages[stage])
