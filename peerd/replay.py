"""Computes again in one process what the peers of a run with local steps have computed, from the logs of their moves (stage/moves.py).

A log says in which order a peer added gradients, sealed batches and dropped them, and with which versions of all stages each gradient was
computed. So every version of every peer can be made again, and from these what each gave to the averages that were applied.
"""

from __future__ import annotations

import bisect
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.errors import UsageError
from peerd.models.stages import StageModule, build_stage
from peerd.replicas import Backpropagate
from peerd.stage.accumulator import views_of
from peerd.stage.history import HistoryEntry, entry_after
from peerd.stage.local_steps import change_of
from peerd.stage.moves import BEGUN, VersionId
from peerd.stage.optimizer import Optimizer
from peerd.stage.parameters import copy_parameters
from peerd.stage.update import apply_sums

Move = Mapping[str, Any]
BackwardOf = Callable[[int], Backpropagate]
"""By step, what computes a microbatch of it."""
Versions = tuple[VersionId, ...]
"""The versions of all stages that a microbatch was computed with."""
REMEDY = "give the logs of all peers that were in the run, each from its beginning"


@dataclass
class PeerLog:
    """The moves of one peer from one start of its daemon on, and how far they are played."""

    name: str
    stage: int
    moves: Sequence[Move]
    module: StageModule
    inner: Optimizer
    begins: dict[tuple[int, str], list[int]] = field(init=False)
    """The places of moves that begin a step, by the step and the lineage of its parameters."""
    at: int = 0
    step: int = -1
    batches: dict[str, list[tuple[int, Versions]]] = field(default_factory=dict)
    num_sealed: int = 0
    loss_sum: float = 0.0
    given: dict[tuple[int, int], tuple[Tensor, float]] = field(default_factory=dict)
    """What it gave to rounds, by step and ledger: its change of the parameters, flat, and the sum of its losses."""

    def __post_init__(self) -> None:
        self.begins = {}
        for place, move in enumerate(self.moves):
            if move["move"] == "begin":
                self.begins.setdefault((move["step"], move["lineage"]), []).append(place)


