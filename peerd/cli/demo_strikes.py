"""Carries out the schedule of demo_chaos.py on the demo's daemons, and replaces those it killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from peerd.cli.demo_acts import Act, kill_p2pd, pause_stale, wipe_stage
from peerd.cli.demo_chaos import MIN_FAULTS, STEPS_MISSED, Candidate, Chaos, FaultKind, Strike, schedule, victims
from peerd.errors import PeerdError

if TYPE_CHECKING:
    from peerd.cli.demo_daemons import DemoSwarm
    from peerd.cli.demo_process import DemoDaemon

ORDER_SILENCE_S = 3.0
LAST_LOOK_SILENCE_S = 0.5
MAX_CONTACTS = 3
"""Number of addresses given to a replacement, because the next fault may hit the first of them."""
DAY_S = 86400.0
ALONE = (FaultKind.STAGE_WIPED, FaultKind.PAUSE_STALE)
"""Kinds during which no other strike begins."""
_OVER = object()


class Strikes:
    """The chaos of one demo. Peers in `spared` are never killed; all other faults may hit them."""

    def __init__(self, swarm: DemoSwarm, chaos: Chaos, seed: int, spared: frozenset[int] = frozenset()) -> None:
        self._spared = spared
        self._swarm = swarm
        self._chaos = chaos
        self._kinds = chaos.kinds(can_wipe=not spared and swarm.plan.has_checkpoints)
        self._schedule = schedule(self._kinds, chaos.every_s, seed)
        self._next: Strike = next(self._schedule)
        self._began = time.monotonic()
        self._late_s = 0.0
        self._struck = 0
        self._nobody_left = False
        self._acts: list[Act] = []
        """Strikes under way."""
        self._alone: Act | None = None
        """No other strike begins while this one is under way."""
        self._gone_back_to = 0
        """The step that a wiped stage came back with."""

    @property
    def over(self) -> bool:
        """True if no more strikes will begin, and none is under way."""
        return self._are_enough and not self._acts

    @property
    def _are_enough(self) -> bool:
        """True if all steps are done, and enough strikes have happened or no peer is left to strike."""
        enough = self._struck >= max(MIN_FAULTS, len(self._kinds))
        return self._swarm.steps_done and (enough or self._nobody_left)

    def tick(self) -> None:
        """Advance what is under way, and carry out a strike that is due. The schedule waits while no peer may be struck."""
        if self._chaos.respawn:
            self._replace_the_dead()
        self._acts = [act for act in self._acts if next(act, _OVER) is not _OVER]
        now_s = time.monotonic() - self._began
        if self._alone in self._acts:
            self._late_s = max(self._late_s, now_s + self._chaos.every_s - self._next.at_s)
            return
        if self._are_enough or now_s < self._next.at_s + self._late_s:
            return
        self._swarm.poll()
        if self._comes_too_late(self._next.kind):
            self._nobody_left = self._chaos.kind is not FaultKind.MIXED
            self._next = next(self._schedule)
            return
        spared = self._spared if self._next.kind is FaultKind.KILL else frozenset()
        victim = self._next.victim([peer for peer in self._able(self._swarm.living) if peer not in spared])
        self._nobody_left = victim is None and not self._chaos.respawn
        if victim is None or not self._still_may_be_struck(self._swarm.daemons[victim]):
            return
        self._late_s = max(self._late_s, now_s - self._next.at_s)
        if self._strikes(self._swarm.daemons[victim], self._next.kind):
            self._next = next(self._schedule)

    def _comes_too_late(self, kind: FaultKind) -> bool:
        """Whether the run ends before it is seen to go on after a strike of this kind."""
        return kind in ALONE and self._swarm.step + STEPS_MISSED > self._swarm.plan.steps

    def _able(self, daemons: Sequence[DemoDaemon]) -> list[int]:
        return victims(self._next.kind, [self._candidate(daemon) for daemon in daemons], self._gone_back_to)

    def _still_may_be_struck(self, victim: DemoDaemon) -> bool:
        """Ask again: the victim may have become the only one at a newer step while the poll waited for a slow daemon."""
        wipes = self._next.kind is FaultKind.STAGE_WIPED
        asked = [daemon for daemon in self._swarm.living if wipes or daemon.stage == victim.stage]
        self._swarm.ask(asked, LAST_LOOK_SILENCE_S)
        return victim.peer in self._able(asked)

    def _candidate(self, daemon: DemoDaemon) -> Candidate:
        return Candidate(
            peer=daemon.peer,
            stage=daemon.stage,
            step=daemon.step,
            serving=daemon.serves,
            sound=daemon.ready is not None and daemon.answers and not daemon.disturbed,
            on_disk=daemon.steps_on_disk if self._next.kind is FaultKind.STAGE_WIPED else frozenset(),
        )

    def _strikes(self, daemon: DemoDaemon, kind: FaultKind) -> bool:
        """Strike. False if the daemon has just ended by itself, or is too busy to answer."""
        for_s = self._chaos.for_s
        deeds: dict[FaultKind, Callable[[DemoDaemon], str]] = {
            FaultKind.KILL: self._kill,
            FaultKind.STOP: self._stop,
            FaultKind.CUT: self._cut,
            FaultKind.SLOW: self._slow,
            FaultKind.CORRUPT: self._corrupt,
            FaultKind.PROPOSAL_CANCEL: self._cancel_proposals,
            FaultKind.DISK_FULL: self._fill_disk,
            FaultKind.SKEWED_CLOCK: self._skew_clock,
        }
        match kind:
            case FaultKind.P2PD:
                if not daemon.has_p2pd:
                    return False
                self._begin(kill_p2pd(self._swarm, daemon, for_s))
            case FaultKind.STAGE_WIPED:
                self._gone_back_to = max(daemon.steps_on_disk)
                self._alone = self._begin(wipe_stage(self._swarm, daemon, self._addresses(other_than=daemon.stage)))
            case FaultKind.PAUSE_STALE:
                self._alone = self._begin(pause_stale(self._swarm, daemon))
            case _:
                try:
                    detail = deeds[kind](daemon)
                except (PeerdError, ProcessLookupError):
                    return False
                if kind is not FaultKind.KILL:  # the swarm notes every death, whatever its cause
                    self._swarm.note(daemon, str(kind), detail)
        self._struck += 1
        daemon.disturbed_until = time.monotonic() + for_s
        return True

    def _begin(self, act: Act) -> Act:
        self._acts = [*self._acts, act] if next(act, _OVER) is not _OVER else self._acts
        return act

    def _kill(self, daemon: DemoDaemon) -> str:
        daemon.kill()
        return ""

    def _stop(self, daemon: DemoDaemon) -> str:
        daemon.suspend(self._chaos.for_s)
        return f"was stopped for {self._chaos.for_s:g} s"

    def _cut(self, daemon: DemoDaemon) -> str:
        daemon.cut_links(self._chaos.for_s)
        return f"lost its links for {self._chaos.for_s:g} s"

    def _slow(self, daemon: DemoDaemon) -> str:
        self._order(daemon, kind="slow", factor=self._chaos.factor, for_s=self._chaos.for_s)
        return f"became {self._chaos.factor:g} times slower for {self._chaos.for_s:g} s"

    def _corrupt(self, daemon: DemoDaemon) -> str:
        self._order(daemon, kind="corrupt", for_s=self._chaos.for_s, seed=self._struck)
        return f"sent broken messages for {self._chaos.for_s:g} s"

    def _cancel_proposals(self, daemon: DemoDaemon) -> str:
        self._order(daemon, kind="proposal-cancel", for_s=self._chaos.for_s, seed=self._struck)
        return f"had the calls that propose a round to it ended for {self._chaos.for_s:g} s"

    def _fill_disk(self, daemon: DemoDaemon) -> str:
        self._order(daemon, kind="disk-full", for_s=self._chaos.for_s)
        return f"found its disk full for {self._chaos.for_s:g} s"

    def _skew_clock(self, daemon: DemoDaemon) -> str:
        is_ahead = self._next.chance < 0.5
        self._order(daemon, kind="skewed-clock", by_s=DAY_S if is_ahead else -DAY_S, for_s=self._chaos.for_s)
        return f"had its clock a day {'ahead' if is_ahead else 'behind'} for {self._chaos.for_s:g} s"

    def _order(self, daemon: DemoDaemon, **fault: Any) -> None:
        daemon.client.request("fault", silence_s=ORDER_SILENCE_S, **fault)

    def _replace_the_dead(self) -> None:
        """Start a new daemon for each dead one, also for one that could not join, with the addresses of sound peers."""
        for daemon in [each for each in self._swarm.daemons if each.noted and not each.replaced]:
            if addresses := self._addresses():
                daemon.replaced = True
                self._swarm.spawn_another(daemon.stage, addresses, daemon)

    def _addresses(self, other_than: int = -1) -> str:
        """Addresses of a few sound peers, except those of one stage."""
        sound = [each for each in self._swarm.living if each.answers and not each.disturbed and each.stage != other_than]
        addresses = [each.ready.join for each in sound if each.ready is not None]
        first = int(self._next.chance * len(addresses))
        return " ".join((addresses[first:] + addresses[:first])[:MAX_CONTACTS])