def read_logs(folder: Path) -> list[list[Move]]:
    """All logs in a folder, each once: of one that mates have copied the longest. Raises UsageError, as `read_log` does."""
    longest: dict[str, list[Move]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        moves = read_log(path)
        if len(moves) > len(longest.get(moves[0]["id"], [])):
            longest[moves[0]["id"]] = moves
    return list(longest.values())


def read_log(path: Path) -> list[Move]:
    """Raises UsageError if the file is no log of moves. A last line that a kill has cut off is left out."""
    try:
        lines = path.read_text().splitlines(keepends=True)
        moves = [json.loads(line) for line in lines if line.endswith("\n")]
        if not moves or moves[0]["move"] != "serve" or not isinstance(moves[0]["id"], str):
            raise ValueError("it does not begin with the peer")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no log of a peer's moves: {error}", REMEDY) from None
    return moves


@dataclass(frozen=True)
class Applied:
    """What a stage applied at a step: the lineages before and after it, and by peer the ledger behind its change."""

    before: str
    after: str
    computed: Mapping[str, int]


def path_of(logs: Sequence[Sequence[Move]], stage: int, steps: range) -> list[Applied]:
    """What a stage applied in each of these steps. A run may go back and repeat a step: what leads to the last one counts.

    Raises UsageError if the logs do not say it.
    """
    found: dict[int, dict[tuple[str, str], Applied]] = {step: {} for step in steps}
    for moves in logs:
        for move in moves if moves[0]["stage"] == stage else ():
            if move["move"] == "apply" and move["step"] in found:
                computed = {peer: int(bits, 16) for peer, bits in move["computed"].items()}
                found[move["step"]][move["lineage"], move["after"]] = Applied(move["lineage"], move["after"], computed)
    viable: set[str] | None = None
    for step in reversed(steps):
        found[step] = {key: each for key, each in found[step].items() if viable is None or each.after in viable}
        viable = {each.before for each in found[step].values()}
        if not viable:
            raise UsageError(f"no log says which average stage {stage} applied at step {step}", REMEDY)
    path: list[Applied] = []
    for step in steps:
        path.append([each for each in found[step].values() if not path or each.before == path[-1].after][-1])
    return path


class Replay:
    """Plays all logs of a run, step by step."""

    def __init__(self, manifest: Manifest, logs: Sequence[Sequence[Move]], backward_of: BackwardOf, steps: int) -> None:
        """Plays the steps up to `steps`. Raises UsageError, as `play_step` does, if the logs lack what it takes."""
        self._manifest = manifest
        self._precision = torch.float64 if manifest.train.accumulate == "float64" else torch.float32
        self._backward_of = backward_of
        self.stages = [build_stage(manifest, stage, "cpu") for stage in range(manifest.train.num_stages)]
        """The parameters that the present step begins with."""
        self.outer = [Optimizer(manifest, dict(stage.named_parameters())) for stage in self.stages]
        self.history: list[HistoryEntry] = []
        self.step = self._first = manifest.start.step
        self._paths = [path_of(logs, stage.stage, range(self.step, steps)) for stage in self.stages]
        self._peers = [self._peer(moves) for moves in logs]
        self._makers = {bytes.fromhex(move["id"]): peer for peer in self._peers for move in peer.moves if move["move"] == "seal"}
        self._versions: dict[VersionId, StageModule] = {}
        self._gradients: dict[tuple[int, Versions], tuple[list[list[Tensor]], float]] = {}

    def _peer(self, moves: Sequence[Move]) -> PeerLog:
        stage = copy.deepcopy(self.stages[moves[0]["stage"]])
        return PeerLog(moves[0]["peer"], stage.stage, moves, stage, self._fresh(stage))

    def _fresh(self, module: StageModule) -> Optimizer:
        return Optimizer(self._manifest.inner, dict(module.named_parameters()))

    def play_step(self) -> None:
        """Compute a step again. Raises UsageError if the logs lack what it takes."""
        train = self._manifest.train
        is_local = train.is_local_at(self.step)
        if is_local:
            self._play_all()
        plain, loss_sum = ([], 0.0) if is_local else self._sums_of_gradients()
        for stage, optimizer in zip(self.stages, self.outer, strict=True):
            computed = self._applied(stage.stage).computed
            if not computed:  # the step was given up
                optimizer.skip(self.step)
                continue
            if is_local:
                total, loss_sum = self._sum_of(stage.stage, computed)
            else:
                total = plain[stage.stage]
            shapes = {name: parameter.shape for name, parameter in stage.named_parameters()}
            apply_sums(train, optimizer, self.step, views_of(total, shapes), train.microbatches_per_step, None)
            if stage.is_last:
                loss = loss_sum / train.microbatches_per_step
                self.history.append(entry_after(self.history, self.step, loss, self._manifest.tokens_per_step_at(self.step)))
        self._versions.clear()
        self._gradients.clear()
        for peer in self._peers:
            peer.given.clear()
        self.step += 1

    def _sums_of_gradients(self) -> tuple[list[Tensor], float]:
        """Compute a step before local steps: gradients by stage, flat and summed over its microbatches, and the sum of losses."""
        totals = [torch.cat([each.detach().flatten() for each in stage.parameters()]).to(self._precision).zero_() for stage in self.stages]
        loss_sum, work = 0.0, self._backward_of(self.step)
        for index in range(self._manifest.train.microbatches_per_step):
            loss_sum += work(self.stages, index)
            for stage, total in zip(self.stages, totals, strict=True):
                total += torch.cat([_gradient(parameter).flatten() for parameter in stage.parameters()])
                stage.zero_grad()
        return totals, loss_sum

    def _play_all(self) -> None:
        """Play the step at all peers, a move of each in turn. What is in no average has changed moments, too."""
        goes_on = True
        while goes_on:
            goes_on = False
            for peer in self._peers:
                goes_on |= self._plays(peer)

    def _applied(self, stage: int) -> Applied:
        return self._paths[stage][self.step - self._first]

    def _sum_of(self, stage: int, computed: Mapping[str, int]) -> tuple[Tensor, float]:
        shares = [self._share(stage, peer, done) for peer, done in sorted(computed.items())]
        total = shares[0][0].clone()
        for share, _ in shares[1:]:
            total += share
        return total, sum(loss for _, loss in shares)

    def _share(self, stage: int, name: str, done: int) -> tuple[Tensor, float]:
        """What a peer gave for this ledger."""
        for peer in [each for each in self._peers if (each.name, each.stage) == (name, stage)]:
            if (self.step, done) in peer.given:
                return peer.given[self.step, done]
        raise UsageError(f"no log says what peer {name} gave to the average of step {self.step}", REMEDY)

    def _version(self, stage: int, name: VersionId) -> StageModule:
        if name == BEGUN:
            return self.stages[stage]
        maker = self._makers.get(name)
        while name not in self._versions and maker is not None and self._plays(maker):
            pass
        if name not in self._versions:
            raise UsageError(f"no log says how version {name.hex()} of stage {stage} was made", REMEDY)
        return self._versions[name]

    def _gradients_of(self, index: int, path: Versions) -> tuple[list[list[Tensor]], float]:
        """The gradients of a microbatch by stage, with these versions, and its loss."""
        found = self._gradients.get((index, path))
        if found is None:
            modules = [self._version(stage, name) for stage, name in enumerate(path)]
            loss = self._backward_of(self.step)(modules, index)
            gradients = [[_gradient(parameter) for parameter in module.parameters()] for module in modules]
            for module in modules:
                module.zero_grad()
            found = self._gradients[index, path] = gradients, loss
        return found

    def _plays(self, peer: PeerLog) -> bool:
        """Play the next move of a peer, unless it belongs to a later step. Returns whether there was one."""
        if peer.at >= len(peer.moves):
            return False
        move = peer.moves[peer.at]
        if move["move"] == "begin" and not self._is_present(peer, move):
            return self._skips(peer)
        peer.at += 1
        match move["move"]:
            case "begin":
                peer.step, peer.num_sealed, peer.loss_sum = move["step"], 0, 0.0
                peer.batches.clear()
                self._take_back(peer)
                if peer.step == self._manifest.train.local_steps_after > 0:
                    peer.inner.begin_from(self.outer[peer.stage])
            case "forget":
                peer.inner = self._fresh(peer.module)
            case "add":
                path = tuple(bytes.fromhex(name) for name in move["versions"])
                peer.batches.setdefault(move["batch"], []).append((move["index"], path))
            case "drop":
                for name in move["batches"]:
                    peer.batches.pop(name, None)
            case "take back":
                peer.num_sealed, peer.loss_sum = 0, 0.0
                self._take_back(peer)
            case "seal":
                self._seal(peer, peer.batches.pop(move["batch"], []), bytes.fromhex(move["id"]))
            case "give":
                peer.given[peer.step, int(move["done"], 16)] = self._change(peer), peer.loss_sum
        return True

    def _is_present(self, peer: PeerLog, begin: Move) -> bool:
        """Whether this is the beginning of the present step, with the parameters that the stage began it with."""
        return (begin["step"], begin["lineage"]) == (self.step, self._applied(peer.stage).before)

    def _skips(self, peer: PeerLog) -> bool:
        """Go on at the next moves of the present step, if there are any: the run gave up what comes before. Returns whether there are."""
        places = peer.begins.get((self.step, self._applied(peer.stage).before), [])
        number = bisect.bisect_left(places, peer.at)
        if number == len(places):
            return False
        if any(move["move"] == "forget" for move in peer.moves[peer.at : places[number]]):
            peer.inner = self._fresh(peer.module)
        peer.at = places[number]
        return True

    def _take_back(self, peer: PeerLog) -> None:
        copy_parameters(self.stages[peer.stage], peer.module)

    def _seal(self, peer: PeerLog, batch: Sequence[tuple[int, Versions]], name: VersionId) -> None:
        totals = {each: torch.zeros_like(value, dtype=self._precision) for each, value in peer.module.named_parameters()}
        loss_sum = 0.0
        for index, path in batch:
            gradients, loss = self._gradients_of(index, path)
            loss_sum += loss
            for total, gradient in zip(totals.values(), gradients[peer.stage], strict=True):
                total += gradient
        peer.inner.update(self.step, totals, lambda total: total / len(batch))
        peer.num_sealed += len(batch)
        peer.loss_sum += loss_sum
        self._versions[name] = copy.deepcopy(peer.module)

    def _change(self, peer: PeerLog) -> Tensor:
        begun = dict(self.stages[peer.stage].named_parameters())
        now = dict(peer.module.named_parameters())
        with torch.no_grad():
            return torch.cat([change_of(begun[name], now[name], peer.num_sealed, self._precision).flatten() for name in begun])


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
